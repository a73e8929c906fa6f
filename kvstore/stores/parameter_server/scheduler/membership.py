"""Who takes part in one store: members, those that rest, those that are lost; a new epoch for each change."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from ....settings.definitions import USUAL_SLICE_BYTES
from ..protocol.losses import lost
from ..protocol.messages import Failure, Loss, Member, View
from .hosts import HostSeats
from .key_table import KeyTable
from .rejoins import JoinPoint, RejoinCoordinator
from .settings import SettingsTable


class Membership:
    """One store as the scheduler sees it."""

    def __init__(self, number: int, name: tuple[str, int], options: dict[str, Any], loads: list[int]) -> None:
        self.number = number
        self.name = name
        self.options = options
        self.mode = str(options.get("mode", "sync"))
        self.raises = options.get("on_peer_loss", "raise") == "raise"
        self.started = False
        self.epoch = 0
        self.members: dict[int, Member] = {}
        self.resting: set[int] = set()
        self.over = False  # all have closed it
        self.shown = False  # a view, since the last tick
        self.stale = False  # the last one that was shown
        self._settled: dict[int, int] = {}  # by rank that has joined: the newest settings that it has changed
        self._rested: set[int] = set()  # ranks that have joined and left since then
        self.broken = False
        self.at_barrier: dict[int, int] = {}  # request by rank
        self._barriers: dict[int, int] = {}  # by rank at it: the number of the barrier, as its host counts
        self._opened: dict[int, int] = {}  # by seat: the last barrier that its host has passed
        self.rejoins = RejoinCoordinator()
        self.hosts = HostSeats(str(options.get("hierarchy", "flat")))
        asked = options.get("slice_bytes")
        slice_bytes = asked if isinstance(asked, int) and asked > 0 else USUAL_SLICE_BYTES
        self.keys = KeyTable(slice_bytes, loads, bool(options.get("whole_keys", False)))
        self.settings = SettingsTable(number)
        self._servers = len(loads)  # of the job
        self._losses: dict[tuple[str, int], Loss] = {}

    def __str__(self) -> str:
        return f"store {self.name[0]!r} number {self.name[1]}"

    @property
    def needed(self) -> frozenset[int]:
        """Ranks that rounds and barriers wait for."""
        return frozenset(self.members.keys() - self.resting - self.rejoins.rejoining)

    @property
    def unpaced(self) -> frozenset[int]:
        """Ranks that no rounds keep near the others."""
        return frozenset() if self.mode == "sync" else frozenset(self.members.keys() - self.resting)

    @property
    def initializer(self) -> int:
        """Rank whose values count at init; -1 without members.

        One that rejoins may wait for the others, who must not wait for its values.
        """
        return min(self.members.keys() - self.rejoins.rejoining or self.members, default=-1)

    @property
    def failure(self) -> Failure:
        """What those get who can go on no longer."""
        return lost(tuple(self._losses.values()), self._servers)

    def start(self) -> None:
        """All are there."""
        self.started = True
        self.hosts.give(self.members)
        self.epoch = 1

    def end(self) -> None:
        """All have closed it: servers hold nothing of it any more."""
        self.over = True
        self.keys.drop(tuple(self.keys.entries))

    def enter(self, member: Member) -> None:
        """Take in a member; one that comes back takes the place of the lost one."""
        self.members[member.rank] = member
        self.resting.discard(member.rank)
        self._rested.discard(member.rank)
        self._settled.pop(member.rank, None)
        self._losses.pop(("worker", member.rank), None)
        self.settings.forget(member.rank)
        if self.started:
            self.epoch += 1
            if self.mode == "sync" and not self.hosts.seats:  # else its host has gone on in its rounds
                self.rejoins.enter(member.rank)

    def next_join_point(self) -> JoinPoint | None:
        """Let the next one take part who came back, if all others have said where they are."""
        join_point = self.rejoins.due(self.needed, self.epoch)
        self.epoch += join_point is not None
        return join_point

    def rest(self, rank: int) -> None:
        """Let nobody wait for this worker's pushes any more."""
        self.resting.add(rank)
        self._settled[rank] = self.settings.known(rank)
        self.epoch += 1

    def awaited_at_barrier(self) -> list[int]:
        """Ranks that a barrier waits for."""
        seat = self.hosts.seat
        return (
            sorted(set(map(seat, self.needed)) - set(map(seat, self.at_barrier))) if self.at_barrier else []
        )

    def come_to_barrier(self, rank: int, request: int, number: int) -> bool:
        """Note who has come; False: others of its host were there for it, and it need not wait.

        Workers of a host meet first, and then each of them comes here: one stands for all.
        """
        if self.hosts.seats and rank not in self.resting:
            if number <= self._opened.get(self.hosts.seat(rank), 0):
                return False
            self._barriers[rank] = number
        self.at_barrier[rank] = request
        return True

    def open_barrier(self) -> list[tuple[int, int]]:
        """Rank and request of all that may go on now, if all have arrived; they are forgotten."""
        there = len(self.at_barrier) + len(self.resting) + len(self.rejoins.rejoining)
        if (there < len(self.members) and not self.hosts.seats) or self.awaited_at_barrier():
            return []
        for rank, number in self._barriers.items():
            seat = self.hosts.seat(rank)
            self._opened[seat] = max(number, self._opened.get(seat, 0))
        return self._clear_barrier()

    def _clear_barrier(self) -> list[tuple[int, int]]:
        waiting, self.at_barrier, self._barriers = sorted(self.at_barrier.items()), {}, {}
        return waiting

    def lose(self, loss: Loss) -> None:
        """Note that a member is lost."""
        self.leave(loss.rank)
        self._losses[("worker", loss.rank)] = loss
        self.broken = self.broken or self.raises

    def lose_server(self, loss: Loss) -> None:
        """Note that a server is lost and nobody takes its place: its values are gone."""
        self._losses[("server", loss.rank)] = loss
        self.broken = True
        self.epoch += 1

    def view(self, servers: Iterable[Member], join_point: JoinPoint | None = None) -> View:
        """Who takes part now; with a join point, no other is collected in this view."""
        members = tuple(self.members[rank] for rank in sorted(self.members))
        resting = tuple(sorted(self.resting | self._rested))
        losses = tuple(self._losses.values())
        rejoining = tuple(sorted(self.rejoins.rejoining))
        rank, after = join_point or (-1, ())
        join_slice = -1 if join_point or self.broken else self.rejoins.join_slice
        return View(
            self.number, self.epoch, members, resting, losses, tuple(servers), self.broken, self.mode,
            rejoining, join_slice, rank, after, self.hosts.shown(), tuple(sorted(self.hosts.whole)),
            tuple(sorted(self._settled.items())),
        )  # fmt: skip

    def note_shown(self) -> None:
        """Note that all are told of a new view."""
        self.shown, self.stale = True, False
        self._rested.clear()

    def waiting(self) -> list[tuple[int, int]]:
        """Rank and request of everybody who waits for others; they are forgotten."""
        return [*self._clear_barrier(), *self.keys.clear(), *self.settings.clear()]

    def leave(self, rank: int) -> None:
        """Let a member go that has closed its store, or is lost."""
        del self.members[rank]
        if rank in self.resting:
            self.resting.discard(rank)
            self._rested.add(rank)
        self.at_barrier.pop(rank, None)
        self._barriers.pop(rank, None)
        self.rejoins.leave(rank)
        self.keys.leave(rank)
        self.settings.forget(rank)
        self.epoch += 1
