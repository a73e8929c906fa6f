"""A key whose rule needs whole tensors, in two slices of one server: updated together, also after deaths."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from kvstore.optimizer import Updater, create
from kvstore.settings.parameter_server import PsConfig
from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.server.machine import ServerMachine, ServerOptions
from kvstore.stores.parameter_server.server.storage import ServerStorage

Array = npt.NDArray[np.float32]

K = m.RecordKind
HALF, SLICES = 3, (0, 1)
ENTRY = m.KeyEntry(
    m.KeySpec("w", (2 * HALF,), "float32"), 0, (m.Slice(0, 0, 0, HALF), m.Slice(1, 0, HALF, 2 * HALF)), False
)
START = np.arange(1, 2 * HALF + 1, dtype=np.float32)


def gradient(seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(2 * HALF).astype(np.float32)


def half(value: Array, slice_: int) -> Array:
    return value[slice_ * HALF : (slice_ + 1) * HALF]


def only(slice_: int, value: Array) -> Array:
    """Half of a gradient, whose other half has not arrived."""
    found = np.zeros_like(value)
    half(found, slice_)[:] = half(value, slice_)
    return found


def updated(*gradients: Array) -> Array:
    """Return the value of the key after these updates."""
    value, updater = START.copy(), Updater(create("lamb", wd=0.1))
    for one in gradients:
        updater("w", one, value)
    return value


class Job:
    """A server with its data, its workers, and their replies."""

    def __init__(self, mode: str, workers: int = 1, completed: int | None = None) -> None:
        """`completed`: it was started again from a snapshot after this round."""
        self.mode, self.storage = mode, ServerStorage(0, PsConfig())
        self.members, self.epoch, self.messages = {rank: 100 + rank for rank in range(workers)}, 0, 0
        self.sequences = dict.fromkeys(range(workers), 0)
        self.answers: list[tuple[int, m.RecordKind, int, int]] = []  # rank, kind, slice, the request's round
        hello = m.HelloRequest("server", 0, 1, "s", "job", m.PROTOCOL, restarted=completed is not None)
        self.machine = ServerMachine(hello, ServerOptions(), self._snapshot(completed))
        self.from_scheduler(m.SlicesNotice(0, (ENTRY,)))
        text = json.dumps(create("lamb", wd=0.1).describe())
        self.from_scheduler(m.InstallRequest(0, 1, "settings", text, since=1, ordinal=1, epoch=1))
        self.view()

    def _snapshot(self, completed: int | None) -> dict[str, Any] | None:
        if completed is None:
            return None
        self.storage.define_slices(e.DefineSlices(0, (ENTRY,)))
        self.storage.write_slices(e.WriteSlices(0, [self._value(slice_) for slice_ in SLICES]))
        rounds = [[slice_, completed] for slice_ in SLICES]
        return {"stores": [{"store": 0, "version": 0, "rounds": rounds, "windows": []}]}

    def _value(self, slice_: int) -> e.SliceWrite:
        return e.SliceWrite(slice_, *self._payload(slice_, 0, START, kind=K.INIT))

    def _payload(self, slice_: int, sequence: int, value: Array, kind: m.RecordKind, **more: Any) -> Any:
        data = half(value, slice_).tobytes()
        record = m.Record(kind, slice_, sequence, place=m.PayloadLocation.FRAME, nbytes=len(data), **more)
        return record, (data,)

    def step(self, event: e.Event) -> None:
        work = [event]
        while work:
            for action in self.machine.step(work.pop(0), 0.0):
                follows = self._carry_out(action)
                if follows is not None:
                    work.append(follows)

    def _carry_out(self, action: e.Action) -> e.Event | None:
        if isinstance(action, e.SendReplies):
            for kind, request, _, _ in action.answers:
                self.answers.append((action.batch.rank, kind, request.slice, request.round))
        elif isinstance(action, m.InstallRequest):
            return e.InstallDone(0, action.version, self.storage.install_settings(action))
        handlers: dict[type, Any] = {
            e.DefineSlices: self.storage.define_slices,
            e.WriteSlices: self.storage.write_slices,
            e.ApplyRounds: self.storage.apply_rounds,
            e.AbortJobs: self.storage.abort_jobs,
            e.WithdrawJobs: self.storage.withdraw_jobs,
            e.WorkerAttachment: lambda one: self.storage.attach_worker(one) and None,
        }
        return handlers[type(action)](action) if type(action) in handlers else None  # type: ignore[no-any-return]

    def from_scheduler(self, body: Any) -> None:
        self.messages += 1
        self.step(e.MessageReceived("scheduler", m.ReliableMessage(self.messages, 0, body)))

    def view(self, lost: int | None = None) -> None:
        """Send the view of the members; a worker may be lost."""
        self.epoch += 1
        losses = () if lost is None else (m.Loss("worker", lost, 5.0),)
        if lost is not None:
            del self.members[lost]
        members = tuple(m.Member(rank, one) for rank, one in self.members.items())
        self.from_scheduler(m.ViewNotice(0, self.epoch, members, (), losses, servers=(), mode=self.mode))

    def attach(self, rank: int, **more: Any) -> None:
        self.step(
            e.MessageReceived(rank, m.AttachRequest(0, rank, self.members[rank], self.epoch, "job", **more))
        )

    def start(self) -> Job:
        for rank in self.members:
            self.attach(rank)
        for slice_ in SLICES:
            self.push(0, slice_, 0, START, kind=K.INIT)
        self.answers.clear()
        return self

    def push(self, rank: int, slice_: int, round_: int, value: Array, **more: Any) -> None:
        """Have a worker push its part of a slice."""
        more = {"kind": K.PUSH, "version": 1, **more}
        self._ask(rank, *self._payload(slice_, self._next(rank), value, round=round_, **more))

    def pull(self, rank: int, slice_: int, round_: int) -> None:
        self._ask(rank, m.Record(K.PULL, slice_, self._next(rank), round_))

    def _next(self, rank: int) -> int:
        self.sequences[rank] += 1
        return self.sequences[rank]

    def _ask(self, rank: int, record: m.Record, frames: Any = ()) -> None:
        self.step(e.MessageReceived(rank, m.Batch(0, rank, self.members[rank], self.epoch, [record], frames)))

    def told(self) -> list[tuple[int, m.RecordKind, int, int]]:
        found, self.answers = self.answers, []
        return sorted(found)

    def value(self) -> Array:
        return np.concatenate([self.storage.store_shard(0).read_value(slice_) for slice_ in SLICES])

    def check(self, *gradients: Array) -> None:
        """These updates are all there were."""
        np.testing.assert_allclose(self.value(), updated(*gradients), rtol=1e-6)


# ------------------------------------------------------------------------- a server that was started again


def restarted(*accepted: int, workers: int = 1) -> Job:
    """Return a job whose server had round 5 in its snapshot; by slice the last acknowledged push."""
    job = Job("sync", workers, completed=5)
    for rank in job.members:
        job.attach(rank, accepted=tuple(enumerate(accepted)), met=True)
    return job


def test_a_round_of_which_one_slice_lost_its_parts_is_done_with_repeated_pushes() -> None:
    job, again, then = restarted(6, 5), gradient(1), gradient(2)
    job.pull(0, 0, 6)
    assert job.told() == []  # it is not read before the other slice's part is in it
    job.push(0, 1, 6, again)
    job.pull(0, 1, 6)
    assert job.told() == [(0, K.DONE, 1, 6), (0, K.VALUE, 0, 6), (0, K.VALUE, 1, 6)]
    job.check(only(1, again))
    for slice_ in SLICES:
        job.push(0, slice_, 7, then)
        job.pull(0, slice_, 7)
    assert job.told() == [(0, kind, slice_, 7) for kind in (K.DONE, K.VALUE) for slice_ in SLICES]
    job.check(only(1, again), then)


def test_slices_that_lost_several_rounds_come_together_again() -> None:
    job, pushed = restarted(1007, 1005), [gradient(seed) for seed in range(3)]
    for round_, one in zip((1006, 1007), pushed, strict=False):
        job.push(0, 1, round_, one)
    for slice_ in SLICES:
        job.push(0, slice_, 1008, pushed[2])
        job.pull(0, slice_, 1008)
    assert not [one for one in job.told() if one[1] == K.FAILED]
    assert {job.machine._stores[0].requests.slices[slice_].round for slice_ in SLICES} == {1008}
    job.check(only(1, pushed[0]), only(1, pushed[1]), pushed[2])


def test_what_all_slices_were_before_such_a_round_is_kept() -> None:
    job, again = restarted(6, 5, workers=2), gradient(1)
    for rank in (0, 1):
        job.push(rank, 1, 6, again)
    job.check(2 * only(1, again))
    for slice_ in SLICES:
        np.testing.assert_array_equal(job.storage.store_shard(0).past_value(slice_, 5), half(START, slice_))


def test_a_repeated_push_may_be_of_an_older_version() -> None:
    job, again = restarted(6, 5), gradient(1)
    job.push(0, 1, 6, again, version=0)  # before there was an optimizer
    job.pull(0, 0, 6)
    assert job.told() == [(0, K.DONE, 1, 6), (0, K.VALUE, 0, 6)]
    np.testing.assert_array_equal(job.value(), [*half(START, 0), *half(again, 1)])
    assert job.machine.is_quiet()


def test_a_round_that_all_slices_lost_changes_nothing() -> None:
    job = restarted(7, 7)
    job.pull(0, 0, 7)
    assert job.told() == [(0, K.VALUE, 0, 7)]
    assert job.machine.is_quiet()
    np.testing.assert_array_equal(job.value(), START)


# ---------------------------------------------------------- without rounds, a worker lost between two slices


def test_what_waits_of_a_lost_worker_is_given_up() -> None:
    job, whole = Job("async", workers=2).start(), gradient(1)
    job.push(0, 0, 1, gradient(9))
    job.push(1, 0, 1, whole)  # waits for the first one's slice
    job.view(lost=0)
    job.push(1, 1, 1, whole)
    assert job.told() == [(1, K.DONE, 0, 1), (1, K.DONE, 1, 1)]
    job.check(whole)


@pytest.mark.parametrize("late", [False, True])
def test_no_worker_waits_for_the_other_slice_of_a_lost_worker_that_was_updated(late: bool) -> None:
    """The first slice has had one part more than the other; `late`: its last part arrives after the loss."""
    job, lost, whole, then = Job("async", workers=2).start(), gradient(9), gradient(1), gradient(2)
    job.push(0, 0, 1, lost)
    job.push(1, 1, 1, whole)
    if not late:
        job.push(1, 0, 1, whole)
    assert job.told() == [(0, K.DONE, 0, 1), (1, K.DONE, 1, 1)]
    job.view(lost=0)
    if late:
        job.push(1, 0, 1, whole)
    assert job.told() == [(1, K.DONE, 0, 1)]
    mixed = only(0, lost) + only(1, whole)
    job.check(mixed, only(0, whole))
    for slice_ in SLICES:
        job.push(1, slice_, 2, then)
    assert job.told() == [(1, K.DONE, 0, 2), (1, K.DONE, 1, 2)]
    job.check(mixed, only(0, whole), then)
    assert job.machine.is_quiet()
