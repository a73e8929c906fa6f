"""The tables of states and transitions of workers and servers list exactly the changes in random runs.

Whole simulated jobs show that the tables have each change; programs for one machine show the rare ones.
"""

from __future__ import annotations

import random
import runpy
from collections.abc import Iterator
from typing import Any

import paths
import pytest
from simulator import Faults, simulate
from stores.parameter_server.recorded_states import Recorder, listed, watched_servers, watched_workers

from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.server.machine import TRANSITIONS as SERVER
from kvstore.stores.parameter_server.server.machine import ServerMachine, ServerOptions
from kvstore.stores.parameter_server.worker.state_machine.machine import TRANSITIONS as WORKER
from kvstore.stores.parameter_server.worker.state_machine.machine import WorkerMachine
from kvstore.stores.parameter_server.worker.state_machine.options import WorkerOptions

K = m.RecordKind
JOBS, PROGRAMS = 60, 1500
ROUNDS = paths.ROOT / "kvstore/stores/parameter_server/native/rounds.h"
PAYLOAD = (b"123456",)
PUSHES, READS = (K.PUSH, K.PUSHPULL), (K.PULL, K.PUSHPULL)


def faults(seed: int) -> Faults | None:
    """Return the faults of a job; None: the simulator draws them."""
    noisy = Faults(late=0.2 * (seed % 3), drop=0.05 * (seed % 2), double=0.1)
    return (
        None,
        noisy._replace(kill_worker=True, return_worker=True, kill_more=seed % 2),
        noisy._replace(kill_server=True, return_server=True, mute=bool(seed % 4)),
        noisy._replace(stop=9.0),
        noisy._replace(kill_server=True),
        noisy._replace(kill_worker=True, ahead=True, tardy=2.0),
    )[seed % 6]


