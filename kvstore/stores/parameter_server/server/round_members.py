"""The members of the rounds of one store, as the scheduler's last view lists them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from ..native._native import Members
from ..protocol.messages import AttachRequest, Failure, ViewNotice
from .slice_rounds import SliceRounds


class RoundMembers:
    """The members of one store: which ones rounds wait for or not, and from which round each pushes.

    Where hosts push and not workers, rounds wait for seats: the lowest ranks of the hosts that have members.

    `restarted`: this server has replaced one that ended, and all members have to attach again.
    """

    def __init__(self, restarted: bool) -> None:
        self.restarted = restarted
        self.epoch = 0
        self.sync = True
        self.incarnations: dict[int, int] = {}  # by rank
        self.seats: dict[int, int] = {}  # by rank, where hosts push; else empty
        self.needed: frozenset[int] = frozenset()  # members, or seats, that rounds wait for
        self.rejoining: frozenset[int] = frozenset()  # restarted members that no round waits for
        self.collecting_join_point = False  # of one of them: `ViewNotice.begin`
        self.broken: Failure | None = None
        #: Of a restarted server: the attachments of members, until all have attached.
        self.returning: dict[int, AttachRequest] | None = {} if restarted else None
        #: The ranks that rounds wait for, as `native/rounds.h` reads them; `_set_needed` keeps it up to date.
        self.of_rounds = Members()
        #: Of restarted workers: (slice, round), the last rounds without them.
        self._join_points: dict[int, tuple[tuple[int, int], ...]] = {}
        #: Of workers that have left without having joined: the last round of each slice with their part.
        self.left: dict[int, dict[int, int]] = {}

    def apply_view(self, view: ViewNotice, slices: Iterable[SliceRounds]) -> set[int]:
        """Apply a newer view; return the ranks of lost parts of incomplete rounds."""
        self.epoch, self.sync, self.seats = view.epoch, view.mode == "sync", dict(view.seats)
        members = {member.rank: member.incarnation for member in view.members}
        dead = {loss.rank for loss in view.losses if loss.role == "worker"} & self.incarnations.keys()
        replaced = {rank for rank, old in self.incarnations.items() if members.get(rank, old) != old}
        if self.sync:
            self._note_left(map(self.seat, members.keys() | dead | set(view.resting)), slices)
        for rank in [rank for rank in self._join_points if self.incarnations.get(rank) != members.get(rank)]:
            del self._join_points[rank]
        self.incarnations, self.rejoining = members, frozenset(view.late)
        waited_for = members.keys() - set(view.resting) - self.rejoining
        self.needed = frozenset(map(self.seat, waited_for))
        self.collecting_join_point = view.begin >= 0
        self._set_needed()
        return self.without_members(dead | replaced, replaced) - set(view.whole)

    def without_members(self, gone: set[int], replaced: Iterable[int] = ()) -> set[int]:
        """Return the seats of these ranks that no member is left to push for, unless it was `replaced`."""
        return set(map(self.seat, gone)) - set(map(self.seat, self.incarnations.keys() - set(replaced)))

    def seat(self, rank: int) -> int:
        """Return the rank that a worker pushes for: itself, or the seat of its host."""
        return self.seats.get(rank, rank)

    def _set_needed(self) -> None:
        """Set the ranks that `native/rounds.h` waits for; to be called after each change of their sources."""
        waits = self.returning is not None or self.collecting_join_point or bool(self.left)
        usual = self.broken is None and not waits
        self.of_rounds.set(self.needed, self.sync and usual, self.epoch, not self.sync and usual)

    def break_off(self, failure: Failure) -> None:
        """Complete no more rounds."""
        self.broken = failure
        self._set_needed()

    def await_all(self) -> None:
        """Replace a server that has ended: all members have to attach again."""
        self.returning = {}
        self._set_needed()

    def missing_ranks(self, rounds: SliceRounds | None, number: int) -> list[int]:
        """Return the ranks that a round of a slice waits for."""
        if self.returning is not None:
            return sorted(self.incarnations.keys() - self.returning.keys())
        return rounds.missing(number, self.needed) if rounds is not None and number > rounds.round else []

    # ------------------------------------------------------------------------------------ restarted workers

    def join_point(self, rank: int) -> tuple[tuple[int, int], ...]:
        """Return (slice, round): the last rounds without this worker, if it was restarted."""
        return self._join_points.get(rank, ())

    def set_join_point(self, rank: int, after: Mapping[int, int], slices: Iterable[SliceRounds]) -> None:
        """Let a restarted worker take part after these rounds; rounds up to them do not wait for it."""
        point: dict[int, int] = {}
        for rounds in slices:
            last = point[rounds.id] = max(after.get(rounds.id, 0), rounds.base())
            rounds.lose({rank}, last)  # parts that its predecessor had pushed ahead of all others
            if last > rounds.round:
                rounds.pass_over(rank, last)
        self._join_points[rank] = tuple((slice_, last) for slice_, last in point.items() if last)

    def all_returned(self, slices: Mapping[int, SliceRounds]) -> bool:
        """Return whether, since the last call, all members have attached to a restarted server.

        Parts that they had pushed, and this server does not have, are lost: rounds proceed without them.
        """
        if self.returning is None or not self.incarnations.keys() <= self.returning.keys():
            return False
        attaches, self.returning = self.returning, None
        self._set_needed()
        for rank, attach in attaches.items():
            begins = not attach.met and rank not in self.rejoining and rank not in self._join_points
            if begins and self.sync and not self.seats:
                self.set_join_point(rank, dict(attach.accepted), slices.values())
                continue
            for slice_, round_ in attach.accepted:
                rounds = slices.get(slice_)
                if rounds is not None and round_ > rounds.round:
                    seat = self.seat(rank)
                    rounds.pass_over(seat, max(round_, rounds.skip.get(seat, 0)))
        return True

    # ----------------------------------------------------------------------------------- workers that left

    def _note_left(self, others: Iterable[int], slices: Iterable[SliceRounds]) -> None:
        """Record the members that rounds have waited for and that have left without joining: not `others`."""
        for rank in self.needed.difference(others):
            after = dict(self.join_point(rank))
            last = ((rounds.id, rounds.last(rank)) for rounds in slices)
            was_in = {slice_: round_ for slice_, round_ in last if round_ > after.get(slice_, 0)}
            if was_in:
                self.left[rank] = was_in

    def left_out(self, slice_: int, round_: int) -> list[tuple[int, int]]:
        """Return, once, the (rank, last round) of workers that rounds of this slice now proceed without."""
        gone = [(rank, rounds[slice_]) for rank, rounds in self.left.items() if slice_ in rounds]
        gone = [(rank, last) for rank, last in gone if last < round_]
        for rank, _ in gone:
            del self.left[rank]
        self._set_needed()
        return gone
