"""Makes the values that a worker pushes readable for the other workers.

With the last value the worker has arrived.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from ...arrays.grouping import Key
from ...compression import Codec, Feedback
from ...kernels import cpu
from ...observe.counters import CONVERTING, MOVING, SUMMING
from ..entry import Array
from ..update import kernel_sources
from .arguments import Sparse
from .gpu_access import Dense, GpuAccess
from .native import _shared as shm
from .rows import SparseKeys
from .waiting import RoundWaiter

Handle = shm.Handle
#: A key of a pushpull: the values, and the arrays to fill.
Exchanged = tuple[Handle, list[Array], list[Array]]

_ONE_KEY = contextlib.nullcontext()


class RoundPusher:
    """The pushes of one worker of a job."""

    def __init__(self, job: shm.Job, gpus: GpuAccess, rows: SparseKeys, waiter: RoundWaiter) -> None:
        self._job, self._gpus, self._rows, self._waiter = job, gpus, rows, waiter
        self._feedback: Feedback | None = None  # codec and residuals, if pushed values are packed
        # The last two arrays of the region that were pushed, by parity of the round.
        self._in_flight: dict[tuple[Key, int], Array] = {}

    def pack(self, codec: Codec) -> Feedback:
        """Pack pushed values from now on; arrays on GPUs are copied to the host for that."""
        self._feedback = Feedback(codec).follow(self._feedback)
        self._gpus.staging.packs = True
        return self._feedback

    def one_call(self, handles: list[Handle]) -> AbstractContextManager[None]:
        """Arrive at all keys, or at none that counts if this process dies.

        The body does not wait for other workers.
        """
        return self._several_keys(handles) if len(handles) > 1 else _ONE_KEY

    @contextlib.contextmanager
    def _several_keys(self, handles: list[Handle]) -> Iterator[None]:
        try:
            shm.begin_call(self._job, handles)
            yield
            self._waiter.note_call(handles)
        finally:
            shm.end_call(self._job)

    def push(self, dense: Dense, sparse: Sparse) -> None:
        """Push copies, arrays of the region, arrays on GPUs, and rows."""
        on_gpu, host = self._gpus.staging.split_gpu(dense)
        self.push_on_gpu(on_gpu)
        if self._feedback is not None:
            self._pack_to_slots(host, self._feedback)
        else:
            self._copy_to_slots([pair for pair in host if not self._push_from_region(*pair)])
        for handle, sources in sparse:
            self._rows.arrive(handle, sources)

    def push_copies(self, handles: list[Handle], values: list[Array], divisor: int = 1) -> None:
        """Push copies of small arrays, one for each key.

        `shm.can_arrive` has confirmed that no wait is needed.
        """
        with self.one_call(handles):
            shm.arrive_with_copies(handles, values, divisor)

    def push_on_gpu(self, on_gpu: Dense) -> None:
        """Push values that GPUs read from each other."""
        if on_gpu:
            self._gpus.staging_in_use().ipc.push(on_gpu)  # type: ignore[arg-type]

    def push_pushpull(self, wanted: list[Exchanged], private: set[Key], divisor: int = 1) -> set[Key]:
        """Push values of a pushpull: copies, arrays of the region, and arrays that others read from here.

        Returns the keys that receive the sum in the pushed array; adds the keys that are read from this
        process to `private`. Sums divide plain float32 values by `divisor`.
        """
        slots: Dense = []
        direct: set[Key] = set()
        if self._feedback is not None:
            self._pack_to_slots([(handle, values) for handle, values, _ in wanted], self._feedback)
            return direct
        staging = self._gpus.staging
        for handle, values, outs in wanted:
            if len(values) > 1 or handle.small:
                slots.append((handle, values))
                continue
            if offset := self._job.offset_of(values[0]):
                in_place = (
                    len(outs) == 1
                    and outs[0] is values[0]
                    and self._may_share(region=True)
                    and not staging.may_be_pushed_on_gpu(handle)
                )
                self._arrive_in_region(handle, values[0], offset, in_place, divisor)
                direct |= {handle.key} if in_place else set()
            elif self._may_share():
                staging.wait_staged(handle)
                private.add(handle.key)
                shm.arrive_privately(handle, values[0], divisor)
            else:
                slots.append((handle, values))
        self._copy_to_slots(slots, divisor)
        return direct

    def _may_share(self, region: bool = False) -> bool:
        """Return whether the workers may read, or with `region` write, each other's arrays in a round.

        If the job continues after a loss, the part of a lost worker must outlive it; and an update that has
        begun must end.
        """
        sums = not self._job.continues_after_loss and not shm.mode(self._job) & 1
        return sums and (region or self._job.can_read_peers())

    def _push_from_region(self, handle: Handle, values: list[Array]) -> bool:
        offset = self._job.offset_of(values[0]) if len(values) == 1 and not handle.small else 0
        if not offset:
            return False
        self._arrive_in_region(handle, values[0], offset, False)
        return True

    def _arrive_in_region(
        self, handle: Handle, value: Array, offset: int, in_place: bool, divisor: int = 1
    ) -> None:
        """Push an array of the region, which stays alive for the other workers if the caller drops it."""
        self._gpus.staging.wait_staged(handle)
        shm.arrive_in_region(handle, offset, in_place, divisor)
        self._in_flight[handle.key, handle.arrived % 2] = value

    def _pack_to_slots(self, pairs: Dense, feedback: Feedback) -> None:
        """Push packed values; values of a codec without kernels are packed and unpacked here."""
        compiled = feedback.codec.compiled
        for handle, _ in pairs:
            self._gpus.staging.wait_staged(handle)
        if compiled is None:
            self._push_restored(pairs, feedback)
            return
        for handle, _ in pairs:
            feedback.prepare(handle.key, handle.shape)
        slots = [shm.packing_slot(handle, compiled[0]) for handle, _ in pairs]
        for (handle, values), slot in zip(pairs, slots, strict=True):  # nothing is allocated: all arrive
            with shm.Phase(self._job, CONVERTING, handle, handle.arrived + 1, handle.nbytes):
                feedback.pack(handle.key, values, slot)
                shm.arrive_packed(handle, *compiled)

    def _push_restored(self, pairs: Dense, feedback: Feedback) -> None:
        """Push the values that a codec without kernels packs and unpacks here."""
        with self._push_phase(CONVERTING, pairs):
            totals = [(handle, feedback.total(handle.key, values)) for handle, values in pairs]
            restored = [(handle, kernel_sources(pushed)) for handle, pushed in totals]
        self._copy_to_slots([(handle, values) for handle, values in restored if isinstance(values, list)])
        for _, pushed in totals:
            pushed.keep()

    def _copy_to_slots(self, pairs: Dense, divisor: int = 1) -> None:
        summed: Dense = []
        staging = self._gpus.staging
        for handle, values in pairs:
            staging.wait_staged(handle)
            if handle.small and len(values) == 1:
                shm.arrive_with_copy(handle, values[0], divisor)
            else:
                summed.append((handle, values))
        if not summed:
            return
        several = any(len(values) > 1 for _, values in summed)
        with self._push_phase(SUMMING if several else MOVING, summed):
            cpu.reduce([(values, shm.slot(handle), []) for handle, values in summed])
            for handle, _ in summed:
                shm.arrive_with_slot(handle, divisor)

    def _push_phase(self, phase: int, pairs: Dense) -> shm.Phase:
        """Return a phase of a push, as a context."""
        only = pairs[0][0] if len(pairs) == 1 else None
        round = 0 if only is None else only.arrived + 1
        return shm.Phase(self._job, phase, only, round, sum(handle.nbytes for handle, _ in pairs))
