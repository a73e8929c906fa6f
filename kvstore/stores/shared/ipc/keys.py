"""A key whose value is summed on the workers' GPUs, as one worker has it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....devices.gpu_context import GpuContext
from ....devices.memory import Memory
from ....devices.streams import Stream, StreamCursor
from ....errors import KVStoreError
from ....kernels import cuda
from ..native import _shared as shm
from .memory import Exports, Imports, Room
from .table import MOST_SLOTS, IpcTable

#: Slots that are shown at once; more are added where a worker is further ahead of others than usual.
_FIRST_SLOTS = 2


class IpcKey:
    """The value of a key on this worker's GPU, the slots that it pushes to, and the others' slots.

    Attributes
    ----------
    agreed, hopeless : bool
        Whether all workers can push to it from GPU to GPU; whether it is known that not all of them can.
    applied : int
        The last round whose sum was put into `value`, on some stream.
    in_region : int
        The last round whose value was copied to the region by this worker.
    through : int
        The last round that this worker knows to be complete, and whose sum it has or does not need.
    tail : StreamCursor or None
        End of the stream where the last work on the value was put, after `hold`.
    """

    def __init__(self, handle: shm.Handle, place: GpuContext, table: IpcTable, rank: int) -> None:
        self.handle, self.place, self.table = handle, place, table
        self.numel = math.prod(handle.shape)
        self.agreed = self.hopeless = False
        self.applied = self.in_region = self.through = 0
        self._rank = rank
        self._slots: list[Room] = []
        self._round_in: list[int] = []  # of each slot
        self._bases: dict[tuple[int, int], int] = {}  # of other workers' slots
        self._value: Memory | None = None
        self.tail: StreamCursor | None = None

    # ------------------------------------------------------------------------------------------- slots

    def offer(self, exports: Exports) -> None:
        """Show the first slots."""
        for _ in range(_FIRST_SLOTS):
            self._add_slot(exports)

    def _add_slot(self, exports: Exports) -> None:
        room = exports.room(self.handle.nbytes)
        self.table.add_slot(room.offset, room.name, room.proof)
        self._slots.append(room)
        self._round_in.append(0)

    def free_slot(self, exports: Exports) -> int:
        """Return the number of a slot that nobody reads any more."""
        through = self.table.read_by_all()
        for number, round in enumerate(self._round_in):
            if round <= through:
                return number
        if len(self._slots) == MOST_SLOTS:  # see docs/decisions/0011: it cannot be
            raise KVStoreError(f"all slots of key {self.handle.key!r} are in use in round {through + 1}")
        self._add_slot(exports)
        return len(self._slots) - 1

    def use(self, slot: int) -> None:
        """Note that the worker's part in its next round is in a slot."""
        round = self.handle.arrived + 1
        self._round_in[slot] = round
        self.table.use(round, slot)

    def open_all(self, size: int, imports: Imports) -> None:
        """Open what all workers show."""
        for worker in range(size):
            for number in range(self.table.slots(worker)):
                self._source(worker, number, imports)

    def source(self, worker: int, round: int, imports: Imports) -> int:
        """Where this worker reads another one's part in a round."""
        return self._source(worker, self.table.used(worker, round), imports)

    def _source(self, worker: int, number: int, imports: Imports) -> int:
        if worker == self._rank:
            return self._slots[number].address
        known = self._bases.get((worker, number))
        if known is None:
            offset, name, proof = self.table.slot(worker, number)
            known = self._bases[worker, number] = imports.address(self.place.own, name, proof) + offset
        return known

    # ------------------------------------------------------------------------------------------- value

    @property
    def value(self) -> int:
        """Address of the value on this worker's GPU."""
        if self._value is None:
            self._value = Memory(self.place.driver, self.place.device, self.handle.nbytes)
        return self._value.address

    def put_row(self, sources: Sequence[int], slot: int) -> cuda.Row:
        """Return what pushes the sum of some arrays."""
        return cuda.Row(self.numel, srcs=tuple(sources), dst=self._slots[slot].address)

    def sum_row(self, sources: Sequence[int], outs: Sequence[int]) -> cuda.Row:
        """Return what sums a round into the value and some outs."""
        return cuda.Row(self.numel, srcs=tuple(sources), dst=self.value, outs=tuple(outs))

    def copy_row(self, outs: Sequence[int]) -> cuda.Row:
        """Return what copies the value to outs, one or more."""
        return cuda.Row(self.numel, srcs=(self.value,), dst=outs[0], outs=tuple(outs[1:]))

    # ------------------------------------------------------------------------------------------- order

    def hold(self, stream: Stream) -> None:
        """Let a stream wait for all that was done with the value."""
        if self.tail is not None:
            self.tail.hold(stream)

    def be_through(self) -> None:
        """Say that this worker reads no slot of the rounds up to `through`; what did is done."""
        self.table.note_read(self.through)

    def close(self) -> None:
        """Give back what is this worker's alone; nothing is under way."""
        self.tail = self._value = None
