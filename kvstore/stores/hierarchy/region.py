"""The memory that the workers of one host share: they sum there, and the servers' values are copied there.

It is a region of the shared store with one key for each slice of a key on servers. A round of it is complete
when the servers have answered, not when it is summed: the opener of a round passes it to its carrier.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from functools import partial

import msgspec
import numpy as np

from ...arrays.grouping import Group
from ...arrays.sparse import RowSparseArray
from ...errors import KVStoreError
from ...settings.options import StoreConfig
from ...waiting import WaitClock
from ..entry import Array
from ..parameter_server.protocol.failures import as_exception
from ..parameter_server.protocol.messages import Failure
from ..shared.arguments import Sparse
from ..shared.backend import SharedBackend
from ..shared.gpu_access import Dense
from ..shared.native import _shared as shm
from ..shared.native.registration import JobRegistration, OtherProcesses, RegionPlace
from ..shared.optimizer import JobUpdater
from ..shared.rows import SparseKeys
from ..shared.wait_errors import Missing, WaitErrors
from ..shared.waiting import RoundWaiter, Step
from .pusher import HostPusher
from .rows import HostRows

#: Seconds for which a worker lets the lowest of its host fetch a value: one fetch for each host is enough.
_PATIENCE = 0.3

Handle = shm.Handle
#: Carries a round that this worker has opened.
Carry = Callable[[Handle, int], None]
#: Lets another worker of the host carry a round that this worker cannot, for a reason.
GiveUp = Callable[[Handle, BaseException], None]


class HostUpdater(JobUpdater):
    """The update of a round of a host: its sum is sent to the servers."""

    completes = False
    carry: Carry
    give_up: GiveUp

    def carry_out(self, handle: Handle, rows: SparseKeys) -> None:
        """Pass the round that this worker has opened to the carrier, unless another thread does."""
        try:
            if handle.begin_plan():
                self.carry(handle, handle.complete + 1)
        except BaseException as error:
            self.give_up(handle, error)
            raise


def failure_text(failure: Failure) -> str:
    """Return the text from which `HostWaitErrors` makes an error; a long text may be cut at its end."""
    head = msgspec.structs.replace(failure, text="")
    return f"{msgspec.json.encode(head).decode()}\n{failure.text}"


class HostWaitErrors(WaitErrors):
    """Errors in the servers' answers reach every worker of the host with their type."""

    _of_size = ""  # the job has more workers than the region

    def _error_of(self, handle: Handle, round: int, text: str | None) -> KVStoreError:
        head, _, why = (text or "").partition("\n")
        try:
            return as_exception(msgspec.structs.replace(msgspec.json.decode(head, type=Failure), text=why))
        except msgspec.MsgspecError:
            why = text or "there was no memory for the cause"
            return KVStoreError(f"round {round} of key {handle.key!r} failed: {why}")

    def waiting_text(self, handle: Handle | None, missing: Missing | None, what: str, waited: float) -> str:
        """Describe a wait of this worker, for workers of its host or for other hosts."""
        if handle is None or self.missing_workers(handle, missing):
            return super().waiting_text(handle, missing, what, waited)
        return (
            f"worker {self._rank} has waited {waited:.0f} s on round {handle.complete + 1} of key "
            f"{handle.key!r} for the sums of other hosts; look there for a worker that is slow or waits"
        )


class HostWaiter(RoundWaiter):
    """The waits of a worker, which also end if its job breaks at another host, or its link to the servers."""

    #: Raises an error if all waits must end.
    check: Callable[[], None]
    #: Detects, in a long wait, the loss of the scheduler: another worker may be the carrier.
    listening: Callable[[], AbstractContextManager[None]]

    def check_writing(self) -> None:
        """Raise an error unless this worker may push."""
        self.check()
        super().check_writing()

    def wait(
        self,
        step: Step,
        handle: Handle | None,
        missing: Missing | None = None,
        what: str = "",
        first: int = shm.TICK,
    ) -> None:
        """Repeat a step until it is ready, or the deadline is reached."""

        def checked() -> int:
            self.check()
            return step()

        super().wait(checked, handle, missing, what, first)

    def _wait_long(
        self, step: Step, handle: Handle | None, missing: Missing | None, what: str, clock: WaitClock
    ) -> None:
        with self.listening():
            super()._wait_long(step, handle, missing, what, clock)

    def open_next(self, handle: Handle) -> None:
        """Open the next round of a key, if all parts are there and no waiting worker does."""
        self._help_call(shm.Call(handle, [], False))


