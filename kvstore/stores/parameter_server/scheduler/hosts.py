"""Which workers of one store share a host, where the sums of hosts travel and not those of workers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..protocol.losses import ANEW, host_is_gone
from ..protocol.messages import Failure


class HostSeats:
    """The seat of each worker at the servers: the lowest rank of its host. Given once, when the store starts.

    `wanted` is what all workers ask for: ``"host"``, ``"auto"`` or ``"flat"``.
    """

    def __init__(self, wanted: str) -> None:
        self._wanted = wanted
        self._hosts: dict[int, str] = {}  # by rank
        #: By rank; empty where each worker has its own.
        self.seats: dict[int, int] = {}
        #: Seats whose hosts have pushed all that they will.
        self.whole: set[int] = set()

    def enter(self, rank: int, host: str) -> None:
        """Note where a worker is, before the store starts."""
        self._hosts[rank] = host

    def give(self, ranks: Iterable[int]) -> None:
        """Give the seats to those with whom the store starts."""
        hosts = {rank: self._hosts[rank] for rank in sorted(ranks) if self._hosts.get(rank)}
        together = [count for count in Counter(hosts.values()).values() if count > 1]
        if len(together) > {"host": 0, "auto": 1}.get(self._wanted, len(together)):
            first: dict[str, int] = {}
            self.seats = {rank: first.setdefault(host, rank) for rank, host in hosts.items()}

    def seat(self, rank: int) -> int:
        """Return for whom a worker pushes."""
        return self.seats.get(rank, rank)

    def shown(self) -> tuple[tuple[int, int], ...]:
        """Return the seats as a view has them."""
        return tuple(self.seats.items())

    def keeps_out(self, rank: int, host: str, members: Iterable[int]) -> Failure | None:
        """Say why a worker that comes late cannot take its place; `members` are those that are there."""
        if not self.seats:
            return None
        if rank not in self.seats or host != self._hosts.get(rank):
            text = f"worker {rank} is not on the host where the job started with it"
            return Failure("ConfigError", f"{text}; start it there, or {ANEW}")
        if not any(self.seat(one) == self.seat(rank) for one in members if one != rank):
            return host_is_gone(rank)
        return None
