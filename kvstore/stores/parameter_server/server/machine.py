"""The server's state machine: stores that the scheduler speaks of, workers, and their requests."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass
from typing import Any

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
from .sessions import StepEffects, WorkerSession
from .store_machine import StoreMachine

SCHEDULER = "scheduler"

_AHEAD = 1024  # batches of an epoch that is not known yet; what is not kept is sent again
_EARLY = 4096  # attachments that are kept for stores of which the scheduler has not spoken yet


@dataclass(frozen=True)
class ServerOptions:
    """How a server goes about it."""

    #: Seconds after which what goes to the scheduler is sent again.
    resend_after: float = 1.0
    #: After twice as many seconds without a word of the scheduler it is lost, and the server ends.
    dead_after: float = DEFAULTS["dead_after"]
    #: Bytes of requests after which a worker is told that they have come, if no answer tells it; it may want
    #: to be told earlier.
    report: int = 1 << 20
    #: Whether snapshots are kept: the first value of a key is then answered once it is in one, and no sum is
    #: written over what was pushed, which comes again if this server is started again.
    saves: bool = False
    #: Seconds that it may take until the scheduler's first word; 0: as long.
    start: float = 0.0
    #: Address at which the scheduler is looked for.
    where: str = "its address"


class Server:
    """One server process; `step` is all there is to drive it."""

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
        self._saving: list[tuple[WorkerSession, Record]] = []  # in the snapshot that is being written
        self._silence = SilenceDetector(self.options.dead_after)
        self._met = False  # the scheduler has ever said a word
        self._absence = 0.0  # seconds that it may be away, as it has said
        self._echoes = False  # it has said where its echo is
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
        """Take one event; return what is to be done."""
        kind = type(event)
        self._effects.gather()
        self._silence.step(now)
        if self.ended:
            return []
        if kind is events.Received:
            self._received(event.peer, event.message, now)  # type: ignore[union-attr]
        elif kind is events.Applied:
            self._applied(event)  # type: ignore[arg-type]
        elif kind is events.Tick:
            self._tick(now)
        elif kind is events.Configured:
            self._configured(event, now)  # type: ignore[arg-type]
        elif kind is events.Saved:
            self._saved(event)  # type: ignore[arg-type]
        elif kind is events.Start:
            self._silence.hear(now)
            self._write(self.hello, now)
        return self._effects.end()

    def quiet(self) -> bool:
        """Whether no `Apply` or `Write` is under way, so that values and `snapshot` belong together."""
        return all(store.quiet() for store in self._stores.values())

    def snapshot(self) -> dict[str, Any]:
        """Return what to keep beside the values, fit for JSON; only while it is `quiet`."""
        if self._effects.unsaved:
            self._saving += self._effects.unsaved
            self._effects.unsaved.clear()
        return {"stores": [store.snapshot() for store in self._stores.values()]}

    def waits_for(self, store: int, rank: int) -> bool:
        """Whether no round goes on without this worker: what it is sent cannot change before it has it."""
        found = self._stores.get(store)
        if found is None or found.members.seats:  # there its host may go on without it
            return False
        return found.members.sync and rank in found.members.needed

    def link(self, store: int, rank: int, job: int) -> Link | None:
        """Make what handles a worker's requests where nothing is special; None: it has not attached."""
        found = self._stores.get(store)
        return None if found is None else found.link(rank, self._sums, job)

    def observe(self, counters: Counters) -> Any:
        """Count in `counters` from now on; return a capsule that says whom this server waits for."""
        self._effects.observe(counters)
        self._sums.observe(counters)
        return self._effects.waits

    def watch_arrivals(self) -> None:
        """Take the times at which parts of rounds arrive, from now on."""
        self._effects.watch_arrivals()

    def take_late(self) -> tuple[int, list[tuple[int, int, int, int, int, int]]]:
        """Return how many rounds were complete since the last call, and those that waited for one worker."""
        return self._effects.take_late()

    def hold(self, store: int, slice_: int, value: SliceValue | TableRows) -> None:
        """Know where a slice has its value, so that its rounds can be summed outside of this class."""
        found = self._stores.get(store)
        if found is not None:
            found.requests.hold(slice_, value)

    def stores(self) -> list[int]:
        """Numbers of the stores that it holds."""
        return list(self._stores)

    # ------------------------------------------------------------------------------------------------ workers

    def _received(self, peer: Hashable, message: Any, now: float) -> None:
        kind = type(message)
        if kind is Batch:
            self._requests(peer, message)
        elif peer == ECHO:
            self._silence.hear(now)
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
                store.take(session, batch)
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

    def _applied(self, event: events.Applied) -> None:
        store = self._stores.get(event.store)
        if store is not None:
            store.requests.applied(event.results)
            store.requests.given_up(event.given_up)

    def _saved(self, event: events.Saved) -> None:
        """Answer what waited for a snapshot."""
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
        self._silence.hear(now)
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
        self._effects.actions.append(events.Define(message.store, message.keys))
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
            self._effects.work.append(events.Forget(message.store, None))

    def _configured(self, event: events.Configured, now: float) -> None:
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
            self._effects.work.append(events.Save())
        silent, patience = self._silence.silent(now), self.options.dead_after
        # Until it has said how long it may be away, it may be as long as until its first word.
        told = self._met and self._echoes
        limit = 2 * patience if told else self.options.start or 2 * patience
        if self._silence.lost(now, max(self._absence, limit)):
            # Before this process was started again it had met one.
            met = self._met or self.hello.restarted
            failure = lost((m.Loss("scheduler", 0, silent),)) if met else unmet(self.options.where, silent)
            if met and self._silence.stopped > patience:
                failure = stopped(f"server {self.rank}", self._silence.stopped, patience, failure)
            self._end(failure)
        elif self._silence.asks(now):
            if self._echoes:
                self._effects.actions.append(Send(ECHO, m.Ping(0)))
            if not self._echoes or self._silence.is_long(now):  # another may be at its address
                self._effects.actions.append(Send(SCHEDULER, self._link.send_unreliable(m.Ping(0))))
