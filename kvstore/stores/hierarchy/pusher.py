"""Pushes a call into the memory of the host, portion by portion."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator

from ..shared.gpu_access import Dense, GpuAccess
from ..shared.native import _shared as shm
from ..shared.pushing import RoundPusher
from ..shared.rows import SparseKeys
from ..shared.waiting import RoundWaiter

#: Bytes of a portion: the copy of about a millisecond.
_PORTION = 4 * 1024 * 1024


class HostPusher(RoundPusher):
    """Pushes a large call in portions: servers receive its first slices during the copy of the next ones.

    If a worker dies within such a call, some portions count and others do not, as in flat stores; each
    portion counts as a whole.
    """

    def __init__(
        self,
        job: shm.Job,
        gpus: GpuAccess,
        rows: SparseKeys,
        waiter: RoundWaiter,
        open_next: Callable[[shm.Handle], None],
    ) -> None:
        super().__init__(job, gpus, rows, waiter)
        self._open_next = open_next
        self._has_memory: set[tuple[shm.Handle, int]] = set()  # by parity of the round
        self._call = threading.local()  # its `errors` are of rounds that this thread's call has opened

    @contextlib.contextmanager
    def one_call(self, handles: list[shm.Handle]) -> Iterator[None]:
        """Make each portion one call.

        Raise errors once all has arrived, because other workers wait for that.
        """
        errors: list[Exception] = []
        self._call.errors = errors
        yield
        if errors:
            raise errors[0]

    def _copy_to_slots(self, pairs: Dense, divisor: int = 1) -> None:
        self._reserve_memory(pairs)
        for portion in _call_portions(pairs):
            handles = [handle for handle, _ in portion]
            with super().one_call(handles):
                super()._copy_to_slots(portion, divisor)
            if portion[-1] is not pairs[-1]:  # after the last one, the caller opens rounds
                self._open_rounds(handles)

    def _reserve_memory(self, pairs: Dense) -> None:
        """Reserve memory for the whole call, so that nothing arrives if there is too little."""
        for handle, _ in pairs:
            slot = handle, handle.arrived & 1
            if slot not in self._has_memory:
                shm.slot(handle)
                self._has_memory.add(slot)

    def _open_rounds(self, handles: list[shm.Handle]) -> None:
        """Open the rounds for which this worker was the last to arrive.

        Errors of failed ones are raised later.
        """
        try:
            for handle in handles:
                self._open_next(handle)
        except Exception as error:
            self._call.errors.append(error)


def _call_portions(pairs: Dense) -> Iterator[Dense]:
    portion, nbytes = [], 0
    for pair in pairs:
        portion.append(pair)
        nbytes += pair[0].nbytes
        if nbytes >= _PORTION:
            yield portion
            portion, nbytes = [], 0
    if portion:
        yield portion
