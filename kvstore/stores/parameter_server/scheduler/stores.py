"""All stores of a job: who enters them, when they start, and what their members are told of it."""

from __future__ import annotations

from collections.abc import Iterable, ValuesView

from ..protocol.messages import Answer, Failure, Hello, Install, KeyEntry, Loss, Member, Slices, Welcome
from .membership import Membership
from .peers import Outgoing, Peer, Process, State
from .rank_assignment import RankAssignment
from .rejoins import JoinPoint


def dropped(store: Membership, slices: Iterable[int] = ()) -> Install:
    """Say to servers that slices are no more, or the store, where none is named."""
    return Install(store.number, 0, "drop", ",".join(map(str, slices)))


class Stores:
    """Stores by group and number; `assignment` says who is behind a rank."""

    def __init__(self, assignment: RankAssignment) -> None:
        self._assignment = assignment
        self._servers = assignment.servers
        self._stores: dict[tuple[str, int], Membership] = {}
        self._loads = [0] * assignment.servers.count

    def values(self) -> ValuesView[Membership]:
        """Return all stores, in the order of their numbers."""
        return self._stores.values()

    # --------------------------------------------------------------------------------------- entry and start

    def enter(self, peer: Peer, process: Process, hello: Hello, outgoing: Outgoing) -> None:
        """Let a worker into the store that it names, or refuse it."""
        name = (hello.group, hello.ordinal)
        store = self._stores.get(name)
        if store is None:
            store = Membership(len(self._stores), name, hello.options, self._loads)
            self._stores[name] = store
        error = self._keeps_out(store, process, hello)
        if error is not None:
            outgoing.refuse(peer, error)
            return
        peer.store = store
        process.peers[store.number] = peer
        store.enter(Member(process.rank, process.incarnation))
        if not store.started:
            store.hosts.enter(process.rank, hello.host)
            self.try_start(store, outgoing)
            return
        self._welcome(store, peer, True, outgoing)
        self.show(store, outgoing, but=process.rank)

    def _keeps_out(self, store: Membership, process: Process, hello: Hello) -> Failure | None:
        if hello.options != store.options:
            mine, others = hello.options, store.options
            names = sorted(name for name in {*mine, *others} if mine.get(name) != others.get(name))
            told = ", ".join(f"{name} {mine.get(name)!r} instead of {others.get(name)!r}" for name in names)
            return Failure("ConfigError", f"{process} creates {store} with {told}: give all workers the same")
        if store.broken or self._servers.doom is not None:
            return store.failure if store.broken else self._servers.doomed()
        if store.number in process.peers:
            return Failure("FencedError", f"{process} has been in {store} before; create another store")
        if store.over:
            return Failure("FencedError", f"{store} is over: all others have closed it")
        # Who comes into a store that has started takes the place of one who was lost, here or elsewhere.
        lost = [process.rank] if store.started else self._assignment.ranks(State.LOST)
        if store.raises and lost:
            return Failure(
                "PeerLostError", f"worker {lost[0]} is lost; start the job again", "worker", lost[0]
            )
        return store.hosts.keeps_out(process.rank, hello.host, store.members) if store.started else None

    def try_start(self, store: Membership, outgoing: Outgoing) -> None:
        """Start a store once everybody is there; those that are lost are not waited for."""
        if store.started or not self._servers.welcomed or not store.members:
            return
        assignment = self._assignment
        missing = (
            set(range(assignment.num_workers)) - store.members.keys() - set(assignment.ranks(State.LOST))
        )
        ended = missing.intersection(assignment.ranks(State.ENDED))
        if ended:
            text = (
                f"worker {min(ended)} has ended and never created {store}: all workers create the same stores"
            )
            self._turn_away(store, Failure("ConfigError", text), outgoing)
        elif not missing:
            store.start()
            for peer in self._peers(store):
                self._welcome(store, peer, False, outgoing)
            self._servers.tell_all(store.view(self._servers.members), outgoing)

    def _turn_away(self, store: Membership, why: Failure, outgoing: Outgoing) -> None:
        """Refuse everybody in a store that cannot start; who comes later must not start it without them."""
        for peer in self._peers(store):
            outgoing.refuse(peer, why)
        store.members.clear()

    def lose_before_start(self, store: Membership, loss: Loss, outgoing: Outgoing) -> None:
        """Go on without a worker that never came to a store, or turn the others away."""
        if not store.raises:
            self.try_start(store, outgoing)
        elif store.members:
            text = f"{loss.role} {loss.rank} was lost before {store} started; start the job again"
            self._turn_away(
                store, Failure("PeerLostError", text, loss.role, loss.rank, loss.silent), outgoing
            )

    def bring_up(self, rank: int, outgoing: Outgoing) -> None:
        """Tell a server that has come back everything, and everybody that it has."""
        for store in self.values():
            if store.over:  # the server may have a snapshot from before
                self._servers.tell(rank, dropped(store), outgoing)
            if store.over or not store.started:
                continue
            entries = store.keys.placed()
            if entries:
                self._servers.tell(rank, Slices(store.number, entries), outgoing)
            if gone := store.keys.gone():
                self._servers.tell(rank, dropped(store, gone), outgoing)
            for install in store.settings.again(rank):
                self._servers.tell(rank, install, outgoing)
            store.epoch += 1
            self.show(store, outgoing)

    # ----------------------------------------------------------------------------------------------- changes

    def changed(self, store: Membership, outgoing: Outgoing) -> None:
        """Tell of a loss, and let go whom it held up."""
        if not store.started:
            if store.broken:
                self._turn_away(store, store.failure, outgoing)
            return
        self.show(store, outgoing)
        if store.broken:
            failed = [(rank, Answer(request, error=store.failure)) for rank, request in store.waiting()]
            self.answer(store, failed, outgoing)
        else:
            self.go_on(store, outgoing)

    def go_on(self, store: Membership, outgoing: Outgoing) -> None:
        """After somebody has left or joined: perhaps the others need not wait any more."""
        self.leave_old_places(store, -1, outgoing)
        self._let_join(store, outgoing)
        opened = [(rank, store.settings.at_barrier(request)) for rank, request in store.open_barrier()]
        answers, new = store.keys.promote(store.initializer)
        self.place(store, new, outgoing)
        self.answer(store, [*opened, *answers], outgoing)

    def leave_old_places(self, store: Membership, rank: int, outgoing: Outgoing) -> None:
        """Have servers drop slices of keys that have moved, once all members know it; `rank` does now."""
        if slices := store.keys.leave_old_places(rank, store.members):
            self._servers.tell_all(dropped(store, slices), outgoing)

    def _let_join(self, store: Membership, outgoing: Outgoing) -> None:
        """Tell all of one who came back, once the others have reached where it joins; then the next may."""
        while not store.broken and (join_point := store.next_join_point()) is not None:
            self.show(store, outgoing, join_point=join_point)
            if store.rejoins.join_slice >= 0:
                store.epoch += 1
                self.show(store, outgoing)

    # ----------------------------------------------------------------------------------- what they are told

    def show(
        self, store: Membership, outgoing: Outgoing, but: int = -1, join_point: JoinPoint | None = None
    ) -> None:
        """Tell everybody in the store who takes part now."""
        view = store.view(self._servers.members, join_point)
        store.note_shown()
        for peer in self._peers(store):
            if peer.rank != but:
                outgoing.write(peer, view)
        self._servers.tell_all(view, outgoing)

    def show_once(self, store: Membership, outgoing: Outgoing) -> None:
        """Tell everybody who takes part now; if that was done since the last tick, at the next one.

        Each view goes to all and names all: with one for each of many that leave at once, the scheduler would
        be busy for minutes.
        """
        if store.shown and not store.rejoins.rejoining:
            store.stale = True
        else:
            self.show(store, outgoing)

    def look(self, outgoing: Outgoing) -> None:
        """Show what was not shown yet."""
        for store in self.values():
            if store.stale and store.members:
                self.show(store, outgoing)
            outgoing.changed = outgoing.changed or store.shown
            store.shown = False

    def answer(self, store: Membership, answers: Iterable[tuple[int, Answer]], outgoing: Outgoing) -> None:
        """Answer requests of members, by rank."""
        for rank, answer in answers:
            peer = self._assignment.peer(store, rank)
            if peer is not None:
                outgoing.write(peer, answer)

    def place(self, store: Membership, new: tuple[KeyEntry, ...], outgoing: Outgoing) -> None:
        """Tell the servers of new keys."""
        if new:
            self._servers.tell_all(Slices(store.number, new), outgoing)

    def _welcome(self, store: Membership, peer: Peer, returned: bool, outgoing: Outgoing) -> None:
        members = tuple(store.members[rank] for rank in sorted(store.members))
        size, servers = self._assignment.num_workers, self._servers.members
        rejoining = tuple(sorted(store.rejoins.rejoining))
        welcome = Welcome(
            store.number, peer.rank, size, store.epoch, members, servers, returned, rejoining,
            store.hosts.shown(),
        )  # fmt: skip
        outgoing.write(peer, welcome)

    def _peers(self, store: Membership) -> list[Peer]:
        """Sockets of the members, by rank."""
        peers = (self._assignment.peer(store, rank) for rank in sorted(store.members))
        return [peer for peer in peers if peer is not None]
