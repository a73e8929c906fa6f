"""Meetings: each worker sends a message, and receives the messages of all workers, by rank.

A meeting is one round of a side key with a slot of bytes for each worker. A worker pushes zeros into the
other slots, so the sum has the contents of all slots. This works in each store that sums, and meetings are in
call order. The slot of a worker that has joined or is lost stays empty. Content that is longer than a slot is
sent in further rounds, after all workers have received its length.
"""

from __future__ import annotations

import itertools
import struct
import threading
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays.grouping import Group
from ..errors import ArgumentError, DTypeError, KVStoreError, ShapeError
from ..settings.definitions import SIDE

if TYPE_CHECKING:
    from ..engine import AsyncEngine, Work

Array = npt.NDArray[Any]

#: The operations of workers, by number. The last one ends an `all_reduce` of long arrays.
ALL_REDUCE, BROADCAST, ALL_GATHER, REDUCED = range(1, 5)
_CALLED = {ALL_REDUCE: "all_reduce", BROADCAST: "broadcast_object", ALL_GATHER: "all_gather_object"}

_HEAD = struct.Struct("<IIQ")  # the operation; bytes of its description; bytes of its content
_KEY = SIDE + "meeting"
_FEW = 256  # least size of a slot in bytes, and largest size with few workers
_MANY = 1024
_USUAL = 4096  # largest size of all slots together in bytes, where the least size of a slot permits it
_KEPT = 4  # pairs of buffers that are used again

#: Long content is sent in pieces; their numbers of elements are powers of two between these.
_SMALLEST, _LARGEST = 1 << 10, 1 << 20


class SideKeys(NamedTuple):
    """The side keys of a store, for the modules that are built on them."""

    rank: int
    num_workers: int
    #: Whether operations on side keys run concurrently with other operations of the store.
    are_concurrent: bool
    #: The engine of the store.
    engine: AsyncEngine
    init: Callable[[str, Array], None]
    pushpull: Callable[..., Any]
    #: Starts a method with its arguments; the function passed as `then` is called at its end.
    start: Callable[..., Work]
    #: Whether the store waits for a worker of which no message has arrived.
    expects: Callable[[int], bool]


class MeetingMessage(NamedTuple):
    """The message of one worker: its operation, the description, and the length of its content."""

    operation: int
    description: bytes
    nbytes: int


class MeetingMessages(NamedTuple):
    """The messages of the workers, by rank; None for a worker that does not take part any more."""

    said: list[MeetingMessage | None]
    data: bytes
    slot: int

    def is_here(self, rank: int) -> bool:
        """Return whether the content of a worker is in its slot."""
        one = self.said[rank]
        return one is not None and _content_offset(one.description) + one.nbytes <= self.slot

    def nbytes(self, rank: int) -> int:
        """Return the length of a worker's content in bytes."""
        one = self.said[rank]
        return 0 if one is None else one.nbytes

    def content(self, rank: int) -> memoryview:
        """Return the content of a worker from its slot."""
        one = self.said[rank]
        assert one is not None
        at = rank * self.slot + _content_offset(one.description)
        return memoryview(self.data)[at : at + one.nbytes]

    @property
    def present(self) -> list[int]:
        """Return the ranks of the present workers."""
        said = self.said
        return list(range(len(said))) if None not in said else [r for r, one in enumerate(said) if one]


class _MeetingBuffers(NamedTuple):
    """Memory of a meeting: this worker's message, its bytes, and the sum of all messages."""

    mine: Array
    slots: memoryview
    sum: Array