class WorkerProgram:
    """One worker of a job of two workers and two servers, whose messages and losses are drawn."""

    def __init__(self, draw: random.Random) -> None:
        self.draw, self.now, self.epoch, self.heard, self.ops = draw, 0.0, 1, 0, 0
        self.mode = draw.choice(("sync", "async"))
        hello = m.HelloRequest("worker", -1, 100, "w", "job", m.PROTOCOL, options={"mode": self.mode})
        options = WorkerOptions(credit=draw.choice((8, 1000)), resend=1.0, control_resend=0.5, dead_after=5.0)
        self.machine = WorkerMachine(hello, options)
        self.members = {0: 100, 1: 101}
        self.servers = {0: 1, 1: 1}
        self.submitted: dict[Any, dict[int, e.SliceRequest]] = {}  # parts of operations, by index
        self.losses: tuple[m.Loss, ...] = ()
        self.late: tuple[int, ...] = ()

    def step(self, event: e.Event) -> None:
        for action in self.machine.step(event, self.now):
            if isinstance(action, e.ReadsCopied) and self.draw.random() < 0.7:
                self.step(action)
            elif isinstance(action, e.SliceReceived) and self.draw.random() < 0.2:
                part = self.submitted.get(action.op, {}).get(action.index)
                if part is not None:
                    self.step(e.RetrySlice(action.op, action.index, part))

    def hear(self, body: Any) -> None:
        self.heard += 1
        self.step(e.MessageReceived("scheduler", m.ReliableMessage(self.heard, 0, body)))

    def present(self, ranks: dict[int, int]) -> tuple[m.Member, ...]:
        return tuple(m.Member(rank, one, "tcp://a") for rank, one in ranks.items())

    def view(self, **more: Any) -> None:
        self.epoch += 1
        own = (self.present(self.members), (), self.losses, self.present(self.servers))
        self.hear(m.ViewNotice(3, self.epoch, *own, mode=self.mode, late=self.late, **more))

    def begin(self) -> None:
        """Send the hello; the scheduler admits this worker, refuses it, or is silent."""
        self.step(e.StartEvent())
        how = self.draw.random()
        if how < 0.03:
            self.hear(m.RefusalNotice("ConfigError", "no"))
        elif how < 0.06:
            self.tick(6.0)
        elif how < 0.09:
            self.step(e.SchedulerLost(m.Failure("PeerLostError", "lost")))
        elif how < 0.12:
            self.hear(m.FenceNotice(1, "fenced"))
        else:
            self.late = (0,) if self.draw.random() < 0.3 else ()
            members, servers = self.present(self.members), self.present(self.servers)
            self.hear(m.WelcomeNotice(3, 0, 2, 1, members, servers, bool(self.late), self.late))

    def tick(self, seconds: float) -> None:
        for _ in range(int(seconds / 0.5)):
            self.now += 0.5
            self.step(e.TickEvent())

    def act(self) -> None:
        """Draw one event."""
        draw, rank = self.draw, self.draw.choice((0, 1))
        link = self.machine._servers._links.get(rank)
        if link is None:
            self.tick(1.0)
            return
        weighted = {
            self.submit: 12, self.reply: 12, self.attached: 6, self.exchange: 4, self.pass_time: 3,
            self.change: 3, self.end: 1, self.copied: 4,
        }  # fmt: skip
        draw.choices(list(weighted), list(weighted.values()))[0](rank, link)

    def attached(self, rank: int, link: Any) -> None:
        self.step(e.MessageReceived(rank, m.AttachReply(link.incarnation, epoch=self.epoch)))

    def parts(self) -> list[e.SliceRequest]:
        found = []
        for slice_ in self.draw.sample(range(6), self.draw.choice((1, 2, 4))):
            kind = self.draw.choice((K.PUSH, K.PULL, K.PUSHPULL))
            place = m.PayloadLocation.FRAME if kind in PUSHES else m.PayloadLocation.NONE
            nbytes = self.draw.choice((1, 6)) if kind in PUSHES else 0
            record = m.Record(kind, slice_, 0, place=place, nbytes=nbytes)
            found.append(e.SliceRequest(slice_ % 2, record, PAYLOAD))
        return found

    def submit(self, rank: int, link: Any) -> None:
        self.ops += 1
        parts = self.parts()
        self.submitted[self.ops] = dict(enumerate(parts))
        self.step(e.SubmitRequests(self.ops, parts))

    def reply(self, rank: int, link: Any) -> None:
        """Answer some of the requests that the server has."""
        requests = list(link.requests._open.values())
        records = []
        for one in requests[: self.draw.choice((1, 3))]:
            kind = self.draw.choice((K.VALUE if one.record.kind in READS else K.DONE, K.UNKNOWN))
            shared = kind == K.VALUE and self.mode == "async"
            place = m.PayloadLocation.SHARED if shared else m.PayloadLocation.NONE
            last = one.record.round + link.requests.first_rounds.get(one.record.slice, 0)
            records.append(m.Record(kind, one.record.slice, one.sequence, last, place=place))
        self.step(e.MessageReceived(rank, m.Batch(3, 0, 100, self.epoch, records, ())))

    def copied(self, rank: int, link: Any) -> None:
        """Report the values that were copied late."""
        reads = [(slice_, round_) for slice_, rounds in link.requests._reads.items() for round_ in rounds]
        if self.mode == "async" and reads:
            self.step(e.ReadsCopied(rank, tuple(reads)))
        elif self.draw.random() < 0.2:
            self.machine.forget_reads()

    def exchange(self, rank: int, link: Any) -> None:
        """Send requests as `transport/native/exchange.h` does, and continue those without answers."""
        if not self.machine.allows_exchange([rank]):
            return
        slices = [one for one in range(6) if one % 2 == rank]
        first, _, rounds = self.machine.begin_exchange(rank, slices, True)
        frame = {"place": m.PayloadLocation.FRAME, "nbytes": 6}
        parts = [
            (
                at,
                e.SliceRequest(rank, m.Record(K.PUSHPULL, slice_, first + at, round_, **frame), (b"123456",)),
            )
            for at, (slice_, round_) in enumerate(zip(slices, rounds, strict=True))
        ]
        self.ops += 1
        self.machine.adopt(self.ops, parts[1:], {rank: first + self.draw.randrange(1, 4)}, self.now)

    def pass_time(self, rank: int, link: Any) -> None:
        if self.draw.random() < 0.3:
            self.step(e.StreamLost(rank))
        self.tick(self.draw.choice((0.5, 1.5)))
        self.hear(m.PingRequest(0))

    def change(self, rank: int, link: Any) -> None:
        """A server or the other worker is lost or replaced, or this worker joins."""
        how = self.draw.choice(("server restarts", "server lost", "worker lost", "joins", "nothing"))
        if how == "server restarts":
            self.servers[rank] += 1
        elif how == "server lost" and self.draw.random() < 0.3:
            self.losses = (*self.losses, m.Loss("server", rank, 9.0))
        elif how == "worker lost" and self.draw.random() < 0.5:
            self.losses = (*self.losses, m.Loss("worker", 1, 9.0))
        begun = 0 if how == "joins" and self.late else -1
        self.late = () if begun == 0 else self.late
        self.view(broken=bool(self.losses), begun=begun, bases=((0, 0),) if begun == 0 else ())
        if begun == 0 and self.draw.random() < 0.4:
            self.draw.choice((self.change, self.end))(rank, link)

    def end(self, rank: int, link: Any) -> None:
        how = self.draw.choice(("leave", "leave", "fenced", "fenced by a server", "silence", "lost"))
        if how == "leave":
            self.step(e.SchedulerRequest("leave", m.LeaveNotice(3)))
        elif how == "fenced":
            self.hear(m.FenceNotice(self.epoch, "fenced"))
        elif how == "fenced by a server":
            self.step(e.MessageReceived(rank, m.FenceNotice(self.epoch, "fenced")))
        elif how == "silence":
            self.machine.listeners.add(self)
            self.tick(9.0)
        elif how == "lost":
            self.step(e.SchedulerLost(m.Failure("PeerLostError", "lost")))

    def run(self) -> None:
        self.begin()
        for _ in range(self.draw.choice((10, 40))):
            self.act()


