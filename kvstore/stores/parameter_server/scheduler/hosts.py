"""Which workers of one store share a host: with `hierarchy="host"` each host sends one sum to the servers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from ..protocol.losses import ANEW, host_is_gone
from ..protocol.messages import Failure


class HostSeats:
    """The seat of each worker: the lowest rank of its host, under which servers count the pushes of the host.

    The seats are assigned once, when the store starts. `hierarchy` is the option of the store: ``"host"``,
    ``"auto"`` or ``"flat"``.
    """

    def __init__(self, hierarchy: str) -> None:
        self._hierarchy = hierarchy
        self._hosts: dict[int, str] = {}  # by rank
        #: Seat by rank; empty if each worker pushes for itself.
        self.seats: dict[int, int] = {}
        #: Seats of hosts that have no more pushes.
        self.finished: set[int] = set()

    def add_host(self, rank: int, host: str) -> None:
        """Record the host of a worker, before the store starts."""
        self._hosts[rank] = host

    def assign_seats(self, ranks: Iterable[int]) -> None:
        """Assign the seats to the workers with which the store starts."""
        hosts = {rank: self._hosts[rank] for rank in sorted(ranks) if self._hosts.get(rank)}
        together = [count for count in Counter(hosts.values()).values() if count > 1]
        if len(together) > {"host": 0, "auto": 1}.get(self._hierarchy, len(together)):
            first: dict[str, int] = {}
            self.seats = {rank: first.setdefault(host, rank) for rank, host in hosts.items()}

    def seat(self, rank: int) -> int:
        """Return the seat of a worker, which is its rank if it pushes for itself."""
        return self.seats.get(rank, rank)

    def items(self) -> tuple[tuple[int, int], ...]:
        """Return the pairs of rank and seat, as views contain them."""
        return tuple(self.seats.items())

    def entry_failure(self, rank: int, host: str, members: Iterable[int]) -> Failure | None:
        """Return why a worker cannot enter a running store with these members; None if it can."""
        if not self.seats:
            return None
        if rank not in self.seats or host != self._hosts.get(rank):
            text = f"worker {rank} is not on the host where the job started with it"
            return Failure("ConfigError", f"{text}; start it there, or {ANEW}")
        if not any(self.seat(member) == self.seat(rank) for member in members if member != rank):
            return host_is_gone(rank)
        return None
