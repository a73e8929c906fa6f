"""All stores of a job: which workers enter them, when they start, and the views and answers that are sent."""

from __future__ import annotations

from collections.abc import Iterable, ValuesView

from ..protocol.messages import (
    Failure,
    HelloRequest,
    InstallRequest,
    KeyEntry,
    Loss,
    Member,
    MemberReply,
    SlicesNotice,
    WelcomeNotice,
)
from .peers import AdmittedProcess, PeerConnection, ProcessState, StepActions
from .rank_assignment import RankAssignment
from .rejoins import JoinPoint
from .store_membership import StoreMembership


def drop_message(store: StoreMembership, slices: Iterable[int] = ()) -> InstallRequest:
    """Return the message that tells servers to drop these slices, or the whole store if there are none."""
    return InstallRequest(store.number, 0, "drop", ",".join(map(str, slices)))


class JobStores:
    """Stores by group and number; `assignment` has the process of each rank."""

    def __init__(self, assignment: RankAssignment) -> None:
        self._assignment = assignment
        self._servers = assignment.servers
        self._stores: dict[tuple[str, int], StoreMembership] = {}
        self._loads = [0] * assignment.servers.count

    def values(self) -> ValuesView[StoreMembership]:
        """Return all stores, in the order of their numbers."""
        return self._stores.values()

    # --------------------------------------------------------------------------------------- entry and start

    def add_worker(
        self, peer: PeerConnection, process: AdmittedProcess, hello: HelloRequest, outgoing: StepActions
    ) -> None:
        """Add a worker to the store that its hello names, or refuse it."""
        name = (hello.group, hello.ordinal)
        store = self._stores.get(name)
        if store is None:
            store = StoreMembership(len(self._stores), name, hello.options, self._loads)
            self._stores[name] = store
        failure = self._entry_failure(store, process, hello)
        if failure is not None:
            outgoing.refuse(peer, failure)
            return
        peer.store = store
        process.peers[store.number] = peer
        store.add_member(Member(process.rank, process.incarnation))
        if not store.started:
            store.hosts.add_host(process.rank, hello.host)
            self.try_start(store, outgoing)
            return
        self._welcome_worker(store, peer, True, outgoing)
        self.send_view(store, outgoing, but=process.rank)

    def _entry_failure(
        self, store: StoreMembership, process: AdmittedProcess, hello: HelloRequest
    ) -> Failure | None:
        """Return why a worker cannot enter a store; None if it can."""
        if hello.options != store.options:
            mine, others = hello.options, store.options
            names = sorted(name for name in {*mine, *others} if mine.get(name) != others.get(name))
            differ = ", ".join(f"{name} {mine.get(name)!r} instead of {others.get(name)!r}" for name in names)
            return Failure(
                "ConfigError", f"{process} creates {store} with {differ}: give all workers the same"
            )
        if store.broken or self._servers.final_loss is not None:
            return store.failure if store.broken else self._servers.final_failure()
        if store.number in process.peers:
            return Failure("FencedError", f"{process} has been in {store} before; create another store")
        if store.over:
            return Failure("FencedError", f"{store} is over: all other workers have closed it")
        # A worker that enters a started store replaces a lost worker: one of this store, or of another.
        lost = [process.rank] if store.started else self._assignment.ranks_in_state(ProcessState.LOST)
        if store.raises and lost:
            return Failure(
                "PeerLostError", f"worker {lost[0]} is lost; start the job again", "worker", lost[0]
            )
        return store.hosts.entry_failure(process.rank, hello.host, store.members) if store.started else None

    def try_start(self, store: StoreMembership, outgoing: StepActions) -> None:
        """Start a store if all servers are present, and all workers that are not lost."""
        if store.started or not self._servers.welcomed or not store.members:
            return
        assignment = self._assignment
        missing = (
            set(range(assignment.num_workers))
            - store.members.keys()
            - set(assignment.ranks_in_state(ProcessState.LOST))
        )
        ended = missing.intersection(assignment.ranks_in_state(ProcessState.ENDED))
        if ended:
            text = (
                f"worker {min(ended)} has ended and never created {store}: all workers create the same stores"
            )
            self._refuse_members(store, Failure("ConfigError", text), outgoing)
        elif not missing:
            store.start()
            for peer in self._member_peers(store):
                self._welcome_worker(store, peer, False, outgoing)
            self._servers.send_all(store.current_view(self._servers.members), outgoing)

    def _refuse_members(self, store: StoreMembership, failure: Failure, outgoing: StepActions) -> None:
        """Refuse all members of a store that cannot start; a later worker must not start it without them."""
        for peer in self._member_peers(store):
            outgoing.refuse(peer, failure)
        store.members.clear()

    def start_without(self, store: StoreMembership, loss: Loss, outgoing: StepActions) -> None:
        """Start a store without a worker that was lost before, or refuse the other workers."""
        if not store.raises:
            self.try_start(store, outgoing)
        elif store.members:
            text = f"{loss.role} {loss.rank} was lost before {store} started; start the job again"
            self._refuse_members(
                store, Failure("PeerLostError", text, loss.role, loss.rank, loss.silent), outgoing
            )

    def send_state(self, rank: int, outgoing: StepActions) -> None:
        """Send the state of all stores to a restarted server, and a new view of each to all processes."""
        for store in self.values():
            if store.over:  # the server can have an older snapshot that has the store
                self._servers.send(rank, drop_message(store), outgoing)
            if store.over or not store.started:
                continue
            entries = store.keys.placed_entries()
            if entries:
                self._servers.send(rank, SlicesNotice(store.number, entries), outgoing)
            if dropped := store.keys.dropped_slices():
                self._servers.send(rank, drop_message(store, dropped), outgoing)
            for install in store.settings.for_restarted_server(rank):
                self._servers.send(rank, install, outgoing)
            store.epoch += 1
            self.send_view(store, outgoing)

    # ----------------------------------------------------------------------------------------------- changes

    def announce_loss(self, store: StoreMembership, outgoing: StepActions) -> None:
        """Send a view after a loss, and answer the requests that waited for the lost process."""
        if not store.started:
            if store.broken:
                self._refuse_members(store, store.failure, outgoing)
            return
        self.send_view(store, outgoing)
        if store.broken:
            failed = [
                (rank, MemberReply(request, error=store.failure)) for rank, request in store.clear_waiters()
            ]
            self.send_answers(store, failed, outgoing)
        else:
            self.release_waiters(store, outgoing)

    def release_waiters(self, store: StoreMembership, outgoing: StepActions) -> None:
        """Answer the requests that no longer have to wait after a change of the members."""
        self.leave_old_places(store, -1, outgoing)
        self._complete_rejoins(store, outgoing)
        opened = [(rank, store.settings.barrier_answer(request)) for rank, request in store.open_barrier()]
        answers, new = store.keys.answer_initializer(store.initializer)
        self.send_slices(store, new, outgoing)
        self.send_answers(store, [*opened, *answers], outgoing)

    def leave_old_places(self, store: StoreMembership, rank: int, outgoing: StepActions) -> None:
        """Let servers drop the old slices of moved keys if all members know the move; `rank` knows it now."""
        if slices := store.keys.leave_old_places(rank, store.members):
            self._servers.send_all(drop_message(store, slices), outgoing)

    def _complete_rejoins(self, store: StoreMembership, outgoing: StepActions) -> None:
        """Send a view with the join point of each restarted worker that all other workers have reached."""
        while not store.broken and (join_point := store.complete_rejoin()) is not None:
            self.send_view(store, outgoing, join_point=join_point)
            if store.rejoins.join_slice >= 0:
                store.epoch += 1
                self.send_view(store, outgoing)

    # ---------------------------------------------------------------------------------------------- messages

    def send_view(
        self,
        store: StoreMembership,
        outgoing: StepActions,
        but: int = -1,
        join_point: JoinPoint | None = None,
    ) -> None:
        """Send the current view to all servers, and to all members except rank `but`."""
        view = store.current_view(self._servers.members, join_point)
        store.note_view_sent()
        for peer in self._member_peers(store):
            if peer.rank != but:
                outgoing.write(peer, view)
        self._servers.send_all(view, outgoing)

    def send_view_soon(self, store: StoreMembership, outgoing: StepActions) -> None:
        """Send the current view now, or at the next tick if one was sent since the last tick.

        Each view is sent to all members and names all members: with one view for each of many workers that
        leave at the same time, the scheduler would be busy for minutes.
        """
        if store.view_sent and not store.rejoins.rejoining:
            store.view_stale = True
        else:
            self.send_view(store, outgoing)

    def send_stale_views(self, outgoing: StepActions) -> None:
        """Send the views that `send_view_soon` has delayed."""
        for store in self.values():
            if store.view_stale and store.members:
                self.send_view(store, outgoing)
            outgoing.changed = outgoing.changed or store.view_sent
            store.view_sent = False

    def send_answers(
        self, store: StoreMembership, answers: Iterable[tuple[int, MemberReply]], outgoing: StepActions
    ) -> None:
        """Send answers to members, by rank."""
        for rank, answer in answers:
            peer = self._assignment.worker_peer(store, rank)
            if peer is not None:
                outgoing.write(peer, answer)

    def send_slices(self, store: StoreMembership, new: tuple[KeyEntry, ...], outgoing: StepActions) -> None:
        """Send the slices of new keys to the servers."""
        if new:
            self._servers.send_all(SlicesNotice(store.number, new), outgoing)

    def _welcome_worker(
        self, store: StoreMembership, peer: PeerConnection, returned: bool, outgoing: StepActions
    ) -> None:
        members = tuple(store.members[rank] for rank in sorted(store.members))
        size, servers = self._assignment.num_workers, self._servers.members
        rejoining = tuple(sorted(store.rejoins.rejoining))
        welcome = WelcomeNotice(
            store.number, peer.rank, size, store.epoch, members, servers, returned, rejoining,
            store.hosts.items(),
        )  # fmt: skip
        outgoing.write(peer, welcome)

    def _member_peers(self, store: StoreMembership) -> list[PeerConnection]:
        """Return the connections of the members, by rank."""
        peers = (self._assignment.worker_peer(store, rank) for rank in sorted(store.members))
        return [peer for peer in peers if peer is not None]