class ServerProgram:
    """One server of a job of up to two workers, whose requests, losses and returns are drawn."""

    def __init__(self, draw: random.Random, snapshot: dict[str, Any] | None = None) -> None:
        self.draw, self.epoch, self.messages, self.version = draw, 0, 0, 0
        self.broken = draw.random() < 0.05
        self.mode = draw.choice(("sync", "sync", "async"))
        hello = m.HelloRequest("server", 0, 1, "s", "job", m.PROTOCOL, restarted=snapshot is not None)
        self.machine = ServerMachine(hello, ServerOptions(dead_after=5.0), snapshot)
        self.members = dict.fromkeys(range(draw.choice((1, 2))), 1)
        self.numbers: dict[int, int] = {}
        self.resting: tuple[int, ...] = ()
        self.losses: tuple[m.Loss, ...] = ()
        self.now = 0.0
        self.due: list[Any] = []  # slices with jobs and writes that are not done
        self.step(e.StartEvent())

    def step(self, event: e.Event) -> None:
        for action in self.machine.step(event, self.now):
            if isinstance(action, e.ApplyRounds):
                self.due += [job.slice for job in action.jobs]
            elif isinstance(action, e.WriteSlices):
                self.due += [write.slice for write in action.writes]
            elif isinstance(action, e.AbortJobs | e.WithdrawJobs) and self.draw.random() < 0.8:
                given_up, self.due = self.due, []
                self.step(e.JobsApplied(0, [], given_up))

    def hear(self, body: Any) -> None:
        self.messages += 1
        self.step(e.MessageReceived("scheduler", m.ReliableMessage(self.messages, 0, body)))

    def view(self, **more: Any) -> None:
        self.epoch += 1
        members = tuple(m.Member(rank, one) for rank, one in sorted(self.members.items()))
        more.setdefault("broken", self.broken)
        self.hear(m.ViewNotice(0, self.epoch, members, self.resting, self.losses, (), mode=self.mode, **more))

    def define(self) -> None:
        keys = [m.KeySpec(str(at), (8,), "float32") for at in range(2)]
        slices = [m.KeyEntry(key, at, (m.Slice(at, 0, 0, 8),), ready=False) for at, key in enumerate(keys)]
        self.hear(m.SlicesNotice(0, tuple(slices)))

    def attach(self) -> None:
        rank = self.draw.choice(list(self.members))
        accepted = tuple((at, self.draw.randrange(3)) for at in range(2)) if self.draw.random() < 0.3 else ()
        met = bool(accepted)
        self.step(
            e.MessageReceived(
                rank, m.AttachRequest(0, rank, self.members[rank], self.epoch, "job", accepted, met)
            )
        )

    def ask(self) -> None:
        """Send requests of one worker, perhaps of an epoch that the server does not know yet."""
        draw, rank = self.draw, self.draw.choice(list(self.members))
        records = []
        store = self.machine._stores.get(0)
        slices = store.requests.slices if store is not None else {}
        for _ in range(draw.choice((1, 1, 2))):
            slice_ = draw.choice((0, 1))
            kind = draw.choices((K.PUSH, K.PUSHPULL, K.PULL, K.INIT, K.ASSIGN, K.SEAL, K.UNSEAL, K.FORGET),
                                (9, 6, 3, 6, 1, 2, 2, 1))[0]  # fmt: skip
            known = slices.get(slice_)
            last = known.round if known is not None else 0
            sequence = self.numbers[rank] = self.numbers.get(rank, 0) + 1
            round_ = last + draw.choice((1, 1, 1, 2)) if kind in PUSHES else 0
            place = m.PayloadLocation.FRAME if kind in (*PUSHES, K.INIT) else m.PayloadLocation.NONE
            records.append(m.Record(kind, slice_, sequence, round_, place=place, nbytes=4))
        epoch = self.epoch + (draw.random() < 0.1)
        self.step(e.MessageReceived(rank, m.Batch(0, rank, self.members[rank], epoch, records, (b"1234",))))

    def applied(self) -> None:
        done, self.due = self.due, []
        failures = [m.Failure("UpdaterError", "bad") if self.draw.random() < 0.05 else None for _ in done]
        self.step(e.JobsApplied(0, list(zip(done, failures, strict=True))))

    def change(self) -> None:
        """A worker is lost, replaced, has joined or has left."""
        draw, rank = self.draw, self.draw.choice(list(self.members))
        how = draw.choice(("replaced", "joined", "lost", "left", "broken"))
        if how == "replaced":
            self.members[rank] += 1
            self.numbers.pop(rank, None)
        elif how == "joined":
            self.resting = tuple({*self.resting, rank})
        elif how in ("lost", "left") and len(self.members) > 1:
            del self.members[rank]
            if how == "lost":
                self.losses = (*self.losses, m.Loss("worker", rank, 9.0))
        self.view(broken=bool(self.losses) or (how == "broken" and draw.random() < 0.3))

    def end(self) -> None:
        how = self.draw.choice(
            ("over", "refused", "fenced", "silence", "drop", "drop a slice", "drop a slice")
        )
        if how in ("drop", "drop a slice") and 0 in self.machine._stores:
            self.version += 1
            self.hear(
                m.InstallRequest(0, self.version, "drop", "" if how == "drop" else self.draw.choice("01"))
            )
        elif how == "silence":
            for _ in range(60):
                self.now += 0.5
                self.step(e.TickEvent())
        elif how in ("over", "refused", "fenced"):
            self.hear(
                {"over": m.JobEndNotice(), "refused": m.RefusalNotice("ConfigError", "no")}.get(
                    how, m.FenceNotice(0, "")
                )
            )

    def run(self) -> None:
        """Announce slices and members in any order, then draw events."""
        self.hear(m.WelcomeNotice(-1, 0, 1, 0, (), ()))
        acts = [self.define, self.view, self.attach, self.ask, self.end]
        for act in self.draw.sample(acts, 5) if self.draw.random() < 0.2 else acts[:3]:
            act()
        for _ in range(self.draw.choice((10, 40))):
            acts = (self.ask, self.applied, self.attach, self.change, self.define, self.end)
            self.draw.choices(acts, (20, 12, 4, 1, 1, 0.3))[0]()


