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
from ..protocol.events import ECHO, Action, Send
from ..protocol.losses import lost, stopped, unmet
from ..protocol.messages import Batch, Failure, Kind, Record, ReliableMessage
from ..protocol.reliable_link import ReliableLink
from ..protocol.silence import SilenceDetector
from ..protocol.transitions import transitions
from .store_machine import StoreMachine
from .worker_sessions import StepEffects, WorkerSession

SCHEDULER = "scheduler"

_AHEAD = 1024  # stored batches of an unknown epoch; workers repeat the others
_EARLY = 4096  # stored attachments to stores that the scheduler has not announced yet

TRANSITIONS: Final = transitions(
    ("server", "working", "ended", "Over Refused Fenced Tick", "Tick: the scheduler is lost"),
    ("store", "new", "announced", "Slices", "the scheduler has placed a slice here"),
    ("store", "new", "running", "View", "its first members are admitted"),
    (
        "store",
        "new",
        "returning",
        "Slices View",
        "a restarted server without a snapshot of the store",
    ),
    ("store", "new", "broken", "View", "a process was lost before"),
    ("store", "announced", "running", "View", "its first members are admitted"),
    ("store", "announced", "broken", "View", "a process was lost before"),
    ("store", "returning", "running", "Attach View", "all members have attached again"),
    ("store", "returning", "broken", "View", "a process is lost for good (`on_peer_loss`)"),
    ("store", "running", "broken", "View", "a process is lost for good (`on_peer_loss`)"),
    ("store", "announced", "gone", "Install", "all workers have left the store"),
    ("store", "returning", "gone", "Install", "all workers have left the store"),
    ("store", "running", "gone", "Install", "all workers have left the store"),
    ("store", "broken", "gone", "Install", "all workers have left the store"),
)


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
        self, hello: m.Hello, options: ServerOptions | None = None, snapshot: dict[str, Any] | None = None
    ) -> None:
        self.hello = hello
        self.options = options or ServerOptions()
        self.rank = hello.rank
        self.failure: Failure | None = None
        self.ended = False
        self._effects = StepEffects(self.options.saves)
        self._link = ReliableLink(self.options.resend_after)
        self._stores: dict[int, StoreMachine] = {}
        self._early: dict[Hashable, m.Attach] = {}
        self._sums = Sums(self.options.saves)
        self._saving: list[tuple[WorkerSession, Record]] = []  # answered when the current snapshot is written
        self._silence = SilenceDetector(self.options.dead_after)
        self._met = False  # a message of the scheduler has arrived
        self._absence = 0.0  # seconds that the scheduler may be absent, as in its `Met`
        self._echoes = False  # the address of its echo is known
        self._handlers: dict[type, Callable[[Any, float], None]] = {
            m.Met: self._has_met,
            m.Welcome: self._welcomed,
            m.View: self._viewed,
            m.Slices: self._define,
            m.Install: self._install,
            m.Over: self._over,
            m.Refused: self._refused,
            m.Fenced: self._fenced,
            m.Ping: self._ping,
        }
        for state in (snapshot or {}).get("stores", ()):
            self._store(state["store"]).restore(state)

    def step(self, event: events.Event, now: float) -> list[Action]:
        """Handle one event; return the actions."""
        kind = type(event)
        self._effects.gather()
        self._silence.step(now)
        if self.ended:
            return []
        if kind is events.Received:
            self._received(event.peer, event.message, now)  # type: ignore[union-attr]
        elif kind is events.JobsApplied:
            self._applied(event)  # type: ignore[arg-type]
        elif kind is events.Tick:
            self._tick(now)
        elif kind is events.InstallDone:
            self._configured(event, now)  # type: ignore[arg-type]
        elif kind is events.SnapshotSaved:
            self._saved(event)  # type: ignore[arg-type]
        elif kind is events.Start:
            self._silence.note_heartbeat(now)
            self._write(self.hello, now)
        return self._effects.end()

    def quiet(self) -> bool:
        """Return whether no `Apply` or `WriteSlices` is in progress, so that values and `snapshot` agree."""
        return all(store.quiet() for store in self._stores.values())

    def snapshot(self) -> dict[str, Any]:
        """Return the state to store with the values, as JSON types; only while it is `quiet`."""
        if self._effects.unsaved:
            self._saving += self._effects.unsaved
            self._effects.unsaved.clear()
        return {"stores": [store.snapshot() for store in self._stores.values()]}

    def waits_for(self, store: int, rank: int) -> bool:
        """Return whether all rounds wait for this worker: a value cannot change before the worker has it."""
        found = self._stores.get(store)
        if found is None or found.members.seats:  # another worker of its host may push in its place
            return False
        return found.members.sync and rank in found.members.needed

    def link(self, store: int, rank: int, job: int) -> Link | None:
        """Return a link that handles a worker's usual requests in C; None: the worker has not attached."""
        found = self._stores.get(store)
        return None if found is None else found.link(rank, self._sums, job)

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

    def hold(self, store: int, slice_: int, value: SliceValue | TableRows) -> None:
        """Set the value of a slice, so that C can sum its rounds."""
        found = self._stores.get(store)
        if found is not None:
            found.requests.hold(slice_, value)

    def stores(self) -> list[int]:
        """Return the numbers of the stores."""
        return list(self._stores)

    # ------------------------------------------------------------------------------------------------ workers

    def _received(self, peer: Hashable, message: Any, now: float) -> None:
        kind = type(message)
        if kind is Batch:
            self._requests(peer, message)
        elif peer == ECHO:
            self._silence.note_heartbeat(now)
        elif kind is ReliableMessage:
            if peer == SCHEDULER:
                self._read(message, now)
        elif kind is m.Attach:
            self._attach(peer, message)
        elif kind is m.Who:
            store = self._stores.get(message.store)
            if store is not None:
                self._effects.actions.append(Send(peer, store.missing(message.slice, message.round)))

    def _requests(self, peer: Hashable, batch: Batch) -> None:
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
            self._effects.actions.append(Send(peer, store.fence(batch.rank)))

    def _attach(self, peer: Hashable, attach: m.Attach) -> None:
        if attach.job != self.hello.job:
            text = f"this is job {self.hello.job!r}, not {attach.job!r}"
            self._effects.actions.append(Send(peer, m.Fenced(0, text)))
            return
        store = self._stores.get(attach.store)
        if store is not None and store.members.epoch:
            store.attach(peer, attach)
        elif len(self._early) < _EARLY:
            self._early[peer] = attach

    def _applied(self, event: events.JobsApplied) -> None:
        store = self._stores.get(event.store)
        if store is not None:
            store.requests.applied(event.results)
            store.requests.given_up(event.given_up)

    def _saved(self, event: events.SnapshotSaved) -> None:
        """Answer the requests that waited for a snapshot."""
        for session, record in self._saving:
            if event.error is None:
                store = self._stores.get(session.store)
                if store is not None:
                    store.mark_kept(record.slice)
                self._effects.answer(session, Kind.DONE, record, 0)
            else:
                self._effects.fail(session, record, 0, event.error)
        self._saving.clear()

    # ------------------------------------------------------------------------------------------ the scheduler

    def _read(self, message: ReliableMessage, now: float) -> None:
        if not self._link.follows(message):
            return
        self._silence.note_heartbeat(now)
        self._met = True
        for body in self._link.read(message, now):
            handler = self._handlers.get(type(body))
            if handler is not None:
                handler(body, now)
        acknowledgement = self._link.pending_ack()
        if acknowledgement is not None:
            self._effects.actions.append(Send(SCHEDULER, acknowledgement))

    def _write(self, body: Any, now: float) -> None:
        self._effects.actions.append(Send(SCHEDULER, self._link.write(body, now)))

    def _store(self, number: int) -> StoreMachine:
        store = self._stores.get(number)
        if store is None:
            store = StoreMachine(number, self.hello, self.options.report, self._effects)
            self._stores[number] = store
        return store

    def _has_met(self, message: m.Met, now: float) -> None:
        self._echoes, self._absence = True, message.absence
        self._effects.actions.append(message)

    def _welcomed(self, message: m.Welcome, now: float) -> None:
        self.rank = message.rank
        self._effects.actions.append(message)

    def _viewed(self, view: m.View, now: float) -> None:
        store = self._store(view.store)
        store.view(view)
        ahead, store.ahead = store.ahead, []
        for peer, batch in ahead:
            self._requests(peer, batch)
        for peer, attach in list(self._early.items()):
            if attach.store == view.store:
                del self._early[peer]
                store.attach(peer, attach)

    def _define(self, message: m.Slices, now: float) -> None:
        self._effects.actions.append(events.DefineSlices(message.store, message.keys))
        mine = [one.id for entry in message.keys for one in entry.slices if one.server == self.rank]
        self._store(message.store).define(mine)

    def _install(self, message: m.Install, now: float) -> None:
        store = self._store(message.store)
        if message.kind == "drop":
            self._drop(message)
        elif message.version <= store.version:
            self._write(m.Installed(message.store, message.version), now)  # it was in the snapshot
        else:
            self._effects.actions.append(message)

    def _drop(self, message: m.Install) -> None:
        if message.text:
            self._stores[message.store].requests.forget(map(int, message.text.split(",")))
        else:
            del self._stores[message.store]
            for waiting in (self._effects.unsaved or [], self._saving):
                waiting[:] = [one for one in waiting if one[0].store != message.store]
            self._effects.work.append(events.ForgetSlices(message.store, None))

    def _configured(self, event: events.InstallDone, now: float) -> None:
        store = self._stores.get(event.store)
        if store is not None:
            store.version = max(store.version, event.version)
        self._write(m.Installed(event.store, event.version, event.error), now)

    def _over(self, message: m.Over, now: float) -> None:
        self._end(Failure("PeerLostError", message.error) if message.error else None)

    def _refused(self, message: m.Refused, now: float) -> None:
        self._end(Failure(message.error, message.text))

    def _fenced(self, message: m.Fenced, now: float) -> None:
        self._end(Failure("FencedError", message.text))

    def _end(self, failure: Failure | None) -> None:
        if not self.ended:
            self.ended, self.failure = True, failure
            self._effects.work.append(events.End(failure))

    def _ping(self, message: m.Ping, now: float) -> None:
        self._effects.actions.append(Send(SCHEDULER, self._link.send_unreliable(m.Pong(message.number))))

    # --------------------------------------------------------------------------------------------------- time

    def _tick(self, now: float) -> None:
        self._effects.actions.extend(Send(SCHEDULER, message) for message in self._link.again(now))
        if self._effects.unsaved:
            self._effects.work.append(events.SaveSnapshot())
        silent, patience = self._silence.silent(now), self.options.dead_after
        # Until the scheduler has sent its absence, the limit is that of its first message.
        told = self._met and self._echoes
        limit = 2 * patience if told else self.options.start or 2 * patience
        if self._silence.is_lost(now, max(self._absence, limit)):
            # A restarted server had met a scheduler before.
            met = self._met or self.hello.restarted
            failure = lost((m.Loss("scheduler", 0, silent),)) if met else unmet(self.options.where, silent)
            if met and self._silence.stopped > patience:
                failure = stopped(f"server {self.rank}", self._silence.stopped, patience, failure)
            self._end(failure)
        elif self._silence.should_ask(now):
            if self._echoes:
                self._effects.actions.append(Send(ECHO, m.Ping(0)))
            if not self._echoes or self._silence.is_long(now):  # another process may be at the echo's address
                self._effects.actions.append(Send(SCHEDULER, self._link.send_unreliable(m.Ping(0))))
