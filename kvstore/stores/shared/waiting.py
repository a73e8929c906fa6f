"""The waits of the shared store: rounds are completed, deadlines enforced."""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict, deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, wraps
from typing import Any, TypeVar, cast

from ...arrays.grouping import Key
from ...errors import ConfigError, KVStoreError, PeerLostError, TimeoutError
from ...observe.counters import WAITING
from ...waiting import WaitClock
from .native import _shared as shm
from .optimizer import JobUpdater
from .rows import SparseKeys
from .wait_errors import Missing, SlowWait, WaitErrors

log = logging.getLogger("kvstore.shared")

_Method = TypeVar("_Method", bound=Callable[..., None])

#: Outcomes of a step after which the wait continues, until the deadline.
_UNDONE = (shm.TICK, shm.PLAN, shm.NEW_MODE)

Handle = shm.Handle
Step = Callable[[], int]

#: The number of recent calls of each key that can differ in their rounds after a loss: a round after the last
#: one of the lost worker never completes, and no push is more than two rounds ahead.
_CALLS = 3


@dataclass
class _PushCall:
    """A push of several keys."""

    handles: list[Handle]
    rounds: list[int]  # the round of each key
    evened: bool = False  # after a loss: all keys have its rounds, or none has, as far as possible

    @property
    def keys(self) -> list[tuple[Handle, int]]:
        """The keys with their rounds."""
        return list(zip(self.handles, self.rounds, strict=True))


def _has_mixed_rounds(keys: list[tuple[Handle, int]]) -> bool:
    """Return whether some keys have the round of the call that pushed them, and others have not."""
    return len({handle.value_round >= round for handle, round in keys}) > 1


def _releasing_opened(method: _Method) -> _Method:
    """Wrap a method: if an error ends it, other workers carry out the rounds that this worker has opened."""

    @wraps(method)
    def run(self: RoundWaiter, *args: Any, **kwargs: Any) -> None:
        try:
            method(self, *args, **kwargs)
        except BaseException:
            self.release_opened()
            raise

    return cast("_Method", run)


