"""A whole job in one thread: the machines of all its processes, a seeded network between them, and faults.

`simulate(seed)` draws a job (workers, servers, stores, programs) and what happens to it (messages that are
late, lost, doubled or out of order, cut links, processes that stop, die and come back), runs it on a clock of
its own, and checks it. The payload of a push names its worker, slice and number, and the value of a slice is
the list of rounds that made it, so that every check is exact:

* a push is applied at most once, in the round that its number says, with the parts of all that are needed;
* an acknowledged push is applied in the end, unless its worker is lost, or it falls into the interval that a
  server loses with its memory;
* a pull has the round promised, with every push of this worker before it;
* all workers that read a round of a slice see the same value;
* every failed round is reported once to each worker that pushed into it, before it reads a later value;
* a rejoined worker begins at the same pass in all slices, at any progress of the other workers;
* a barrier opens when all members that are there have arrived; epochs only grow;
* a key is read as of one round, also by a resting worker during rounds and after a loss, or its rounds are
  named in the error;
* the reads of all workers are explained by a model of the store, which knows nothing of the machines: see
  `histories.checker`;
* every call ends, within bounded time after the last fault, and only with errors that the faults explain.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

import msgspec
from buggify import Points
from histories.checker import violations
from histories.simulated import SimulatedCalls

from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.scheduler.journaled_scheduler import RecordedScheduler
from kvstore.stores.parameter_server.scheduler.machine import SchedulerMachine, SchedulerOptions
from kvstore.stores.parameter_server.server.machine import ServerMachine, ServerOptions
from kvstore.stores.parameter_server.worker.consistent_rounds import PushCalls, slices_behind
from kvstore.stores.parameter_server.worker.state_machine.machine import WorkerMachine
from kvstore.stores.parameter_server.worker.state_machine.options import WorkerOptions
from kvstore.stores.parameter_server.worker.state_machine.server_links import failure_of

TICK, LETTER, RESEND, DEAD, GRACE = 0.25, 0.4, 0.6, 3.0, 10.0
APART = 12.0  # seconds at most, in which other workers compute while one pushes ahead
TOGETHER = 8.0  # seconds for slices to reach one round
PATIENCE = 90.0  # seconds after the last fault within which everything has to end
ABSENCE = 40.0  # seconds in which a scheduler can return; a pause of a process begins them anew
MESSAGES = 50_000  # no job needs nearly as many
STALL = 0.5  # seconds at most, where nothing fails
JOB = "simulated"
OPTIMIZER = '{"name": "sgd", "config": {}}'
HALF = 0  # number of a push of which a half is in a value


class Broken(AssertionError):
    """The job did what it must not do."""


class Payload(NamedTuple):
    """The payload of a push."""

    rank: int
    incarnation: int
    store: int
    slice: int
    number: int  # of the pushes of this process into the slice
    bad: bool = False


class Value(NamedTuple):
    """A version of a slice: the round before, and the parts this round added; the first has neither."""

    before: Value | None
    round: int
    parts: tuple[Payload, ...]

    def payloads(self) -> list[Payload]:
        """All pushes in it."""
        found: list[Payload] = []
        at: Value | None = self
        while at is not None:
            found += at.parts
            at = at.before
        return found


class Faults(NamedTuple):
    """What happens to a job besides its program."""

    late: float = 0.0
    drop: float = 0.0
    double: float = 0.0
    kill_worker: bool = False
    return_worker: bool = False
    kill_more: int = 0  # further workers, or the rejoined worker
    kill_server: bool = False
    return_server: bool = False
    kill_scheduler: bool = False
    return_scheduler: bool = False  # each time that it is killed
    cut: float = 0.0  # seconds
    stop: float = 0.0
    busy: float = 0.0  # with one step; its echo still answers
    bad: bool = False
    ahead: bool = False  # the killed worker has pushed ahead of the others, which compute or rest
    mute: bool = False  # between the last two snapshots of a server that dies, its answers are lost
    tardy: float = 0.0  # seconds by which workers learn of the members later than servers
    steps: bool = False  # all pushes are made in whole steps
    points: bool = False  # small delays wherever time passes, by the seed: none of them is a fault

    @property
    def losing(self) -> bool:
        """Whether a process may be declared lost."""
        kills = self.kill_worker or self.kill_server or (self.kill_scheduler and not self.return_scheduler)
        return kills or max(self.cut, self.stop) > DEAD / 2


class Plan:
    """A job as drawn."""

    def __init__(self, rng: random.Random, faults: Faults | None) -> None:
        self.workers = rng.choice((1, 2, 2, 3, 3, 4))
        self.servers = rng.choice((1, 1, 2, 2, 3))
        self.stores = rng.choice((1, 1, 1, 2))
        self.mode = rng.choice(("sync", "sync", "async"))
        self.on_peer_loss = rng.choice(("raise", "continue"))
        self.given_ranks = rng.random() < 0.7
        self.slow_apply = rng.random() < 0.4
        self.credit = rng.choice((2, 5, 1000))
        self.batch = rng.choice((1, 3, 1000))
        self.shared = rng.random() < 0.2
        self.faults = _faults(rng) if faults is None else faults
        if self.faults.steps:
            self.mode, self.on_peer_loss = "sync", "raise"
        # A rejoined worker begins a pass; in a program of another kind the others' progress is unknown.
        self.passes = self.faults.return_worker and self.on_peer_loss == "continue"
        self.keys = [(f"k{at}", rng.choice((1, 1, 2, 3))) for at in range(rng.choice((1, 2, 3)))]
        draw = self._passes if self.passes else self._script
        self.script = [draw(rng) for _ in range(self.stores)]

    def _passes(self, rng: random.Random) -> list[tuple[Any, ...]]:
        """Passes over all keys, all alike: keys in one call, in one call each, or between."""
        names = [key for key, _ in self.keys]
        calls: list[list[str]] = [[]]
        for name in rng.sample(names, len(names)):
            if calls[-1] and rng.random() < 0.7:
                calls.append([])
            calls[-1].append(name)
        one: list[tuple[Any, ...]] = [("round", tuple(call)) for call in calls]
        if rng.random() < 0.3:
            one.insert(rng.randint(0, len(one)), ("barrier",))
        script: list[tuple[Any, ...]] = [("init", tuple(names))]
        for at in range(rng.randint(2, 8)):
            script.append(("pass",))
            if rng.random() < 0.1:
                script.append(("configure", rng.choice("ab"), at))
            script += one
        return script

    def _script(self, rng: random.Random) -> list[tuple[Any, ...]]:
        names = [key for key, _ in self.keys]
        script: list[tuple[Any, ...]] = [("init", tuple(names))]
        for at in range(rng.randint(2, 6)):
            what = rng.random()
            if what < 0.12:
                script.append(("barrier",))
            elif what < 0.22:
                script.append(("configure", rng.choice("ab"), at))
            script.append(("round", tuple(rng.sample(names, rng.randint(1, len(names))))))
        return script


def _faults(rng: random.Random) -> Faults:
    kind = rng.random()
    noisy = {
        "late": rng.choice((0.0, 0.1, 0.4)),
        "drop": rng.choice((0.0, 0.0, 0.05, 0.1)),
        "double": rng.choice((0.0, 0.1, 0.3)),
    }
    if kind < 0.12:
        return Faults(bad=rng.random() < 0.5)
    if kind < 0.15:
        return Faults(**noisy, busy=rng.choice((1.0, 4.0, 9.0)))
    if kind < 0.40:
        return Faults(**noisy, bad=rng.random() < 0.2)
    if kind < 0.50:
        return Faults(**noisy, kill_worker=True)
    if kind < 0.65:
        more = rng.choice((0, 0, 1, 2))
        back = Faults(**noisy, kill_worker=True, return_worker=True, kill_more=more, bad=rng.random() < 0.2)
        server = rng.random() < 0.3
        return back._replace(kill_server=server, return_server=server)
    if kind < 0.69:
        return Faults(**noisy, kill_server=True)
    if kind < 0.83:
        return Faults(**noisy, kill_server=True, return_server=True)
    if kind < 0.86:
        return Faults(**noisy, kill_scheduler=True)
    if kind < 0.93:
        return Faults(**noisy, cut=rng.choice((0.3, 1.0, 4.0, 9.0)))
    return Faults(**noisy, stop=rng.choice((0.3, 1.0, 4.0, 9.0)))


class Host:
    """A process: alive, stopped or dead."""

    def __init__(self, job: Job, name: str) -> None:
        self.job = job
        self.name = name
        self.alive = True
        self.resumes = 0.0
        self.engaged = 0.0  # until then it takes no step
        self.ahead = job.points.seconds(name, "clock", 1.0, 1e5)  # its clock is, of the job's
        self.jumped, self.unheard = False, 0  # once; heartbeats that did not arrive
        job.hosts[name] = self

    @property
    def now(self) -> float:
        """Time by its own clock."""
        return self.job.now + self.ahead

    def buggify(self) -> None:
        """Let it be kept from its work for a moment, or its clock jump; for less than a loss takes."""
        fires, seconds = self.job.points.fires, self.job.points.seconds
        self.engaged = max(self.engaged, self.job.now + seconds(self.name, "stall", 0.02, STALL))
        if not self.jumped and fires(self.name, "jump", 0.05):
            self.jumped, self.ahead = True, self.ahead + self.job.points.draw(self.name, "jump") * STALL
        self.unheard = self.unheard + 1 if self.unheard < 2 and fires(self.name, "heartbeat", 0.3) else 0

    def tick(self) -> None:
        """Let time pass in its machines."""
        raise NotImplementedError

    def die(self) -> None:
        """End without a word."""
        self.alive = False


class SchedulerHost(Host):
    """The scheduler's process, and its journal: records in memory."""

    def __init__(self, job: Job) -> None:
        super().__init__(job, "scheduler")
        plan = job.plan
        grace = GRACE if plan.faults.return_server else 0.0
        self.options = SchedulerOptions(JOB, plan.workers, plan.servers, LETTER, DEAD, grace, 30.0)
        self.records: list[bytes] = []
        self.returns = 0
        self.start()

    @property
    def machine(self) -> SchedulerMachine:
        """The current state machine."""
        return self.recorded.machine

    def start(self) -> None:
        """Begin, or continue from the journal."""
        self.alive = True
        self.recorded = RecordedScheduler(self.options, lambda: self.now)
        self.recorded.restore_records(self.records)
        if self.job.plan.faults.return_scheduler:
            self.recorded.step(e.SchedulerRestarted(self.machine.term + 1))
            self.recorded.next_record()
            self.records = [self.recorded.state_record(("", ""))]

    def tick(self) -> None:
        self.take(e.TickEvent())

    def take(self, event: e.Event) -> None:
        """Step, and send the resulting messages."""
        actions = self.recorded.step(event)
        if record := self.recorded.next_record():
            self.records.append(record)
            if self.returns > 0 and self.job.plan.faults.return_scheduler and self.job.rng.random() < 0.05:
                self.job.kill_scheduler()  # before any message is sent
                return
        absence = ABSENCE if self.job.plan.faults.return_scheduler else 0.0
        for action in actions:
            if isinstance(action, e.SendMessage):
                host, store = msgspec.msgpack.decode(action.peer)
                message = action.message
                if type(message) is m.ReliableMessage and type(message.body) is m.HelloReply:
                    message = msgspec.structs.replace(
                        message, body=m.HelloReply(echo=e.ECHO, absence=absence)
                    )
                self.job.send(self.name, host, ("scheduler", store), message)
            elif isinstance(action, e.JobEnded):
                self.alive = False

    def receive(self, where: Any, message: Any) -> None:
        """Take a message from the socket of a process."""
        self.take(e.MessageReceived(msgspec.msgpack.encode(where), message))