class WorkerMeetings:
    """The meetings of one worker."""

    def __init__(self, sides: SideKeys) -> None:
        self._sides = sides
        self.rank, self.size = sides.rank, sides.num_workers
        #: Whether meetings run concurrently with other operations of the store.
        self.are_concurrent = sides.are_concurrent
        #: Held during all rounds of one operation.
        self.lock = threading.RLock()
        #: Size of a slot in bytes.
        self.slot = min(_MANY, max(_FEW, _USUAL // self.size // 64 * 64))
        self._free: list[_MeetingBuffers] = []
        self._made: set[str] = set()
        self._making = threading.Lock()
        self._gone: set[int] = set()  # ranks that do not take part any more

    def fits_slot(self, said: MeetingMessage) -> bool:
        """Return whether the content fits into a slot."""
        return _content_offset(said.description) + said.nbytes <= self.slot

    def exchange_messages(self, said: MeetingMessage, content: Sequence[Array] = ()) -> MeetingMessages:
        """Send a message, with the content if it fits into a slot, and wait for the messages of all workers.

        The first meeting of a restarted worker can be the end of an operation that began without it.
        """
        while True:
            buffers = self._fill_slot(said, content)
            self._sides.pushpull(_KEY, buffers.mine, out=buffers.sum)
            heard = self._decode_sum(buffers)
            if said.operation == REDUCED or not ranks_at_end(heard):
                return heard

    def start_meeting(
        self, said: MeetingMessage, content: Sequence[Array], end: Callable[[MeetingMessages], None]
    ) -> Work:
        """Send a message and its content.

        `end` is called with the messages of all workers, when they have arrived.
        """
        buffers = self._fill_slot(said, content)
        groups: list[Group] = [(_KEY, [buffers.mine])]

        def then() -> None:
            end(self._decode_sum(buffers))

        return self._sides.start("pushpull", groups, 0, groups, [(_KEY, [buffers.sum])], then=then)

    def queue_run(self, run: Callable[[], None], what: str) -> Work:
        """Run a function with meetings in the background, after the queued meetings."""
        return self._sides.engine.submit([_KEY], run, 0, what)

    def run_now(self, run: Callable[[], None], what: str) -> Work:
        """Run a function with meetings in this call, and return a complete handle."""
        self.wait()
        return self._sides.engine.run_now(run, what)

    def wait(self) -> None:
        """Wait for the meetings of this worker in the background."""
        if self._sides.engine.busy:
            self._sides.engine.wait_for([_KEY])

    def _fill_slot(self, said: MeetingMessage, content: Sequence[Array]) -> _MeetingBuffers:
        """Return memory with this worker's slot filled, and memory for the sum."""
        self._create_key(_KEY, self.size * self.slot // 4, np.dtype(np.int32))
        buffers = self._free.pop() if self._free else _meeting_buffers(self.size * self.slot // 4)
        text, start = said.description, self.rank * self.slot
        head = _HEAD.pack(said.operation, len(text), said.nbytes) + text
        buffers.slots[start : start + len(head)] = head
        if content and self.fits_slot(said):
            at = start + _content_offset(text)
            buffers.slots[at : at + said.nbytes] = b"".join([array.tobytes() for array in content])
        return buffers

    def _decode_sum(self, buffers: _MeetingBuffers) -> MeetingMessages:
        """Decode the sum, and release its memory for further use."""
        data = buffers.sum.tobytes()
        if len(self._free) < _KEPT:
            self._free.append(buffers)
        at = self.rank * self.slot
        own = _decode_message(data, at)  # usually equal in all workers
        begin = data[at : at + _HEAD.size + (len(own.description) if own else 0)]
        said = [
            own if data.startswith(begin, at) else _decode_message(data, at)
            for at in range(0, self.size * self.slot, self.slot)
        ]
        if None in said:
            self._check_absent([rank for rank, one in enumerate(said) if one is None])
        return MeetingMessages(said, data, self.slot)

    def _check_absent(self, ranks: list[int]) -> None:
        """Raise if the message of a present worker is missing."""
        for rank in ranks:
            if rank not in self._gone and self._sides.expects(rank):
                raise KVStoreError(
                    f"worker {self.rank}: the message of worker {rank} was lost with the memory of a "
                    "restarted server; no array has changed here, but other workers may have the result"
                )
        self._gone.update(ranks)

    # ---------------------------------------------------------------------------------------- long content

    def sum_flat(self, flat: Array) -> None:
        """Replace a flat array by its sum over the workers.

        All workers call this with the same number of elements.
        """
        done = 0
        while done < flat.size:
            sizes = _cut_pieces(flat.size - done)
            keys = [f"{SIDE}{flat.dtype.name} {size}" for size in sizes]
            for key, size in zip(keys, sizes, strict=True):
                self._create_key(key, size, flat.dtype)
            ends = np.cumsum([done, *sizes]).tolist()
            pieces = [flat[start:stop] for start, stop in itertools.pairwise(ends)]
            last = pieces[-1]
            pieces[-1] = sent = _padded_piece(last, sizes[-1])
            self._sides.pushpull(keys, pieces)
            if sent is not last:
                last[:] = sent[: last.size]
            done = ends[-1]

    def _create_key(self, key: str, size: int, dtype: np.dtype[Any]) -> None:
        """Create a side key on all workers, unless it exists."""
        if key in self._made:
            return
        with self._making:
            if key not in self._made:
                self._sides.init(key, np.zeros(size, dtype))
                self._made.add(key)


def _meeting_buffers(words: int) -> _MeetingBuffers:
    mine = np.zeros(words, np.int32)
    return _MeetingBuffers(mine, mine.data.cast("B"), np.empty(words, np.int32))


def ranks_at_end(heard: MeetingMessages) -> list[int]:
    """Return the ranks that are at the end of an `all_reduce` of long arrays."""
    return [rank for rank, one in enumerate(heard.said) if one is not None and one.operation == REDUCED]


def check_same(heard: MeetingMessages, sizes: bool = True) -> None:
    """Raise, on all workers, unless all have called the same operation, with content of the same `sizes`."""
    (first, one), *others = [(rank, said) for rank, said in enumerate(heard.said) if said is not None]
    for rank, other in others:
        if other is not one and (other[:2] != one[:2] or (sizes and other != one)):
            raise _difference_error(first, one, rank, other)


def _difference_error(first: int, one: MeetingMessage, rank: int, other: MeetingMessage) -> KVStoreError:
    text = (
        f"worker {first} has called {_call_text(one)}, worker {rank} {_call_text(other)}: all workers make "
        "the same calls in the same order, with the same shapes and element types. Nothing was changed"
    )
    if one.operation != ALL_REDUCE or other.operation != ALL_REDUCE:
        return ArgumentError(text)
    return DTypeError(text) if _types_text(one) != _types_text(other) else ShapeError(text)


def _call_text(said: MeetingMessage) -> str:
    return f"{_CALLED.get(said.operation, 'something else')} of {said.description.decode(errors='replace')}"


def _types_text(said: MeetingMessage) -> list[bytes]:
    return [part.split(b" (")[0] for part in said.description.split(b"; ")]


def _decode_message(data: bytes, at: int) -> MeetingMessage | None:
    operation, length, nbytes = _HEAD.unpack_from(data, at)
    begin = at + _HEAD.size
    return MeetingMessage(operation, data[begin : begin + length], nbytes) if operation else None


def _content_offset(description: bytes) -> int:
    """Return the offset of the content in a slot, aligned for all element types."""
    return -(-(_HEAD.size + len(description)) // 8) * 8


def _cut_pieces(count: int) -> list[int]:
    """Cut the next elements into pieces.

    Each power of two at most once, because keys do not repeat in a call.
    """
    count = min(-(-count // _SMALLEST) * _SMALLEST, 2 * _LARGEST - _SMALLEST)
    sizes = (1 << bit for bit in reversed(range(_LARGEST.bit_length())))
    return [size for size in sizes if size >= _SMALLEST and count & size]


def _padded_piece(piece: Array, size: int) -> Array:
    """Return a piece, padded with zeros to a size; a copy only if it is shorter."""
    if piece.size == size:
        return piece
    padded = np.zeros(size, piece.dtype)
    padded[: piece.size] = piece
    return padded
