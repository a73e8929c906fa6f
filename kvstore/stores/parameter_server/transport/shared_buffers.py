"""Memory that one process writes and others of the same machine read: payloads and values without a copy.

The memory is a memfd without a name, which grows by segments, is reserved before it is touched and sealed
against shrinking, so that a full machine gives an error and never a signal. Its owner passes a handle; a
reader opens it by /proc, which admits only the same user on the same machine.
"""

from __future__ import annotations

import errno
import os
import platform
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ....arrays.pages import next_page_offset
from ....errors import ProtocolError
from ....kernels import cpu
from .shared_buffer_file import PAGE, Bytes, PeerFile, SharedFile, Words

_LINE = 64
_FIRST_BYTES = 4 * 1024 * 1024
_GROWTH = 4  # a new segment has at least a fourth of the memory so far
# A seqlock is valid only where the processor keeps the order of reads and of writes.
_ORDERED = platform.machine() in ("x86_64", "AMD64", "i686")
_CURES = {
    errno.EMFILE: "; raise the limit of open files (ulimit -n)",
    errno.ENOMEM: "; raise the limit of addresses (ulimit -v), or give the machine more memory",
}


class SharedBlock(NamedTuple):
    """A piece of memory that others can read."""

    array: Bytes
    segment: int
    offset: int


