"""The format, the lock and the writes of the scheduler's journal: a file of records with checksums.

`journaled_scheduler` decides which records are written. A record is on disk when `append` returns. If a
process was killed while it wrote the last record, the file ends within this record, or in zeros; the next
process that opens the file cuts that end off. Any other damage is an error, in the last record too. The
process that opens the file locks it, so that one process of a machine has it. On file systems whose locks do
not reach other machines, `append` checks that no other process has replaced the file.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import stat
import struct
import zlib
from collections.abc import Callable
from pathlib import Path

from ....errors import ConfigError, FencedError, KVStoreError

_MARK, _EARLIER = b"\xa7kv2", b"\xa7kvj"  # an earlier format had one checksum for head and text
_END = b"\xa7end"  # not zeros: a file system fills space with zeros that it has allocated and not written
_HEAD = struct.Struct("<4sII")  # mark, bytes of the text, CRC-32 of both
_TAIL = struct.Struct("<I4s")  # CRC-32 of the text, end
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def encode_record(text: bytes) -> bytes:
    """Return the bytes of a record with this text."""
    head = _MARK + len(text).to_bytes(4, "little")
    return _HEAD.pack(_MARK, len(text), zlib.crc32(head)) + text + _TAIL.pack(zlib.crc32(text), _END)


def decode_records(data: bytes) -> tuple[list[bytes], int]:
    """Return the texts of the complete records of a file, and the number of bytes of these records.

    Bytes after that number belong to a record whose write was interrupted.

    Raises
    ------
    ValueError
        A record is damaged, or has the format of an earlier version; the message says where.
    """
    records: list[bytes] = []
    at = 0
    while (text := _record_at(data, at)) is not None:
        records.append(text)
        at += _HEAD.size + len(text) + _TAIL.size
    if not _is_cut(data[at:]):
        state = "of an earlier version of kvstore" if data[at:].startswith(_EARLIER) else "damaged"
        raise ValueError(f"record {len(records)}, at byte {at} of {len(data)}, is {state}")
    return records, at


def _record_at(data: bytes, at: int) -> bytes | None:
    length = _text_length(data[at : at + _HEAD.size])
    text = b"" if length is None else data[at + _HEAD.size : at + _HEAD.size + length]
    whole = encode_record(text)
    return text if data[at : at + len(whole)] == whole else None


def _text_length(head: bytes) -> int | None:
    """Return the length of the text of a record; None if its head is incomplete or damaged."""
    if len(head) < _HEAD.size:
        return None
    _, length, check = _HEAD.unpack(head)
    return int(length) if head.startswith(_MARK) and check == zlib.crc32(head[:-4]) else None


def _is_cut(rest: bytes) -> bool:
    """Return whether an interrupted write explains these bytes: they are too few, or end in zeros."""
    if len(rest) < _HEAD.size or not any(rest[-len(_END) :]):
        return True
    length = _text_length(rest[: _HEAD.size])
    return length is not None and len(rest) < _HEAD.size + length + _TAIL.size


class JournalFile:
    """The journal file of one job, in a folder; `records` are the texts that it had when it was opened.

    Raises
    ------
    ConfigError
        The folder or the file cannot be used, another process has the file, or it is damaged.
    """

    def __init__(self, folder: str, job: str) -> None:
        if not job:
            raise ConfigError(
                "a scheduler with KVSTORE_JOURNAL that listens at any free port cannot be found again after "
                "a restart: give it a port, or name the job (KVSTORE_JOB)"
            )
        name = hashlib.sha256(job.encode()).hexdigest()[:16]
        self.path = Path(folder) / f"scheduler-{name}.journal"
        self._new = self.path.with_suffix(".new")
        self._file = -1
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = self._open_and_lock()
            self.records = self._read_records()
        except OSError as error:
            self.close()
            raise ConfigError(
                f"the scheduler's journal {self.path} cannot be used: {error.strerror}; name another folder "
                "(KVSTORE_JOURNAL)"
            ) from None
        except BaseException:
            self.close()
            raise

    @property
    def size(self) -> int:
        """Return the number of bytes of the file."""
        return os.fstat(self._file).st_size

    def append(self, text: bytes) -> None:
        """Add a record; blocks until the record is on disk.

        Raises
        ------
        KVStoreError
            The record cannot be written. The caller must not carry out the actions of its events.
        FencedError
            Another scheduler has replaced the file.
        """
        try:
            _write_all(self._file, encode_record(text))
            os.fdatasync(self._file)
        except OSError as error:
            raise KVStoreError(
                f"the scheduler's journal {self.path} cannot be written: {error.strerror}; make room and "
                "start the scheduler again"
            ) from None
        self.check_ownership()

    def check_ownership(self) -> None:
        """Raise FencedError if another scheduler has replaced the file."""
        if not self._is_current(self._file):
            raise FencedError(
                f"another scheduler of this job has replaced the journal {self.path}: this scheduler ends, "
                "and the job continues with the other one"
            )

    def replace_all(self, text: bytes) -> None:
        """Replace all records by one; after a kill the file has either the old records or the new one."""
        try:
            self._new.unlink(missing_ok=True)
            file = os.open(self._new, _FLAGS | os.O_EXCL, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _write_all(file, encode_record(text))
                os.fsync(file)
                self._new.rename(self.path)
            except BaseException:
                os.close(file)
                raise
            self._sync_folder()
        except OSError as error:
            raise KVStoreError(
                f"the scheduler's journal {self.path} cannot be written: {error.strerror}; make room and "
                "start the scheduler again"
            ) from None
        before, self._file = self._file, file
        os.close(before)

    def replace_by_merged(self, merge: Callable[[list[bytes]], bytes]) -> None:
        """Replace all records by one, which `merge` computes from them.

        Where locks do not reach another machine, an older scheduler may still append. Its records count if it
        wrote them before the file was replaced, and `merge` is then called again. A later `append` of the
        older scheduler raises FencedError before it sends a message.
        """
        before = os.dup(self._file)
        try:
            while True:
                self.replace_all(merge(self.records))
                found = decode_records(_all_bytes(before))[0]
                if found == self.records:
                    return
                self.records = found
        finally:
            os.close(before)

    def remove(self) -> None:
        """Delete the file, because the job is over; and close it."""
        if self._is_current(self._file):
            for path in (self._new, self.path):
                path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Close and unlock the file. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _open_and_lock(self) -> int:
        """Open and lock the file; repeat if another process replaces it between the two."""
        while True:
            file = os.open(self.path, _FLAGS, 0o600)
            try:
                self._check_owner(file)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                raise ConfigError(
                    f"another scheduler of this job has the journal {self.path}: a job has one scheduler; "
                    "end the other one first, or name another folder (KVSTORE_JOURNAL)"
                ) from None
            except BaseException:
                os.close(file)
                raise
            if self._is_current(file):
                return file
            os.close(file)

    def _check_owner(self, file: int) -> None:
        """Raise ConfigError if another user could have written the file."""
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"the scheduler's journal {self.path} must be a file of this user that no other can read or "
                f"write: chmod 600 it, or name another folder (KVSTORE_JOURNAL)"
            )

    def _read_records(self) -> list[bytes]:
        data = _all_bytes(self._file)
        try:
            records, end = decode_records(data)
            if data and not records:
                raise ValueError("its first record is cut short")
        except ValueError as error:
            raise ConfigError(
                f"the scheduler's journal {self.path}: {error}; its content cannot be trusted: delete it, "
                "and start the job again from the last saved values"
            ) from None
        if end < len(data):
            os.ftruncate(self._file, end)
        os.lseek(self._file, 0, os.SEEK_END)
        return records

    def _is_current(self, file: int) -> bool:
        with contextlib.suppress(FileNotFoundError):
            return os.path.samestat(os.fstat(file), os.stat(self.path))
        return False

    def _sync_folder(self) -> None:
        folder = os.open(self.path.parent, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def _all_bytes(file: int) -> bytes:
    with open(file, "rb", closefd=False) as reader:
        reader.seek(0)
        return reader.read()


def _write_all(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
