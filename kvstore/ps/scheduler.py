"""The scheduler's state machine: who is there, which stores there are, and whatever needs one judge."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable
from dataclasses import dataclass, field
from typing import Any

from .admission import Process, State, free_rank, unfit
from .arrivals import Begun
from .events import Action, End, Event, Heard, Received, Send, Tick
from .link import Link
from .membership import Membership
from .messages import (
    Answer,
    Barrier,
    Begin,
    Bye,
    Command,
    Count,
    Drop,
    Failure,
    Fenced,
    Found,
    Hello,
    Install,
    Installed,
    JoinRounds,
    KeyEntry,
    Leave,
    Letter,
    Lookup,
    Loss,
    Member,
    Missing,
    Over,
    Ping,
    Pong,
    Reached,
    Ready,
    Refused,
    Settings,
    Slices,
    Welcome,
    Who,
)

_STRANGERS = 4096  # peers that have not said who they are


@dataclass(frozen=True)
class SchedulerOptions:
    """The job, and how patient its scheduler is.

    Attributes
    ----------
    job : str
        Everybody who says hello must name it.
    num_workers, num_servers : int
        How many there are.
    letter : float
        Seconds after which a letter that has not been acknowledged is sent again.
    dead_after : float
        Seconds of silence after which a process is lost.
    server_grace : float
        Seconds that a lost server has to come back; 0: it cannot.
    timeout : float
        Seconds without any worker after which the job is given up.
    """

    job: str
    num_workers: int
    num_servers: int
    letter: float = 1.0
    dead_after: float = 5.0
    server_grace: float = 0.0
    timeout: float = 300.0


@dataclass
class _Peer:
    """One socket: a worker's store, or a server."""

    name: Hashable
    link: Link
    since: float
    hello: Hello | None = None
    process: Process | None = None
    store: Membership | None = None

    @property
    def rank(self) -> int:
        return self.process.rank if self.process is not None else -1


@dataclass
class _Servers:
    """Servers by rank: those that are there, and until when those that are away may come back."""

    there: dict[int, Process] = field(default_factory=dict)
    members: dict[int, Member] = field(default_factory=dict)
    away: dict[int, tuple[float, Loss]] = field(default_factory=dict)
    doom: Loss | None = None  # a server that will not come back