class ServerHost(Host):
    """A server's process, with its data; a snapshot is a copy of both."""

    def __init__(self, job: Job, at: int, rank: int, incarnation: int, snapshot: Any = None) -> None:
        super().__init__(job, f"server{at}.{incarnation}")
        self.incarnation = incarnation
        self.values: dict[tuple[int, int], Value] = dict(snapshot[0]) if snapshot else {}
        self.busy: set[tuple[int, int]] = set()
        self.jobs: dict[tuple[int, int], e.SliceRound] = {}  # rounds that are being done
        self.defined: set[tuple[int, int]] = set()
        self.wants_snapshot = False
        self.saves = -1  # dies just after so many snapshots, while replies for pushes in the last one travel
        self.members: dict[int, dict[int, int]] = {}  # before the step
        hello = m.HelloRequest(
            "server", rank, incarnation, self.name, JOB, m.PROTOCOL, self.name, restarted=incarnation > 1
        )
        start = 10 * DEAD if job.plan.faults.return_scheduler else 0.0
        options = ServerOptions(LETTER, DEAD, 1, job.plan.faults.return_server, start)
        self.machine = ServerMachine(hello, options, snapshot[1] if snapshot else None)
        self.take(e.StartEvent())

    def tick(self) -> None:
        self.take(e.TickEvent())
        saves = self.alive and self.job.plan.faults.return_server
        if saves and (self.wants_snapshot or self.saves > 0 or self.job.rng.random() < 0.1):
            self.save()

    def save(self) -> None:
        """Write a snapshot, if nothing is being done."""
        if self.busy or not self.machine.is_quiet() or self.job.points.fires(self.name, "save", 0.3):
            return
        state = msgspec.json.decode(msgspec.json.encode(self.machine.snapshot_state()))
        self.job.snapshots[self.machine.rank] = (dict(self.values), state)
        self.job.saved[self.machine.rank] = self.job.now
        self.wants_snapshot = False
        self.take(e.SnapshotSaved())
        self.saves -= 1
        if not self.saves:
            self.job.at(self.job.now, self.job.kill_server, self.job.servers.index(self))

    def receive(self, where: Any, message: Any) -> None:
        """Take a message from the scheduler, or from a worker's data socket."""
        if where[0] == e.ECHO:
            self.take(e.MessageReceived(e.ECHO, message))
            return
        if self.job.plan.faults.kill_worker:
            self.members = {
                number: store.members.incarnations for number, store in self.machine._stores.items()
            }
        self.take(e.MessageReceived("scheduler" if where[0] == "scheduler" else where, message))

    def take(self, event: e.Event) -> None:
        """Step, and carry out the resulting actions."""
        for action in self.machine.step(event, self.now):
            kind = type(action)
            if kind is e.SendMessage:
                self._send(action)
            elif kind is e.SendReplies:
                self._reply(action)
            elif kind is e.ApplyRounds:
                for job in action.jobs:
                    self._check_parts(action.store, job)
                    self.jobs[action.store, job.slice] = job
                    self._later((action.store, job.slice), self._apply, action.store, job)
            elif kind is e.AbortJobs:
                self._abort(action.store)
            elif kind is e.WithdrawJobs:
                self._abort(action.store, action.rank)
            elif kind is e.WriteSlices:
                self._begin_writes(action)
            elif kind is m.InstallRequest:
                self.take(e.InstallDone(action.store, action.version))
            elif kind is e.DefineSlices:
                ours = [one.id for entry in action.keys for one in entry.slices]
                self.defined.update((action.store, one) for one in ours)
            elif kind is e.ForgetSlices:
                self._forget(action)
            elif kind is e.SaveSnapshot:
                self.wants_snapshot = True
            elif kind is e.JobEnded:
                self.alive = False

    def _send(self, action: e.SendMessage) -> None:
        if action.peer == "scheduler":
            self.job.send(self.name, "scheduler", (self.name, -1), action.message)
        elif action.peer == e.ECHO:
            self.job.echo(self.name, (e.ECHO, -1), action.message)
        else:
            host, store = action.peer
            if self.job.plan.faults.mute and self.saves == 1:
                return
            self.job.send(self.name, host, (self.machine.rank, self.incarnation, store), action.message)

    def _begin_writes(self, action: e.WriteSlices) -> None:
        """Carry out all at once, as a server does; or some later, to see what comes meanwhile."""
        at = [(action.store, write.slice) for write in action.writes]
        if self.job.plan.slow_apply or self.job.plan.faults.points:
            for where, write in zip(at, action.writes, strict=True):
                self._later(where, self._write, action.store, write)
            return
        for where in at:
            self.job.check(where not in self.busy, f"{self.name} works on slice {where} twice at once")
        results = [(write.slice, self._write(action.store, write)) for write in action.writes]
        self.take(e.JobsApplied(action.store, results))

    def _later(self, at: tuple[int, int], work: Callable[..., Any], *arguments: Any) -> None:
        self.job.check(at not in self.busy, f"{self.name} works on slice {at} twice at once")
        self.busy.add(at)
        delay = self.job.rng.random() * 0.05 if self.job.plan.slow_apply else 0.0
        delay += self.job.points.seconds(self.name, "work", 0.1, STALL)
        if delay:
            self.job.at(self.job.now + delay, self._work, at, work, arguments)
        else:
            self._work(at, work, arguments)

    def _work(self, at: tuple[int, int], work: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
        if not self.alive and not self.machine.ended:
            return
        if arguments[-1] is self.jobs.get(at):
            del self.jobs[at]
        elif isinstance(arguments[-1], e.SliceRound):
            return  # given up
        self.busy.discard(at)
        failure = work(*arguments)
        self.take(e.JobsApplied(at[0], [(at[1], failure)]))

    def _abort(self, store: int, rank: int | None = None) -> None:
        """Give up some rounds that are not done, all or of one worker, as if they waited for other slices."""
        its = [at for at, job in self.jobs.items() if rank is None or job.parts[0][0] == rank]
        given_up = [at[1] for at in its if at[0] == store and self.job.rng.random() < 0.5]
        for slice_ in given_up:
            del self.jobs[store, slice_]
            self.busy.discard((store, slice_))
        self.take(e.JobsApplied(store, [], given_up))

    def _apply(self, store: int, job: e.SliceRound) -> m.Failure | None:
        parts = tuple(frames[record.frame] for _, record, frames in job.parts)
        ranks = [rank for rank, _, _ in job.parts]
        check = self.job.check
        check(ranks == sorted(set(ranks)), f"parts of ranks {ranks}")
        at = (store, job.slice)
        values = self.values if at in self.values else self.job.gone  # dropped since
        before = values[at]
        if self.job.plan.mode == "sync":
            self._check_round(store, job, parts, ranks)
        check(before.round < job.round or self.job.plan.mode == "async", "a round is done twice")
        if not parts:
            return None  # lost with a server's memory
        if any(part.bad for part in parts):
            self.job.failed.update(parts)
            if self.job.plan.mode == "sync":
                for part in parts:
                    self.job.untold.setdefault((part.incarnation, *at), set()).add(job.round)
            return m.Failure("UpdaterError", f"bad gradient; that was in round {job.round}")
        values[at] = Value(before, job.round, parts)
        for part in parts:
            self.job.applied[part] = self.job.now
        return None

    def _check_round(
        self, store: int, job: e.SliceRound, parts: tuple[Payload, ...], ranks: list[int]
    ) -> None:
        check = self.job.check
        for part in parts:
            base = self.job.bases.get((part.rank, part.incarnation, store, job.slice), 0)
            told = f"push {part.number} (base {base}) of {part} is in round {job.round}"
            check(part.number + base == job.round, told)
        if not self.job.restarted:
            found = self.machine._stores.get(store)
            needed = found.members.needed if found is not None else frozenset()
            missing = [rank for rank in needed - set(ranks) if self._belongs(found, rank, job)]
            told = f"round {job.round} of {store, job.slice} on {self.name} lacks {sorted(missing)}"
            check(not missing, told)

    def _check_parts(self, store: int, job: e.SliceRound) -> None:
        """No part is of a worker that was lost before."""
        members = self.members.get(store)
        if members is None:
            return
        processes = {one.incarnation: one for one in self.job.scheduler.machine._processes.values()}
        for rank, record, frames in job.parts:
            incarnation = frames[record.frame].incarnation
            lost = processes[incarnation].state.value == "lost" and members.get(rank) != incarnation
            lost = lost and not self.job.has_left(store, incarnation)
            self.job.check(not lost, f"round {job.round} of {store, job.slice} has a part of a lost worker")

    def _belongs(self, store: Any, rank: int, job: e.SliceRound) -> bool:
        """Whether a part of this worker has to be in the round: not if it rejoined and began after it."""
        return dict(store.members.join_point(rank)).get(job.slice, 0) < job.round

    def _write(self, store: int, write: e.SliceWrite) -> m.Failure | None:
        at = (store, write.slice)
        self.job.check(at in self.defined, f"{at} is written before it is defined")
        kind = write.record.kind
        if kind == m.RecordKind.INIT:
            self.job.check(at not in self.values, f"{at} is initialised twice")
        self.values[at] = Value(None, 0, ())
        return None

    def _forget(self, action: e.ForgetSlices) -> None:
        for at in [one for one in self.values if one[0] == action.store]:
            if action.slices is None or at[1] in action.slices:
                self.job.gone[at] = self.values.pop(at)

    def _reply(self, action: e.SendReplies) -> None:
        records: list[m.Record] = []
        frames: list[Any] = []
        for kind, request, round_, detail in action.answers:
            place, nbytes = m.PayloadLocation.NONE, 0
            if kind == m.RecordKind.VALUE:
                at = (action.batch.store, request.slice)
                self.job.check(at not in self.busy, f"{at} is read while it is written")
                at_once = self.job.plan.mode == "async"  # a worker then says when it has taken a value in
                place, nbytes = m.PayloadLocation.SHARED if at_once else m.PayloadLocation.FRAME, 1
                value = self._torn(at) if at in self.busy else self.values[at]
                if request.flags == m.OF_ROUND and request.round < round_:
                    value, round_ = self._past(value, request.round), request.round
                frames.append(value)
                self._check_told(action.batch, request)
            elif kind == m.RecordKind.FAILED:
                self._note_told(action.batch, request, detail)
                place = m.PayloadLocation.FRAME
                frames.append(msgspec.msgpack.encode(detail))
                nbytes = len(frames[-1])
            pushed = (
                kind == m.RecordKind.DONE
                and request.kind == m.RecordKind.PUSH
                and self.job.plan.mode == "sync"
            )
            ahead = request.round - round_
            self.job.check(not pushed or ahead <= 2, f"push {request.round} did not wait at round {round_}")
            records.append(
                m.Record(
                    kind,
                    request.slice,
                    request.sequence,
                    round_,
                    place=place,
                    frame=len(frames) - 1,
                    nbytes=nbytes,
                )
            )
        batch = action.batch._replace(records=records, frames=tuple(frames))
        self._send(e.SendMessage(action.peer, batch))

    def _torn(self, at: tuple[int, int]) -> Value:
        """Return a slice as it is while it is written: with half of the change."""
        value, job = self.values[at], self.jobs.get(at)
        if job is None:
            return value
        _, record, frames = job.parts[0]
        return Value(value, value.round, (frames[record.frame]._replace(number=HALF),))

    def _past(self, value: Value, round_: int) -> Value:
        """Return the value of a slice after a round: it is kept for one round longer."""
        if value.round <= round_:  # the later rounds have failed
            return value
        self.job.past += 1
        self.job.check(value.before is not None and value.before.round <= round_, f"{round_} is not kept")
        assert value.before is not None
        return value.before

    def _note_told(self, batch: m.Batch, request: m.Record, failure: m.Failure) -> None:
        """Note that a failed round is reported, by one request, however often that is answered."""
        if failure.error != "UpdaterError" or self.job.plan.mode != "sync":
            return
        at = (batch.incarnation, batch.store, request.slice)
        round_ = int(failure.text.split()[-1])
        asked = (self.name, request.sequence)
        by = self.job.told.setdefault((*at, round_), asked)
        self.job.check(by == asked, f"round {round_} of {at} has failed, and is told twice")
        self.job.untold[at].discard(round_)

    def _check_told(self, batch: m.Batch, request: m.Record) -> None:
        """A worker that gets a value has been notified of all its failed rounds before."""
        at = (batch.incarnation, batch.store, request.slice)
        left = {round_ for round_ in self.job.untold.get(at, ()) if round_ <= request.round}
        excused = self.job.restarted or request.kind == m.RecordKind.FETCH_STATE
        self.job.check(excused or not left, f"rounds {left} of {at} have failed, and it reads a later one")


class Store:
    """One store of a worker process: its machine, and the program that uses it."""

    def __init__(self, host: WorkerHost, ordinal: int, script: list[tuple[Any, ...]]) -> None:
        plan = host.job.plan
        self.host = host
        self.job = host.job
        self.ordinal = ordinal
        self.script = script
        self.step_ = 0
        self.busy: dict[Hashable, tuple[str, ...]] = {}  # keys of operations under way
        self.calls: dict[Hashable, Callable[[e.OperationDone], None]] = {}
        self.parts: dict[Hashable, list[e.SliceRequest]] = {}
        self.sent: dict[int, list[Payload]] = {}  # pushes, by slice
        self.entries: dict[str, m.KeyEntry] = {}
        self.names = 0
        self.barriers = 0
        self.has_optimizer = False
        self.made = 0  # calls that have pushed
        self.resting = False
        self.over = False
        self.error: m.Failure | None = None
        self.epoch = 0
        self.pushed = PushCalls()
        self.shrunk: set[int] = set()  # workers that rounds no longer wait for, as this worker knows
        self.rounds: dict[Hashable, dict[int, int]] = {}  # of received values, by operation and part
        self.recorded: dict[Hashable, tuple[Hashable, bool]] = {}  # call of an operation; whether it ends it
        self.known: set[Hashable] = set()  # operations that were started when a loss was known
        self.connections: dict[int, int] = {}
        self.addresses: dict[int, str] = {}
        rank = host.asked
        hello = m.HelloRequest(
            "worker",
            rank,
            host.incarnation,
            host.name,
            JOB,
            m.PROTOCOL,
            group="default",
            ordinal=ordinal,
            options={"mode": plan.mode, "on_peer_loss": plan.on_peer_loss, "slice_bytes": 4096},
        )
        options = WorkerOptions(plan.credit, plan.batch, RESEND, LETTER, DEAD, start=10 * DEAD)
        self.machine = WorkerMachine(hello, options)

    @property
    def leaves(self) -> bool:
        """Whether it has closed the store, or does."""
        return self.over or (self.step_ > 0 and self.script[self.step_ - 1] == ("close",))

    @property
    def number(self) -> int:
        """The store's number."""
        return self.machine.member.welcome.store if self.machine.member.welcome else -1

    def take(self, event: e.Event) -> None:
        """Step, and carry out the resulting actions."""
        actions = self.machine.step(event, self.host.now)
        for action in actions:
            kind = type(action)
            if kind is e.SendMessage:
                self._send(action)
            elif kind is e.SliceReceived:
                self._got(action)
            elif kind is e.ReadsCopied:
                self.take(action)
            elif kind is e.OperationDone:
                self.busy.pop(action.op, None)
                call, ends = self.recorded.get(action.op, (None, False))
                if ends or action.error is not None:
                    self.job.recorded.returned(self, call, action.error, self.job.now)
                self.calls.pop(action.op)(action)
            elif kind is e.ConnectServer:
                self.connections[action.server] = action.incarnation
                self.addresses[action.server] = action.address
            elif kind is m.WelcomeNotice:
                self.host.rank = action.rank
                self.epoch = action.epoch
                self.go()
            elif kind is m.ViewNotice:
                self.job.check(action.epoch > self.epoch, "an epoch went back")
                self.epoch = action.epoch
                self._check_begin(action)
            elif kind is e.RoundsShrunk:
                self._check_shrunk(action)
            elif kind is e.ProcessFailed:
                if action.failure.role == "scheduler":
                    self.host.lose_scheduler(action.failure)
                self.fail(action.failure)

    def receive(self, where: Any, message: Any) -> None:
        """Take a message from the scheduler, or from a server if it is the one connected to."""
        if where[0] in ("scheduler", e.ECHO):
            self.take(e.MessageReceived(where[0], message))
        elif self.connections.get(where[0]) == where[1]:
            if isinstance(message, m.Batch):
                self._acknowledge(where[0], message)
            self.take(e.MessageReceived(where[0], message))
            if isinstance(message, m.AttachReply):
                who = (self.host.rank, self.host.incarnation, self.number)
                bases = self.machine._servers[where[0]].requests.first_rounds
                self.job.bases.update({(*who, slice_): base for slice_, base in bases.items()})

    def _send(self, action: e.SendMessage) -> None:
        job = self.job
        if action.peer == "scheduler":
            job.send(self.host.name, "scheduler", (self.host.name, self.ordinal), action.message)
        elif action.peer == e.ECHO:
            job.echo(self.host.name, (e.ECHO, self.ordinal), action.message)
        else:
            address = self.addresses[action.peer]
            job.send(self.host.name, address, (self.host.name, self.ordinal), action.message)

    # ------------------------------------------------------------------------------------------ program

    def go(self) -> None:
        """Start as many steps of the program as may run at once."""
        while not self.over and self.step_ < len(self.script):
            step = self.script[self.step_]
            wanted = step[1] if step[0] in ("init", "push", "pull", "pushpull", "look") else None
            taken = {key for keys in self.busy.values() for key in keys}
            if self.busy and (wanted is None or taken & {*wanted, "*"} or len(self.busy) > 2):
                return
            self.step_ += 1
            getattr(self, "_" + step[0])(*step[1:])

    def _name(self, keys: tuple[str, ...], then: Callable[[e.OperationDone], None]) -> int:
        self.names += 1
        self.busy[self.names] = keys
        self.calls[self.names] = then
        return self.names

    def _next(self, done: e.OperationDone) -> None:
        if done.error is not None:
            self.fail(done.error)
        else:
            self.go()

    def ask(self, message: Any, then: Callable[[e.OperationDone], None] | None = None) -> None:
        """Ask the scheduler."""
        self.take(e.SchedulerRequest(self._name(("*",), then or self._next), message))

    def submit(
        self, kind: m.RecordKind, keys: tuple[str, ...], then: Callable[[e.OperationDone], None]
    ) -> None:
        """Ask the servers, for all slices of these keys."""
        parts = [self._part(kind, one) for key in keys for one in self.entries[key].slices]
        if kind in (m.RecordKind.PUSH, m.RecordKind.PUSHPULL):
            self.made += 1
            self.pushed.note_call({key: len(self.sent[self.entries[key].slices[0].id]) for key in keys})
        verb = (
            kind.name.lower() if kind in (m.RecordKind.PUSH, m.RecordKind.PUSHPULL, m.RecordKind.PULL) else ""
        )
        self.send_parts(keys, parts, then, verb)

    def _step(self, keys: tuple[str, ...], verb: str) -> None:
        """Push in one call, and do nothing else until all servers have it."""
        parts = [
            self._part(m.RecordKind[verb.upper()], one) for key in keys for one in self.entries[key].slices
        ]
        self.made += 1
        self.pushed.note_call({key: len(self.sent[self.entries[key].slices[0].id]) for key in keys})
        self.send_parts(("*",), parts, self._next, "step")

    def send_parts(
        self,
        keys: tuple[str, ...],
        parts: list[e.SliceRequest],
        then: Callable[[e.OperationDone], None],
        verb: str = "",
        of: Hashable = None,
    ) -> int:
        """Ask the servers, in a call of its own, or as a part of one that ends later."""
        name = self._name(keys, then)
        self.parts[name] = parts
        self.rounds[name] = {}
        if self.error is not None:
            self.known.add(name)
        if verb:
            self._record(name, verb, parts)
            self.recorded[name] = (name, True)
        elif of is not None:
            self.recorded[name] = (of, False)
        self.take(e.SubmitRequests(name, parts, self.job.rng.randint(-1, 1)))
        return name

    def _record(self, name: Hashable, verb: str, parts: list[e.SliceRequest]) -> None:
        places = self.places
        keys = tuple(dict.fromkeys(places[part.record.slice][0] for part in parts))
        pushes = [part.payload for part in parts if isinstance(part.payload, Payload)]
        pushed = {places[one.slice][0]: one.number for one in pushes}
        bad = frozenset(places[one.slice] for one in pushes if one.bad)
        self.job.recorded.called(self, name, verb, keys, pushed, bad)

    @property
    def places(self) -> dict[int, tuple[str, int]]:
        """Key of each slice, and which of its slices it is."""
        return {
            one.id: (key, at) for key, entry in self.entries.items() for at, one in enumerate(entry.slices)
        }

    def _part(self, kind: m.RecordKind, one: m.Slice) -> e.SliceRequest:
        if kind not in (m.RecordKind.PUSH, m.RecordKind.PUSHPULL):
            carries = kind in (m.RecordKind.INIT, m.RecordKind.ASSIGN)
            place = m.PayloadLocation.FRAME if carries else m.PayloadLocation.NONE
            return e.SliceRequest(
                one.server, m.Record(kind, one.id, 0, place=place, nbytes=int(carries)), "value"
            )
        sent = self.sent.setdefault(one.id, [])
        bad = self.job.plan.faults.bad and self.job.rng.random() < 0.05
        payload = Payload(self.host.rank, self.host.incarnation, self.number, one.id, len(sent) + 1, bad)
        sent.append(payload)
        big = self.job.rng.choice((1, 5000))
        return e.SliceRequest(
            one.server, m.Record(kind, one.id, 0, place=m.PayloadLocation.FRAME, nbytes=big), payload
        )

    def _init(self, keys: tuple[str, ...]) -> None:
        sizes = dict(self.job.plan.keys)
        specs = tuple(m.KeySpec(key, (1024 * sizes[key],), "float32") for key in keys)
        self.ask(m.CreateKeysRequest(0, 0, specs), self._placed)

    def _placed(self, done: e.OperationDone) -> None:
        if done.error is not None or done.answer is None:
            self._next(done)
            return
        self.entries.update({entry.spec.key: entry for entry in done.answer.entries})
        empty = tuple(entry.spec.key for entry in done.answer.entries if not entry.ready)
        if empty:
            self.submit(m.RecordKind.INIT, empty, lambda done: self._filled(empty, done))
        else:
            self.go()

    def _filled(self, keys: tuple[str, ...], done: e.OperationDone) -> None:
        if done.error is not None:
            self.fail(done.error)
        else:
            self.ask(m.KeysReadyRequest(0, 0, keys))

    def _barrier(self) -> None:
        self.barriers += 1
        self.job.arrived[self.host.name, self.ordinal] = self.barriers
        self.ask(m.BarrierRequest(0, 0, self.barriers), self._opened)

    def _opened(self, done: e.OperationDone) -> None:
        if done.error is None:
            self.job.check_barrier(self)
        self._next(done)

    def _configure(self, text: str, at: int) -> None:
        """Change a setting; of an optimizer, which it sets before the first time."""
        if self.has_optimizer:
            self._change(text, at, None)
        else:
            self.has_optimizer = True
            self._ask_for("optimizer", OPTIMIZER, lambda done: self._change(text, at, done))

    def _change(self, text: str, at: int, before: e.OperationDone | None) -> None:
        if before is not None and before.error is not None:
            self.fail(before.error)
        else:
            changes = f'{{"wd": {ord(text)}.0}}'
            self._ask_for("configure", changes, lambda done: self._configured(at, done))

    def _ask_for(self, kind: str, text: str, then: Callable[[e.OperationDone], None]) -> None:
        self.ask(m.SettingsRequest(0, 0, kind, 1, text, self.made + self.barriers), then)

    def _configured(self, at: int, done: e.OperationDone) -> None:
        if done.error is None and done.answer is not None and not self.job.plan.passes:
            found = done.answer.version, done.answer.epoch, done.answer.text
            first = self.job.settings.setdefault((self.ordinal, at), found)
            self.job.check(first == found, f"step {at} has settings {first} and others, {found}")
            place = self.made + self.barriers
            self.job.check(found[0] == place + 1, f"step {at} at {place} has the settings of {found[0]}")
        self._next(done)

    def _push(self, keys: tuple[str, ...]) -> None:
        self.submit(m.RecordKind.PUSH, keys, self._next)

    def _pull(self, keys: tuple[str, ...]) -> None:
        if self.job.plan.mode == "sync" and (self.resting or self.machine.member.rejoining):
            parts = [self._part(m.RecordKind.PULL, one) for key in keys for one in self.entries[key].slices]
            self._read_together(keys, parts, {}, self.job.now + TOGETHER)
        else:
            self.submit(m.RecordKind.PULL, keys, self._next)

    # ------------------------------------------------------------------------------ reads of one round

    def _read_together(
        self,
        keys: tuple[str, ...],
        parts: list[e.SliceRequest],
        rounds: dict[int, int],
        end: float,
        call: Hashable = None,
    ) -> None:
        """Read, and read again the slices that are behind, while other processes continue."""
        if call is None:
            call = ("read", self.names)
            self._record(call, "pull", parts)
        name = self.send_parts(keys, parts, lambda done: self._came(keys, parts, rounds, end, done), of=call)
        self.job.at(end, self._give_up, name)

    def _give_up(self, name: int) -> None:
        """Name the rounds, and continue: the worker that should have pushed the rest is lost."""
        if name in self.busy and self.host.alive:
            self.job.named += 1
            self.job.recorded.dropped(self, self.recorded[name][0])
            self.calls[name] = lambda done: None
            del self.busy[name]
            self.go()

    def _came(
        self,
        keys: tuple[str, ...],
        parts: list[e.SliceRequest],
        rounds: dict[int, int],
        end: float,
        done: e.OperationDone,
    ) -> None:
        if done.error is not None:
            self.fail(done.error)
            return
        rounds.update({parts[at].record.slice: round_ for at, round_ in self.rounds[done.op].items()})
        again: list[e.SliceRequest] = []
        for key in keys:
            slices = self.entries[key].slices
            there = [self._own(one, rounds[one.id]) for one in slices]
            late = [self._part(m.RecordKind.PULL, slices[at]) for at in slices_behind(there)]
            again += [one._replace(record=one.record._replace(round=max(there))) for one in late]
        if again:
            self._read_together(keys, again, rounds, end, self.recorded[done.op][0])
            return
        self.job.recorded.returned(self, self.recorded[done.op][0], None, self.job.now)
        self._check_one_round(keys, rounds)
        self.go()

    def _own(self, one: m.Slice, round_: int) -> int:
        return round_ - self.machine.base_round(one.server, one.id)

    def _check_one_round(self, keys: Iterable[str], rounds: dict[int, int]) -> None:
        for key in keys:
            found = {self._own(one, rounds[one.id]) for one in self.entries[key].slices if one.id in rounds}
            self.job.check(len(found) == 1, f"{self} read {key} of rounds {found}")
            self.job.together += 1

    def _reread(self) -> None:
        """After a loss: learn where all slices are, then read each key as of the last whole round."""
        view = self.machine.member.view
        if view is None or not view.broken:
            if self.host.alive and not self.over:
                self.job.at(self.job.now + 0.1, self._reread)
            return
        lost = {one.rank for one in view.losses if one.role == "server"}
        here = {
            key: entry for key, entry in self.entries.items() if not lost & {s.server for s in entry.slices}
        }
        parts = [self._part(m.RecordKind.LAST_ROUND, one) for entry in here.values() for one in entry.slices]
        self.send_parts(("*",), parts, lambda done: self._know(tuple(here), done))

    def _know(self, keys: tuple[str, ...], done: e.OperationDone) -> None:
        slices = {key: self.entries[key].slices for key in keys}
        if done.error is not None:  # a key without a value, or another loss
            self._close()
            return
        last = {
            one.id: self.machine.complete_pushes(one.server, one.id) for key in keys for one in slices[key]
        }
        rounds = {key: [last[one.id] for one in slices[key]] for key in keys}
        parts, wanted = [], {}
        for key in keys:
            whole = self.pushed.whole_round(key, rounds)
            self.job.check(whole <= min(rounds[key]), f"round {whole} of {key} is not whole: {rounds}")
            if max(rounds[key]) > whole + 1:
                self.job.check(not self.job.plan.faults.steps, f"{key} cannot go back to {whole}: {rounds}")
                self.job.named += 1
                continue
            for one in slices[key]:
                part = self._part(m.RecordKind.PULL, one)
                if last[one.id] > whole:
                    part = part._replace(record=part.record._replace(round=whole, flags=m.OF_ROUND))
                parts.append(part)
                wanted[one.id] = whole
        self.send_parts(("*",), parts, lambda done: self._known(keys, wanted, done), "pull")

    def _known(self, keys: tuple[str, ...], wanted: dict[int, int], done: e.OperationDone) -> None:
        if done.error is None:
            parts = self.parts[done.op]
            rounds = {parts[at].record.slice: round_ for at, round_ in self.rounds[done.op].items()}
            for key in keys:
                for one in self.entries[key].slices:
                    there = self._own(one, rounds[one.id]) if one.id in rounds else wanted.get(one.id)
                    told = f"{self} read round {there} of {key}, not {wanted.get(one.id)}"
                    self.job.check(there == wanted.get(one.id), told)
            self.job.reread += 1
        else:
            self.job.recorded.dropped(self, done.op)
        self._close()

    def _pushpull(self, keys: tuple[str, ...]) -> None:
        self.submit(m.RecordKind.PUSHPULL, keys, self._next)

    def _join(self) -> None:
        self.resting = True
        self._record_word("join")
        self.ask(m.JoinRequest(0, 0))

    def _pause(self) -> None:
        """Compute for so long that another worker is found lost."""
        self.busy["pause"] = ("*",)
        self.job.at(self.job.now + DEAD + 1.0, self._resume)

    def _resume(self) -> None:
        self.busy.pop("pause", None)
        if self.host.alive:
            self.go()

    def _nap(self, seconds: float) -> None:
        """Compute for a moment."""
        self.busy["nap"] = ("*",)
        self.job.at(self.job.now + seconds, self._wake)

    def _wake(self) -> None:
        self.busy.pop("nap", None)
        if self.host.alive:
            self.go()

    def _look(self, keys: tuple[str, ...]) -> None:
        self._pull(keys)

    def _linger(self) -> None:
        """Stay, resting, until all other workers are through: they must not wait for this one."""
        if not self.host.alive:
            return
        others = [one.stores[self.ordinal] for one in self.job.workers if one.alive and one is not self.host]
        if self.over or all(one.over or one.resting for one in others):
            self.busy.pop("linger", None)
            self.go()
        else:
            self.busy["linger"] = ("*",)
            self.job.at(self.job.now + 0.3, self._linger)

    def _record_word(self, verb: str, failure: m.Failure | None = None) -> None:
        self.job.recorded.called(self, verb, verb, (), {}, frozenset())
        self.job.recorded.returned(self, verb, failure, self.job.now)

    def _close(self) -> None:
        self._record_word("close")
        self.ask(m.LeaveNotice(0), self._closed)

    def _closed(self, done: e.OperationDone) -> None:
        self.over = True
        if done.error is not None:
            self.fail(done.error)
        self.host.finish()

    def fail(self, failure: m.Failure) -> None:
        """Note an error after which the program cannot continue; a bad gradient it can."""
        if failure.error == "UpdaterError" and self.job.plan.faults.bad:
            self.go()
            return
        if self.error is None:
            self.error = failure
            if self.number >= 0:
                self._record_word("told", failure)
            self.job.errors.append((self, failure))
        if not self.over:
            self.over = True
            self.calls = {name: lambda done: None for name in self.calls}
            if self.machine.failure is None:
                self.over = False
                self.script = [("close",)]
                self.step_ = 0
                reads = self.job.plan.mode == "sync" and failure.error == "PeerLostError"
                self.job.at(self.job.now + 0.01, self._close_after, reads)
            else:
                self.host.finish()

    def _close_after(self, reads: bool) -> None:
        """Read the remaining values, or close with operations in flight, as an error in a `with` does."""
        if self.host.alive and self.machine.failure is None and self.step_ == 0:
            self.step_ = 1
            if reads and self.job.rng.random() < 0.8:
                self._reread()
            else:
                self._close()

    # ------------------------------------------------------------------------------------------- checks

    def _acknowledge(self, server: int, batch: m.Batch) -> None:
        """Note which pushes are answered now, and which are refused."""
        requests = self.machine._servers[server].requests
        for record in batch.records:
            request = requests._open.get(record.sequence)
            if request is None or not isinstance(request.payload, Payload):
                continue
            if record.kind in (m.RecordKind.DONE, m.RecordKind.VALUE):
                self.job.acknowledged[request.payload] = self.job.now
            elif record.kind == m.RecordKind.FAILED and failure_of(record, batch).error == "PeerLostError":
                self.job.failed.add(request.payload)  # this worker may not have heard of the loss

    def _check_shrunk(self, action: e.RoundsShrunk) -> None:
        """Who is missing has left on its own, without a word, after the round that is named."""
        ranked = [one.stores[self.ordinal] for one in self.job.incarnations if one.rank == action.rank]
        left = [one for one in ranked if one.leaves and not one.resting]
        last = [len(one.sent.get(action.slice, ())) + one.base(action.slice) for one in left]
        told, check = f"{self} is told that worker {action.rank} left after {action.round}", self.job.check
        check(
            action.round + self.base(action.slice) in last and self.job.plan.mode == "sync", f"{told}: {last}"
        )
        check(action.rank not in self.shrunk, f"{told}, twice")
        self.shrunk.add(action.rank)
        self.job.shrunk += 1

    def base(self, slice_: int) -> int:
        """Round after which this worker's own begin."""
        return self.job.bases.get((self.host.rank, self.host.incarnation, self.number, slice_), 0)

    def _check_begin(self, view: m.ViewNotice) -> None:
        """A rejoined worker begins after the same pass in all slices, unless it met no other worker."""
        if view.begun != self.host.rank:
            return
        rounds = {round_ for _, round_ in view.bases}
        self.job.met = self.job.met and bool(rounds)
        self.job.begun += len(rounds) > 0
        told = f"{self} begins after different passes: {view.bases}"
        self.job.check(len(rounds) <= 1 or not self.job.met, told)

    def _got(self, action: e.SliceReceived) -> None:
        if action.op not in self.calls:
            return
        part = self.parts[action.op][action.index]
        self.rounds[action.op][action.index] = action.record.round
        value = action.frames[action.record.frame]
        slice_ = part.record.slice
        call = self.recorded[action.op][0]
        if self.machine.member.is_broken and call not in self.known:
            self.job.recorded.unread(self, call)
        else:
            self.job.recorded.came(self, call, *self.places[slice_], value)
        if self.job.plan.shared and self.job.rng.random() < 0.1:
            return
        sent = self.sent.get(slice_, [])
        mine = {one for one in value.payloads() if one[:2] == (self.host.rank, self.host.incarnation)}
        wanted = {one for one in sent if one not in self.job.failed}
        check = self.job.check
        if self.job.plan.mode == "sync" and not self.job.restarted:
            seen = self.job.seen.setdefault((self.number, slice_, value.round), value)
            check(seen is value, f"slice {slice_} has two values of round {value.round}")
        excused = self.job.restarted or self.machine.member.is_broken
        told = f"slice {slice_}"
        if not excused:
            check(mine == wanted, f"{self} pulled {told} with {sorted(mine)} and not {sorted(wanted)}")
        counts = self.job.plan.mode == "sync" and not self.resting and not self.machine.member.rejoining
        if counts and not excused and not self.job.plan.faults.bad:
            base = self.job.bases.get((self.host.rank, self.host.incarnation, self.number, slice_), 0)
            promised = len(sent) + base
            check(value.round == promised, f"{self} pulled round {value.round}, not {promised}, of {told}")

    def __str__(self) -> str:
        return f"{self.host.name}/{self.ordinal} (rank {self.host.rank})"


class WorkerHost(Host):
    """A worker's process, with one or two stores."""

    def __init__(self, job: Job, asked: int, incarnation: int, name: str, cut: bool = False) -> None:
        super().__init__(job, name)
        self.asked = asked
        self.rank = asked
        self.incarnation = incarnation
        self.stores = [
            Store(self, at, job.program(self, script, cut)) for at, script in enumerate(job.plan.script)
        ]
        self.saying_bye = False
        self.killed = False
        self.without_scheduler: m.Failure | None = None
        job.incarnations.append(self)

    def start(self) -> None:
        """Create the stores."""
        for store in self.stores:
            store.take(e.StartEvent())

    def tick(self) -> None:
        for store in self.stores:
            lost = self.without_scheduler
            store.take(e.TickEvent() if lost is None else e.SchedulerLost(lost))

    def lose_scheduler(self, failure: m.Failure) -> None:
        """Leave the job; a scheduler that continues or restarts takes the worker for lost."""
        plan = self.job.plan
        returns = not plan.faults.kill_scheduler or plan.faults.return_scheduler
        if self.without_scheduler is None and returns and plan.on_peer_loss == "continue":
            self.job.happened.append(("stopped", self, self.job.now, math.inf))
        self.without_scheduler = failure

    def receive(self, where: Any, message: Any) -> None:
        """Take a message to one of its stores."""
        self.stores[where[-1]].receive(where, message)

    def finish(self) -> None:
        """Once all stores are through, say so and end."""
        if self.saying_bye or not all(store.over for store in self.stores):
            return
        self.saying_bye = True
        able = [
            store for store in self.stores if store.machine.failure is None and store.machine.member.welcome
        ]
        if not able:
            self.die()
            return
        store = able[0]
        store.calls["bye"] = lambda done: self.die()
        store.take(e.SchedulerRequest("bye", m.ProcessEndNotice(self.name)))


class Job:
    """The world."""

    def __init__(self, seed: int, faults: Faults | None = None) -> None:
        self.rng = random.Random(seed)
        self.plan = Plan(self.rng, faults)
        self.points = Points(seed, self.plan.faults.points)
        self.now = 0.0
        self.hosts: dict[str, Host] = {}
        self.recorded = SimulatedCalls(self.plan.workers)
        self.happened: list[tuple[str, Host, float, float]] = []
        self.errors: list[tuple[Store, m.Failure]] = []
        self.bases: dict[Any, int] = {}
        self.applied: dict[Payload, float] = {}
        self.failed: set[Payload] = set()
        self.untold: dict[tuple[int, int, int], set[int]] = {}  # failed rounds, by worker, store and slice
        self.told: dict[tuple[int, int, int, int], tuple[str, int]] = {}  # by which request
        self.acknowledged: dict[Payload, float] = {}
        self.arrived: dict[Any, int] = {}
        self.settings: dict[Any, tuple[int, int, str]] = {}
        self.gone: dict[tuple[int, int], Value] = {}
        self.snapshots: dict[int, Any] = {}
        self.saved: dict[int, float] = {}
        self.seen: dict[tuple[int, int, int], Value] = {}  # values that were read, by store, slice and round
        self.together = 0  # keys that were read as of one round during the rounds of others
        self.reread = 0  # times that all keys were read after a loss
        self.shrunk = 0  # notifications of workers that rounds no longer wait for
        self.past = 0  # slices that were read as they were a round before
        self.named = 0  # times that the rounds of a key were named instead
        self.begun = 0  # rejoined workers that met others
        self.met = True  # each that began has met others, and learned from them where they are
        self.restarted = False
        self.crashed: dict[int, tuple[float, float]] = {}
        self.last_fault = 0.0
        self.over = False
        self.incarnations: list[WorkerHost] = []
        self.ahead = f"worker{self.plan.workers - 1}"  # the worker to kill, where `Faults.ahead`
        self.straggling = 0.7 + 3 * STALL * self.plan.faults.points
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0
        self._cut: list[tuple[float, float, str]] = []
        self.scheduler = SchedulerHost(self)
        self.servers = [
            ServerHost(self, rank, rank if self.plan.given_ranks else -1, 1)
            for rank in range(self.plan.servers)
        ]
        self.workers = [
            WorkerHost(self, rank if self.plan.given_ranks else -1, 100 + rank, f"worker{rank}")
            for rank in range(self.plan.workers)
        ]
        for worker in self.workers:
            self.at(self.rng.random() * 0.1, worker.start)
        self._draw_faults()
        self.at(TICK, self._tick)

    def check(self, good: bool, text: str) -> None:
        """Stop at the first thing that must not be."""
        if not good:
            raise Broken(f"at {self.now:.3f}: {text}")

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call at some time."""
        self._count += 1
        heapq.heappush(self._events, (when, self._count, call, arguments))

    def program(self, host: WorkerHost, script: list[tuple[Any, ...]], cut: bool) -> list[tuple[Any, ...]]:
        """One worker's way through the script: which verbs, where it stops, where it starts if it is late."""
        rng = self.rng
        steps = list(script)
        if self.plan.faults.ahead and not cut:
            return self._apart(host, steps)
        if cut:
            starts = [at for at, step in enumerate(steps) if step[0] == "pass" or not self.plan.passes]
            steps = steps[:1] + steps[max(1, rng.choice([*starts, len(steps)])) :]
        elif rng.random() < 0.2:
            looks = [("look", tuple(key for key, _ in self.plan.keys))] * rng.choice((0, 0, 2))
            linger = [("linger",)] * rng.randint(0, 1)
            steps = [*steps[: rng.randint(1, len(steps))], ("join",), *looks, *linger]
        elif rng.random() < 0.05 and not self.plan.passes:
            return [*self._calls(steps[: rng.randint(1, len(steps))]), ("close",)]  # without a word
        program = self._calls(steps)
        if rng.random() < 0.5:
            program.append(("pull", tuple(key for key, _ in self.plan.keys)))
        if self.plan.faults.kill_worker and rng.random() < 0.3:
            program.insert(rng.randint(1, len(program)), ("pause",))
        return [*program, ("close",)]

    def _apart(self, host: WorkerHost, steps: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Return the steps of the worker that pushes ahead and is killed; others compute long, or rest."""
        rng = self.rng
        if host.name == self.ahead:
            push = ("step", "push") if self.plan.faults.steps else ("push",)
            rounds = [(push[0], step[1], *push[1:]) if step[0] == "round" else step for step in steps]
            return [step for step in rounds if step[0] != "pass"]
        if rng.random() < 0.2:
            look = ("look", tuple(key for key, _ in self.plan.keys))
            return [steps[0], ("join",), look, ("nap", rng.random() * APART), look, ("close",)]
        program = self._calls(steps)
        program.insert(rng.randint(1, len(program)), ("nap", rng.random() * APART))
        return [*program, ("pull", tuple(key for key, _ in self.plan.keys)), ("close",)]

    def _calls(self, steps: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
        """Verbs for the steps of a script."""
        rng = self.rng
        program: list[tuple[Any, ...]] = []
        for step in steps:
            if self.plan.passes and rng.random() < 0.1:
                program.append(("nap", rng.random() * 0.5))
            if step[0] == "pass":
                continue
            if step[0] != "round":
                program.append(step)
                continue
            verb = rng.choice(("pushpull", "push", "push pull"))
            if self.plan.faults.steps:
                first, *rest = verb.split()
                program += [("step", step[1], first), *((word, step[1]) for word in rest)]
            else:
                program.extend((word, step[1]) for word in verb.split())
            if rng.random() < 0.2:
                program.append(("pull", step[1]))
        return program

    # ------------------------------------------------------------------------------------------ network

    def send(self, source: str, target: str, where: Any, message: Any) -> None:
        """Send a message, which may arrive late, twice or never."""
        rng, faults = self.rng, self.plan.faults
        # Heartbeats are sent so often that some get through; here one has to.
        sign = type(message) is m.ReliableMessage and type(message.body) in (m.PingRequest, m.PingReply)
        for _ in range(1 + (rng.random() < faults.double)):
            if rng.random() < faults.drop and not sign:
                continue
            delay = 0.001 + rng.random() * 0.01
            if rng.random() < faults.late:
                delay += rng.random() * 0.6
            told = type(message) is m.ReliableMessage and type(message.body) is m.ViewNotice
            if told and target.startswith("worker"):
                delay += faults.tardy
            self.at(self.now + delay, self._deliver, source, target, where, message)

    def echo(self, source: str, where: Any, message: Any) -> None:
        """Send a message to the scheduler's echo, which is there as long as its process is not stopped."""
        self.at(self.now + self.rng.random() * 0.01, self._echoed, source, where, message)

    def _echoed(self, source: str, where: Any, message: Any) -> None:
        there = self.scheduler.alive and self.now >= self.scheduler.resumes
        if there and not self.cut(source, "scheduler"):
            self._deliver("scheduler", source, where, message)

    def _deliver(self, source: str, target: str, where: Any, message: Any) -> None:
        host = self.hosts.get(target)
        if host is None or not host.alive or self.cut(source, target):
            return
        resumes = max(host.resumes, host.engaged)
        if self.now < resumes:
            self.at(resumes + self.rng.random() * 0.01, self._deliver, source, target, where, message)
        else:
            host.receive(where, message)

    def cut(self, source: str, target: str) -> bool:
        """Whether the network separates one of the two from all processes now."""
        return bool(self._cut) and any(
            start <= self.now < stop and name in (source, target) for start, stop, name in self._cut
        )

    def _tick(self) -> None:
        for host in list(self.hosts.values()):
            if not host.alive or self.now < host.resumes:
                continue
            listens = self.scheduler.alive and self.now >= max(self.scheduler.resumes, self.scheduler.engaged)
            host.buggify()
            listens = listens and not host.unheard
            if host is not self.scheduler and listens and not self.cut(host.name, "scheduler"):
                self.scheduler.take(e.HeartbeatReceived(host.name))
            if self.now >= host.engaged and not self.points.fires(host.name, "tick", 0.3):
                host.tick()
        self.over = not any(host.alive for host in self.hosts.values())
        self.at(self.now + TICK, self._tick)

    # ------------------------------------------------------------------------------------------- faults

    def _draw_faults(self) -> None:
        rng, faults = self.rng, self.plan.faults
        when = rng.random() ** 2 * 1.5
        self.last_fault = when
        if faults.kill_worker:
            victim = int(self.ahead[6:]) if faults.ahead else rng.randrange(self.plan.workers)
            self.at(when, self._kill_worker, victim)
        for _ in range(faults.kill_more):
            self.at(when + rng.random() * 6.0, self._kill_one_more)
        if faults.kill_server and faults.return_server and (faults.mute or rng.random() < 0.5):
            self.servers[rng.randrange(self.plan.servers)].saves = rng.choice((2, 3, 4))
        elif faults.kill_server:
            when += rng.random() * 5.0 * faults.kill_worker
            self.at(when, self.kill_server, rng.randrange(self.plan.servers))
        if faults.kill_scheduler:
            self.at(when, self.kill_scheduler)
            self.scheduler.returns = rng.randint(0, 6)
        name = rng.choice([one for one in self.hosts if one != "scheduler" or faults.stop])
        if faults.cut or faults.stop:
            self.at(when, self._hinder, name)
        if faults.busy:
            self.at(when, self._keep_busy, rng.choice(["scheduler", *self.hosts]))

    def _kill_worker(self, at: int) -> None:
        worker = self.workers[at]
        if not worker.alive or worker.saying_bye:
            return
        if not self._known(worker):
            self.at(self.now + 0.1, self._kill_worker, at)
            return
        self.last_fault = self.now
        worker.die()
        worker.killed = True
        self.happened.append(("killed", worker, self.now, math.inf))
        if self.plan.faults.return_worker:
            delay = self.rng.choice((0.1, DEAD + 1.0))
            self.last_fault = self.now + delay
            self.at(self.now + delay, self._return_worker, at)

    def _kill_one_more(self) -> None:
        """Kill another worker, or a rejoined one; one worker has to continue."""
        there = [at for at, one in enumerate(self.workers) if one.alive and not one.saying_bye]
        if len(there) > 1:
            self._kill_worker(self.rng.choice(there))

    def _known(self, host: Host) -> bool:
        """Whether the scheduler knows a process: else its loss cannot be noticed."""
        return host.name in self.scheduler.machine._processes

    def _return_worker(self, at: int) -> None:
        old = self.workers[at]
        name = f"{old.name}again"
        known = self.scheduler.machine._processes
        asked = known[old.name].rank
        others = [known[one.name].rank for one in self.workers if one.alive and one.name in known]
        if not self.plan.given_ranks and asked in others:
            asked = -1  # it was lost before the job was complete, and another got its rank
        new = self.workers[at] = WorkerHost(self, asked, old.incarnation + 100, name, cut=True)
        new.start()

    def kill_server(self, at: int) -> None:
        """Let a server die, and restart if it may."""
        server = self.servers[at]
        if not server.alive:
            return
        # A server lost before all servers have started is waited for: another may be started in its place.
        if not self.scheduler.machine._assignment.servers.welcomed or server.machine.rank < 0:
            self.at(self.now + 0.1, self.kill_server, at)
            return
        self.last_fault = self.now
        server.die()
        self.happened.append(("killed", server, self.now, math.inf))
        if self.plan.faults.return_server:
            self.restarted = True
            delay = self.rng.choice((0.1, 1.0, DEAD + 1.0))
            self.last_fault = self.now + delay
            rank = server.machine.rank
            self.crashed[rank] = (self.saved.get(rank, -1.0), self.now)
            self.at(self.now + delay, self._return_server, at)

    def _return_server(self, at: int) -> None:
        old = self.servers[at]
        rank = old.machine.rank
        self.servers[at] = ServerHost(self, at, rank, old.incarnation + 1, self.snapshots.get(rank))

    def kill_scheduler(self) -> None:
        """Let the scheduler die, and restart if it may."""
        if not self.scheduler.alive:
            return
        self.scheduler.die()
        if not self.plan.faults.return_scheduler:
            self.happened.append(("killed", self.scheduler, self.now, math.inf))
        else:
            self.scheduler.returns -= 1
            delay = self.rng.choice((0.05, 1.0, DEAD + 2.0))
            self.happened.append(("paused", self.scheduler, self.now, self.now + delay))
            self.last_fault = max(self.last_fault, self.now + delay)
            self.at(self.now + delay, self.scheduler.start)

    def _keep_busy(self, name: str) -> None:
        """Have a process take no step for some time, once all know where the echo is."""
        stores = [store.machine for worker in self.workers for store in worker.stores]
        known = [*(one._scheduler.echoes for one in stores), *(one.machine._echoes for one in self.servers)]
        if not all(known):
            self.at(self.now + 0.1, self._keep_busy, name)
            return
        self.hosts[name].engaged = self.last_fault = self.now + self.plan.faults.busy

    def _hinder(self, name: str) -> None:
        """Cut a process off, or stop it, for some time."""
        faults = self.plan.faults
        if not all(self._known(host) for host in (*self.workers, *self.servers)):
            self.at(self.now + 0.1, self._hinder, name)
            return
        self._cut.append((self.now, self.now + faults.cut, name))
        self.hosts[name].resumes = self.now + faults.stop
        self.last_fault = self.now + max(faults.cut, faults.stop)
        kind = "stopped" if faults.losing else "paused"
        self.happened.append((kind, self.hosts[name], self.now, self.last_fault))

    # ------------------------------------------------------------------------------------------------ the end

    def check_barrier(self, store: Store) -> None:
        """All members that do not rest have arrived at the barrier of this store."""
        if self.plan.faults.cut or self.plan.faults.stop:
            return
        stores = {one.number: one for one in self.scheduler.machine._stores.values()}
        for worker in self.workers:
            other = worker.stores[store.ordinal]
            lost = not worker.alive and worker.rank not in stores[store.number].members
            excused = other.resting or other.leaves or lost or worker.incarnation >= 200
            number = self.arrived.get((worker.name, store.ordinal), 0)
            self.check(excused or number >= store.barriers, f"{store} went through a barrier before {other}")

    def run(self) -> None:
        """Run until all processes have ended."""
        while not self.over:
            when, count, call, arguments = heapq.heappop(self._events)
            if count > MESSAGES:
                raise Broken(f"at {self.now:.1f}: too many messages; {self._waiting()}")
            self.now = max(self.now, when)
            call(*arguments)
            pauses = ABSENCE if self.plan.faults.points and self.plan.faults.return_scheduler else 0.0
            if self.now > self.last_fault + PATIENCE + pauses:
                raise Broken(f"at {self.now:.1f}: {self._waiting()}")
        self._check_errors()
        self._check_updates()
        self._check_histories()

    def _check_histories(self) -> None:
        for history in self.recorded.histories(self):
            found = violations(history)
            if found:
                told = "; ".join(f"{one.kind}: {one.text}" for one in found[:3])
                raise Broken(f"at {self.now:.3f}: {told}")

    def _waiting(self) -> str:
        told = []
        for worker in self.workers:
            for store in worker.stores:
                if worker.alive and not store.over:
                    pending = {op: store.machine.pending(op) for op in store.busy}
                    told.append(f"{store} at {store.script[max(0, store.step_ - 1)]} waits for {pending}")
        alive = [host.name for host in self.hosts.values() if host.alive]
        return f"alive are {alive}; " + "; ".join(told)

    def _check_errors(self) -> None:
        faults = self.plan.faults
        for store, failure in self.errors:
            late = " is over" in failure.text or " has ended" in failure.text
            late = late or (failure.role == "scheduler" and store.number < 0)
            if store.host.incarnation >= 200 and late:
                continue  # it rejoined when the others had ended
            told = f"{store}: {failure.error}: {failure.text}"
            self.check(faults.losing, told)
            self.check(failure.error in ("PeerLostError", "FencedError"), told)
            only_worker = faults.kill_worker and not (faults.cut or faults.stop)
            self.check(not only_worker or self.plan.on_peer_loss == "raise", told)
            if faults.kill_worker or faults.kill_server or faults.kill_scheduler:
                self.check(failure.error == "PeerLostError" or store.host.incarnation >= 200, told)
            returned = (
                faults.kill_server
                and faults.return_server
                and not faults.kill_worker
                and all(server.incarnation == 1 or server.machine.failure is None for server in self.servers)
            )
            self.check(not returned, told)

    def _check_updates(self) -> None:
        """Each push is applied at most once, and each acknowledged and unexcused push exactly once."""
        values = dict(self.gone)
        for server in self.servers:
            values.update(server.values)
        for at, value in values.items():
            found = value.payloads()
            self.check(len(found) == len(set(found)), f"slice {at}: a push was applied twice")
        inside = {one for value in values.values() for one in value.payloads()}
        for payload, when in self.acknowledged.items():
            value = values.get((payload.store, payload.slice))
            excused = (
                payload in inside
                or payload in self.failed
                or self._open(payload, value)
                or self._forgone(payload, when)
            )
            self.check(excused, f"{payload} was acknowledged at {when:.3f} and is lost")

    def came_back(self, store: int, incarnation: int) -> bool:
        """Whether a worker took the place of a lost one, or is not even welcomed yet."""
        worker = next(one for one in self.incarnations if one.incarnation == incarnation)
        stores = [one.machine.member.welcome for one in worker.stores if one.number == store]
        return not stores or (stores[0] is not None and stores[0].returned)

    def has_left(self, store: int, incarnation: int) -> bool:
        """Whether a worker had closed its store before it was lost: its pushes count."""
        worker = next(one for one in self.incarnations if one.incarnation == incarnation)
        return any(one.number == store and one.machine._left for one in worker.stores)

    def _open(self, payload: Payload, value: Value | None) -> bool:
        """Whether its round never was complete, since all other workers closed the store without pushing."""
        base = self.bases.get((payload.rank, payload.incarnation, payload.store, payload.slice), 0)
        return self.plan.mode == "sync" and (value is None or payload.number + base > value.round)

    def _forgone(self, payload: Payload, when: float) -> bool:
        """Whether a push may be lost: with its worker, its store, or a server's last interval."""
        worker = next(one for one in self.incarnations if one.incarnation == payload.incarnation)
        store = next(one for one in worker.stores if one.number == payload.store)
        broken = {one.number for one in self.scheduler.machine._stores.values() if one.broken}
        if worker.killed or store.error is not None or payload.store in broken:
            return True
        for saved, crashed in self.crashed.values():
            applied = self.applied.get(payload, math.inf)
            # An answer of the dead server may still be on its way for a while.
            if when <= crashed + self.straggling and not applied <= saved:
                return True
        return False


def simulate(seed: int, faults: Faults | None = None) -> Job:
    """Run one job; `Broken` describes the fault."""
    job = Job(seed, faults)
    job.run()
    return job
