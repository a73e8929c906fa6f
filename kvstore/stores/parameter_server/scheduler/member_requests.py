"""What members of a store ask: barriers, keys, settings, where they rejoin, whom they wait for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....errors import ConfigError
from ..protocol import messages as m
from ..protocol.messages import Answer, Failure
from .membership import Membership
from .peers import Outgoing, Peer, State
from .rank_assignment import RankAssignment
from .stores import Stores, dropped


class MemberRequests:
    """Takes requests, one method for each; answers at once, or when the others or the servers have come."""

    def __init__(self, assignment: RankAssignment, stores: Stores) -> None:
        self._assignment = assignment
        self._stores = stores
        self._servers = assignment.servers

    def handle(self, answer: Callable[..., None], peer: Peer, message: Any, outgoing: Outgoing) -> None:
        """Have a request of a store's member answered by one of the methods below, or with why it is not."""
        store = peer.store
        if store is None or not store.started or not self._assignment.holds(peer, store):
            return
        if store.broken and not isinstance(message, (m.Lookup, m.Count)):
            outgoing.write(peer, Answer(message.request, error=store.failure))
        elif peer.rank not in store.members:
            closed = Failure("ClosedError", f"this worker has left {store}")
            outgoing.write(peer, Answer(message.request, error=closed))
        else:
            answer(store, peer, message, outgoing)

    # ------------------------------------------------------------------------------------------------ rounds

    def join_rounds(self, store: Membership, peer: Peer, message: m.JoinRounds, outgoing: Outgoing) -> None:
        """Let nobody wait for this worker's pushes any more."""
        if peer.rank not in store.resting:
            store.rest(peer.rank)
            self._stores.show_once(store, outgoing)
        outgoing.write(peer, Answer(message.request))
        self._stores.go_on(store, outgoing)

    def collect_join_point(self, peer: Peer, message: m.Begin, outgoing: Outgoing) -> None:
        """Ask the others where they are, for one who came back and is about to push."""
        store = peer.store
        if store is None or not self._assignment.holds(peer, store):
            return
        if store.rejoins.ask(peer.rank, message.slice):
            store.epoch += 1
            self._stores.show(store, outgoing)
            self._stores.go_on(store, outgoing)

    def join_point_reached(self, peer: Peer, message: m.JoinPointReached, outgoing: Outgoing) -> None:
        """Note where one of the others is."""
        store = peer.store
        if store is not None and self._assignment.holds(peer, store):
            store.rejoins.reached(peer.rank, message.epoch, message.pushed)
            self._stores.go_on(store, outgoing)

    def barrier(self, store: Membership, peer: Peer, message: m.Barrier, outgoing: Outgoing) -> None:
        """Answer once all have arrived."""
        if not store.come_to_barrier(peer.rank, message.request, message.number):
            outgoing.write(peer, store.settings.at_barrier(message.request))
            return
        opened = [(rank, store.settings.at_barrier(request)) for rank, request in store.open_barrier()]
        self._stores.answer(store, opened, outgoing)

    # -------------------------------------------------------------------------------------------------- keys

    def create_keys(self, store: Membership, peer: Peer, message: m.CreateKeys, outgoing: Outgoing) -> None:
        """Place new keys; whoever does not fill them waits until they have values."""
        answer, new = store.keys.create(peer.rank, message.request, message.keys, store.initializer)
        self._stores.place(store, new, outgoing)
        if answer is not None:
            outgoing.write(peer, answer)

    def ready(self, store: Membership, peer: Peer, message: m.Ready, outgoing: Outgoing) -> None:
        """Answer those who wait for the values of keys."""
        if message.error is None:
            told = store.keys.ready(message.keys)
        else:
            slices, told = store.keys.stay(message.keys, message.error)
            if slices:  # none would be the whole store
                self._servers.tell_all(dropped(store, slices), outgoing)
        self._stores.answer(store, told, outgoing)
        outgoing.write(peer, Answer(message.request))

    def lookup(self, store: Membership, peer: Peer, message: m.Lookup, outgoing: Outgoing) -> None:
        """Say where keys lie, once they have values if the worker waits for that."""
        wait = message.wait and not store.broken
        answer = store.keys.lookup(peer.rank, message.request, message.keys, wait)
        if answer is not None:
            outgoing.write(peer, answer)

    def drop(self, store: Membership, peer: Peer, message: m.Drop, outgoing: Outgoing) -> None:
        """Forget keys; workers that wait for their first values are told why there will be none."""
        keys = message.keys
        if message.error is not None:
            absent = store.keys.without_values(keys)
            keys = tuple(key for key in keys if key in absent)
        slices = store.keys.drop(keys)
        if slices:
            self._servers.tell_all(dropped(store, slices), outgoing)
        if message.error is not None:
            self._stores.answer(store, store.keys.fail(keys, message.error, peer.rank), outgoing)
        outgoing.write(peer, Answer(message.request))

    # ---------------------------------------------------------------------------------------------- settings

    def settings(self, store: Membership, peer: Peer, message: m.Settings, outgoing: Outgoing) -> None:
        """Have a change of settings installed once, and answer when all servers have it."""
        if message.kind == "optimizer":  # a worker that sets one has nothing under way, and knows all places
            self._stores.leave_old_places(store, peer.rank, outgoing)
        servers = set(range(self._servers.count))
        try:
            change, installs = store.settings.ask(peer.rank, message, servers, store.unpaced)
        except ConfigError as error:
            failure = Failure("ConfigError", f"worker {peer.rank}: {store}: {error}")
            outgoing.write(peer, Answer(message.request, error=failure))
            return
        if change is None:
            there = store.settings.in_place_of(message)
            text = m.another_optimizer(f"worker {peer.rank}: {store}", there.rank, there.text)
            outgoing.write(peer, Answer(message.request, error=Failure("ConfigError", text)))
            return
        for install in installs:
            self._servers.tell_all(install, outgoing)
        self._stores.answer(store, store.settings.answers(), outgoing)

    def command(self, store: Membership, peer: Peer, message: m.Command, outgoing: Outgoing) -> None:
        """Pass a command on to all servers."""
        install = store.settings.command(peer.rank, message, set(range(self._servers.count)))
        self._servers.tell_all(install, outgoing)

    def installed(self, peer: Peer, message: m.Installed, outgoing: Outgoing) -> None:
        """Take a server's word that it has a setting, or why not."""
        for store in self._stores.values():
            if store.number == message.store:
                servers = range(self._servers.count)
                told = store.settings.installed(peer.rank, message.version, message.error, servers)
                for install in told[1]:
                    self._servers.tell_all(install, outgoing)
                self._stores.answer(store, told[0], outgoing)

    # ----------------------------------------------------------------------------------------------- absence

    def count(self, store: Membership, peer: Peer, message: m.Count, outgoing: Outgoing) -> None:
        """Say how many processes are silent, or lost and not replaced."""
        assignment = self._assignment
        processes = [*assignment.workers.values(), *self._servers.there.values()]
        silent = [
            one for one in processes if one.state == State.HERE and outgoing.now - one.heard > message.seconds
        ]
        count = len(silent) + len(assignment.ranks(State.LOST)) + len(self._servers.missing)
        outgoing.write(peer, Answer(message.request, count=count))

    def who(self, peer: Peer, message: m.Who, outgoing: Outgoing) -> None:
        """Say whom the store's start, its barrier, or a worker's keys or first push wait for."""
        store = peer.store
        servers = () if store is not None and store.started else tuple(self._servers.missing)
        ranks = self._assignment.missing if store is None else self._awaited(store, peer.rank)
        outgoing.send_unreliable(
            peer, m.Missing(message.store, message.slice, message.round, tuple(ranks), servers)
        )

    def _awaited(self, store: Membership, rank: int) -> list[int]:
        if not store.started:
            return sorted(set(range(self._assignment.num_workers)) - store.members.keys())
        if store.keys.waits(rank):
            return [store.initializer]
        if store.rejoins.waits(rank):
            return store.rejoins.missing(store.needed, store.epoch)
        return store.awaited_at_barrier()