class SharedBufferPool:
    """A process's memory for the payloads that it sends. Not thread-safe.

    It grows to at most `limit` bytes; None: to the memory that the machine has left.
    """

    _has_seqlocks = False

    def __init__(self, limit: int | None = None) -> None:
        self._limit = limit
        self._pid = os.getpid()
        self._file: SharedFile | None = None
        self._closed = False
        self._segments: list[Bytes] = []
        self._used: list[int] = []
        self._free: defaultdict[int, list[tuple[int, int]]] = defaultdict(list)

    @property
    def nbytes(self) -> int:
        """Memory reserved, in bytes."""
        return sum(segment.nbytes for segment in self._segments)

    def allocate(self, nbytes: int) -> SharedBlock | None:
        """Return `nbytes` of memory, of any content, aligned to a cache line.

        None where there is no memory, for 0 bytes, in the child of a fork, and after `close`.
        """
        if nbytes <= 0 or not self._is_usable():
            return None
        size = _block_size(nbytes)
        free = self._free[size]
        place = free.pop() if free else self._new_place(size)
        if place is None:
            return None
        segment, offset = place
        return SharedBlock(self._segments[segment][offset : offset + nbytes], segment, offset)

    def free(self, block: SharedBlock) -> None:
        """Return a block that no process reads any more."""
        if self._is_usable():
            self._free[_block_size(block.array.nbytes)].append((block.segment, block.offset))

    def handle(self) -> str:
        """Return the handle for `PeerBuffers.open` in another process; "" where there is no memory.

        It is valid as long as the process lives, also after the memory grows.
        """
        if not self._is_usable() or (self._has_seqlocks and not _ORDERED):
            return ""
        try:
            return self._open_file().handle()
        except OSError:
            return ""

    def close(self) -> None:
        """Release the memory, once no block is in use."""
        self._closed = True
        if self._file is not None:
            self._file.close()
        self._file = None
        self._segments, self._used = [], []
        self._free.clear()

    def _is_usable(self) -> bool:
        return not self._closed and self._pid == os.getpid()

    def _open_file(self) -> SharedFile:
        if self._file is None:
            self._file = SharedFile(self._has_seqlocks)
        return self._file

    def _new_place(self, size: int) -> tuple[int, int] | None:
        """Allocate a block of a segment with enough space, or of a new one."""
        for segment in reversed(range(len(self._segments))):
            offset = _next_offset(self._used[segment], size)
            if offset + size <= self._segments[segment].nbytes:
                self._used[segment] = offset + size
                return segment, offset
        return self._new_place(size) if self._add_segment(size) else None

    def _add_segment(self, size: int) -> bool:
        """Add a segment that has `size` bytes of space: a larger one, or else one of just that size."""
        size += PAGE if size >= PAGE else 0  # for the offset in its first page
        need = _round_up(size + self._table_bytes(size + size // 256 + 2 * PAGE), PAGE)
        room = None if self._limit is None else self._limit - self.nbytes
        for nbytes in (_round_up(max(need, self.nbytes // _GROWTH, _FIRST_BYTES), PAGE), need):
            if room is not None and nbytes > room:
                continue
            try:
                segment = self._open_file().add_segment(nbytes)
            except OSError:
                return False
            if segment is not None:
                self._segments.append(segment)
                self._used.append(self._table_bytes(nbytes))
                return True
        return False

    def _table_bytes(self, nbytes: int) -> int:
        """Bytes at the beginning of a segment of `nbytes` that are not for blocks."""
        return 0


class SharedValues(SharedBufferPool):
    """A server's memory for values, with seqlocks: a seqlock is odd while its value is written.

    There is one seqlock for each page, at the beginning of the segment; a value uses the seqlock of the page
    in which it begins. Small values in one page share it.
    """

    _has_seqlocks = True

    def read_seqlock(self, segment: int, offset: int) -> int:
        """Return the seqlock of the value that begins at `offset`."""
        return int(self.seqlock_word(segment, offset)[0])

    def seqlock_word(self, segment: int, offset: int) -> Words:
        """View the seqlock of the value that begins at `offset`, a word in the same memory."""
        page = offset // PAGE
        return _seqlock_words(self._segments[segment])[page : page + 1]

    @contextmanager
    def mark_writing(self, places: Iterable[tuple[int, int]]) -> Iterator[None]:
        """Mark the values that begin at these (segment, offset) as being written."""
        # Large sums use stores that bypass the cache, and could pass these words; but they release the
        # interpreter's lock first, which is a barrier.
        pages = {(segment, offset // PAGE) for segment, offset in places}
        words = [_seqlock_words(self._segments[segment])[page : page + 1] for segment, page in pages]
        for word in words:
            word += np.uint64(1)
        try:
            yield
        finally:
            for word in words:
                word += np.uint64(1)

    def _table_bytes(self, nbytes: int) -> int:
        return _round_up(nbytes // PAGE * 8, PAGE)


class PeerBuffers:
    """The shared memory of another process, in mapped segments."""

    def __init__(self, file: PeerFile) -> None:
        self._file: PeerFile | None = file
        self._segments: dict[int, Bytes] = {}

    @classmethod
    def open(cls, handle: str, writes: bool = False) -> PeerBuffers | None:
        """Open the memory of a handle, to read it, or to write as well.

        None where it cannot be opened: another machine, user or container.
        """
        try:
            return cls(PeerFile(handle, writes))
        except (OSError, ValueError, TypeError, RecursionError):
            return None

    def view_block(self, segment: int, offset: int, nbytes: int) -> Bytes:
        """View a block of a `SharedBufferPool`; ProtocolError: no such place, or its process has ended."""
        memory = self.view_segment(segment)
        if offset < 0 or nbytes < 0 or offset + nbytes > memory.nbytes:
            raise ProtocolError(
                f"bytes {offset} to {offset + nbytes} of shared segment {segment}, which has {memory.nbytes}"
            )
        return memory[offset : offset + nbytes]

    @property
    def segments(self) -> Mapping[int, Bytes]:
        """The segments that are mapped."""
        return self._segments

    def view_segment(self, number: int) -> Bytes:
        """View a whole segment; ProtocolError: there is none, or its process has ended."""
        memory = self._segments.get(number)
        if memory is not None:
            return memory
        if self._file is None:
            raise ProtocolError("the shared memory of this peer is closed")
        try:
            memory = self._segments[number] = self._file.map_segment(number)
        except (OSError, ValueError) as error:
            cure = _CURES.get(getattr(error, "errno", 0), "")
            raise ProtocolError(f"shared segment {number} of a peer cannot be read: {error}{cure}") from error
        return memory

    def copy_block(self, segment: int, offset: int, nbytes: int, seqlock: int, out: npt.NDArray[Any]) -> bool:
        """Copy a block of `SharedValues` to a contiguous array of that size; ProtocolError: no such place.

        False if the value was written since its seqlock had this number: the content of `out` is then
        invalid.
        """
        source = self.view_block(segment, offset, nbytes)
        if self._file is None or not self._file.has_seqlocks:
            raise ProtocolError("shared memory of a peer that has no stamps")
        words = _seqlock_words(self._segments[segment])
        page = offset // PAGE
        if seqlock % 2 or int(words[page]) != seqlock:
            return False
        cpu.reduce([([source], None, [out.reshape(-1).view(np.uint8)])])
        return int(words[page]) == seqlock

    def close(self) -> None:
        """Release the memory, once no view of it is in use."""
        self._segments.clear()
        self._file = None


def _next_offset(used: int, size: int) -> int:
    """Return where the next block begins: large ones at the offset in a page that suits sums best."""
    return _round_up(used, PAGE) + next_page_offset() if size >= PAGE else _round_up(used, _LINE)


def _seqlock_words(segment: Bytes) -> Words:
    return segment[: segment.nbytes // PAGE * 8].view(np.uint64)


def _round_up(nbytes: int, step: int) -> int:
    return -(-nbytes // step) * step


def _block_size(nbytes: int) -> int:
    """Round up to one of eight sizes between a number and its double, so that freed blocks fit again."""
    if nbytes < PAGE:
        return _round_up(nbytes, _LINE)
    return _round_up(nbytes, max(PAGE, 1 << (nbytes.bit_length() - 4)))
