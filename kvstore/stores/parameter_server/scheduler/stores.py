"""All stores of a job: who enters them, when they start, and what their members are told of it."""

from __future__ import annotations

from collections.abc import Iterable, ValuesView

from ..protocol.messages import Answer, Failure, Hello, KeyEntry, Loss, Member, Slices, Welcome
from .membership import Membership
from .peers import Outgoing, Peer, Process, State
from .rank_assignment import RankAssignment
from .rejoins import Begun


class Stores:
    """Stores by group and number; `roster` says who is behind a rank."""

    def __init__(self, roster: RankAssignment) -> None:
        self._roster = roster
        self._servers = roster.servers
        self._stores: dict[tuple[str, int], Membership] = {}
        self._loads = [0] * roster.servers.count

    def values(self) -> ValuesView[Membership]:
        """Return all stores, in the order of their numbers."""
        return self._stores.values()

    # --------------------------------------------------------------------------------------- entry and start

    def enter(self, peer: Peer, process: Process, hello: Hello, mail: Outgoing) -> None:
        """Let a worker into the store that it names, or refuse it."""
        name = (hello.group, hello.ordinal)
        store = self._stores.get(name)
        if store is None:
            store = Membership(len(self._stores), name, hello.options, self._loads)
            self._stores[name] = store
        error = self._keeps_out(store, process, hello)
        if error is not None:
            mail.refuse(peer, error)
            return
        peer.store = store
        process.peers[store.number] = peer
        store.enter(Member(process.rank, process.incarnation))
        if not store.started:
            self.try_start(store, mail)
            return
        self._welcome(store, peer, True, mail)
        self.show(store, mail, but=process.rank)

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
        lost = [process.rank] if store.started else self._roster.ranks(State.LOST)
        if store.raises and lost:
            return Failure(
                "PeerLostError", f"worker {lost[0]} is lost; start the job again", "worker", lost[0]
            )
        return None

    def try_start(self, store: Membership, mail: Outgoing) -> None:
        """Start a store once everybody is there; those that are lost are not waited for."""
        if store.started or not self._servers.welcomed or not store.members:
            return
        roster = self._roster
        missing = set(range(roster.num_workers)) - store.members.keys() - set(roster.ranks(State.LOST))
        ended = missing.intersection(roster.ranks(State.ENDED))
        if ended:
            text = (
                f"worker {min(ended)} has ended and never created {store}: all workers create the same stores"
            )
            self._turn_away(store, Failure("ConfigError", text), mail)
        elif not missing:
            store.start()
            for peer in self._peers(store):
                self._welcome(store, peer, False, mail)
            self._servers.tell_all(store.view(self._servers.members), mail)

    def _turn_away(self, store: Membership, why: Failure, mail: Outgoing) -> None:
        """Refuse everybody in a store that cannot start."""
        for peer in self._peers(store):
            mail.refuse(peer, why)

    def lose_before_start(self, store: Membership, loss: Loss, mail: Outgoing) -> None:
        """Go on without a worker that never came to a store, or turn the others away."""
        if not store.raises:
            self.try_start(store, mail)
        elif store.members:
            text = f"{loss.role} {loss.rank} was lost before {store} started; start the job again"
            self._turn_away(store, Failure("PeerLostError", text, loss.role, loss.rank, loss.silent), mail)

    def bring_up(self, rank: int, mail: Outgoing) -> None:
        """Tell a server that has come back everything, and everybody that it has."""
        for store in self.values():
            if not store.started:
                continue
            entries = tuple(store.keys.entries.values())
            if entries:
                self._servers.tell(rank, Slices(store.number, entries), mail)
            for install in store.settings.again(rank):
                self._servers.tell(rank, install, mail)
            store.epoch += 1
            self.show(store, mail)

    # ----------------------------------------------------------------------------------------------- changes

    def changed(self, store: Membership, mail: Outgoing) -> None:
        """Tell of a loss, and let go whom it held up."""
        if not store.started:
            if store.broken:
                self._turn_away(store, store.failure, mail)
            return
        self.show(store, mail)
        if store.broken:
            failed = [(rank, Answer(request, error=store.failure)) for rank, request in store.waiting()]
            self.answer(store, failed, mail)
        else:
            self.go_on(store, mail)

    def go_on(self, store: Membership, mail: Outgoing) -> None:
        """After somebody has left or begun: perhaps the others need not wait any more."""
        self._let_begin(store, mail)
        opened = [(rank, Answer(request)) for rank, request in store.barrier.open(store.needed)]
        answers, new = store.keys.promote(store.founder)
        self.place(store, new, mail)
        self.answer(store, [*opened, *answers], mail)

    def _let_begin(self, store: Membership, mail: Outgoing) -> None:
        """Once all others are where somebody begins who came back, tell all; then the next one may."""
        while not store.broken and (begun := store.begin()) is not None:
            self.show(store, mail, begun=begun)
            if store.arrivals.begin >= 0:
                store.epoch += 1
                self.show(store, mail)

    # ----------------------------------------------------------------------------------- what they are told

    def show(self, store: Membership, mail: Outgoing, but: int = -1, begun: Begun | None = None) -> None:
        """Tell everybody in the store who takes part now."""
        view = store.view(self._servers.members, begun)
        for peer in self._peers(store):
            if peer.rank != but:
                mail.write(peer, view)
        self._servers.tell_all(view, mail)

    def answer(self, store: Membership, answers: Iterable[tuple[int, Answer]], mail: Outgoing) -> None:
        """Answer requests of members, by rank."""
        for rank, answer in answers:
            peer = self._roster.peer(store, rank)
            if peer is not None:
                mail.write(peer, answer)

    def place(self, store: Membership, new: tuple[KeyEntry, ...], mail: Outgoing) -> None:
        """Tell the servers of new keys."""
        if new:
            self._servers.tell_all(Slices(store.number, new), mail)

    def _welcome(self, store: Membership, peer: Peer, returned: bool, mail: Outgoing) -> None:
        members = tuple(store.members[rank] for rank in sorted(store.members))
        size, servers = self._roster.num_workers, self._servers.members
        late = tuple(sorted(store.arrivals.late))
        welcome = Welcome(store.number, peer.rank, size, store.epoch, members, servers, returned, late=late)
        mail.write(peer, welcome)

    def _peers(self, store: Membership) -> list[Peer]:
        """Sockets of the members, by rank."""
        peers = (self._roster.peer(store, rank) for rank in sorted(store.members))
        return [peer for peer in peers if peer is not None]
