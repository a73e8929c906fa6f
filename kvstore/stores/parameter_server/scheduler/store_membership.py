"""The members of one store, those that have joined or are lost, its barrier; each change begins an epoch.

This module decides when a store is broken, which members rounds and barriers wait for, and when a barrier
opens. `stores` sends the resulting views and answers.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ....settings.definitions import USUAL_SLICE_BYTES
from ..protocol.losses import loss_failure
from ..protocol.messages import Failure, Loss, Member, ViewNotice
from .hosts import HostSeats
from .key_table import KeyTable
from .rejoins import JoinPoint, RejoinCoordinator
from .settings import SettingsTable


class StoreMembership:
    """The scheduler's state of one store."""

    def __init__(self, number: int, name: tuple[str, int], options: dict[str, Any], loads: list[int]) -> None:
        self.number = number
        self.name = name
        self.options = options
        self.mode = str(options.get("mode", "sync"))
        self.raises = options.get("on_peer_loss", "raise") == "raise"
        self.started = False
        self.epoch = 0
        self.members: dict[int, Member] = {}
        self.joined: set[int] = set()  # ranks that have called `join`
        self.over = False  # all members have closed the store
        self.view_sent = False  # since the last tick
        self.view_stale = False  # the last view that was sent
        self._settled: dict[int, int] = {}  # by rank that has joined: the newest settings that it has changed
        self._joined_and_left: set[int] = set()  # ranks, since the last view
        self.broken = False
        self.at_barrier: dict[int, int] = {}  # request by rank
        self._barriers: dict[int, int] = {}  # by rank at the barrier: its number, as the host counts
        self._opened: dict[int, int] = {}  # by seat: the last barrier that the host has passed
        self.rejoins = RejoinCoordinator()
        self.hosts = HostSeats(str(options.get("hierarchy", "flat")))
        given = options.get("slice_bytes")
        slice_bytes = given if isinstance(given, int) and given > 0 else USUAL_SLICE_BYTES
        self.keys = KeyTable(slice_bytes, loads, bool(options.get("whole_keys", False)))
        self.settings = SettingsTable(number)
        self._servers = len(loads)  # number of servers of the job
        self._losses: dict[tuple[str, int], Loss] = {}

    def __str__(self) -> str:
        return f"store {self.name[0]!r} number {self.name[1]}"

    @property
    def needed_ranks(self) -> frozenset[int]:
        """Return the ranks that rounds and barriers wait for."""
        return frozenset(self.members.keys() - self.joined - self.rejoins.rejoining)

    @property
    def unpaced_ranks(self) -> frozenset[int]:
        """Return the ranks whose progress no round limits: all active workers of a store without rounds."""
        return frozenset() if self.mode == "sync" else frozenset(self.members.keys() - self.joined)

    @property
    def initializer(self) -> int:
        """Return the rank whose values count at init; -1 without members.

        A rejoining worker is not chosen if there is another member: it can wait for the other workers, which
        must then not wait for its values.
        """
        return min(self.members.keys() - self.rejoins.rejoining or self.members, default=-1)

    @property
    def failure(self) -> Failure:
        """Return the error for the members of a broken store."""
        return loss_failure(tuple(self._losses.values()), self._servers)

    def start(self) -> None:
        """Start the store with its current members."""
        self.started = True
        self.hosts.assign_seats(self.members)
        self.epoch = 1

    def end(self) -> None:
        """End the store after all members have closed it, and forget its keys."""
        self.over = True
        self.keys.drop_keys(tuple(self.keys.entries))

    def add_member(self, member: Member) -> None:
        """Add a member, which can replace a lost member of its rank."""
        self.members[member.rank] = member
        self.joined.discard(member.rank)
        self._joined_and_left.discard(member.rank)
        self._settled.pop(member.rank, None)
        self._losses.pop(("worker", member.rank), None)
        self.settings.forget_rank(member.rank)
        if self.started:
            self.epoch += 1
            if self.mode == "sync" and not self.hosts.seats:  # else the rounds of its host have continued
                self.rejoins.add_worker(member.rank)

    def complete_rejoin(self) -> JoinPoint | None:
        """Let the next restarted worker join, if all other workers have reached its join point."""
        join_point = self.rejoins.complete_next(self.needed_ranks, self.epoch)
        self.epoch += join_point is not None
        return join_point

    def join(self, rank: int) -> None:
        """Let no round wait for this worker any longer."""
        self.joined.add(rank)
        self._settled[rank] = self.settings.newest_place(rank)
        self.epoch += 1

    def awaited_at_barrier(self) -> list[int]:
        """Return the ranks that a barrier waits for."""
        seat = self.hosts.seat
        return (
            sorted(set(map(seat, self.needed_ranks)) - set(map(seat, self.at_barrier)))
            if self.at_barrier
            else []
        )

    def reach_barrier(self, rank: int, request: int, number: int) -> bool:
        """Record that a worker has reached the barrier; False if it need not wait.

        With seats, the workers of a host meet in their region first, and then each of them sends its request.
        The first request represents the host; a request after the barrier has opened need not wait.
        """
        if self.hosts.seats and rank not in self.joined:
            if number <= self._opened.get(self.hosts.seat(rank), 0):
                return False
            self._barriers[rank] = number
        self.at_barrier[rank] = request
        return True

    def open_barrier(self) -> list[tuple[int, int]]:
        """Return and forget rank and request of the waiting workers, if all needed workers have arrived."""
        accounted = len(self.at_barrier) + len(self.joined) + len(self.rejoins.rejoining)
        if (accounted < len(self.members) and not self.hosts.seats) or self.awaited_at_barrier():
            return []
        for rank, number in self._barriers.items():
            seat = self.hosts.seat(rank)
            self._opened[seat] = max(number, self._opened.get(seat, 0))
        return self._clear_barrier()

    def _clear_barrier(self) -> list[tuple[int, int]]:
        waiting, self.at_barrier, self._barriers = sorted(self.at_barrier.items()), {}, {}
        return waiting

    def lose_worker(self, loss: Loss) -> None:
        """Remove a lost member; the store is broken if its `on_peer_loss` is ``"raise"``."""
        self.remove_member(loss.rank)
        self._losses[("worker", loss.rank)] = loss
        self.broken = self.broken or self.raises

    def lose_server(self, loss: Loss) -> None:
        """Break the store: a server was lost with its values and not restarted in time."""
        self._losses[("server", loss.rank)] = loss
        self.broken = True
        self.epoch += 1

    def current_view(self, servers: Iterable[Member], join_point: JoinPoint | None = None) -> ViewNotice:
        """Return the current view; one with a join point does not ask for reports on the next one."""
        members = tuple(self.members[rank] for rank in sorted(self.members))
        joined = tuple(sorted(self.joined | self._joined_and_left))
        losses = tuple(self._losses.values())
        rejoining = tuple(sorted(self.rejoins.rejoining))
        rank, after = join_point or (-1, ())
        join_slice = -1 if join_point or self.broken else self.rejoins.join_slice
        return ViewNotice(
            self.number, self.epoch, members, joined, losses, tuple(servers), self.broken, self.mode,
            rejoining, join_slice, rank, after, self.hosts.items(), tuple(sorted(self.hosts.finished)),
            tuple(sorted(self._settled.items())),
        )  # fmt: skip

    def note_view_sent(self) -> None:
        """Record that the current view was sent to all members and servers."""
        self.view_sent, self.view_stale = True, False
        self._joined_and_left.clear()

    def clear_waiters(self) -> list[tuple[int, int]]:
        """Return and forget rank and request of all workers that wait for a barrier, keys or settings."""
        return [*self._clear_barrier(), *self.keys.clear_waiters(), *self.settings.clear_waiters()]

    def remove_member(self, rank: int) -> None:
        """Remove a member that has closed its store, or is lost."""
        del self.members[rank]
        if rank in self.joined:
            self.joined.discard(rank)
            self._joined_and_left.add(rank)
        self.at_barrier.pop(rank, None)
        self._barriers.pop(rank, None)
        self.rejoins.remove_worker(rank)
        self.keys.forget_waiter(rank)
        self.settings.forget_rank(rank)
        self.epoch += 1