def restart(draw: random.Random) -> None:
    """Run a server, and another one from its snapshot."""
    first = ServerProgram(draw)
    first.run()
    if first.machine.is_quiet() and not first.machine.ended:
        ServerProgram(draw, first.machine.snapshot_state()).run()


# ------------------------------------------------------------------------------------------------ the tables


@pytest.fixture(scope="module")
def recorders() -> Iterator[tuple[Recorder, Recorder]]:
    """The changes of workers and servers in simulated jobs and in programs."""
    with pytest.MonkeyPatch.context() as patch:
        workers, servers = watched_workers(patch), watched_servers(patch)
        runs = [lambda seed=seed: simulate(seed, faults(seed)) for seed in range(JOBS)]
        runs += [lambda seed=seed: WorkerProgram(random.Random(seed)).run() for seed in range(PROGRAMS)]
        runs += [lambda seed=seed: restart(random.Random(seed)) for seed in range(PROGRAMS)]
        for run in runs:
            run()
            workers.known.clear()
            servers.known.clear()
        yield workers, servers


def test_the_table_of_workers_lists_exactly_their_changes(recorders: tuple[Recorder, Recorder]) -> None:
    assert recorders[0].changes - listed(WORKER) == set(), "a change that the table does not list"
    assert listed(WORKER) - recorders[0].changes == set(), "a row that is never seen"


def test_the_tables_of_servers_list_exactly_their_changes(recorders: tuple[Recorder, Recorder]) -> None:
    rows = runpy.run_path(str(paths.ROOT / "docs/states_page.py"))["rows_of_header"](ROUNDS)
    table = listed(SERVER) | listed(rows)
    assert recorders[1].changes - table == set(), "a change that no table lists"
    assert table - recorders[1].changes == set(), "a row that is never seen"