class RoundWaiter:
    """The waits of one worker of a job.

    If an error such as Ctrl-C ends a wait, another worker carries out the round that this worker has opened.
    """

    def __init__(
        self,
        job: shm.Job,
        keys: shm.Keys,
        updater: JobUpdater,
        rows: SparseKeys,
        timeout: float,
        rank: int,
        errors: WaitErrors,
    ) -> None:
        self._job, self._keys, self._updater, self._rows = job, keys, updater, rows
        self._timeout, self._rank = timeout, rank
        self._errors = errors
        #: Whether each round checks for lost and returned workers, to log them.
        self.logs_members = log.isEnabledFor(logging.INFO)
        # The last calls with several keys, by key.
        self._calls: dict[Key, deque[_PushCall]] = defaultdict(partial(deque, maxlen=_CALLS))
        self._preparing = threading.RLock()  # the updater is used by one thread at a time
        self.joined = False  # this worker has no more batches
        #: Whether this worker has replaced an earlier process, and has not pushed yet.
        self.rejoining = job.returned()

    @property
    def can_read(self) -> bool:
        """Whether reads wait for rounds only: this worker is in the job, and no loss was reported to it."""
        job = self._job
        return not job.forked and not self._errors.loss_reported and job.check_membership() == shm.READY

    def check_open(self) -> None:
        """Raise an error in a fork of the registered process, and in a fenced process."""
        if self._job.forked:
            raise KVStoreError(
                f"this process is a fork of worker {self._rank} and has no part in its job; use the store in "
                "the process that created it, or start workers with `kvstore run` or kv.spawn"
            )
        if self._job.check_membership() == shm.FENCED:
            self._errors.raise_outcome(shm.FENCED, None)

    def check_writing(self) -> None:
        """Raise an error unless this worker may push."""
        self.check_open()
        standing = self._job.check_membership()
        if standing != shm.READY:
            self._errors.raise_outcome(standing, None)
        if self.joined:
            raise ConfigError(f"worker {self._rank} has joined: it can read, but not push")

    def release_opened(self) -> None:
        """Let other workers carry out the rounds that this worker has opened."""
        if not self._job.forked:
            for handle in list(self._job.handles.values()):
                handle.release_opened()

    @_releasing_opened
    def complete(self, calls: list[shm.Call]) -> None:
        """Complete and deliver all rounds; then raise the first error."""
        errors: list[KVStoreError] = []
        if len(calls) > 1:  # work on all keys first: else workers would wait at the end of each
            for call in calls:
                if not call.handle.small:
                    self._help_call(call)
        for call in calls:
            self._finish_call(call, errors)
        if errors:
            raise errors[0]

    @_releasing_opened
    def complete_all(self, calls: shm.Calls) -> None:
        """As `complete`, for a call with many small keys."""
        errors: list[KVStoreError] = []
        at, end = calls.finish(0), len(calls.handles)
        while at < end:
            self._finish_call(calls.late(at), errors)
            at = calls.finish(at + 1)
        if errors:
            raise errors[0]

    @_releasing_opened
    def help_all(self, calls: shm.Calls) -> None:
        """As `begin_work`, for a call with many small keys."""
        errors: list[KVStoreError] = []
        at, end = calls.help(0), len(calls.handles)
        while at < end:
            try:
                self.begin_work([calls.late(at)])
            except KVStoreError as error:
                errors.append(error)
            at = calls.help(at + 1)
        if errors:
            raise errors[0]

    def give_up(self, calls: list[shm.Call]) -> None:
        """Fail the rounds in which other workers may be reading this process's memory."""
        for call in calls:
            if call.handle.complete < call.round:
                call.handle.fail_round(call.round, f"worker {self._rank} gave up waiting")

    def _finish_call(self, call: shm.Call, errors: list[KVStoreError]) -> None:
        handle = call.handle
        outcome = call.advance()
        if outcome != shm.READY:
            self.wait(call.advance, handle, first=outcome)
        if self.logs_members:
            self._errors.log_members()
        if failure := self._errors.round_failure(handle, call.round):
            errors.append(failure)
            return
        if left := handle.left_out(call.round):
            self._errors.warn_of_leavers(handle, call.round, left)
        if call.deliver() != shm.READY:
            self.wait(call.deliver, handle)

    def read(self, calls: list[shm.Call]) -> None:
        """Complete the rounds that this worker has pushed into, and deliver."""
        if self._errors.loss_reported:  # the loss was reported: reads return the present values
            self.even_out_calls([call.handle for call in calls])
            for call in calls:
                self.wait(call.deliver, call.handle)
            return
        at_work = self._updater.at_work
        if at_work is None:
            self.complete(calls)
            return
        self.complete([call for call in calls if call.handle.key != at_work])
        for call in calls:
            if call.handle.key == at_work:  # from its own updater: the present value
                self.wait(call.deliver, call.handle)

    @_releasing_opened
    def begin_work(self, calls: list[shm.Call]) -> None:
        """Begin the work of rounds for which this worker was the last to arrive, without a wait."""
        errors: list[KVStoreError] = []
        for call in calls:
            outcome = self._help_call(call)
            if outcome not in (shm.READY, shm.TICK):
                self._errors.raise_outcome(outcome, call.handle)
            if not call.handle.has_failed(call.round):  # reads report earlier rounds: this push counts
                continue
            if failure := self._errors.round_failure(call.handle, call.round):
                errors.append(failure)
        if errors:
            raise errors[0]

    def _help_call(self, call: shm.Call) -> int:
        clock = WaitClock(self._timeout)
        while (outcome := call.help()) in (shm.PLAN, shm.NEW_MODE) and not clock.is_over:
            self._prepare_work(outcome, call.handle)
            clock.read()
        if outcome not in (shm.PLAN, shm.NEW_MODE):
            return outcome
        call.handle.release_opened()
        return shm.TICK

    def _prepare_work(self, outcome: int, handle: Handle | None) -> None:
        with self._preparing:
            if outcome == shm.NEW_MODE:
                self._updater.build_from_mode()
                return
            assert handle is not None
            round = handle.complete + 1
            try:
                self._updater.carry_out(handle, self._rows)
            except BaseException:
                if handle.has_failed(round):
                    handle.note_reported(round)
                raise
            finally:
                handle.end_plan(self._updater.completes)

    def _complete_without_dead(self, call: shm.Call) -> None:
        """After a loss: complete the round as far as possible without the dead workers."""

        def step() -> int:
            outcome = call.help()
            if outcome == shm.TICK and call.handle.is_idle:
                return shm.READY
            if outcome == shm.TICK:
                self._job.detect_losses()  # another worker may have died at work
                self._job.enter(WAITING, call.handle, call.round, call.handle.nbytes)
                time.sleep(0.0005)
            return outcome

        self.wait(step, call.handle)

    def wait_to_push(self, handles: list[Handle]) -> None:
        """Wait until this worker may arrive at keys, in the order of updates.

        Raise an error if it may not.
        """
        self.check_writing()
        if self.rejoining and handles:
            self._catch_up(handles[0])
        self.wait_for_free_slot(handles)

    def _catch_up(self, first: Handle) -> None:
        """Before the first push of a restarted rank: wait until it is in step with the other workers."""

        def step() -> int:
            self.check_writing()
            if self._job.catch_up(first):
                return shm.READY
            self._job.enter(WAITING, first, first.arrived + 1, first.nbytes)
            time.sleep(0.0005)
            return shm.TICK

        self.wait(step, first)
        self.rejoining = False

    @_releasing_opened
    def wait_for_free_slot(self, handles: list[Handle]) -> None:
        """Wait for the rounds that still use the memory of the next push of each key."""
        for handle in handles:
            if (
                outcome := shm.wait_for_free_slot(handle)
            ) != shm.READY:  # the outcome may require work of this worker
                self.wait(partial(shm.wait_for_free_slot, handle), handle, first=outcome)

    def note_call(self, handles: list[Handle]) -> None:
        """Record that this worker has arrived at these keys in one call."""
        call = _PushCall(handles, shm.rounds_of(handles))
        for handle in handles:
            self._calls[handle.key].append(call)

    def even_out_calls(self, handles: list[Handle]) -> None:
        """After a loss: let all keys of one call, or none, have its rounds, including keys that are not read.

        Rounds that can be completed are; a key that is ahead then goes back, if its previous value is still
        there. Raises PeerLostError if the keys that are read differ anyway.
        """
        if not self._errors.loss_reported:
            return
        for handle in handles:
            self._complete_without_dead(shm.Call(handle, [], False))
        wanted = set(handles) if len(handles) > 1 else set()
        for call in {id(c): c for h in handles for c in reversed(self._calls.get(h.key, ()))}.values():
            asked = [pair for pair in call.keys if pair[0] in wanted]
            if not call.evened or _has_mixed_rounds(asked):
                self._even_out(call.keys)
                call.evened = True
            if _has_mixed_rounds(asked):
                raise self._uneven_error(asked)

    def _even_out(self, keys: list[tuple[Handle, int]]) -> None:
        for _ in range(2):  # a surviving worker may arrive between two keys
            for handle, _ in keys:
                self._complete_without_dead(shm.Call(handle, [], False))
        for handle, round in keys if _has_mixed_rounds(keys) else ():
            if handle.value_round >= round:
                handle.restore_round(round - 1)

    def _uneven_error(self, keys: list[tuple[Handle, int]]) -> PeerLostError:
        rounds = ", ".join(f"{handle.key!r} of round {handle.value_round}" for handle, _ in keys)
        return self._errors.peer_lost(
            f". The keys of one call are not of one round: {rounds}. Read each in a separate call, "
            "or return to a checkpoint"
        )

    def wait_at_barrier(self) -> None:
        """Wait until every member has reached this worker's next barrier."""
        job, number = self._job, self._job.arrive_at_barrier()
        self.wait(lambda: job.wait_at_barrier(number), None, lambda: job.missing_at_barrier(number))

    def complete_pushed(self, handle: Handle) -> None:
        """Complete the rounds of a key that this worker has pushed into."""
        if handle.key == self._updater.at_work:
            return
        if self._errors.loss_reported:
            self.even_out_calls([handle])
        elif handle.complete < handle.arrived or handle.first_unreported(handle.arrived):
            self.complete([shm.Call(handle, [], False)])
        else:
            handle.note_complete()

    def complete_all_pushed(self) -> None:
        """Complete every round that this worker has pushed into."""
        self.check_open()
        for handle in self._keys.all():
            self.complete_pushed(handle)

    @_releasing_opened
    def wait(
        self,
        step: Step,
        handle: Handle | None,
        missing: Missing | None = None,
        what: str = "",
        first: int = shm.TICK,
    ) -> None:
        """Repeat a step until it is ready, or the deadline is reached."""
        outcome = step() if first == shm.TICK else first
        clock = WaitClock(self._timeout)
        while outcome not in (shm.READY, shm.TICK):
            self._handle_outcome(outcome, handle)
            waited = clock.read()
            outcome = step()
            if outcome in _UNDONE and clock.is_over:
                raise TimeoutError(self._errors.waiting_text(handle, missing, what, waited))
        if outcome == shm.TICK:
            try:
                self._wait_long(step, handle, missing, what, clock)
            finally:
                self._job.leave_phase()  # the phase of waiting spans all steps

    def _handle_outcome(self, outcome: int, handle: Handle | None) -> None:
        """Do the work that the outcome of a step requires, or raise its error."""
        if outcome in (shm.PLAN, shm.NEW_MODE):
            self._prepare_work(outcome, handle)
        elif outcome != shm.TICK:
            self._errors.raise_outcome(outcome, handle)

    def _wait_long(
        self, step: Step, handle: Handle | None, missing: Missing | None, what: str, clock: WaitClock
    ) -> None:
        """Continue a wait that has become long enough to be logged; it is then a tenth of a second old."""
        outcome, slow = shm.TICK, SlowWait(self._errors, handle, missing, what)
        with clock.described_by(partial(self._errors.waiting_text, handle, missing, what)):
            while outcome != shm.READY:
                self._handle_outcome(outcome, handle)
                waited = clock.read()
                outcome = step()
                if outcome in _UNDONE and clock.is_over:
                    raise TimeoutError(self._errors.waiting_text(handle, missing, what, waited))
                if outcome != shm.TICK:
                    continue
                slow.note_missing(waited)
                if clock.notice_due():
                    log.warning("%s", self._errors.waiting_text(handle, missing, what, waited))
        slow.log_wait(clock.read())
