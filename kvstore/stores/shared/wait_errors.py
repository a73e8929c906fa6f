"""The messages about waits in the shared store: errors from outcomes and failed rounds, warnings."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable

from ...errors import ClosedError, FencedError, KVStoreError, PeerLostError, UpdaterError
from ...observe.log import SLOW
from .native import _shared as shm
from .optimizer import JobUpdater

log = logging.getLogger("kvstore.shared")

_DYING = 0.5  # seconds until a killed process has ended

Handle = shm.Handle
Missing = Callable[[], Iterable[int]]


class WaitErrors:
    """The errors of one worker's waits; each failed round is reported once."""

    def __init__(self, job: shm.Job, updater: JobUpdater, rank: int) -> None:
        self._job, self._updater, self._names = job, updater, job.names
        self._own, self._rank = rank, self._names[rank]
        self._known_lost: set[str] = set()  # as logged
        self.loss_reported = False  # the caller was told that a peer is lost

    def warn_of_leavers(self, handle: Handle, round: int, left: list[tuple[int, int]]) -> None:
        """Warn that workers have left without having joined."""
        for rank, last in left:
            log.warning(
                f"{self.worker_name(rank)} has left after round {last} of key {handle.key!r}, without "
                f"join(): round {round} is without it, says worker {self._rank}, and so are later rounds. If "
                "it should not have ended, see its output; if it had no more batches, call join() there first"
            )

    def worker_name(self, w: int) -> str:
        """Return the name of a worker of the region."""
        return f"worker {self._names[w]}"

    @property
    def _of_size(self) -> str:
        """The number of workers, as a part of messages."""
        return f" of {self._job.size}"

    def missing_workers(self, handle: Handle | None, missing: Missing | None) -> list[int]:
        """Return the other workers that a wait is for."""
        if missing is not None:
            found = missing()
        else:
            found = [] if handle is None else handle.missing(handle.complete + 1)
        return [w for w in found if w != self._own]

    def waiting_text(self, handle: Handle | None, missing: Missing | None, what: str, waited: float) -> str:
        """Describe a wait of this worker, and the workers that it waits for."""
        absent = self.missing_workers(handle, missing)
        seen = (
            ", ".join(f"worker {self._names[w]} (heartbeat {self._job.silence(w):.1f} s ago)" for w in absent)
            or "its peers"
        )
        return f"worker {self._rank} has waited {waited:.0f} s on {_wait_object(handle, what)} for {seen}"

    def log_members(self) -> None:
        """Log the workers that were lost, or have returned, since the last call."""
        lost = {f"worker {self._names[w]}" for w in self._job.lost()}
        for name in sorted(lost - self._known_lost):
            log.info("%s%s is lost", name, self._of_size)
        for name in sorted(self._known_lost - lost):
            log.info("%s%s is back", name, self._of_size)
        if lost != self._known_lost:
            members = ", ".join(str(self._names[w]) for w in self._job.members())
            log.info("rounds wait for workers %s from now on", members)
        self._known_lost = lost

    def raise_outcome(self, outcome: int, handle: Handle | None) -> None:
        """Raise the error of an outcome."""
        where = "" if handle is None else f" (key {handle.key!r}, round {handle.complete + 1})"
        self.log_members()
        if outcome == shm.PEER_LOST:
            self.loss_reported = True
            raise self.peer_lost(
                f"{where}. The last complete values can still be read and saved; with "
                "on_peer_loss='continue' the other workers would have continued"
            )
        if outcome == shm.FENCED and self._job.closed:
            raise ClosedError(
                f"worker {self._rank} has closed its store, in another thread or in its updater{where}"
            )
        if outcome == shm.FENCED:
            raise FencedError(
                f"worker {self._rank} was declared lost by the others (stopped for too long, or its rank "
                f"was started again) and is not in the job any more{where}; end this process"
            )
        if outcome == shm.NO_MEMORY:
            raise MemoryError(f"no memory for more of the job's shared region{where}")
        if outcome == shm.UNREADABLE:
            raise KVStoreError(
                f"worker {self._rank}: the value is not in the job's shared region{where}: the region is "
                "overwritten; start the job again from what was saved last, and report a bug of kvstore"
            )
        raise KVStoreError(f"unexpected outcome {outcome} of a wait{where}")

    def peer_lost(self, text: str) -> PeerLostError:
        """Return the error for a lost worker."""
        lost = self._job.lost()
        first = lost[0] if lost else -1
        rank = self._names[first] if lost else -1
        return PeerLostError(
            f"worker {rank}{self._of_size} died or stopped; noticed by worker {self._rank}{text}",
            role="worker",
            rank=rank,
            last_seen=self._job.silence(first) if lost else None,
        )

    def round_failure(self, handle: Handle, round: int) -> KVStoreError | None:
        """Return the error of the first failed round, up to a given round; each is reported once.

        A worker may push several times before it asks, so an earlier round counts, too.
        """
        failed = handle.first_unreported(round)
        if not failed:
            return None
        handle.note_reported(failed)
        return self._error_of(handle, failed, handle.failure_text(failed))

    def _error_of(self, handle: Handle, round: int, text: str | None) -> KVStoreError:
        """Make the error of a failed round."""
        if not shm.mode(self._job) & 1:
            self.raise_if_peer_lost(handle, patience=_DYING if text is None else 0.0)
        why = text or "the memory of a worker could not be read, or is not in the job's shared region"
        kind = UpdaterError if shm.mode(self._job) & 1 else KVStoreError
        error = kind(f"round {round} of key {handle.key!r} failed: {why}")
        error.__cause__ = self._updater.causes.pop((handle.key, round), None)
        return error

    def raise_if_peer_lost(self, handle: Handle, patience: float) -> None:
        """Raise the error of a lost worker, or of a fenced process, if that is why a sum failed.

        The memory of a killed process is gone before the process has ended, so this waits for `patience`
        seconds.
        """
        end = time.monotonic() + patience
        while True:
            self._job.detect_losses()
            standing = self._job.check_membership()
            if standing != shm.READY:
                self.raise_outcome(standing, handle)
            if time.monotonic() >= end:
                return
            time.sleep(0.001)


class SlowWait:
    """Logs a wait that was long, after its end: the workers that arrived last, and by how much."""

    def __init__(self, errors: WaitErrors, handle: Handle | None, missing: Missing | None, what: str) -> None:
        self._errors, self._handle, self._missing = errors, handle, missing
        self._name = _wait_object(handle, what)
        self._late: list[int] = []

    def note_missing(self, waited: float) -> None:
        """Record the workers that the wait is for; called a few times a second."""
        self._errors.log_members()
        if waited > SLOW and log.isEnabledFor(logging.INFO):
            self._late = self._errors.missing_workers(self._handle, self._missing)

    def log_wait(self, waited: float) -> None:
        """Log the wait, if it was long."""
        self._errors.log_members()
        if self._late:
            last = " or ".join(self._errors.worker_name(w) for w in self._late)
            log.info("%s was slow: %s came last, %.1f s after this worker", self._name, last, waited)


def _wait_object(handle: Handle | None, what: str) -> str:
    if what:
        return what
    return "a barrier" if handle is None else f"round {handle.complete + 1} of key {handle.key!r}"
