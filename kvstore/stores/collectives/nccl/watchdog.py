"""The watchdog of NCCL's running operations: NCCL itself waits for a lost peer without a deadline.

A thread checks the operations as long as there are any. If an operation does not end by the deadline, if a
peer on this machine dies, or if NCCL reports an error, the thread aborts all operations, so that waits for
the GPU end, and keeps the error for the next call.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

from ....devices.driver import CudaDriver
from ....errors import KVStoreError, PeerLostError, TimeoutError
from ....waiting import WaitClock
from .rendezvous import PeerHello

log = logging.getLogger("kvstore.nccl")

_LOOK = 0.02  # seconds between two checks
_IDLE = 1.0  # seconds without operations after which the thread ends
_GRACE = 0.5  # seconds in which an operation that a dead peer has started can still complete
_NAP = 50e-6


@dataclass(eq=False, slots=True)
class NcclOperation:
    """An operation from before its call until the GPU has completed it."""

    what: str
    clock: WaitClock
    begun: float = field(default_factory=time.monotonic)
    event: int = 0  # 0: the call has not returned
    device: int = 0


class NcclWatchdog:
    """The watchdog of one store in a job of several processes.

    Parameters
    ----------
    driver : Driver
    rank : int
    timeout : float
    peers : iterable of PeerHello
        The other processes.
    machine : str
        The machine of this process's hello.
    trouble : callable
        Returns an error of NCCL, or None.
    abort : callable
        Aborts the running operations.

    Attributes
    ----------
    error : KVStoreError or None
        The cause of an abort.
    """

    def __init__(
        self,
        driver: CudaDriver,
        rank: int,
        timeout: float,
        peers: Iterable[PeerHello],
        machine: str,
        trouble: Callable[[], KVStoreError | None],
        abort: Callable[[], None],
    ) -> None:
        self._driver, self._rank, self._timeout = driver, rank, timeout
        self._trouble, self._abort = trouble, abort
        self._pending: deque[NcclOperation] = deque()
        self._lock = threading.Condition()
        self._thread: threading.Thread | None = None
        self._lost: tuple[int, float] | None = None  # a dead peer, and the time of the notice
        self.error: KVStoreError | None = None
        self._peers = {
            _open_pidfd(hello.pid): hello.rank for hello in peers if machine and hello.machine == machine
        }
        self._peers.pop(-1, None)

    # ---------------------------------------------------------------------------------------- operations

    def begin(self, what: str) -> NcclOperation:
        """Register an operation before its call.

        Raises
        ------
        KVStoreError
            The store is broken.
        """
        self.check()
        pending = NcclOperation(what, WaitClock(self._timeout))
        with self._lock:
            self._pending.append(pending)
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._watch_operations, name="kvstore-nccl", daemon=True
                )
                self._thread.start()
        return pending

    def note_stream(self, pending: NcclOperation, stream: int, device: int) -> None:
        """Record the stream of an operation after its call."""
        event = self._driver.event(device)
        self._driver.record(event, stream, device)
        pending.device, pending.event = device, event

    def note_failure(self, pending: NcclOperation, error: KVStoreError) -> KVStoreError:
        """Record that a call has failed; return the error to raise, which may be an earlier cause."""
        with self._lock:
            if pending in self._pending:
                self._pending.remove(pending)
        self._abort_all(error)
        return self.error or error

    def check(self) -> None:
        """Raise if operations were aborted."""
        if self.error is not None:
            raise type(self.error)(f"{self.error}; start the job again") from self.error

    def wait_until(self, ready: Callable[[], bool], what: str) -> None:
        """Wait; the wait ends when `ready`, or when the thread aborts the operations."""
        start = time.monotonic()
        while not ready():
            self.check()
            if time.monotonic() - start > self._timeout + 2 * _GRACE:
                self._abort_all(self._timeout_error(what, time.monotonic() - start))
            time.sleep(_NAP)
        self.check()

    def close(self) -> None:
        """Wait for the running operations, and close the descriptors of the peers."""
        with contextlib.suppress(KVStoreError):
            self.wait_until(lambda: not self._pending, "the last operations")
        with self._lock:
            thread, self._thread = self._thread, None
            self._lock.notify_all()
        if thread is not None and thread is not threading.current_thread():
            thread.join(self._timeout)
        self._remove_complete(lambda pending: True)
        for fd in self._peers:
            os.close(fd)
        self._peers.clear()

    # -------------------------------------------------------------------------------------------- thread

    def _watch_operations(self) -> None:
        idle_since = time.monotonic()
        while True:
            with self._lock:
                if self._thread is not threading.current_thread():
                    return
                if self._pending:
                    idle_since = time.monotonic()
                elif time.monotonic() - idle_since > _IDLE:
                    self._thread = None
                    return
                self._lock.wait(_LOOK)
            try:
                self._check_operations()
            except Exception as error:  # if the thread ended without a notice, no wait would end
                self._abort_all(
                    KVStoreError(f"worker {self._rank}: the watchdog of operations has failed: {error}")
                )

    def _check_operations(self) -> None:
        with self._lock:
            oldest = self._pending[0] if self._pending else None
        if oldest is None:
            return
        waited = oldest.clock.read()
        self._remove_complete(lambda pending: bool(pending.event) and self._is_done(pending))
        with self._lock:
            over = not self._pending or self._pending[0] is not oldest
        if over or self.error is not None:
            return
        if oldest.clock.notice_due():
            log.warning(
                "worker %d has waited %.0f s for %s; all workers must call it",
                self._rank,
                waited,
                oldest.what,
            )
        error = self._trouble() or self._death_error(oldest)
        if error is None and oldest.clock.is_over:
            error = self._timeout_error(oldest.what, waited)
        if error is not None and not (oldest.event and self._is_done(oldest)):
            self._abort_all(error)

    def _is_done(self, pending: NcclOperation) -> bool:
        return self.error is not None or self._driver.is_done(pending.event, pending.device)

    def _remove_complete(self, over: Callable[[NcclOperation], bool]) -> None:
        """Remove complete operations, from the first one on."""
        while True:
            with self._lock:
                first = self._pending[0] if self._pending else None
            if first is None or not over(first):
                return
            with self._lock:
                if self._pending and self._pending[0] is first:
                    self._pending.popleft()
            if first.event:
                self._driver.drop_event(first.event, first.device)

    def _death_error(self, oldest: NcclOperation) -> PeerLostError | None:
        """Return an error if a peer of this machine is dead, and `oldest` cannot complete any more."""
        if self._lost is None and (dead := self._dead_peers()):
            self._lost = dead[0], time.monotonic()
        if self._lost is None:
            return None
        rank, since = self._lost
        if time.monotonic() - max(since, oldest.begun) < _GRACE:
            return None
        return PeerLostError(f"worker {self._rank}: worker {rank} died in {oldest.what}", rank=rank)

    def _dead_peers(self) -> list[int]:
        if not self._peers:
            return []
        poller = select.poll()
        for fd in self._peers:
            poller.register(fd, select.POLLIN)
        return [self._peers[fd] for fd, _ in poller.poll(0)]

    def _timeout_error(self, what: str, waited: float) -> TimeoutError:
        return TimeoutError(
            f"worker {self._rank} has waited {waited:.0f} s for {what}: all workers must call it, with the "
            "same keys and in the same order"
        )

    def _abort_all(self, error: KVStoreError) -> None:
        with self._lock:
            if self.error is not None:
                return
            self.error = error
        log.error("ending what is under way: %s", error)
        self._abort()


def _open_pidfd(pid: int) -> int:
    """Open a descriptor that is readable at the end of a process; -1 if there is none."""
    try:
        return os.pidfd_open(pid)
    except OSError:
        return -1
