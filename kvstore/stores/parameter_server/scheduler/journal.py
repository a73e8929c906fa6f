"""The scheduler's journal: a file of checked records, to which is appended and which is replaced as a whole.

A record is on disk when `append` returns. What a kill left half written at the end is cut off when the file
is opened: the file ends within that record, or in zeros. All other damage is an error, in the last record
too. A process that opens the file locks it, so that on one machine it belongs to one process; where locks do
not reach, `append` notices that another process has replaced it.
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

_MARK, _EARLIER = b"\xa7kv2", b"\xa7kvj"  # whose records were checked as a whole
_END = b"\xa7end"  # no zeros: space that a file system has given and not filled looks otherwise
_HEAD = struct.Struct("<4sII")  # mark, bytes of the text, CRC-32 of both
_TAIL = struct.Struct("<I4s")  # CRC-32 of the text, end
_FLAGS = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW


def packed(text: bytes) -> bytes:
    """Make a record."""
    head = _MARK + len(text).to_bytes(4, "little")
    return _HEAD.pack(_MARK, len(text), zlib.crc32(head)) + text + _TAIL.pack(zlib.crc32(text), _END)


def unpacked(data: bytes) -> tuple[list[bytes], int]:
    """Return the records of a file, and how many bytes they have: what follows was not written to its end.

    Raises
    ------
    ValueError
        A record is damaged, or of an earlier version; the text says where.
    """
    records: list[bytes] = []
    at = 0
    while (text := _record(data, at)) is not None:
        records.append(text)
        at += _HEAD.size + len(text) + _TAIL.size
    if not _is_cut(data[at:]):
        what = "of an earlier version of kvstore" if data[at:].startswith(_EARLIER) else "damaged"
        raise ValueError(f"record {len(records)}, at byte {at} of {len(data)}, is {what}")
    return records, at


def _record(data: bytes, at: int) -> bytes | None:
    length = _length(data[at : at + _HEAD.size])
    text = b"" if length is None else data[at + _HEAD.size : at + _HEAD.size + length]
    whole = packed(text)
    return text if data[at : at + len(whole)] == whole else None


def _length(head: bytes) -> int | None:
    """Return how long the text of a record is; None: its head is not whole."""
    if len(head) < _HEAD.size:
        return None
    _, length, check = _HEAD.unpack(head)
    return int(length) if head.startswith(_MARK) and check == zlib.crc32(head[:-4]) else None


def _is_cut(rest: bytes) -> bool:
    """Whether a write that did not end has left this: it is too short for a record, or ends in zeros."""
    if len(rest) < _HEAD.size or not any(rest[-len(_END) :]):
        return True
    length = _length(rest[: _HEAD.size])
    return length is not None and len(rest) < _HEAD.size + length + _TAIL.size


class Journal:
    """The file of one job, in a folder; `records` are those that were there.

    Raises
    ------
    ConfigError
        The folder or the file cannot be used, another process has it, or it is damaged.
    """

    def __init__(self, folder: str, job: str) -> None:
        if not job:
            raise ConfigError(
                "a scheduler that takes a free port cannot be found again: with KVSTORE_JOURNAL, give it a "
                "port, or name the job (KVSTORE_JOB)"
            )
        name = hashlib.sha256(job.encode()).hexdigest()[:16]
        self.path = Path(folder) / f"scheduler-{name}.journal"
        self._new = self.path.with_suffix(".new")
        self._file = -1
        try:
            self.path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._file = self._locked()
            self.records = self._read()
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
        """Bytes of the file."""
        return os.fstat(self._file).st_size

    def append(self, text: bytes) -> None:
        """Add a record, and return when it is on disk.

        Raises
        ------
        KVStoreError
            It cannot be written: what it says must not be done.
        FencedError
            Another scheduler has taken the journal over.
        """
        try:
            _write(self._file, packed(text))
            os.fdatasync(self._file)
        except OSError as error:
            raise KVStoreError(
                f"the scheduler's journal {self.path} cannot be written: {error.strerror}; make room and "
                "start the scheduler again"
            ) from None
        self.check()

    def check(self) -> None:
        """Raise FencedError if another scheduler has taken the journal over."""
        if not self._is_current(self._file):
            raise FencedError(
                f"another scheduler has taken over the journal {self.path}: this one ends, and the job goes "
                "on with that one"
            )

    def replace(self, text: bytes) -> None:
        """Have this record in the place of all others; a kill leaves either."""
        try:
            self._new.unlink(missing_ok=True)
            file = os.open(self._new, _FLAGS | os.O_EXCL, 0o600)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                _write(file, packed(text))
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

    def take_over(self, make: Callable[[list[bytes]], bytes]) -> None:
        """Have one record in the place of all, which `make` makes of them.

        Another process may still write, where locks do not reach. What it has written before the file was
        replaced counts; after that its `append` fails, before anybody hears of it.
        """
        before = os.dup(self._file)
        try:
            while True:
                self.replace(make(self.records))
                found = _read(before)
                if found == self.records:
                    return
                self.records = found
        finally:
            os.close(before)

    def remove(self) -> None:
        """Delete the file: the job is over."""
        if self._is_current(self._file):
            for path in (self._new, self.path):
                path.unlink(missing_ok=True)
        self.close()

    def close(self) -> None:
        """Let the file go. A second call does nothing."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def _locked(self) -> int:
        """Open the file, and lock it; again if it was replaced just then."""
        while True:
            file = os.open(self.path, _FLAGS, 0o600)
            try:
                self._check_owner(file)
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(file)
                raise ConfigError(
                    f"another scheduler of this job has the journal {self.path}: there is one for each job; "
                    "end that one first, or name another folder (KVSTORE_JOURNAL)"
                ) from None
            except BaseException:
                os.close(file)
                raise
            if self._is_current(file):
                return file
            os.close(file)

    def _check_owner(self, file: int) -> None:
        """Refuse what others could have written."""
        found = os.fstat(file)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"the scheduler's journal {self.path} must be a file of this user that no other can read or "
                f"write: chmod 600 it, or name another folder (KVSTORE_JOURNAL)"
            )

    def _read(self) -> list[bytes]:
        data = _all(self._file)
        try:
            records, end = unpacked(data)
            if data and not records:
                raise ValueError("its first record is cut short")
        except ValueError as error:
            raise ConfigError(
                f"the scheduler's journal {self.path}: {error}; what it says of the job cannot be trusted: "
                "delete it, and start the job again from what was saved last"
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


def _all(file: int) -> bytes:
    with open(file, "rb", closefd=False) as reader:
        reader.seek(0)
        return reader.read()


def _read(file: int) -> list[bytes]:
    return unpacked(_all(file))[0]


def _write(file: int, data: bytes) -> None:
    left = memoryview(data)
    while left:
        left = left[os.write(file, left) :]
