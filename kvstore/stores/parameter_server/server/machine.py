"""The server's state machine: the scheduler, the stores, their workers and requests.

`TRANSITIONS` lists the states of the server and of a store on it; `native/rounds.h` lists those of a slice
and of a round. A test compares both with random jobs, and `docs/reference/states.md` shows them.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any, Final

from ....observe.native._observe import Counters
from ....settings.definitions import DEFAULTS
from ..native._native import Link, SliceValue, Sums, TableRows
from ..protocol import events
from ..protocol import messages as m
from ..protocol.events import ECHO, Action, SendMessage
from ..protocol.losses import loss_failure, no_scheduler_failure, stopped_failure
from ..protocol.messages import Batch, Failure, Record, RecordKind, ReliableMessage
from ..protocol.reliable_link import ReliableLink
from ..protocol.silence import SilenceDetector
from ..protocol.transitions import transitions
from .store_machine import StoreMachine
from .worker_sessions import StepEffects, WorkerSession

SCHEDULER = "scheduler"

_AHEAD = 1024  # stored batches of an unknown epoch; workers repeat the others
_EARLY = 4096  # stored attachments to stores that the scheduler has not announced yet

TRANSITIONS: Final = transitions(
    ("server", "working", "ended", "JobEndNotice RefusalNotice FenceNotice TickEvent",
     "Tick: the scheduler is lost"),
    ("store", "new", "announced", "SlicesNotice", "the scheduler has placed a slice here"),
    ("store", "new", "running", "ViewNotice", "its first members are admitted"),
    ("store", "new", "returning", "SlicesNotice ViewNotice",
     "a restarted server without a snapshot of the store"),
    ("store", "new", "broken", "ViewNotice", "a process was lost before"),
    ("store", "announced", "running", "ViewNotice", "its first members are admitted"),
    ("store", "announced", "broken", "ViewNotice", "a process was lost before"),
    ("store", "returning", "running", "AttachRequest ViewNotice", "all members have attached again"),
    ("store", "returning", "broken", "ViewNotice", "a process is lost for good (`on_peer_loss`)"),
    ("store", "running", "broken", "ViewNotice", "a process is lost for good (`on_peer_loss`)"),
    ("store", "announced", "gone", "InstallRequest", "all workers have left the store"),
    ("store", "returning", "gone", "InstallRequest", "all workers have left the store"),
    ("store", "running", "gone", "InstallRequest", "all workers have left the store"),
    ("store", "broken", "gone", "InstallRequest", "all workers have left the store"),
)  # fmt: skip


@dataclass(frozen=True)
class ServerOptions:
    """The options of a server's machine."""

    #: Seconds after which messages to the scheduler are repeated.
    resend_after: float = 1.0
    #: After twice as many seconds without a message of the scheduler it is lost, and the server ends.
    dead_after: float = DEFAULTS["dead_after"]
    #: Bytes of requests after which the server acknowledges their arrival, if no reply does; a worker may
    #: request a lower number.
    report: int = 1 << 20
    #: Whether there are snapshots: the first value of a key is then answered once it is in a snapshot, and no
    #: sum overwrites a pushed array, which is pushed again if this server restarts.
    saves: bool = False
    #: Seconds until the scheduler's first message; 0: as `dead_after`.
    start: float = 0.0
    #: The scheduler's address, for errors.
    where: str = "its address"


