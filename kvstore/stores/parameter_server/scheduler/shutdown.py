"""How workers leave their stores and the job, and when the job ends."""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol.events import JobEnded
from ..protocol.messages import Failure, JobEndNotice, LeaveNotice, Loss, ProcessEndNotice
from .admission import ProcessAdmission
from .failure_detector import FailureDetector
from .peers import PeerConnection, ProcessState, StepActions
from .rank_assignment import RankAssignment
from .stores import JobStores, drop_message


class JobShutdown:
    """Ends the job: when all workers have ended or are lost, or after a long time without any worker.

    `timeout` is that time, in seconds.
    """

    def __init__(
        self,
        assignment: RankAssignment,
        stores: JobStores,
        detector: FailureDetector,
        admission: ProcessAdmission,
        timeout: float,
    ) -> None:
        self._assignment = assignment
        self._stores = stores
        self._detector = detector
        self._admission = admission
        self._timeout = timeout
        self.manned = 0.0  # when a worker was last present
        self._resumed: float | None = None  # when the scheduler was restarted
        self._over: tuple[float, Failure | None] | None = None  # since when the job is over, and its error

    def count_from(self, now: float) -> None:
        """Count the time without workers from here."""
        self.manned = now

    def delay_end(self, now: float) -> None:
        """Delay the end after a restart: processes that have ended may still wait for an acknowledgement."""
        self._resumed = now

    def leave_store(self, peer: PeerConnection, message: LeaveNotice, outgoing: StepActions) -> None:
        """Remove a worker from a store that it has closed, or in which it failed (`lost`)."""
        store = peer.store
        if store is None or peer.rank not in store.members or not self._assignment.is_current(peer, store):
            return
        if message.lost and store.started:
            store.lose_worker(Loss("worker", peer.rank, 0.0))
            self._stores.announce_loss(store, outgoing)
            return
        store.remove_member(peer.rank)
        if message.last:
            store.hosts.finished.add(store.hosts.seat(peer.rank))
        if not store.started:
            self._stores.try_start(store, outgoing)
        elif store.members:
            self._stores.send_view_soon(store, outgoing)
            self._stores.release_waiters(store, outgoing)
        else:
            store.end()
            self._assignment.servers.send_all(drop_message(store), outgoing)

    def note_process_end(
        self, peer: PeerConnection, message: ProcessEndNotice, outgoing: StepActions
    ) -> None:
        """Record that a process has ended, or that it reports itself as failed (`lost`)."""
        process = peer.process
        if process is None or process.state != ProcessState.HERE:
            return
        if message.lost:
            self._detector.declare_lost(process, outgoing)
        else:
            for connection in process.peers.values():
                if connection.store is not None:
                    self.leave_store(connection, LeaveNotice(connection.store.number), outgoing)
            process.state = ProcessState.ENDED
            for store in self._stores.values():
                self._stores.try_start(store, outgoing)
        self._check_end(outgoing)

    def check_over(self, outgoing: StepActions) -> None:
        """Find out whether the job is over."""
        self._check_end(outgoing)
        self._check_workers(outgoing)

    def close_if_over(
        self, peers: Iterable[PeerConnection], patience: float, linger: float, outgoing: StepActions
    ) -> bool:
        """End the scheduler, if the job is over and all present processes have acknowledged this.

        Without their acknowledgements the scheduler ends after `patience` seconds, with them after `linger`.
        """
        if self._over is None:
            return False
        since, error = self._over
        unacknowledged = any(
            peer.process is not None
            and peer.process.state == ProcessState.HERE
            and peer.link.last_acknowledged < peer.link.last_number
            for peer in peers
        )
        # It stays a little longer, to acknowledge messages that are repeated.
        if outgoing.now - since <= (patience if unacknowledged else linger):
            return False
        if self._resumed is not None and outgoing.now - self._resumed <= patience:
            return False
        outgoing.changed = True
        outgoing.actions.append(JobEnded(error))
        return True

    def _check_end(self, outgoing: StepActions) -> None:
        workers = self._assignment.workers.values()
        if self._over is not None or len(workers) < self._assignment.num_workers:
            return
        if any(worker.state == ProcessState.HERE for worker in workers) or self._admission.has_waiting:
            return
        all_lost = all(worker.state == ProcessState.LOST for worker in workers)
        self._finish_job(Failure("PeerLostError", "all workers are lost") if all_lost else None, outgoing)

    def _check_workers(self, outgoing: StepActions) -> None:
        if any(worker.state == ProcessState.HERE for worker in self._assignment.workers.values()):
            self.manned = outgoing.now
        elif self._over is None and outgoing.now - self.manned > self._timeout:
            text = f"no worker has been there for {self._timeout:g} s"
            self._finish_job(Failure("TimeoutError", text), outgoing)

    def _finish_job(self, error: Failure | None, outgoing: StepActions) -> None:
        self._over = (outgoing.now, error)
        outgoing.changed = True
        self._assignment.servers.send_all(JobEndNotice(error.text if error else ""), outgoing)
        self._admission.refuse_all(outgoing)
