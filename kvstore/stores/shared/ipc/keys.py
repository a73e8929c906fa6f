"""A key that is summed on the workers' GPUs, as one worker holds it."""

from __future__ import annotations

import math
from collections.abc import Sequence

from ....devices.gpu_context import GpuContext
from ....devices.memory import DeviceMemory
from ....devices.streams import DeviceStream, StreamCursor
from ....errors import KVStoreError
from ....kernels import cuda
from ..native import _shared as shm
from .memory import ExportedPiece, MemoryExports, MemoryImports
from .table import MOST_SLOTS, IpcTable

#: Slots that are offered at once; more are added if a worker is further ahead of others than usual.
_FIRST_SLOTS = 2


class IpcKey:
    """The value of a key on this worker's GPU, the slots that it pushes to, and the others' slots.

    Attributes
    ----------
    agreed, hopeless : bool
        Whether all workers can push to it from GPU to GPU; whether at least one of them cannot.
    applied : int
        The last round that was summed into `value_address`, on some stream.
    in_region : int
        The last round that this worker has copied to the region.
    through : int
        The last round that this worker knows to be complete, with slots that it need not read again.
    tail : StreamCursor or None
        End of the stream of the last work on the value, after `hold_stream`.
    """

    def __init__(self, handle: shm.Handle, place: GpuContext, table: IpcTable, rank: int) -> None:
        self.handle, self.place, self.table = handle, place, table
        self.numel = math.prod(handle.shape)
        self.agreed = self.hopeless = False
        self.applied = self.in_region = self.through = 0
        self._rank = rank
        self._slots: list[ExportedPiece] = []
        self._round_in: list[int] = []  # the round in each slot
        self._bases: dict[tuple[int, int], int] = {}  # of other workers' slots
        self._value: DeviceMemory | None = None
        self.tail: StreamCursor | None = None

    # ------------------------------------------------------------------------------------------- slots

    def offer_slots(self, exports: MemoryExports) -> None:
        """Offer the first slots."""
        for _ in range(_FIRST_SLOTS):
            self._add_slot(exports)

    def _add_slot(self, exports: MemoryExports) -> None:
        room = exports.allocate_array(self.handle.nbytes)
        self.table.add_slot(room.offset, room.name, room.proof)
        self._slots.append(room)
        self._round_in.append(0)

    def free_slot(self, exports: MemoryExports) -> int:
        """Return the number of a slot that no worker reads any more."""
        through = self.table.read_by_all()
        for number, round in enumerate(self._round_in):
            if round <= through:
                return number
        if len(self._slots) == MOST_SLOTS:  # impossible: see docs/decisions/0011
            raise KVStoreError(f"all slots of key {self.handle.key!r} are in use in round {through + 1}")
        self._add_slot(exports)
        return len(self._slots) - 1

    def note_slot(self, slot: int) -> None:
        """Record that this worker's part in its next round is in a slot."""
        round = self.handle.arrived + 1
        self._round_in[slot] = round
        self.table.note_slot(round, slot)

    def open_all(self, size: int, imports: MemoryImports) -> None:
        """Open the slots that all workers offer."""
        for worker in range(size):
            for number in range(self.table.slot_count(worker)):
                self._open_source(worker, number, imports)

    def source_address(self, worker: int, round: int, imports: MemoryImports) -> int:
        """Return the address at which this worker reads another's part in a round."""
        return self._open_source(worker, self.table.noted_slot(worker, round), imports)

    def _open_source(self, worker: int, number: int, imports: MemoryImports) -> int:
        if worker == self._rank:
            return self._slots[number].address
        known = self._bases.get((worker, number))
        if known is None:
            offset, name, proof = self.table.slot_offset(worker, number)
            known = self._bases[worker, number] = imports.address(self.place.own, name, proof) + offset
        return known

    # ------------------------------------------------------------------------------------------- value

    @property
    def value_address(self) -> int:
        """Return the address of the value on this worker's GPU."""
        if self._value is None:
            self._value = DeviceMemory(self.place.driver, self.place.device, self.handle.nbytes)
        return self._value.address

    def put_row(self, sources: Sequence[int], slot: int) -> cuda.KernelRow:
        """Return the kernel arguments that write the sum of some arrays to a slot."""
        return cuda.KernelRow(self.numel, srcs=tuple(sources), dst=self._slots[slot].address)

    def sum_row(self, sources: Sequence[int], outs: Sequence[int]) -> cuda.KernelRow:
        """Return the kernel arguments that sum a round into the value and some outs."""
        return cuda.KernelRow(self.numel, srcs=tuple(sources), dst=self.value_address, outs=tuple(outs))

    def copy_row(self, outs: Sequence[int]) -> cuda.KernelRow:
        """Return the kernel arguments that copy the value to one or more outs."""
        return cuda.KernelRow(self.numel, srcs=(self.value_address,), dst=outs[0], outs=tuple(outs[1:]))

    # ------------------------------------------------------------------------------------------- order

    def hold_stream(self, stream: DeviceStream) -> None:
        """Let a stream wait for the work on the value."""
        if self.tail is not None:
            self.tail.hold_stream(stream)

    def be_through(self) -> None:
        """Record that this worker has read all slots of the rounds up to `through`."""
        self.table.note_read(self.through)

    def close(self) -> None:
        """Free the memory of this worker alone; no work is in progress."""
        self.tail = self._value = None
