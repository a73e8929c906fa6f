"""When a process is lost, the effect of a loss on the stores, and how long a server can be restarted."""

from __future__ import annotations

from ..protocol.messages import Loss
from .peers import AdmittedProcess, ProcessState, StepActions
from .rank_assignment import RankAssignment
from .stores import JobStores


class FailureDetector:
    """The times of heartbeats and messages, and the losses that follow from silence.

    `dead_after` is the silence in seconds after which a process is lost. `server_grace` is the time in
    seconds in which a lost server can be restarted; after it the stores are broken.
    """

    def __init__(
        self, assignment: RankAssignment, stores: JobStores, dead_after: float, server_grace: float
    ) -> None:
        self._assignment = assignment
        self._stores = stores
        self._dead_after = dead_after
        self._server_grace = server_grace

    def note_heartbeat(self, name: str, outgoing: StepActions) -> None:
        """Record a heartbeat; fence the process if it was declared lost."""
        process = self._assignment.processes.get(name)
        if process is None:
            return
        process.heard = outgoing.now
        if process.state == ProcessState.LOST:
            for peer in process.peers.values():
                outgoing.fence(peer, fence_reason(process))

    def discount_pause(self, seconds: float) -> None:
        """Subtract a time in which the scheduler itself was stopped from the silence of all processes."""
        for process in self._assignment.processes.values():
            process.heard += seconds

    def restart_silences(self, now: float) -> None:
        """Count silence from now on: the scheduler could receive no heartbeat while it was away."""
        for process in self._assignment.processes.values():
            process.heard = now

    def check_silences(self, outgoing: StepActions) -> None:
        """Declare silent processes lost, and break the stores if a server was not restarted in time."""
        for process in list(self._assignment.processes.values()):
            if process.state == ProcessState.HERE and outgoing.now - process.heard > self._dead_after:
                self.declare_lost(process, outgoing)
        awaited = self._assignment.servers.awaited
        for rank, (deadline, loss) in list(awaited.items()):
            if outgoing.now > deadline:
                del awaited[rank]
                outgoing.changed = True
                self._break_stores(loss, outgoing)

    def declare_lost(self, process: AdmittedProcess, outgoing: StepActions) -> None:
        """Declare a process lost, and notify the members of its stores."""
        process.state = ProcessState.LOST
        outgoing.changed = True
        loss = Loss(process.role, process.rank, max(0.0, outgoing.now - process.heard))
        if process.role == "server":
            self._lose_server(loss, outgoing)
        else:
            self._lose_worker(process, loss, outgoing)

    def _lose_worker(self, process: AdmittedProcess, loss: Loss, outgoing: StepActions) -> None:
        for store in self._stores.values():
            if store.number in process.peers and process.rank in store.members:
                store.lose_worker(loss)
                self._stores.announce_loss(store, outgoing)
        for store in self._stores.values():
            if not store.started and not store.broken:
                self._stores.start_without(store, loss, outgoing)

    def _lose_server(self, loss: Loss, outgoing: StepActions) -> None:
        servers = self._assignment.servers
        servers.remove_server(loss.rank)
        if not servers.welcomed:
            return
        if self._server_grace > 0 and servers.final_loss is None:
            servers.awaited[loss.rank] = (outgoing.now + self._server_grace, loss)
        else:
            self._break_stores(loss, outgoing)

    def _break_stores(self, loss: Loss, outgoing: StepActions) -> None:
        """Break all stores after the final loss of a server: its values are lost."""
        servers = self._assignment.servers
        servers.final_loss = servers.final_loss or loss
        for store in self._stores.values():
            store.lose_server(loss)
            self._stores.announce_loss(store, outgoing)


def fence_reason(process: AdmittedProcess) -> str:
    """Return the text for a process that continues after it was declared lost."""
    return f"{process} was given up after a long silence"