class ServerMachine:
    """One server process; all events enter by `step`."""

    def __init__(
        self,
        hello: m.HelloRequest,
        options: ServerOptions | None = None,
        snapshot: dict[str, Any] | None = None,
    ) -> None:
        self.hello = hello
        self.options = options or ServerOptions()
        self.rank = hello.rank
        self.failure: Failure | None = None
        self.ended = False
        self._effects = StepEffects(self.options.saves)
        self._link = ReliableLink(self.options.resend_after)
        self._stores: dict[int, StoreMachine] = {}
        self._early: dict[Hashable, m.AttachRequest] = {}
        self._sums = Sums(self.options.saves)
        self._saving: list[tuple[WorkerSession, Record]] = []  # answered when the current snapshot is written
        self._silence = SilenceDetector(self.options.dead_after)
        self._met = False  # a message of the scheduler has arrived
        self._absence = 0.0  # seconds that the scheduler may be absent, as in its `HelloReply`
        self._echoes = False  # the address of its echo is known
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            m.HelloReply: self._has_met,
            m.WelcomeNotice: self._note_welcome,
            m.ViewNotice: self._apply_view,
            m.SlicesNotice: self._define_slices,
            m.InstallRequest: self._install_settings,
            m.JobEndNotice: self._note_job_end,
            m.RefusalNotice: self._note_refusal,
            m.FenceNotice: self._note_fence,
            m.PingRequest: self._answer_ping,
        }
        for state in (snapshot or {}).get("stores", ()):
            self._find_or_add_store(state["store"]).restore_state(state)

    def step(self, event: events.Event, now: float) -> list[Action]:
        """Handle one event; return the actions."""
        kind = type(event)
        self._effects.gather()
        self._silence.note_running(now)
        if self.ended:
            return []
        if kind is events.MessageReceived:
            self._receive_message(event.peer, event.message, now)  # type: ignore[union-attr]
        elif kind is events.JobsApplied:
            self._note_applied(event)  # type: ignore[arg-type]
        elif kind is events.TickEvent:
            self._tick(now)
        elif kind is events.InstallDone:
            self._note_installed(event, now)  # type: ignore[arg-type]
        elif kind is events.SnapshotSaved:
            self._note_saved(event)  # type: ignore[arg-type]
        elif kind is events.StartEvent:
            self._silence.note_heartbeat(now)
            self._send_reliable(self.hello, now)
        return self._effects.end_step()

    def is_quiet(self) -> bool:
        """Return whether no job or write is in progress, so that values and `snapshot_state` agree."""
        return all(store.is_quiet() for store in self._stores.values())

    def snapshot_state(self) -> dict[str, Any]:
        """Return the state to store with the values, as JSON types; only while it `is_quiet`."""
        if self._effects.unsaved:
            self._saving += self._effects.unsaved
            self._effects.unsaved.clear()
        return {"stores": [store.snapshot_state() for store in self._stores.values()]}

    def waits_for(self, store: int, rank: int) -> bool:
        """Return whether all rounds wait for this worker: a value cannot change before the worker has it."""
        found = self._stores.get(store)
        if found is None or found.members.seats:  # another worker of its host may push in its place
            return False
        return found.members.sync and rank in found.members.needed

    def worker_link(self, store: int, rank: int, job: int) -> Link | None:
        """Return a link that handles a worker's usual requests in C; None: the worker has not attached."""
        found = self._stores.get(store)
        return None if found is None else found.worker_link(rank, self._sums, job)

    def observe(self, counters: Counters) -> Any:
        """Count in `counters` from now on; return a capsule that names the workers this server waits for."""
        self._effects.observe(counters)
        self._sums.observe(counters)
        return self._effects.waits

    def watch_arrivals(self) -> None:
        """Record the arrival times of parts of rounds from now on."""
        self._effects.watch_arrivals()

    def take_late(self) -> tuple[int, list[tuple[int, int, int, int, int, int]]]:
        """Return how many rounds were complete since the last call, and which waited for one worker."""
        return self._effects.take_late()

    def set_value(self, store: int, slice_: int, value: SliceValue | TableRows) -> None:
        """Set the value of a slice, so that C can sum its rounds."""
        found = self._stores.get(store)
        if found is not None:
            found.requests.hold(slice_, value)

    def store_numbers(self) -> list[int]:
        """Return the numbers of the stores."""
        return list(self._stores)

    # ------------------------------------------------------------------------------------------------ workers

    def _receive_message(self, peer: Hashable, message: Any, now: float) -> None:
        kind = type(message)
        if kind is Batch:
            self._receive_batch(peer, message)
        elif peer == ECHO:
            self._silence.note_heartbeat(now)
        elif kind is ReliableMessage:
            if peer == SCHEDULER:
                self._read_reliable(message, now)
        elif kind is m.AttachRequest:
            self._attach_worker(peer, message)
        elif kind is m.MissingRequest:
            store = self._stores.get(message.store)
            if store is not None:
                self._effects.actions.append(
                    SendMessage(peer, store.missing_reply(message.slice, message.round))
                )

    def _receive_batch(self, peer: Hashable, batch: Batch) -> None:
        store = self._stores.get(batch.store)
        if store is None:
            return  # not attached yet; the worker repeats it
        session = store.sessions.by_rank.get(batch.rank)
        if batch.epoch > store.members.epoch:
            # The worker knows a view that has not arrived here: the batch waits for it.
            if len(store.ahead) < _AHEAD:
                store.ahead.append((peer, batch))
            return
        if session is not None and session.incarnation == batch.incarnation:
            if store.members.returning is None:
                session.peer = peer
                store.handle_requests(session, batch)
        elif store.members.incarnations.get(batch.rank) != batch.incarnation:
            self._effects.actions.append(SendMessage(peer, store.fence_notice(batch.rank)))

    def _attach_worker(self, peer: Hashable, attach: m.AttachRequest) -> None:
        if attach.job != self.hello.job:
            text = f"this is job {self.hello.job!r}, not {attach.job!r}"
            self._effects.actions.append(SendMessage(peer, m.FenceNotice(0, text)))
            return
        store = self._stores.get(attach.store)
        if store is not None and store.members.epoch:
            store.attach_worker(peer, attach)
        elif len(self._early) < _EARLY:
            self._early[peer] = attach

    def _note_applied(self, event: events.JobsApplied) -> None:
        store = self._stores.get(event.store)
        if store is not None:
            store.requests.applied(event.results)
            store.requests.given_up(event.given_up)

    def _note_saved(self, event: events.SnapshotSaved) -> None:
        """Answer the requests that waited for a snapshot."""
        for session, record in self._saving:
            if event.error is None:
                store = self._stores.get(session.store)
                if store is not None:
                    store.mark_kept(record.slice)
                self._effects.answer(session, RecordKind.DONE, record, 0)
            else:
                self._effects.fail_request(session, record, 0, event.error)
        self._saving.clear()

    # ------------------------------------------------------------------------------------------ the scheduler

    def _read_reliable(self, message: ReliableMessage, now: float) -> None:
        if not self._link.is_current_term(message):
            return
        self._silence.note_heartbeat(now)
        self._met = True
        for body in self._link.read(message, now):
            handler = self._handlers.get(type(body))
            if handler is not None:
                handler(body, now)
        acknowledgement = self._link.pending_ack()
        if acknowledgement is not None:
            self._effects.actions.append(SendMessage(SCHEDULER, acknowledgement))

    def _send_reliable(self, body: Any, now: float) -> None:
        self._effects.actions.append(SendMessage(SCHEDULER, self._link.write(body, now)))

    def _find_or_add_store(self, number: int) -> StoreMachine:
        store = self._stores.get(number)
        if store is None:
            store = StoreMachine(number, self.hello, self.options.report, self._effects)
            self._stores[number] = store
        return store

    def _has_met(self, message: m.HelloReply, now: float) -> None:
        self._echoes, self._absence = True, message.absence
        self._effects.actions.append(message)

    def _note_welcome(self, message: m.WelcomeNotice, now: float) -> None:
        self.rank = message.rank
        self._effects.actions.append(message)

    def _apply_view(self, view: m.ViewNotice, now: float) -> None:
        store = self._find_or_add_store(view.store)
        store.apply_view(view)
        ahead, store.ahead = store.ahead, []
        for peer, batch in ahead:
            self._receive_batch(peer, batch)
        for peer, attach in list(self._early.items()):
            if attach.store == view.store:
                del self._early[peer]
                store.attach_worker(peer, attach)

    def _define_slices(self, message: m.SlicesNotice, now: float) -> None:
        self._effects.actions.append(events.DefineSlices(message.store, message.keys))
        mine = [one.id for entry in message.keys for one in entry.slices if one.server == self.rank]
        self._find_or_add_store(message.store).define_slices(mine)

    def _install_settings(self, message: m.InstallRequest, now: float) -> None:
        store = self._find_or_add_store(message.store)
        if message.kind == "drop":
            self._drop_slices(message)
        elif message.version <= store.version:
            self._send_reliable(m.InstallReply(message.store, message.version), now)  # it was in the snapshot
        else:
            self._effects.actions.append(message)

    def _drop_slices(self, message: m.InstallRequest) -> None:
        if message.text:
            self._stores[message.store].requests.forget(map(int, message.text.split(",")))
        else:
            del self._stores[message.store]
            for waiting in (self._effects.unsaved or [], self._saving):
                waiting[:] = [one for one in waiting if one[0].store != message.store]
            self._effects.work.append(events.ForgetSlices(message.store, None))

    def _note_installed(self, event: events.InstallDone, now: float) -> None:
        store = self._stores.get(event.store)
        if store is not None:
            store.version = max(store.version, event.version)
        self._send_reliable(m.InstallReply(event.store, event.version, event.error), now)

    def _note_job_end(self, message: m.JobEndNotice, now: float) -> None:
        self._end_machine(Failure("PeerLostError", message.error) if message.error else None)

    def _note_refusal(self, message: m.RefusalNotice, now: float) -> None:
        self._end_machine(Failure(message.error, message.text))

    def _note_fence(self, message: m.FenceNotice, now: float) -> None:
        self._end_machine(Failure("FencedError", message.text))

    def _end_machine(self, failure: Failure | None) -> None:
        if not self.ended:
            self.ended, self.failure = True, failure
            self._effects.work.append(events.JobEnded(failure))

    def _answer_ping(self, message: m.PingRequest, now: float) -> None:
        self._effects.actions.append(
            SendMessage(SCHEDULER, self._link.send_unreliable(m.PingReply(message.number)))
        )

    # --------------------------------------------------------------------------------------------------- time

    def _tick(self, now: float) -> None:
        self._effects.actions.extend(
            SendMessage(SCHEDULER, message) for message in self._link.overdue_messages(now)
        )
        if self._effects.unsaved:
            self._effects.work.append(events.SaveSnapshot())
        silent, patience = self._silence.silent_seconds(now), self.options.dead_after
        # Until the scheduler has sent its absence, the limit is that of its first message.
        told = self._met and self._echoes
        limit = 2 * patience if told else self.options.start or 2 * patience
        if self._silence.is_lost(now, max(self._absence, limit)):
            # A restarted server had met a scheduler before.
            met = self._met or self.hello.restarted
            failure = (
                loss_failure((m.Loss("scheduler", 0, silent),))
                if met
                else no_scheduler_failure(self.options.where, silent)
            )
            if met and self._silence.stopped > patience:
                failure = stopped_failure(f"server {self.rank}", self._silence.stopped, patience, failure)
            self._end_machine(failure)
        elif self._silence.should_ask(now):
            if self._echoes:
                self._effects.actions.append(SendMessage(ECHO, m.PingRequest(0)))
            if not self._echoes or self._silence.is_long(now):  # another process may be at the echo's address
                self._effects.actions.append(
                    SendMessage(SCHEDULER, self._link.send_unreliable(m.PingRequest(0)))
                )