class HostRegion(SharedBackend):
    """The region of one host's workers, with their ranks in the job."""

    _updater: HostUpdater
    _waiter: HostWaiter

    def __init__(
        self,
        config: StoreConfig,
        place: RegionPlace,
        ranks: Sequence[int],
        check: Callable[[], None],
        others: OtherProcesses,
        listening: Callable[[], AbstractContextManager[None]],
    ) -> None:
        self._place, self._ranks, self._check, self._others = place, ranks, check, others
        self._listening = listening
        super().__init__(config)
        self._updater.set_updater(self.mark_callable)
        self.job, self.waits = self._job, self._waiter
        #: The rows that are pushed to keys of this worker.
        self.rows = HostRows()

    def _enter_region(self) -> JobRegistration:
        # A message of the network takes longer than a wake-up, and any worker with a processor may receive
        # it.
        crowded = len(self._ranks) > len(os.sched_getaffinity(0))
        config = dataclasses.replace(self.config, spin=0.0) if crowded else self.config
        return JobRegistration(config, self._place, self._others)

    def _make_updater(self) -> HostUpdater:
        return HostUpdater(self._job, self._keys, self._gpus, self.rank)

    def _make_waiter(self, rows: SparseKeys) -> HostWaiter:
        self._job.names = self._ranks
        errors = HostWaitErrors(self._job, self._updater, self.rank)
        parts = (self._job, self._keys, self._updater, rows)
        made = HostWaiter(*parts, self.config.timeout, self.rank, errors)
        made.check, made.listening = self._check, self._listening
        return made

    def _make_pusher(self, rows: SparseKeys) -> HostPusher:
        waiter = self._waiter
        return HostPusher(self._job, self._gpus, rows, waiter, waiter.open_next)

    def mark_callable(self, *_: object) -> None:
        """Mark the updater as a callable; `carry_with` sets the carrier."""

    def carry_with(self, carry: Carry, give_up: GiveUp) -> None:
        """Set the carrier of the rounds that this worker opens; called before it pushes."""
        self._updater.carry, self._updater.give_up = carry, give_up

    # ---------------------------------------------------------------------------------------------- keys

    def find(self, name: str) -> Handle | None:
        """Return the key of a slice, if it is there."""
        return self._keys.find(name)

    def add(self, name: str, value: Array) -> None:
        """Make the key of a slice, unless another worker has made it concurrently."""
        self._keys.add(name, value)

    def add_table(self, name: str) -> None:
        """Make the key of a row-sparse slice, which has no value here; see `add`."""
        self._keys.add(name, np.zeros(1, np.int8))

    def is_lowest(self) -> bool:
        """Return whether this worker is the lowest member of the host."""
        return self.rank == min(self._job.members(), default=self.rank)

    def wait_for(self, name: str) -> None:
        """Wait until the key of a slice is there, or this worker may make it."""
        end = time.monotonic() + _PATIENCE

        def step() -> int:
            known = len(self._keys)
            late = self.is_lowest() or time.monotonic() > end
            if late or self._keys.find(name) is not None:
                return shm.READY
            outcome = self._keys.wait_for_more(known)
            return shm.TICK if outcome == shm.READY else outcome

        self._waiter.wait(
            step, None, lambda: [min(self._job.members(), default=0)], f"the init of key {name!r}"
        )

    # -------------------------------------------------------------------------------------------- rounds

    def finish(self, call: shm.Call, receives: bool) -> None:
        """Open the round of a quick call, if needed; wait, if it `receives` a result."""
        if receives:
            self._waiter.read([call])
        elif call.help() != shm.TICK or call.handle.has_failed(call.round):
            self._waiter.begin_work([call])

    def _check_sources(self, groups: list[Group]) -> tuple[Dense, Sparse]:
        """Return rows unchanged: they are checked, and the region does not have the form of their keys."""
        dense, _ = super()._check_sources(
            [one for one in groups if not isinstance(one[1][0], RowSparseArray)]
        )
        rows = [one for one in groups if isinstance(one[1][0], RowSparseArray)]
        return dense, [(self._arguments.handle(key), values) for key, values in rows]

    def total_of_rows(self, handle: Handle) -> RowSparseArray | Array | None:
        """Sum the round that this worker has opened, if it has parts that are rows."""
        if not shm.opened_with_rows(handle):
            return None
        return self.rows.sum_parts(handle, shm.opened_sources(handle))

    def complete_rounds(self, handles: Sequence[Handle]) -> None:
        """Complete the rounds that this worker has pushed into."""
        self._waiter.check_open()
        for handle in handles:
            self._waiter.complete_pushed(handle)

    def complete_all_pushed(self) -> None:
        """Complete all rounds that this worker has pushed into."""
        self._waiter.complete_all_pushed()

    def open_next(self) -> None:
        """Open the rounds of dead openers that no worker waits for."""
        self._job.detect_losses()
        for handle in self._keys.with_open_rounds():
            self._waiter.open_next(handle)

    def meet_at_barrier(self) -> int:
        """Wait until every worker of the host has reached its next barrier; return the number of that."""
        self._waiter.check_writing()
        job, number = self._job, self._job.arrive_at_barrier()
        self._waiter.wait(lambda: job.wait_at_barrier(number), None, lambda: job.missing_at_barrier(number))
        return number

    def stop_taking_part(self) -> None:
        """Let rounds of this host no longer wait for this worker."""
        self._waiter.joined = True
        self._job.stop_taking_part()

    def retire_worker(self) -> bool:
        """Let no round wait for this worker; return whether rounds of the host waited for no other."""
        self._job.detect_losses()  # dead workers do not count
        with contextlib.suppress(InterruptedError):  # fenced: then other workers remain
            return self._job.retire()
        return False

    def sum_unopened(self) -> Iterator[tuple[Handle, int, RowSparseArray | Array]]:
        """Sum the unopened rounds of the host's workers: keys, rounds and sums."""
        for handle in self._keys.all():
            first = handle.complete + 1
            for round in (first, first + 1):  # a push waits for the round before the last
                # Without use of a key, this worker does not know the form of its rows: see the carrier.
                merge = partial(self.rows.sum_parts, handle) if self.rows.knows_slice(handle) else tuple
                if (total := shm.sum_unopened(handle, round, merge)) is not None:
                    yield handle, round, total

    @property
    def is_fenced(self) -> bool:
        """Whether the other workers of the host have declared this worker lost."""
        return self._job.check_membership() == shm.FENCED

    def declare_lost(self) -> None:
        """Declare this worker lost: other workers of the host complete its work."""
        self._job.declare_lost()

    def new_memory(self, like: Array) -> Array:
        """Return a new array in the region."""
        return self._job.empty(like.shape, like.dtype)
