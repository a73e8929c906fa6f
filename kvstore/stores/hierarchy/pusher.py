"""Pushes a call into the memory of the host, portion by portion."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

from ...errors import KVStoreError
from ..shared.gpu_access import Dense, GpuAccess
from ..shared.native import _shared as shm
from ..shared.pushing import RoundPusher
from ..shared.rows import SparseKeys
from ..shared.waiting import RoundWaiter

#: Bytes that are copied until the host can send the first of them: a millisecond's work.
_PORTION = 4 * 1024 * 1024


class HostPusher(RoundPusher):
    """Has the first slices of a large call on their way to the servers while the next ones are copied.

    A worker that dies within such a call may have come to some of its slices and not to others, as in flat
    stores; to all of a portion or to none.
    """

    def __init__(self, job: shm.Job, gpus: GpuAccess, rows: SparseKeys, waiter: RoundWaiter) -> None:
        super().__init__(job, gpus, rows, waiter)
        self._has_memory: set[tuple[shm.Handle, int]] = set()  # by parity of the round

    def one_call(self, handles: list[shm.Handle]) -> AbstractContextManager[None]:
        """Each portion is one."""
        return contextlib.nullcontext()

    def _copy_to_slots(self, pairs: Dense) -> None:
        self._reserve(pairs)
        errors: list[KVStoreError] = []
        begun = False
        try:
            for portion in _portions(pairs):
                handles = [handle for handle, _ in portion]
                with super().one_call(handles):
                    super()._copy_to_slots(portion)
                begun = portion[-1] is not pairs[-1]
                if begun:  # at the end the caller opens rounds
                    self._open(handles, errors)
        except BaseException:
            if begun:  # interrupted: the rest never comes, and nobody is to wait for it
                self._job.be_lost()
            raise
        if errors:
            raise errors[0]

    def _reserve(self, pairs: Dense) -> None:
        """Take memory for all of a call, so that none of it arrives if there is too little."""
        for handle, _ in pairs:
            slot = handle, handle.arrived & 1
            if slot not in self._has_memory:
                shm.slot(handle)
                self._has_memory.add(slot)

    def _open(self, handles: list[shm.Handle], errors: list[KVStoreError]) -> None:
        """Open the rounds to which this worker was the last to come."""
        try:
            self._waiter.help([shm.Call(handle, [], False) for handle in handles])
        except KVStoreError as error:  # the others wait for the rest of the call
            errors.append(error)


def _portions(pairs: Dense) -> Iterator[Dense]:
    portion, nbytes = [], 0
    for pair in pairs:
        portion.append(pair)
        nbytes += pair[0].nbytes
        if nbytes >= _PORTION:
            yield portion
            portion, nbytes = [], 0
    if portion:
        yield portion
