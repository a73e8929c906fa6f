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
        self, roster: RankAssignment, stores: Stores, dead_after: float, server_grace: float
    ) -> None:
        self._roster = roster
        self._stores = stores
        self._dead_after = dead_after
        self._server_grace = server_grace

    def heard(self, name: str, mail: Outgoing) -> None:
        """Note a sign of life; one that was lost hears that it comes too late."""
        process = self._roster.processes.get(name)
        if process is None:
            return
        process.heard = mail.now
        if process.state == State.LOST:
            for peer in process.peers.values():
                mail.fence(peer, given_up(process))

    def forgive(self, seconds: float) -> None:
        """Take a time in which the scheduler itself was stopped for nobody's silence."""
        for process in self._roster.processes.values():
            process.heard += seconds

    def look(self, mail: Outgoing) -> None:
        """Lose those that are silent, and give up servers that have not come back in time."""
        for process in list(self._roster.processes.values()):
            if process.state == State.HERE and mail.now - process.heard > self._dead_after:
                self.lose(process, mail)
        away = self._roster.servers.away
        for rank, (deadline, loss) in list(away.items()):
            if mail.now > deadline:
                del away[rank]
                self._give_up(loss, mail)

    def lose(self, process: Process, mail: Outgoing) -> None:
        """Go on without a process."""
        process.state = State.LOST
        loss = Loss(process.role, process.rank, max(0.0, mail.now - process.heard))
        if process.role == "server":
            self._lose_server(loss, mail)
        else:
            self._lose_worker(process, loss, mail)

    def _lose_worker(self, process: Process, loss: Loss, mail: Outgoing) -> None:
        for store in self._stores.values():
            if store.number in process.peers and process.rank in store.members:
                store.lose(loss)
                self._stores.changed(store, mail)
        for store in self._stores.values():
            if not store.started and not store.broken:
                self._stores.lose_before_start(store, loss, mail)

    def _lose_server(self, loss: Loss, mail: Outgoing) -> None:
        servers = self._roster.servers
        servers.leave(loss.rank)
        if not servers.welcomed:
            return
        if self._server_grace > 0 and servers.doom is None:
            servers.away[loss.rank] = (mail.now + self._server_grace, loss)
        else:
            self._give_up(loss, mail)

    def _give_up(self, loss: Loss, mail: Outgoing) -> None:
        """Go on without a server: its values are lost, so no store can be whole again."""
        servers = self._roster.servers
        servers.doom = servers.doom or loss
        for store in self._stores.values():
            store.lose_server(loss)
            self._stores.changed(store, mail)


def given_up(process: Process) -> str:
    """Word it for a process that was lost and speaks again."""
    return f"{process} was given up after a long silence"
