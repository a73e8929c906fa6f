"""Waits of the shared store: rounds brought to their end, deadlines kept, outcomes turned into errors."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial

from ...arrays.grouping import Key
from ...errors import ConfigError, FencedError, KVStoreError, PeerLostError, TimeoutError, UpdaterError
from ...waiting import WaitClock
from .native import _shared as shm
from .optimizer import Updates
from .rows import Rows

log = logging.getLogger("kvstore.shared")

_DYING = 0.5  # seconds that the end of a process may take

Handle = shm.Handle
Step = Callable[[], int]
Missing = Callable[[], Iterable[int]]


class CallOnce:
    """Something to be done once, by whichever thread comes first; all are told how it went."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run: Callable[[], None] | None = run
        self._error: BaseException | None = None
        self._lock = threading.Lock()

    @property
    def done(self) -> bool:
        """Whether it was done, well or not."""
        return self._run is None

    def __call__(self) -> None:
        """Do it, or wait until it is done. Raises what it raised."""
        with self._lock:
            if self._run is not None:
                try:
                    self._run()
                except BaseException as error:
                    self._error = error
                self._run = None
        if self._error is not None:
            raise self._error


@dataclass
class _Call:
    """A push of several keys."""

    keys: list[tuple[Handle, int]]  # each with its round
    evened: bool = False  # after a loss: they stand at one round, if that could be


def _behind(keys: list[tuple[Handle, int]]) -> int:
    """How many rounds the last of some keys is behind the call that pushed them; 0 where all are alike."""
    behind = {round - handle.standing for handle, round in keys if handle.arrived == round}
    return max(behind) if len(behind) > 1 else 0


