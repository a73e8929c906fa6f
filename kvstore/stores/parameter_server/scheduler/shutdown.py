"""How workers leave their stores and the job, and how the job ends."""

from __future__ import annotations

from collections.abc import Iterable

from ..protocol.events import End
from ..protocol.messages import Bye, Failure, Leave, Loss, Over
from .admission import Admission
from .failure_detector import FailureDetector
from .peers import Outgoing, Peer, State
from .rank_assignment import RankAssignment
from .stores import Stores, dropped


class JobShutdown:
    """What leads to the end: all have said goodbye, all are lost, or nobody has been there for too long.

    `timeout` is in seconds without any worker.
    """

    def __init__(
        self,
        assignment: RankAssignment,
        stores: Stores,
        detector: FailureDetector,
        admission: Admission,
        timeout: float,
    ) -> None:
        self._assignment = assignment
        self._stores = stores
        self._detector = detector
        self._admission = admission
        self._timeout = timeout
        self.manned = 0.0  # when a worker was last there
        self._resumed: float | None = None  # when it was started again
        self._over: tuple[float, Failure | None] | None = None

    def begin(self, now: float) -> None:
        """Count the time without workers from here."""
        self.manned = now

    def resume(self, now: float) -> None:
        """Stay for a while, though all may have said goodbye: they may not know that it was heard."""
        self._resumed = now

    def leave(self, peer: Peer, message: Leave, outgoing: Outgoing) -> None:
        """Take a worker out of a store that it closes, or that it had to give up."""
        store = peer.store
        if store is None or peer.rank not in store.members or not self._assignment.holds(peer, store):
            return
        if message.lost and store.started:
            store.lose(Loss("worker", peer.rank, 0.0))
            self._stores.changed(store, outgoing)
            return
        store.leave(peer.rank)
        if message.last:
            store.hosts.whole.add(store.hosts.seat(peer.rank))
        if not store.started:
            self._stores.try_start(store, outgoing)
        elif store.members:
            self._stores.show_once(store, outgoing)
            self._stores.go_on(store, outgoing)
        else:
            store.end()
            self._assignment.servers.tell_all(dropped(store), outgoing)

    def bye(self, peer: Peer, message: Bye, outgoing: Outgoing) -> None:
        """Take a process out of the job."""
        process = peer.process
        if process is None or process.state != State.HERE:
            return
        if message.lost:
            self._detector.lose(process, outgoing)
        else:
            for one in process.peers.values():
                if one.store is not None:
                    self.leave(one, Leave(one.store.number), outgoing)
            process.state = State.ENDED
            for store in self._stores.values():
                self._stores.try_start(store, outgoing)
        self._look_for_end(outgoing)

    def look(self, outgoing: Outgoing) -> None:
        """See whether the job is over."""
        self._look_for_end(outgoing)
        self._look_for_workers(outgoing)

    def close(self, peers: Iterable[Peer], patience: float, linger: float, outgoing: Outgoing) -> bool:
        """End, if all that are there know that the job is over, or have had so many seconds to hear it."""
        if self._over is None:
            return False
        since, error = self._over
        open_ = any(
            peer.process is not None
            and peer.process.state == State.HERE
            and peer.link.acknowledged < peer.link.number
            for peer in peers
        )
        # It stays a little longer, so that messages which come again are acknowledged once more.
        if outgoing.now - since <= (patience if open_ else linger):
            return False
        if self._resumed is not None and outgoing.now - self._resumed <= patience:
            return False
        outgoing.changed = True
        outgoing.actions.append(End(error))
        return True

    def _look_for_end(self, outgoing: Outgoing) -> None:
        workers = self._assignment.workers.values()
        if self._over is not None or len(workers) < self._assignment.num_workers:
            return
        if any(one.state == State.HERE for one in workers) or self._admission.contested:
            return
        alone = all(one.state == State.LOST for one in workers)
        self._finish(Failure("PeerLostError", "all workers are lost") if alone else None, outgoing)

    def _look_for_workers(self, outgoing: Outgoing) -> None:
        if any(one.state == State.HERE for one in self._assignment.workers.values()):
            self.manned = outgoing.now
        elif self._over is None and outgoing.now - self.manned > self._timeout:
            text = f"no worker has been there for {self._timeout:g} s"
            self._finish(Failure("TimeoutError", text), outgoing)

    def _finish(self, error: Failure | None, outgoing: Outgoing) -> None:
        self._over = (outgoing.now, error)
        outgoing.changed = True
        self._assignment.servers.tell_all(Over(error.text if error else ""), outgoing)
        self._admission.close(outgoing)