class Scheduler:
    """The scheduler of one job; `step` is all there is to drive it."""

    def __init__(self, options: SchedulerOptions) -> None:
        self.options = options
        self.ended = False
        self._peers: dict[Hashable, _Peer] = {}
        self._processes: dict[str, Process] = {}
        self._workers: dict[int, Process] = {}
        self._servers = _Servers()
        self._stores: dict[tuple[str, int], Membership] = {}
        self._contests: list[_Peer] = []  # they want a rank that somebody has
        self._loads = [0] * options.num_servers
        self._welcomed = False  # the servers are
        self._over: tuple[float, Failure | None] | None = None
        self._stepped: float | None = None
        self._manned = 0.0  # when a worker was last there
        self._handlers: dict[type, Callable[[_Peer, Any, float, list[Action]], None]] = {
            Hello: self._hello,
            Bye: self._bye,
            Leave: self._leave,
            JoinRounds: self._join,
            Begin: self._begin,
            Reached: self._reached,
            Barrier: self._barrier,
            Found: self._found,
            Ready: self._ready,
            Lookup: self._lookup,
            Count: self._count,
            Drop: self._drop,
            Settings: self._settings,
            Command: self._command,
            Installed: self._installed,
            Ping: self._ping,
            Who: self._who,
        }

    def step(self, event: Event, now: float) -> list[Action]:
        """Take one event; return what is to be done."""
        actions: list[Action] = []
        self._pass(now)
        if self.ended:
            return actions
        if isinstance(event, Received):
            self._received(event.peer, event.message, now, actions)
        elif isinstance(event, Heard):
            self._heard(event.process, now, actions)
        elif isinstance(event, Tick):
            self._tick(now, actions)
        return actions

    def waits_for(self) -> str:
        """Say who is not there yet, for a log line."""
        missing = [
            f"server {rank}" for rank in range(self.options.num_servers) if rank not in self._servers.there
        ]
        missing += [f"worker {rank}" for rank in range(self.options.num_workers) if rank not in self._workers]
        return ", ".join(missing)

    def _pass(self, now: float) -> None:
        """Forgive all silence while the scheduler itself was stopped."""
        if self._stepped is None:
            self._manned = now
        elif now - self._stepped > self.options.dead_after / 2:
            for process in self._processes.values():
                process.heard += now - self._stepped
        self._stepped = now

    # ------------------------------------------------------------------------------------------------ letters

    def _received(self, name: Hashable, letter: Any, now: float, actions: list[Action]) -> None:
        if type(letter) is not Letter:
            return
        peer = self._peers.get(name)
        if peer is None:
            if len(self._peers) > _STRANGERS + 2 * len(self._processes):
                self._clear_strangers(now)
            peer = self._peers[name] = _Peer(name, Link(self.options.letter), now)
        if letter.seen > peer.link.number:
            self._fence(peer, "this scheduler is not the one that you know; start the job again", actions)
            return
        if peer.process is not None and peer.process.state == State.LOST:
            self._fence(peer, f"{peer.process} was given up after a long silence", actions)
            return
        if peer.process is not None:
            peer.process.heard = now
        for body in peer.link.read(letter, now):
            handler = self._handlers.get(type(body))
            if handler is not None and (peer.hello is not None or type(body) is Hello):
                handler(peer, body, now, actions)
        owed = peer.link.owed()
        if owed is not None:
            actions.append(Send(name, owed))

    def _clear_strangers(self, now: float) -> None:
        old = [
            name
            for name, peer in self._peers.items()
            if peer.hello is None and now - peer.since > self.options.dead_after
        ]
        for name in old:
            del self._peers[name]

    def _write(self, peer: _Peer, body: Any, now: float, actions: list[Action]) -> None:
        actions.append(Send(peer.name, peer.link.write(body, now)))

    def _fence(self, peer: _Peer, text: str, actions: list[Action]) -> None:
        actions.append(Send(peer.name, peer.link.aside(Fenced(0, text))))

    def _refuse(self, peer: _Peer, error: str, text: str, now: float, actions: list[Action]) -> None:
        self._turn_down(peer, Failure(error, text), now, actions)

    def _turn_down(self, peer: _Peer, why: Failure, now: float, actions: list[Action]) -> None:
        self._write(peer, Refused(why.error, why.text, why.role, why.rank, why.silent), now, actions)

    def _answer(
        self, store: Membership, answers: Iterable[tuple[int, Answer]], now: float, actions: list[Action]
    ) -> None:
        for rank, answer in answers:
            peer = self._peer_of(store, rank)
            if peer is not None:
                self._write(peer, answer, now, actions)

    def _peer_of(self, store: Membership, rank: int) -> _Peer | None:
        process = self._workers.get(rank)
        return None if process is None else self._peers.get(process.peers.get(store.number))

    def _ping(self, peer: _Peer, message: Ping, now: float, actions: list[Action]) -> None:
        actions.append(Send(peer.name, peer.link.aside(Pong(message.number))))

    def _who(self, peer: _Peer, message: Who, now: float, actions: list[Action]) -> None:
        """Say whom the store's start, its barrier, or a worker's keys or first push wait for."""
        store = peer.store
        servers: list[int] = []
        if store is None or not store.started:
            servers = [one for one in range(self.options.num_servers) if one not in self._servers.there]
        if store is None:
            ranks = [one for one in range(self.options.num_workers) if one not in self._workers]
        elif not store.started:
            ranks = sorted(set(range(self.options.num_workers)) - store.members.keys())
        elif store.keys.waits(peer.rank):
            ranks = [store.founder]
        elif store.arrivals.waits(peer.rank):
            ranks = store.arrivals.missing(store.needed, store.epoch)
        else:
            ranks = store.barrier.missing(store.needed) if store.barrier.waiting else []
        told = Missing(message.store, message.slice, message.round, tuple(ranks), tuple(servers))
        actions.append(Send(peer.name, peer.link.aside(told)))

    # ---------------------------------------------------------------------------------------------- admission

    def _hello(self, peer: _Peer, hello: Hello, now: float, actions: list[Action]) -> None:
        if peer.hello is not None:
            return
        peer.hello = hello
        options = self.options
        count = options.num_servers if hello.role == "server" else options.num_workers
        error = unfit(hello, options.job, count)
        if error is not None:
            self._refuse(peer, error.error, error.text, now, actions)
        elif self._over is not None:
            self._refuse(peer, "FencedError", "the job is over", now, actions)
        elif not self._enter(peer, now, actions):
            peer.since = now
            self._contests.append(peer)

    def _enter(self, peer: _Peer, now: float, actions: list[Action]) -> bool:
        """Give the peer's process its rank; False if a process that may be dead still has it."""
        hello = peer.hello
        if hello is None:
            return True
        process = self._processes.get(hello.process)
        if process is None:
            seats = self._servers.there if hello.role == "server" else self._workers
            count = self.options.num_servers if hello.role == "server" else self.options.num_workers
            rank = hello.rank if hello.rank >= 0 else free_rank(seats, count)
            holder = seats.get(rank)
            if rank < 0 or (holder is not None and holder.state == State.HERE and not hello.restarted):
                return False
            if holder is not None and holder.state == State.ENDED:
                self._refuse(
                    peer, "FencedError", f"{holder} has ended; its job goes on without it", now, actions
                )
                return True
            if holder is not None and holder.state == State.HERE:
                self._lose(holder, now, actions)
            process = Process(hello.process, hello.role, rank, hello.incarnation, now)
            self._processes[hello.process] = process
        elif process.state != State.HERE:
            self._fence(peer, f"{process} is no longer part of the job", actions)
            return True
        peer.process = process
        if hello.role == "server":
            self._enter_server(peer, process, hello, now, actions)
        else:
            self._workers[process.rank] = process
            self._enter_store(peer, process, hello, now, actions)
        return True

    def _contest(self, now: float, actions: list[Action]) -> None:
        """Look again at those who want a rank that somebody has."""
        waiting, self._contests = self._contests, []
        for peer in waiting:
            hello = peer.hello
            if hello is None or self._enter(peer, now, actions):
                continue
            seats = self._servers.there if hello.role == "server" else self._workers
            holder = seats.get(hello.rank)
            patience = self.options.dead_after
            if holder is not None and holder.heard > peer.since + patience / 2:
                text = f"{holder} is there already; every process needs a rank of its own"
                self._refuse(peer, "FencedError", text, now, actions)
            elif holder is None and now - peer.since > 2 * patience:
                self._refuse(peer, "ConfigError", f"all {hello.role}s of the job are there", now, actions)
            else:
                self._contests.append(peer)

    def _enter_server(
        self, peer: _Peer, process: Process, hello: Hello, now: float, actions: list[Action]
    ) -> None:
        servers = self._servers
        filled = any(store.keys.entries for store in self._stores.values())
        if servers.doom is not None or (filled and not hello.restarted):
            process.state = State.ENDED
            text = f"server {process.rank} was lost with its values, and none can take its place"
            self._refuse(peer, "FencedError", text, now, actions)
            return
        process.peers[-1] = peer.name
        servers.there[process.rank] = process
        servers.away.pop(process.rank, None)
        servers.members[process.rank] = Member(process.rank, process.incarnation, hello.address)
        if self._welcomed:
            self._welcome_server(process.rank, now, actions)
            self._bring_up(process.rank, now, actions)
        elif len(servers.there) == self.options.num_servers:
            self._welcomed = True
            for rank in sorted(servers.there):
                self._welcome_server(rank, now, actions)
            for store in self._stores.values():
                self._try_start(store, now, actions)

    def _welcome_server(self, rank: int, now: float, actions: list[Action]) -> None:
        servers = tuple(self._members())
        welcome = Welcome(-1, rank, self.options.num_servers, 0, (), servers)
        self._to_server(rank, welcome, now, actions)

    def _bring_up(self, rank: int, now: float, actions: list[Action]) -> None:
        """Tell a server that has come back everything, and everybody that it has."""
        for store in self._stores.values():
            if not store.started:
                continue
            entries = tuple(store.keys.entries.values())
            if entries:
                self._to_server(rank, Slices(store.number, entries), now, actions)
            for install in store.settings.again(rank):
                self._to_server(rank, install, now, actions)
            store.epoch += 1
            self._show(store, now, actions)

    def _members(self) -> list[Member]:
        return [self._servers.members[rank] for rank in sorted(self._servers.members)]

    def _to_server(self, rank: int, body: Any, now: float, actions: list[Action]) -> None:
        process = self._servers.there.get(rank)
        peer = self._peers.get(process.peers[-1]) if process is not None else None
        if peer is not None:
            self._write(peer, body, now, actions)

    def _to_servers(self, body: Any, now: float, actions: list[Action]) -> None:
        for rank in sorted(self._servers.there):
            self._to_server(rank, body, now, actions)

    def _enter_store(
        self, peer: _Peer, process: Process, hello: Hello, now: float, actions: list[Action]
    ) -> None:
        name = (hello.group, hello.ordinal)
        store = self._stores.get(name)
        if store is None:
            store = Membership(len(self._stores), name, hello.options, self._loads)
            self._stores[name] = store
        error = self._keeps_out(store, process, hello)
        if error is not None:
            self._turn_down(peer, error, now, actions)
            return
        peer.store = store
        process.peers[store.number] = peer.name
        store.enter(Member(process.rank, process.incarnation))
        if not store.started:
            self._try_start(store, now, actions)
            return
        self._welcome(store, peer, True, now, actions)
        self._show(store, now, actions, but=process.rank)

    def _keeps_out(self, store: Membership, process: Process, hello: Hello) -> Failure | None:
        if hello.options != store.options:
            mine, others = hello.options, store.options
            names = sorted(name for name in {*mine, *others} if mine.get(name) != others.get(name))
            told = ", ".join(f"{name} {mine.get(name)!r} instead of {others.get(name)!r}" for name in names)
            return Failure("ConfigError", f"{process} creates {store} with {told}: give all workers the same")
        if store.broken or self._servers.doom is not None:
            return store.failure if store.broken else self._doomed()
        if store.number in process.peers:
            return Failure("FencedError", f"{process} has been in {store} before; create another store")
        if store.over:
            return Failure("FencedError", f"{store} is over: all others have closed it")
        lost_ranks = [one for one in self._workers.values() if one.state == State.LOST]
        if store.raises and lost_ranks:
            return Failure(
                "PeerLostError", f"{lost_ranks[0]} is lost; start the job again", "worker", lost_ranks[0].rank
            )
        return None

    def _doomed(self) -> Failure:
        doom = self._servers.doom
        rank = doom.rank if doom is not None else -1
        return Failure("PeerLostError", f"server {rank} is lost; start the job again", "server", rank)

    def _try_start(self, store: Membership, now: float, actions: list[Action]) -> None:
        """Start a store once everybody is there; those that are lost are not waited for."""
        lost_ranks = {rank for rank, one in self._workers.items() if one.state == State.LOST}
        missing = set(range(self.options.num_workers)) - store.members.keys() - lost_ranks
        if store.started or not self._welcomed or not store.members:
            return
        ended = [
            rank
            for rank in sorted(missing)
            if rank in self._workers and self._workers[rank].state == State.ENDED
        ]
        if ended:
            text = (
                f"worker {ended[0]} has ended and never created {store}: all workers create the same stores"
            )
            self._turn_away(store, Failure("ConfigError", text), now, actions)
        elif not missing:
            store.start()
            for rank in sorted(store.members):
                peer = self._peer_of(store, rank)
                if peer is not None:
                    self._welcome(store, peer, False, now, actions)
            self._to_servers(store.view(self._members()), now, actions)

    def _turn_away(self, store: Membership, failure: Failure, now: float, actions: list[Action]) -> None:
        """Refuse everybody in a store that cannot start."""
        for rank in sorted(store.members):
            peer = self._peer_of(store, rank)
            if peer is not None:
                self._turn_down(peer, failure, now, actions)

    def _welcome(
        self, store: Membership, peer: _Peer, returned: bool, now: float, actions: list[Action]
    ) -> None:
        members = tuple(store.members[rank] for rank in sorted(store.members))
        size, servers = self.options.num_workers, tuple(self._members())
        late = tuple(sorted(store.arrivals.late))
        welcome = Welcome(store.number, peer.rank, size, store.epoch, members, servers, returned, late=late)
        self._write(peer, welcome, now, actions)

    def _show(
        self,
        store: Membership,
        now: float,
        actions: list[Action],
        but: int = -1,
        begun: Begun | None = None,
    ) -> None:
        """Tell everybody in the store who takes part now."""
        view = store.view(self._members(), begun)
        for rank in sorted(store.members):
            peer = self._peer_of(store, rank)
            if peer is not None and rank != but:
                self._write(peer, view, now, actions)
        self._to_servers(view, now, actions)

    # ------------------------------------------------------------------------------------------------- losses

    def _heard(self, name: str, now: float, actions: list[Action]) -> None:
        process = self._processes.get(name)
        if process is None:
            return
        process.heard = now
        if process.state == State.LOST:
            for name_ in process.peers.values():
                self._fence(self._peers[name_], f"{process} was given up after a long silence", actions)

    def _lose(self, process: Process, now: float, actions: list[Action]) -> None:
        process.state = State.LOST
        silent = max(0.0, now - process.heard)
        loss = Loss(process.role, process.rank, silent)
        if process.role == "server":
            self._lose_server(process, loss, now, actions)
        else:
            for store in list(self._stores.values()):
                member = store.members.get(process.rank)
                if store.number in process.peers and member is not None:
                    store.lose(loss)
                    self._changed(store, now, actions)
            for store in self._stores.values():
                if not store.started and not store.broken:
                    self._lost_before_start(store, loss, now, actions)

    def _lost_before_start(self, store: Membership, loss: Loss, now: float, actions: list[Action]) -> None:
        if not store.raises:
            self._try_start(store, now, actions)
        elif store.members:
            text = f"{loss.role} {loss.rank} was lost before {store} started; start the job again"
            failure = Failure("PeerLostError", text, loss.role, loss.rank, loss.silent)
            self._turn_away(store, failure, now, actions)

    def _lose_server(self, process: Process, loss: Loss, now: float, actions: list[Action]) -> None:
        servers = self._servers
        servers.there.pop(process.rank, None)
        if not self._welcomed:
            servers.members.pop(process.rank, None)
        elif self.options.server_grace > 0 and servers.doom is None:
            servers.away[process.rank] = (now + self.options.server_grace, loss)
        else:
            self._give_up(loss, now, actions)

    def _give_up(self, loss: Loss, now: float, actions: list[Action]) -> None:
        """Go on without a server: its values are lost, so no store can be whole again."""
        self._servers.doom = self._servers.doom or loss
        for store in self._stores.values():
            store.lose_server(loss)
            self._changed(store, now, actions)

    def _changed(self, store: Membership, now: float, actions: list[Action]) -> None:
        """Tell of a loss, and let go whom it held up."""
        if not store.started:
            if store.broken:
                self._turn_away(store, store.failure, now, actions)
            return
        self._show(store, now, actions)
        if store.broken:
            failed = [(rank, Answer(request, error=store.failure)) for rank, request in store.waiting()]
            self._answer(store, failed, now, actions)
        else:
            self._go_on(store, now, actions)

    def _go_on(self, store: Membership, now: float, actions: list[Action]) -> None:
        """After somebody has left or begun: perhaps the others need not wait any more."""
        self._let_begin(store, now, actions)
        opened = [(rank, Answer(request)) for rank, request in store.barrier.open(store.needed)]
        answers, new = store.keys.promote(store.founder)
        self._place(store, new, now, actions)
        self._answer(store, [*opened, *answers], now, actions)

    # ------------------------------------------------------------------------------------------------ leaving

    def _leave(self, peer: _Peer, message: Leave, now: float, actions: list[Action]) -> None:
        store = peer.store
        if store is None or peer.rank not in store.members or not self._here(peer, store):
            return
        if message.lost and store.started:
            store.lose(Loss("worker", peer.rank, 0.0))
            self._changed(store, now, actions)
            return
        store.leave(peer.rank)
        if not store.started:
            self._try_start(store, now, actions)
            return
        if store.members:
            self._show(store, now, actions)
            self._go_on(store, now, actions)
        else:
            store.over = True
            self._to_servers(Install(store.number, 0, "drop", ""), now, actions)

    def _here(self, peer: _Peer, store: Membership) -> bool:
        """Whether the peer is the member, and not an older process of its rank."""
        process = peer.process
        return (
            process is not None
            and self._workers.get(process.rank) is process
            and store.number in process.peers
        )

    def _bye(self, peer: _Peer, message: Bye, now: float, actions: list[Action]) -> None:
        process = peer.process
        if process is None or process.state != State.HERE:
            return
        if message.lost:
            self._lose(process, now, actions)
            self._look_for_end(now, actions)
            return
        for name in list(process.peers.values()):
            one = self._peers[name]
            if one.store is not None:
                self._leave(one, Leave(one.store.number), now, actions)
        process.state = State.ENDED
        for store in list(self._stores.values()):
            self._try_start(store, now, actions)
        self._look_for_end(now, actions)

    def _look_for_end(self, now: float, actions: list[Action]) -> None:
        workers = self._workers.values()
        if self._over is not None or len(self._workers) < self.options.num_workers:
            return
        if any(one.state == State.HERE for one in workers) or self._contests:
            return
        alone = all(one.state == State.LOST for one in workers)
        error = Failure("PeerLostError", "all workers are lost") if alone else None
        self._finish(error, now, actions)

    def _finish(self, error: Failure | None, now: float, actions: list[Action]) -> None:
        self._over = (now, error)
        self._to_servers(Over(error.text if error else ""), now, actions)
        for peer in self._contests:
            self._refuse(peer, "FencedError", "the job is over", now, actions)

    # ----------------------------------------------------------------------------------------------- requests

    def _member(self, peer: _Peer, message: Any, now: float, actions: list[Action]) -> Membership | None:
        """Store of a request, if it may be made; else it is answered with the reason."""
        store = peer.store
        if store is None or not store.started or not self._here(peer, store):
            return None
        if store.broken and type(message) not in (Lookup, Count):
            self._write(peer, Answer(message.request, error=store.failure), now, actions)
            return None
        if peer.rank not in store.members:
            closed = Failure("ClosedError", f"this worker has left {store}")
            self._write(peer, Answer(message.request, error=closed), now, actions)
            return None
        return store

    def _join(self, peer: _Peer, message: JoinRounds, now: float, actions: list[Action]) -> None:
        store = self._member(peer, message, now, actions)
        if store is None:
            return
        if peer.rank not in store.resting:
            store.rest(peer.rank)
            self._show(store, now, actions)
        self._write(peer, Answer(message.request), now, actions)
        self._go_on(store, now, actions)

    def _begin(self, peer: _Peer, message: Begin, now: float, actions: list[Action]) -> None:
        store = peer.store
        if store is None or not self._here(peer, store) or not store.arrivals.ask(peer.rank, message.slice):
            return
        store.epoch += 1
        self._show(store, now, actions)
        self._go_on(store, now, actions)

    def _reached(self, peer: _Peer, message: Reached, now: float, actions: list[Action]) -> None:
        store = peer.store
        if store is not None and self._here(peer, store):
            store.arrivals.reached(peer.rank, message.epoch, message.pushed)
            self._go_on(store, now, actions)

    def _let_begin(self, store: Membership, now: float, actions: list[Action]) -> None:
        """Once all others are where somebody begins who came back, tell all; then the next one may."""
        while not store.broken and (begun := store.begin()) is not None:
            self._show(store, now, actions, begun=begun)
            if store.arrivals.begin >= 0:
                store.epoch += 1
                self._show(store, now, actions)

    def _barrier(self, peer: _Peer, message: Barrier, now: float, actions: list[Action]) -> None:
        store = self._member(peer, message, now, actions)
        if store is not None:
            store.barrier.arrive(peer.rank, message.request)
            self._go_on(store, now, actions)

    def _found(self, peer: _Peer, message: Found, now: float, actions: list[Action]) -> None:
        store = self._member(peer, message, now, actions)
        if store is None:
            return
        answer, new = store.keys.found(peer.rank, message.request, message.keys, store.founder)
        self._place(store, new, now, actions)
        if answer is not None:
            self._write(peer, answer, now, actions)

    def _place(self, store: Membership, new: tuple[KeyEntry, ...], now: float, actions: list[Action]) -> None:
        if new:
            self._to_servers(Slices(store.number, new), now, actions)

    def _ready(self, peer: _Peer, message: Ready, now: float, actions: list[Action]) -> None:
        store = self._member(peer, message, now, actions)
        if store is not None:
            self._answer(store, store.keys.ready(message.keys), now, actions)
            self._write(peer, Answer(message.request), now, actions)

    def _lookup(self, peer: _Peer, message: Lookup, now: float, actions: list[Action]) -> None:
        store = self._member(peer, message, now, actions)
        if store is None:
            return
        wait = message.wait and not store.broken
        answer = store.keys.lookup(peer.rank, message.request, message.keys, wait)
        if answer is not None:
            self._write(peer, answer, now, actions)

    def _count(self, peer: _Peer, message: Count, now: float, actions: list[Action]) -> None:
        if self._member(peer, message, now, actions) is None:
            return
        processes = [*self._workers.values(), *self._servers.there.values()]
        silent = [one for one in processes if one.state == State.HERE and now - one.heard > message.seconds]
        lost_workers = [one for one in self._workers.values() if one.state == State.LOST]
        lost_servers = self.options.num_servers - len(self._servers.there)
        count = len(silent) + len(lost_workers) + lost_servers
        self._write(peer, Answer(message.request, count=count), now, actions)

    def _drop(self, peer: _Peer, message: Drop, now: float, actions: list[Action]) -> None:
        store = self._member(peer, message, now, actions)
        if store is None:
            return
        slices = store.keys.drop(message.keys)
        if slices:
            text = ",".join(map(str, slices))
            self._to_servers(Install(store.number, 0, "drop", text), now, actions)
        self._write(peer, Answer(message.request), now, actions)

    def _settings(self, peer: _Peer, message: Settings, now: float, actions: list[Action]) -> None:
        store = self._member(peer, message, now, actions)
        if store is None:
            return
        setting, new = store.settings.ask(peer.rank, message, set(range(self.options.num_servers)))
        if setting is None:
            text = (
                f"worker {peer.rank}: {store} has another optimizer already; set the same one on all workers"
            )
            self._write(peer, Answer(message.request, error=Failure("ConfigError", text)), now, actions)
            return
        if new:
            self._to_servers(setting.install, now, actions)
        self._answer(store, setting.answers(), now, actions)

    def _command(self, peer: _Peer, message: Command, now: float, actions: list[Action]) -> None:
        store = self._member(peer, message, now, actions)
        if store is not None:
            setting = store.settings.command(peer.rank, message, set(range(self.options.num_servers)))
            self._to_servers(setting.install, now, actions)

    def _installed(self, peer: _Peer, message: Installed, now: float, actions: list[Action]) -> None:
        for store in self._stores.values():
            if store.number == message.store:
                answers = store.settings.installed(peer.rank, message.version, message.error)
                self._answer(store, answers, now, actions)

    # --------------------------------------------------------------------------------------------------- time

    def _tick(self, now: float, actions: list[Action]) -> None:
        for process in list(self._processes.values()):
            if process.state == State.HERE and now - process.heard > self.options.dead_after:
                self._lose(process, now, actions)
        for rank, (deadline, loss) in list(self._servers.away.items()):
            if now > deadline:
                del self._servers.away[rank]
                self._give_up(loss, now, actions)
        self._contest(now, actions)
        self._look_for_end(now, actions)
        self._look_for_workers(now, actions)
        for peer in self._peers.values():
            if peer.process is None or peer.process.state == State.HERE:
                actions.extend(Send(peer.name, letter) for letter in peer.link.again(now))
        self._look_for_last_letter(now, actions)

    def _look_for_workers(self, now: float, actions: list[Action]) -> None:
        if any(one.state == State.HERE for one in self._workers.values()):
            self._manned = now
        elif self._over is None and now - self._manned > self.options.timeout:
            text = f"no worker has been there for {self.options.timeout:g} s"
            self._finish(Failure("TimeoutError", text), now, actions)

    def _look_for_last_letter(self, now: float, actions: list[Action]) -> None:
        """End when all that are there know it."""
        if self._over is None:
            return
        since, error = self._over
        open_ = [
            peer
            for peer in self._peers.values()
            if peer.process is not None
            and peer.process.state == State.HERE
            and peer.link.acknowledged < peer.link.number
        ]
        # It stays a little longer, so that letters which come again are acknowledged once more.
        patience = self.options.dead_after if open_ else self.options.letter / 5
        if now - since > patience:
            self.ended = True
            actions.append(End(error))
