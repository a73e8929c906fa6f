"""Who is silent for too long, what a loss means for the stores, and servers that may come back."""

from __future__ import annotations

from ..protocol.messages import Loss
from .peers import Outgoing, Process, State
from .rank_assignment import RankAssignment
from .stores import Stores


class FailureDetector:
    """Signs of life, and what follows when there are none.

    `dead_after` is the silence after which a process is lost, `server_grace` the time that a lost server has
    to come back, in seconds.
    """

    def __init__(
        self, assignment: RankAssignment, stores: Stores, dead_after: float, server_grace: float
    ) -> None:
        self._assignment = assignment
        self._stores = stores
        self._dead_after = dead_after
        self._server_grace = server_grace

    def heard(self, name: str, outgoing: Outgoing) -> None:
        """Note a sign of life; one that was lost hears that it comes too late."""
        process = self._assignment.processes.get(name)
        if process is None:
            return
        process.heard = outgoing.now
        if process.state == State.LOST:
            for peer in process.peers.values():
                outgoing.fence(peer, given_up(process))

    def forgive(self, seconds: float) -> None:
        """Take a time in which the scheduler itself was stopped for nobody's silence."""
        for process in self._assignment.processes.values():
            process.heard += seconds

    def resume(self, now: float) -> None:
        """Begin to wait for signs of life: while the scheduler was away there could be none."""
        for process in self._assignment.processes.values():
            process.heard = now

    def look(self, outgoing: Outgoing) -> None:
        """Lose those that are silent, and give up servers that have not come back in time."""
        for process in list(self._assignment.processes.values()):
            if process.state == State.HERE and outgoing.now - process.heard > self._dead_after:
                self.lose(process, outgoing)
        away = self._assignment.servers.away
        for rank, (deadline, loss) in list(away.items()):
            if outgoing.now > deadline:
                del away[rank]
                outgoing.changed = True
                self._give_up(loss, outgoing)

    def lose(self, process: Process, outgoing: Outgoing) -> None:
        """Go on without a process."""
        process.state = State.LOST
        outgoing.changed = True
        loss = Loss(process.role, process.rank, max(0.0, outgoing.now - process.heard))
        if process.role == "server":
            self._lose_server(loss, outgoing)
        else:
            self._lose_worker(process, loss, outgoing)

    def _lose_worker(self, process: Process, loss: Loss, outgoing: Outgoing) -> None:
        for store in self._stores.values():
            if store.number in process.peers and process.rank in store.members:
                store.lose(loss)
                self._stores.changed(store, outgoing)
        for store in self._stores.values():
            if not store.started and not store.broken:
                self._stores.lose_before_start(store, loss, outgoing)

    def _lose_server(self, loss: Loss, outgoing: Outgoing) -> None:
        servers = self._assignment.servers
        servers.leave(loss.rank)
        if not servers.welcomed:
            return
        if self._server_grace > 0 and servers.doom is None:
            servers.away[loss.rank] = (outgoing.now + self._server_grace, loss)
        else:
            self._give_up(loss, outgoing)

    def _give_up(self, loss: Loss, outgoing: Outgoing) -> None:
        """Go on without a server: its values are lost, so no store can be whole again."""
        servers = self._assignment.servers
        servers.doom = servers.doom or loss
        for store in self._stores.values():
            store.lose_server(loss)
            self._stores.changed(store, outgoing)


def given_up(process: Process) -> str:
    """Word it for a process that was lost and speaks again."""
    return f"{process} was given up after a long silence"
