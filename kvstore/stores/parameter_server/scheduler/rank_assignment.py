"""Who has which rank in a job: workers and servers, those that are lost or have ended too."""

from __future__ import annotations

from typing import Any

from ..protocol.messages import Failure, Loss, Member
from .membership import Membership
from .peers import Outgoing, Peer, Process, State


class Servers:
    """Servers by rank: those that are there, and until when those that are away may come back."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.there: dict[int, Process] = {}
        self.away: dict[int, tuple[float, Loss]] = {}
        self.welcomed = False  # all have been there at once, and know each other
        self.doom: Loss | None = None  # one that will not come back
        self._members: dict[int, Member] = {}

    @property
    def members(self) -> tuple[Member, ...]:
        """Those that are there or away, by rank."""
        return tuple(self._members[rank] for rank in sorted(self._members))

    @property
    def missing(self) -> list[int]:
        """Ranks that are not there."""
        return [rank for rank in range(self.count) if rank not in self.there]

    def enter(self, process: Process, address: str) -> None:
        """Take in a server, perhaps in place of one that is away."""
        self.there[process.rank] = process
        self.away.pop(process.rank, None)
        self._members[process.rank] = Member(process.rank, process.incarnation, address)

    def leave(self, rank: int) -> None:
        """Note that a server is lost; before all are welcome, nobody has heard of it."""
        self.there.pop(rank, None)
        if not self.welcomed:
            self._members.pop(rank, None)

    def tell(self, rank: int, body: Any, outgoing: Outgoing) -> None:
        """Write to a server, if it is there; if not, it hears everything when it comes back."""
        process = self.there.get(rank)
        if process is not None:
            outgoing.write(process.peers[-1], body)

    def tell_all(self, body: Any, outgoing: Outgoing) -> None:
        """Write to all servers that are there."""
        for rank in sorted(self.there):
            self.tell(rank, body, outgoing)

    def doomed(self) -> Failure:
        """Say why no store can be entered once a server is lost for good."""
        rank = self.doom.rank if self.doom is not None else -1
        return Failure("PeerLostError", f"server {rank} is lost; start the job again", "server", rank)


class RankAssignment:
    """Everybody who has been let in."""

    def __init__(self, num_workers: int, num_servers: int) -> None:
        self.num_workers = num_workers
        self.processes: dict[str, Process] = {}  # by the name in their hello
        self.workers: dict[int, Process] = {}  # the last that had the rank
        self.servers = Servers(num_servers)

    @property
    def missing(self) -> list[int]:
        """Ranks of workers that have never been there."""
        return [rank for rank in range(self.num_workers) if rank not in self.workers]

    def by_rank(self, role: str) -> dict[int, Process]:
        """Return the processes of a role by rank."""
        return self.servers.there if role == "server" else self.workers

    def count(self, role: str) -> int:
        """Return how many processes of a role the job has."""
        return self.servers.count if role == "server" else self.num_workers

    def ranks(self, state: State) -> list[int]:
        """Return the ranks of workers of which this has become."""
        return [rank for rank, one in self.workers.items() if one.state == state]

    def peer(self, store: Membership, rank: int) -> Peer | None:
        """Return the socket of a worker's store."""
        process = self.workers.get(rank)
        return None if process is None else process.peers.get(store.number)

    def holds(self, peer: Peer, store: Membership) -> bool:
        """Whether the peer is the member, and not an older process of its rank."""
        process = peer.process
        return (
            process is not None
            and self.workers.get(process.rank) is process
            and store.number in process.peers
        )