class RoundWaiter:
    """The waits of one worker of a job."""

    def __init__(
        self, job: shm.Job, keys: shm.Keys, updates: Updates, rows: Rows, timeout: float, rank: int
    ) -> None:
        self._job, self._keys, self._updates, self._rows = job, keys, updates, rows
        self._timeout, self._rank = timeout, rank
        self._told = False  # of the loss of a peer
        # The last call with several keys, by key.
        self._calls: dict[Key, _Call] = {}
        self._reported: dict[Key, int] = {}  # the last failed round that this worker was told of
        self._preparing = threading.RLock()  # the updater works for one thread at a time
        self.joined = False

    def check_open(self) -> None:
        """Raise in a fork of the process that sat down."""
        if self._job.forked:
            raise KVStoreError(
                f"this process is a fork of worker {self._rank} and has no part in its job; use the store in "
                "the process that created it, or start workers with `kvstore run` or kv.spawn"
            )

    def check_writing(self) -> None:
        """Raise unless this worker may push."""
        self.check_open()
        standing = self._job.standing()
        if standing != shm.READY:
            self._raise(standing, None)
        if self.joined:
            raise ConfigError(f"worker {self._rank} has joined: it can read, and push no more")

    def complete(self, calls: list[shm.Call], private: set[Key]) -> None:
        """See all rounds complete and delivered; then raise the first error of any."""
        errors: list[KVStoreError] = []
        try:
            if len(calls) > 1:  # first what can be worked on: at the end of each key somebody would wait
                for call in calls:
                    if not call.handle.small:
                        self._help(call)
            for call in calls:
                self._finish(call, errors)
        except BaseException:
            self.give_up([call for call in calls if call.handle.key in private])
            raise
        if errors:
            raise errors[0]

    def give_up(self, calls: list[shm.Call]) -> None:
        """Others may be reading this process's memory: what they read from now on is not to count."""
        for call in calls:
            if call.handle.complete < call.round:
                call.handle.spoil(call.round, f"worker {self._rank} gave up waiting")

    def _finish(self, call: shm.Call, errors: list[KVStoreError]) -> None:
        handle = call.handle
        outcome = call.advance()
        if outcome != shm.READY:
            self.wait(call.advance, handle, first=outcome)
        if failure := self._failure(handle, call.round):
            errors.append(failure)
            return
        if left := handle.left_out(call.round):
            self._tell_who_left(handle, call.round, left)
        if call.deliver() != shm.READY:
            self.wait(call.deliver, handle)

    def read(self, calls: list[shm.Call]) -> None:
        """See the rounds complete that this worker has pushed into, and deliver."""
        if self._told:  # the loss was reported: reads give what there is
            self.see_whole([call.handle for call in calls])
            for call in calls:
                self.wait(call.deliver, call.handle)
            return
        at_work = self._updates.at_work
        if at_work is None:
            self.complete(calls, set())
            return
        self.complete([call for call in calls if call.handle.key != at_work], set())
        for call in calls:
            if call.handle.key == at_work:  # by its own updater: the value as it is
                self.wait(call.deliver, call.handle)

    def help(self, calls: list[shm.Call]) -> None:
        """Where this worker was the last to arrive, begin the work; never wait."""
        errors: list[KVStoreError] = []
        for call in calls:
            outcome = self._help(call)
            if outcome not in (shm.READY, shm.TICK):
                self._raise(outcome, call.handle)
            if failure := self._failure(call.handle, call.round):
                errors.append(failure)
        if errors:
            raise errors[0]

    def _help(self, call: shm.Call) -> int:
        while (outcome := call.help()) in (shm.PLAN, shm.CATCH_UP):
            self._prepare(outcome, call.handle)
        return outcome

    def _prepare(self, outcome: int, handle: Handle | None) -> None:
        with self._preparing:
            if outcome == shm.CATCH_UP:
                self._updates.catch_up()
                return
            assert handle is not None
            try:
                self._updates.carry_out(handle, self._rows)
            except BaseException:
                self._reported[handle.key] = handle.failed
                raise

    def _rest(self, call: shm.Call) -> None:
        """After a loss: see what can be finished without the dead finished, by this worker or by others."""

        def step() -> int:
            outcome = call.help()
            if outcome == shm.TICK and call.handle.at_rest:
                return shm.READY
            if outcome == shm.TICK:
                self._job.look_around()  # another may have died at work
                time.sleep(0.0005)
            return outcome

        self.wait(step, call.handle)

    def wait_for_free_slot(self, handles: list[Handle]) -> None:
        """See the rounds complete whose memory the next push of each key needs."""
        for handle in handles:
            if (
                outcome := shm.wait_for_free_slot(handle)
            ) != shm.READY:  # the outcome may be work for this worker
                self.wait(partial(shm.wait_for_free_slot, handle), handle, first=outcome)

    def note_call(self, handles: list[Handle]) -> None:
        """Note that this worker has arrived at these keys in one call."""
        call = _Call(shm.rounds_of(handles))
        self._calls.update(dict.fromkeys([handle.key for handle in handles], call))

    def see_whole(self, handles: list[Handle]) -> None:
        """After a loss: have keys that one call pushed stand at one round, also those that are not asked for.

        What can be finished is; what is ahead then goes back, if its last value is still there. Raises where
        several keys are asked for that are not of one round.
        """
        if not self._told:
            return
        for handle in handles:
            self._rest(shm.Call(handle, [], False))
        wanted = set(handles) if len(handles) > 1 else set()
        for call in {id(c): c for h in handles if (c := self._calls.get(h.key))}.values():
            asked = [pair for pair in call.keys if pair[0] in wanted] if wanted else []
            if not call.evened or _behind(asked):
                self._even_out(call.keys)
                call.evened = True
            if _behind(asked):
                raise self._uneven(asked)

    def _even_out(self, keys: list[tuple[Handle, int]]) -> None:
        for _ in range(2):  # a survivor may arrive between two keys
            for handle, _ in keys:
                self._rest(shm.Call(handle, [], False))
        last = _behind(keys)
        for handle, round in keys if last else ():
            if handle.arrived == round and handle.standing > round - last:
                handle.step_back(round - last)

    def _uneven(self, keys: list[tuple[Handle, int]]) -> PeerLostError:
        rounds = ", ".join(f"{handle.key!r} of round {handle.standing}" for handle, _ in keys)
        return self._lost(
            f". The keys of one call are not of one round: {rounds}. Read each by a call of its own, "
            "or go back to a file"
        )

    def _tell_who_left(self, handle: Handle, round: int, left: list[tuple[int, int]]) -> None:
        for rank, last in left:
            log.warning(
                f"worker {rank} has left after round {last} of key {handle.key!r}, without join(): round "
                f"{round} is without it, says worker {self._rank}, and so are those that follow. If it was "
                "not to end, look at its output; if it had no more batches, have it call join() first"
            )

    def settle(self, handle: Handle) -> None:
        """See the rounds complete that this worker has pushed into."""
        if handle.key == self._updates.at_work:
            return
        if self._told:
            self.see_whole([handle])
        elif handle.complete < handle.arrived or handle.failed == handle.arrived > 0:
            self.complete([shm.Call(handle, [], False)], set())

    def settle_all(self) -> None:
        """See every round complete that this worker has pushed into."""
        self.check_open()
        for handle in self._keys.all():
            self.settle(handle)

    def wait(
        self,
        step: Step,
        handle: Handle | None,
        missing: Missing | None = None,
        what: str = "",
        first: int = shm.TICK,
    ) -> None:
        """Take steps until one is ready, within the deadline."""
        outcome = step() if first == shm.TICK else first
        clock = WaitClock(self._timeout)
        while outcome != shm.READY:
            if outcome in (shm.PLAN, shm.CATCH_UP):
                self._prepare(outcome, handle)
            elif outcome != shm.TICK:
                self._raise(outcome, handle)
            waited = clock.read()
            outcome = step()
            if outcome != shm.TICK:
                continue
            if clock.over:
                raise TimeoutError(self._waiting(handle, missing, what, waited))
            if clock.tells():
                log.warning("%s", self._waiting(handle, missing, what, waited))

    def _absent(self, handle: Handle | None, missing: Missing | None) -> list[int]:
        if missing is not None:
            return list(missing())
        return [] if handle is None else handle.missing(handle.complete + 1)

    def _waiting(self, handle: Handle | None, missing: Missing | None, what: str, waited: float) -> str:
        absent = [w for w in self._absent(handle, missing) if w != self._rank]
        where = what or (
            "a barrier" if handle is None else f"round {handle.complete + 1} of key {handle.key!r}"
        )
        seen = (
            ", ".join(f"worker {w} (heard of {self._job.silence(w):.1f} s ago)" for w in absent)
            or "its peers"
        )
        return f"worker {self._rank} has waited {waited:.0f} s on {where} for {seen}"

    def _raise(self, outcome: int, handle: Handle | None) -> None:
        where = "" if handle is None else f" (key {handle.key!r}, round {handle.complete + 1})"
        if outcome == shm.PEER_LOST:
            self._told = True
            raise self._lost(
                f"{where}. The last complete values can still be read and saved; with "
                "on_peer_loss='continue' the others would have gone on"
            )
        if outcome == shm.FENCED:
            raise FencedError(
                f"worker {self._rank} was taken for dead by the others (stopped for too long, or its rank "
                f"was started again) and has no part in the job any more{where}; end this process"
            )
        if outcome == shm.NO_MEMORY:
            raise MemoryError(f"no memory for more of the job's shared region{where}")
        raise KVStoreError(f"unexpected outcome {outcome} of a wait{where}")

    def _lost(self, text: str) -> PeerLostError:
        lost = self._job.lost()
        rank = lost[0] if lost else -1
        return PeerLostError(
            f"worker {rank} of {self._job.size} died or stopped; noticed by worker {self._rank}{text}",
            role="worker",
            rank=rank,
            last_seen=self._job.silence(rank) if rank >= 0 else None,
        )

    def _failure(self, handle: Handle, round: int) -> KVStoreError | None:
        """Return the error of a round that came to nothing; each worker is told once."""
        if not round or handle.failed != round or self._reported.get(handle.key) == round:
            return None
        self._reported[handle.key] = round
        text = handle.why(round)
        if not shm.mode(self._job) & 1:
            self._blame_the_dead(handle, patience=_DYING if text is None else 0.0)
        why = text or "the memory of a worker could not be read"
        kind = UpdaterError if shm.mode(self._job) & 1 else KVStoreError
        error = kind(f"round {round} of key {handle.key!r} came to nothing: {why}")
        error.__cause__ = self._updates.causes.pop((handle.key, round), None)
        return error

    def _blame_the_dead(self, handle: Handle, patience: float) -> None:
        """Raise if a worker is lost, this one or another: that is why a sum failed, or was given up.

        The memory of a process that is killed goes before the process does.
        """
        end = time.monotonic() + patience
        while True:
            self._job.look_around()
            standing = self._job.standing()
            if standing != shm.READY:
                self._raise(standing, handle)
            if time.monotonic() >= end:
                return
            time.sleep(0.001)
