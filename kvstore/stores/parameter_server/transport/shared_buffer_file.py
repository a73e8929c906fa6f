"""A memfd that grows by segments, with a first page that lists them, and how a peer opens it.

The first page, as words of 64 bits: a magic number, whether there are seqlocks, two words of a token that
only a handle has, the number of segments, and from the eighth word on the start and length of each.
"""

from __future__ import annotations

import contextlib
import fcntl
import hmac
import json
import mmap
import os
import secrets
import stat
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from ....settings.descriptors import above_standard, new_memory

Bytes = npt.NDArray[np.uint8]
Words = npt.NDArray[np.uint64]

PAGE = 4096

_MAGIC = int.from_bytes(b"kvstore1", "little")
_HAS_SEQLOCKS, _TOKEN, _COUNT, _FIRST = 1, 2, 4, 8
_MOST_SEGMENTS = (PAGE // 8 - _FIRST) // 2
_MOST_HANDLE = 4096
# In Python's fcntl and mmap only from some version on, and not in all builds.
_F_ADD_SEALS, _F_GET_SEALS, _F_SEAL_SEAL, _F_SEAL_SHRINK = 1033, 1034, 1, 2
_MAP_POPULATE, _MADV_POPULATE_WRITE = 0x8000, 23


class SharedFile:
    """The shared memory of one process, which others may read.

    Raises OSError where the system has no memfd, no descriptor, or not a page of memory.
    """

    def __init__(self, has_seqlocks: bool) -> None:
        if not hasattr(os, "memfd_create"):
            raise OSError("this system has no memory without a name")
        self._fd = new_memory("kvstore-outbox")
        self._end = PAGE
        self._token = secrets.token_bytes(16)
        try:
            fcntl.fcntl(self._fd, _F_ADD_SEALS, _F_SEAL_SHRINK | _F_SEAL_SEAL)  # no process can truncate it
            self._head = self._reserve_piece(0, PAGE).view(np.uint64)
        except BaseException:
            self.close()
            raise
        self._head[_HAS_SEQLOCKS] = has_seqlocks
        self._head[_TOKEN : _TOKEN + 2] = np.frombuffer(self._token, np.uint64)
        self._head[0] = _MAGIC

    def add_segment(self, nbytes: int) -> Bytes | None:
        """Return a new segment of zeros, whole pages; None where there is no memory for it."""
        count = int(self._head[_COUNT])
        if count == _MOST_SEGMENTS or nbytes > free_memory():
            return None
        try:
            segment = self._reserve_piece(self._end, nbytes)
        except (OSError, ValueError, MemoryError):  # a limit on file size or address space
            return None
        self._head[_FIRST + 2 * count : _FIRST + 2 * count + 2] = self._end, nbytes
        self._head[_COUNT] = count + 1
        self._end += nbytes
        return segment

    def _reserve_piece(self, start: int, nbytes: int) -> Bytes:
        """Map a piece and allocate its pages; a failure leaves a longer file that uses no memory."""
        if os.fstat(self._fd).st_size < start + nbytes:
            os.ftruncate(self._fd, start + nbytes)
        memory = mmap.mmap(self._fd, nbytes, offset=start)
        os.posix_fallocate(self._fd, start, nbytes)
        with contextlib.suppress(OSError):  # on an older kernel pages are mapped one by one
            memory.madvise(_MADV_POPULATE_WRITE)
        return np.frombuffer(memory, np.uint8)

    def handle(self) -> str:
        """Return the handle with which a peer opens this memory."""
        return json.dumps(
            {**_machine_identity(), "pid": os.getpid(), "fd": self._fd, "token": self._token.hex()}
        )

    def close(self) -> None:
        """Close the descriptor; mapped memory stays valid."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def __del__(self) -> None:
        if hasattr(self, "_fd"):
            self.close()


class PeerFile:
    """The shared memory of another process.

    Raises OSError or ValueError where it cannot be opened, or does not match the handle.
    """

    def __init__(self, handle: str, writes: bool = False) -> None:
        self._writes = writes
        if len(handle) > _MOST_HANDLE:
            raise ValueError("an offer of that length")
        told: Any = json.loads(handle)
        if not isinstance(told, dict) or any(
            told.get(name) != value for name, value in _machine_identity().items()
        ):
            raise ValueError("another machine, or other processes than can be seen from here")
        self._path = Path(f"/proc/{_checked_number(told.get('pid'))}/fd/{_checked_number(told.get('fd'))}")
        self._identity: tuple[int, int] | None = None
        fd = self._open_memory()
        try:
            self._head = _map_memory(fd, 0, PAGE, False).view(np.uint64)
        finally:
            os.close(fd)
        token = bytes.fromhex(str(told.get("token")))
        if int(self._head[0]) != _MAGIC or not hmac.compare_digest(token, self._its_token()):
            raise ValueError("no memory of a store, or of another one")
        self.has_seqlocks = bool(self._head[_HAS_SEQLOCKS])

    def _its_token(self) -> bytes:
        return self._head[_TOKEN : _TOKEN + 2].tobytes()

    def map_segment(self, number: int) -> Bytes:
        """Map a segment."""
        if not 0 <= number < min(int(self._head[_COUNT]), _MOST_SEGMENTS):
            raise ValueError(f"there is no segment {number}")
        start, nbytes = (int(word) for word in self._head[_FIRST + 2 * number : _FIRST + 2 * number + 2])
        fd = self._open_memory()
        try:
            if start % PAGE or nbytes <= 0 or start + nbytes > os.fstat(fd).st_size:
                raise ValueError(f"segment {number} lies beyond its file")
            return _map_memory(fd, start, nbytes, self._writes)
        finally:
            os.close(fd)

    def _open_memory(self) -> int:
        """Open the memory again for each call: one open descriptor for each process would be too many."""
        if not stat.S_ISREG(self._path.stat().st_mode):
            raise ValueError("that is no memory")
        access = os.O_RDWR if self._writes else os.O_RDONLY
        fd = above_standard(os.open(self._path, access | os.O_CLOEXEC | os.O_NONBLOCK))
        try:
            if not fcntl.fcntl(fd, _F_GET_SEALS) & _F_SEAL_SHRINK:
                raise ValueError("memory that somebody may take away")
            found = os.fstat(fd)
            if self._identity not in (None, (found.st_dev, found.st_ino)):
                raise ValueError("the process has other memory by now")
            self._identity = found.st_dev, found.st_ino
        except BaseException:
            os.close(fd)
            raise
        return fd


def _map_memory(fd: int, start: int, nbytes: int, writes: bool) -> Bytes:
    flags = mmap.MAP_SHARED | _MAP_POPULATE
    access = mmap.PROT_READ | (mmap.PROT_WRITE if writes else 0)
    return np.frombuffer(mmap.mmap(fd, nbytes, flags=flags, prot=access, offset=start), np.uint8)


def _checked_number(value: Any) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 2**31:
        raise ValueError("an offer without numbers")
    return value


@cache
def _machine_identity() -> dict[str, str]:
    """Return what processes that share memory have in common: the kernel's boot id and the PID namespace."""
    boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return {"boot": boot, "processes": os.readlink("/proc/self/ns/pid")}


def free_memory() -> int:
    """Return the memory that the machine and this process's cgroup have left, in bytes.

    A larger allocation would start the kernel's OOM killer, where a reservation in a file should fail.
    """
    available = 0
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            available = int(line.split()[1]) << 10
    with contextlib.suppress(OSError, ValueError):
        group = Path("/proc/self/cgroup").read_text().rpartition("0::")[2].strip()
        for folder in (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup") / group.lstrip("/")):
            with contextlib.suppress(OSError, ValueError):  # no limit is the word "max"
                most = int((folder / "memory.max").read_text())
                available = min(available, most - int((folder / "memory.current").read_text()))
    return available
