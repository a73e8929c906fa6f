"""The rank of each process of a job: workers and servers, also those that are lost or have ended."""

from __future__ import annotations

from typing import Any

from ..protocol.messages import Failure, Loss, Member
from .peers import AdmittedProcess, PeerConnection, ProcessState, StepActions
from .store_membership import StoreMembership


class ServerTable:
    """Servers by rank: those that are present, and those that are lost and can be restarted."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.present: dict[int, AdmittedProcess] = {}
        self.awaited: dict[int, tuple[float, Loss]] = {}  # lost servers: deadline of their restart, and loss
        self.welcomed = False  # all have been present at the same time, and have got their Welcome
        self.final_loss: Loss | None = None  # the first server that was not restarted in time
        self._members: dict[int, Member] = {}

    @property
    def members(self) -> tuple[Member, ...]:
        """Return the servers that are present or can be restarted, by rank."""
        return tuple(self._members[rank] for rank in sorted(self._members))

    @property
    def missing_ranks(self) -> list[int]:
        """Return the ranks of servers that are not present."""
        return [rank for rank in range(self.count) if rank not in self.present]

    def add_server(self, process: AdmittedProcess, address: str) -> None:
        """Add a server, which can replace a lost server of its rank."""
        self.present[process.rank] = process
        self.awaited.pop(process.rank, None)
        self._members[process.rank] = Member(process.rank, process.incarnation, address)

    def remove_server(self, rank: int) -> None:
        """Remove a lost server; before all servers are welcomed, no other process knows it."""
        self.present.pop(rank, None)
        if not self.welcomed:
            self._members.pop(rank, None)

    def send(self, rank: int, body: Any, outgoing: StepActions) -> None:
        """Send a message to a server, if it is present; a restarted server gets the whole state instead."""
        process = self.present.get(rank)
        if process is not None:
            outgoing.write(process.peers[-1], body)

    def send_all(self, body: Any, outgoing: StepActions) -> None:
        """Send a message to all servers that are present."""
        for rank in sorted(self.present):
            self.send(rank, body, outgoing)

    def final_failure(self) -> Failure:
        """Return why no worker can enter a store after a server was not restarted in time."""
        rank = self.final_loss.rank if self.final_loss is not None else -1
        return Failure("PeerLostError", f"server {rank} is lost; start the job again", "server", rank)


class RankAssignment:
    """All processes that were admitted to the job."""

    def __init__(self, num_workers: int, num_servers: int) -> None:
        self.num_workers = num_workers
        self.processes: dict[str, AdmittedProcess] = {}  # by the name in their hello
        self.workers: dict[int, AdmittedProcess] = {}  # by rank: the last process with the rank
        self.servers = ServerTable(num_servers)

    @property
    def missing_ranks(self) -> list[int]:
        """Return the ranks of workers that no process has had yet."""
        return [rank for rank in range(self.num_workers) if rank not in self.workers]

    def by_rank(self, role: str) -> dict[int, AdmittedProcess]:
        """Return the processes of a role by rank."""
        return self.servers.present if role == "server" else self.workers

    def process_count(self, role: str) -> int:
        """Return the number of processes of a role in the job."""
        return self.servers.count if role == "server" else self.num_workers

    def ranks_in_state(self, state: ProcessState) -> list[int]:
        """Return the ranks of workers in a state."""
        return [rank for rank, process in self.workers.items() if process.state == state]

    def worker_peer(self, store: StoreMembership, rank: int) -> PeerConnection | None:
        """Return the connection of a store of a worker."""
        process = self.workers.get(rank)
        return None if process is None else process.peers.get(store.number)

    def is_current(self, peer: PeerConnection, store: StoreMembership) -> bool:
        """Return whether the peer's process is the current process of its rank, and in the store."""
        process = peer.process
        return (
            process is not None
            and self.workers.get(process.rank) is process
            and store.number in process.peers
        )
