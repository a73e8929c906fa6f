"""The requests of members of a store: barriers, keys, settings, rejoins, and what a wait is for."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ....errors import ConfigError
from ..protocol import messages as m
from ..protocol.messages import Failure, MemberReply
from .peers import PeerConnection, ProcessState, StepActions
from .rank_assignment import RankAssignment
from .store_membership import StoreMembership
from .stores import JobStores, drop_message


class MemberRequests:
    """Handles requests, one method for each kind; answers at once, or after other workers or servers."""

    def __init__(self, assignment: RankAssignment, stores: JobStores) -> None:
        self._assignment = assignment
        self._stores = stores
        self._servers = assignment.servers

    def handle_request(
        self, answer: Callable[..., None], peer: PeerConnection, message: Any, outgoing: StepActions
    ) -> None:
        """Let one of the methods below answer a request of a member, or answer with an error."""
        store = peer.store
        if store is None or not store.started or not self._assignment.is_current(peer, store):
            return
        if store.broken and not isinstance(message, (m.LookupRequest, m.LostCountRequest)):
            outgoing.write(peer, MemberReply(message.request, error=store.failure))
        elif peer.rank not in store.members:
            closed = Failure("ClosedError", f"this worker has left {store}")
            outgoing.write(peer, MemberReply(message.request, error=closed))
        else:
            answer(store, peer, message, outgoing)

    # ------------------------------------------------------------------------------------------------ rounds

    def join_rounds(
        self, store: StoreMembership, peer: PeerConnection, message: m.JoinRequest, outgoing: StepActions
    ) -> None:
        """Let no round wait for the pushes of this worker any longer."""
        if peer.rank not in store.joined:
            store.join(peer.rank)
            self._stores.send_view_soon(store, outgoing)
        outgoing.write(peer, MemberReply(message.request))
        self._stores.release_waiters(store, outgoing)

    def begin_rejoin(self, peer: PeerConnection, message: m.RejoinBeginNotice, outgoing: StepActions) -> None:
        """Ask the other workers for their rounds, for a restarted worker that is about to push."""
        store = peer.store
        if store is None or not self._assignment.is_current(peer, store):
            return
        if store.rejoins.enqueue_join(peer.rank, message.slice):
            store.epoch += 1
            self._stores.send_view(store, outgoing)
            self._stores.release_waiters(store, outgoing)

    def join_point_reached(
        self, peer: PeerConnection, message: m.JoinPointNotice, outgoing: StepActions
    ) -> None:
        """Record the rounds that another worker had pushed when it reached the join point."""
        store = peer.store
        if store is not None and self._assignment.is_current(peer, store):
            store.rejoins.note_report(peer.rank, message.epoch, message.pushed)
            self._stores.release_waiters(store, outgoing)

    def enter_barrier(
        self, store: StoreMembership, peer: PeerConnection, message: m.BarrierRequest, outgoing: StepActions
    ) -> None:
        """Answer when all needed workers have reached the barrier."""
        if not store.reach_barrier(peer.rank, message.request, message.number):
            outgoing.write(peer, store.settings.barrier_answer(message.request))
            return
        opened = [(rank, store.settings.barrier_answer(request)) for rank, request in store.open_barrier()]
        self._stores.send_answers(store, opened, outgoing)

    # -------------------------------------------------------------------------------------------------- keys

    def create_keys(
        self,
        store: StoreMembership,
        peer: PeerConnection,
        message: m.CreateKeysRequest,
        outgoing: StepActions,
    ) -> None:
        """Place new keys; a worker that does not set their first values waits until they have values."""
        answer, new = store.keys.create_keys(peer.rank, message.request, message.keys, store.initializer)
        self._stores.send_slices(store, new, outgoing)
        if answer is not None:
            outgoing.write(peer, answer)

    def mark_keys_ready(
        self, store: StoreMembership, peer: PeerConnection, message: m.KeysReadyRequest, outgoing: StepActions
    ) -> None:
        """Answer the workers that wait for the values of keys."""
        if message.error is None:
            answers = store.keys.mark_ready(message.keys)
        else:
            slices, answers = store.keys.cancel_move(message.keys, message.error)
            if slices:  # without slices the message would drop the whole store
                self._servers.send_all(drop_message(store, slices), outgoing)
        self._stores.send_answers(store, answers, outgoing)
        outgoing.write(peer, MemberReply(message.request))

    def look_up_keys(
        self, store: StoreMembership, peer: PeerConnection, message: m.LookupRequest, outgoing: StepActions
    ) -> None:
        """Answer with the places of keys, after they have values if the request asks to wait."""
        wait = message.wait and not store.broken
        answer = store.keys.lookup(peer.rank, message.request, message.keys, wait)
        if answer is not None:
            outgoing.write(peer, answer)

    def drop_keys(
        self, store: StoreMembership, peer: PeerConnection, message: m.DropKeysRequest, outgoing: StepActions
    ) -> None:
        """Forget keys; workers that wait for their first values get the error of the request."""
        keys = message.keys
        if message.error is not None:
            absent = store.keys.without_values(keys)
            keys = tuple(key for key in keys if key in absent)
        slices = store.keys.drop_keys(keys)
        if slices:
            self._servers.send_all(drop_message(store, slices), outgoing)
        if message.error is not None:
            self._stores.send_answers(store, store.keys.fail_init(keys, message.error, peer.rank), outgoing)
        outgoing.write(peer, MemberReply(message.request))

    # ---------------------------------------------------------------------------------------------- settings

    def change_settings(
        self, store: StoreMembership, peer: PeerConnection, message: m.SettingsRequest, outgoing: StepActions
    ) -> None:
        """Install a change of settings once, and answer when all servers have it."""
        if message.kind == "optimizer":  # its worker has no operation in progress, and knows all places
            self._stores.leave_old_places(store, peer.rank, outgoing)
        servers = set(range(self._servers.count))
        try:
            installs = store.settings.request_change(peer.rank, message, servers, store.unpaced_ranks)
        except ConfigError as error:
            failure = Failure("ConfigError", f"worker {peer.rank}: {store}: {error}")
            outgoing.write(peer, MemberReply(message.request, error=failure))
            return
        for install in installs:
            self._servers.send_all(install, outgoing)
        self._stores.send_answers(store, store.settings.immediate_answers(), outgoing)

    def send_command(
        self, store: StoreMembership, peer: PeerConnection, message: m.CommandRequest, outgoing: StepActions
    ) -> None:
        """Send a command to all servers."""
        install = store.settings.request_command(peer.rank, message, set(range(self._servers.count)))
        self._servers.send_all(install, outgoing)

    def note_installed(self, peer: PeerConnection, message: m.InstallReply, outgoing: StepActions) -> None:
        """Record that a server has installed settings, or has refused them."""
        for store in self._stores.values():
            if store.number == message.store:
                servers = range(self._servers.count)
                answers, installs = store.settings.note_installed(
                    peer.rank, message.version, message.error, servers
                )
                for install in installs:
                    self._servers.send_all(install, outgoing)
                self._stores.send_answers(store, answers, outgoing)

    # ----------------------------------------------------------------------------------------------- absence

    def count_lost(
        self, store: StoreMembership, peer: PeerConnection, message: m.LostCountRequest, outgoing: StepActions
    ) -> None:
        """Answer with the number of processes that are silent, or lost and not replaced."""
        assignment = self._assignment
        processes = [*assignment.workers.values(), *self._servers.present.values()]
        silent = [
            process
            for process in processes
            if process.state == ProcessState.HERE and outgoing.now - process.heard > message.seconds
        ]
        count = (
            len(silent) + len(assignment.ranks_in_state(ProcessState.LOST)) + len(self._servers.missing_ranks)
        )
        outgoing.write(peer, MemberReply(message.request, count=count))

    def send_missing(self, peer: PeerConnection, message: m.MissingRequest, outgoing: StepActions) -> None:
        """Send the ranks that the start of the store, its barrier, or this worker's request waits for."""
        store = peer.store
        servers = () if store is not None and store.started else tuple(self._servers.missing_ranks)
        ranks = self._assignment.missing_ranks if store is None else self._awaited_ranks(store, peer.rank)
        outgoing.send_unreliable(
            peer, m.MissingReply(message.store, message.slice, message.round, tuple(ranks), servers)
        )

    def _awaited_ranks(self, store: StoreMembership, rank: int) -> list[int]:
        if not store.started:
            return sorted(set(range(self._assignment.num_workers)) - store.members.keys())
        if store.keys.is_waiting(rank):
            return [store.initializer]
        if store.rejoins.is_waiting(rank):
            return store.rejoins.unreported_ranks(store.needed_ranks, store.epoch)
        return store.awaited_at_barrier()
