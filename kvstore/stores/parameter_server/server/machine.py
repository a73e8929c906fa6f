"""The server's state machine: stores that the scheduler speaks of, workers, and their requests."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

from ....settings.definitions import DEFAULTS
from ..protocol.events import (
    ECHO,
    Action,
    Applied,
    Configure,
    Configured,
    Define,
    End,
    Event,
    Forget,
    MetScheduler,
    Received,
    Save,
    Saved,
    Send,
    Start,
    Tick,
    Welcomed,
)
from ..protocol.losses import lost, stopped, unmet
from ..protocol.messages import (
    Attach,
    Batch,
    Failure,
    Fenced,
    Hello,
    Install,
    Installed,
    Kind,
    Loss,
    Met,
    Over,
    Ping,
    Pong,
    Record,
    Refused,
    ReliableMessage,
    Slices,
    View,
    Welcome,
    Who,
)
from ..protocol.reliable_link import ReliableLink
from ..protocol.silence import SilenceDetector
from .sessions import StepEffects, WorkerSession
from .store_machine import StoreMachine

SCHEDULER = "scheduler"

_AHEAD = 1024  # batches of an epoch that is not known yet; what is not kept is sent again
_EARLY = 4096  # attachments that are kept for stores of which the scheduler has not spoken yet


@dataclass(frozen=True)
class ServerOptions:
    """How a server goes about it.

    Attributes
    ----------
    resend_after : float
        Seconds after which what goes to the scheduler is sent again.
    dead_after : float
        After twice as many seconds without a word of the scheduler it is lost, and the server ends.
    start : float
        Seconds that it may take until the scheduler's first word; 0: as long.
    report : int
        Bytes of requests after which a worker is told that they have come, if no answer tells it.
    saves : bool
        Whether snapshots are kept: the first value of a key is then answered once it is in one.
    where : str
        Address at which the scheduler is looked for.
    """

    resend_after: float = 1.0
    dead_after: float = DEFAULTS["dead_after"]
    report: int = 1 << 20
    saves: bool = False
    start: float = 0.0
    where: str = "its address"


class Server:
    """One server process; `step` is all there is to drive it."""

    def __init__(
        self, hello: Hello, options: ServerOptions | None = None, snapshot: dict[str, Any] | None = None
    ) -> None:
        self.hello = hello
        self.options = options or ServerOptions()
        self.rank = hello.rank
        self.failure: Failure | None = None
        self.ended = False
        self._link = ReliableLink(self.options.resend_after)
        self._stores: dict[int, StoreMachine] = {}
        self._early: dict[Hashable, Attach] = {}
        self._unsaved: list[tuple[WorkerSession, Record]] = []
        self._saving: list[tuple[WorkerSession, Record]] = []  # in the snapshot that is being written
        self._silence = SilenceDetector(self.options.dead_after)
        self._met = False  # the scheduler has ever said a word
        self._echoes = False  # it has said where its echo is
        self._handlers: dict[type, Callable[[Any, float, StepEffects], None]] = {
            Met: self._has_met,
            Welcome: self._welcomed,
            View: self._viewed,
            Slices: self._define,
            Install: self._install,
            Over: self._over,
            Refused: self._refused,
            Fenced: self._fenced,
            Ping: self._ping,
        }
        for state in (snapshot or {}).get("stores", ()):
            self._store(state["store"]).restore(state)

    def step(self, event: Event, now: float) -> list[Action]:
        """Take one event; return what is to be done."""
        effects = StepEffects()
        kind = type(event)
        self._silence.step(now)
        if self.ended:
            return []
        if kind is Received:
            self._received(event.peer, event.message, now, effects)  # type: ignore[union-attr]
        elif kind is Applied:
            self._applied(event, effects)  # type: ignore[arg-type]
        elif kind is Tick:
            self._tick(now, effects)
        elif kind is Configured:
            self._configured(event, now, effects)  # type: ignore[arg-type]
        elif kind is Saved:
            self._saved(event, effects)  # type: ignore[arg-type]
        elif kind is Start:
            self._silence.hear(now)
            self._write(self.hello, now, effects)
        return effects.end()

    def quiet(self) -> bool:
        """Whether no `Apply` or `Write` is under way, so that values and `snapshot` belong together."""
        return all(store.quiet() for store in self._stores.values())

    def snapshot(self) -> dict[str, Any]:
        """Return what to keep beside the values, fit for JSON; only while it is `quiet`."""
        self._saving += self._unsaved
        self._unsaved = []
        return {"stores": [store.snapshot() for store in self._stores.values()]}

    def waits_for(self, store: int, rank: int) -> bool:
        """Whether no round goes on without this worker: what it is sent cannot change before it has it."""
        found = self._stores.get(store)
        return found is not None and found.members.sync and rank in found.members.needed

    def stores(self) -> list[int]:
        """Numbers of the stores that it holds."""
        return list(self._stores)

    # ------------------------------------------------------------------------------------------------ workers

    def _received(self, peer: Hashable, message: Any, now: float, effects: StepEffects) -> None:
        kind = type(message)
        if kind is Batch:
            self._requests(peer, message, effects)
        elif peer == ECHO:
            self._silence.hear(now)
        elif kind is ReliableMessage:
            if peer == SCHEDULER:
                self._read(message, now, effects)
        elif kind is Attach:
            self._attach(peer, message, effects)
        elif kind is Who:
            store = self._stores.get(message.store)
            if store is not None:
                effects.actions.append(Send(peer, store.missing(message.slice, message.round)))

    def _requests(self, peer: Hashable, batch: Batch, effects: StepEffects) -> None:
        store = self._stores.get(batch.store)
        if store is None:
            return  # not attached yet; it will be sent again
        session = store.sessions.by_rank.get(batch.rank)
        if batch.epoch > store.members.epoch:
            # Made after somebody came, of whom the scheduler's word is still on its way: it may have to wait.
            if len(store.ahead) < _AHEAD:
                store.ahead.append((peer, batch))
            return
        if session is not None and session.incarnation == batch.incarnation:
            if store.members.returning is None:
                session.peer = peer
                store.take(session, batch, effects)
        elif store.members.incarnations.get(batch.rank) != batch.incarnation:
            effects.actions.append(Send(peer, store.fence(batch.rank)))

    def _attach(self, peer: Hashable, attach: Attach, effects: StepEffects) -> None:
        if attach.job != self.hello.job:
            text = f"this is job {self.hello.job!r}, not {attach.job!r}"
            effects.actions.append(Send(peer, Fenced(0, text)))
            return
        store = self._stores.get(attach.store)
        if store is not None and store.members.epoch:
            store.attach(peer, attach, effects)
        elif len(self._early) < _EARLY:
            self._early[peer] = attach

    def _applied(self, event: Applied, effects: StepEffects) -> None:
        store = self._stores.get(event.store)
        if store is not None:
            store.requests.applied(event.results, effects)
            store.requests.given_up(event.given_up, effects)

    def _keep(self, session: WorkerSession, record: Record) -> None:
        self._unsaved.append((session, record))

    def _saved(self, event: Saved, effects: StepEffects) -> None:
        """Answer what waited for a snapshot."""
        for session, record in self._saving:
            if event.error is None:
                store = self._stores.get(session.store)
                if store is not None:
                    store.mark_kept(record.slice)
                effects.answer(session, Kind.DONE, record, 0)
            else:
                effects.fail(session, record, 0, event.error)
        self._saving.clear()

    # ------------------------------------------------------------------------------------------ the scheduler

    def _read(self, message: ReliableMessage, now: float, effects: StepEffects) -> None:
        self._silence.hear(now)
        self._met = True
        for body in self._link.read(message, now):
            handler = self._handlers.get(type(body))
            if handler is not None:
                handler(body, now, effects)
        acknowledgement = self._link.pending_ack()
        if acknowledgement is not None:
            effects.actions.append(Send(SCHEDULER, acknowledgement))

    def _write(self, body: Any, now: float, effects: StepEffects) -> None:
        effects.actions.append(Send(SCHEDULER, self._link.write(body, now)))

    def _store(self, number: int) -> StoreMachine:
        store = self._stores.get(number)
        if store is None:
            keep = self._keep if self.options.saves else None
            hello, report = self.hello, self.options.report
            store = StoreMachine(number, hello.incarnation, report, hello.restarted, keep)
            self._stores[number] = store
        return store

    def _has_met(self, message: Met, now: float, effects: StepEffects) -> None:
        self._echoes = True
        effects.actions.append(MetScheduler(message))

    def _welcomed(self, message: Welcome, now: float, effects: StepEffects) -> None:
        self.rank = message.rank
        effects.actions.append(Welcomed(message))

    def _viewed(self, view: View, now: float, effects: StepEffects) -> None:
        store = self._store(view.store)
        store.view(view, effects)
        ahead, store.ahead = store.ahead, []
        for peer, batch in ahead:
            self._requests(peer, batch, effects)
        for peer, attach in list(self._early.items()):
            if attach.store == view.store:
                del self._early[peer]
                store.attach(peer, attach, effects)

    def _define(self, message: Slices, now: float, effects: StepEffects) -> None:
        effects.actions.append(Define(message.store, message.keys))
        mine = [one.id for entry in message.keys for one in entry.slices if one.server == self.rank]
        self._store(message.store).requests.define(mine, effects)

    def _install(self, message: Install, now: float, effects: StepEffects) -> None:
        store = self._store(message.store)
        if message.kind == "drop":
            self._drop(message, effects)
        elif message.version <= store.version:
            self._write(Installed(message.store, message.version), now, effects)  # it was in the snapshot
        else:
            effects.actions.append(Configure(message))

    def _drop(self, message: Install, effects: StepEffects) -> None:
        if message.text:
            self._stores[message.store].requests.forget(map(int, message.text.split(",")), effects)
        else:
            del self._stores[message.store]
            self._unsaved = [one for one in self._unsaved if one[0].store != message.store]
            self._saving = [one for one in self._saving if one[0].store != message.store]
            effects.work.append(Forget(message.store, None))

    def _configured(self, event: Configured, now: float, effects: StepEffects) -> None:
        store = self._stores.get(event.store)
        if store is not None:
            store.version = max(store.version, event.version)
        self._write(Installed(event.store, event.version, event.error), now, effects)

    def _over(self, message: Over, now: float, effects: StepEffects) -> None:
        self._end(Failure("PeerLostError", message.error) if message.error else None, effects)

    def _refused(self, message: Refused, now: float, effects: StepEffects) -> None:
        self._end(Failure(message.error, message.text), effects)

    def _fenced(self, message: Fenced, now: float, effects: StepEffects) -> None:
        self._end(Failure("FencedError", message.text), effects)

    def _end(self, failure: Failure | None, effects: StepEffects) -> None:
        if not self.ended:
            self.ended, self.failure = True, failure
            effects.work.append(End(failure))

    def _ping(self, message: Ping, now: float, effects: StepEffects) -> None:
        effects.actions.append(Send(SCHEDULER, self._link.send_unreliable(Pong(message.number))))

    # --------------------------------------------------------------------------------------------------- time

    def _tick(self, now: float, effects: StepEffects) -> None:
        effects.actions.extend(Send(SCHEDULER, message) for message in self._link.again(now))
        if self._unsaved:
            effects.work.append(Save())
        silent, patience = self._silence.silent(now), self.options.dead_after
        if self._silence.lost(now, 2 * patience if self._met else self.options.start or 2 * patience):
            # Before this process was started again it had met one.
            met = self._met or self.hello.restarted
            failure = lost((Loss("scheduler", 0, silent),)) if met else unmet(self.options.where, silent)
            if met and self._silence.stopped > patience:
                failure = stopped(f"server {self.rank}", self._silence.stopped, patience, failure)
            self._end(failure, effects)
        elif self._silence.asks(now):
            if self._echoes:
                effects.actions.append(Send(ECHO, Ping(0)))
            if not self._echoes or self._silence.is_long(now):  # another may be at its address
                effects.actions.append(Send(SCHEDULER, self._link.send_unreliable(Ping(0))))
