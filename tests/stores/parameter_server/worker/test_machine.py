"""A worker: its operations, its requests, and its reactions to losses and silence."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.worker.state_machine.machine import WorkerMachine
from kvstore.stores.parameter_server.worker.state_machine.options import WorkerOptions

K = m.RecordKind
MEMBERS = (m.Member(0, 100), m.Member(1, 101))
SERVERS = (m.Member(0, 1, "tcp://a"), m.Member(1, 1, "tcp://b"))


class Store:
    """A worker of rank 0, welcomed and attached to two servers."""

    def __init__(self, attach: bool = True, mode: str = "sync") -> None:
        hello = m.HelloRequest("worker", -1, 100, "w", "job", m.PROTOCOL, options={"mode": mode})
        self.machine = WorkerMachine(hello, WorkerOptions(resend=1.0, control_resend=0.5, dead_after=5.0))
        self.now = 0.0
        self.heard = 0
        self.actions: list[e.Action] = []
        self.step(e.StartEvent())
        self.hear(m.WelcomeNotice(3, 0, 2, 1, MEMBERS, SERVERS))
        for rank in (0, 1) if attach else ():
            self.step(e.MessageReceived(rank, m.AttachReply(1, epoch=1)))

    def step(self, event: e.Event) -> list[e.Action]:
        self.actions = self.machine.step(event, self.now)
        return self.actions

    def hear(self, body: Any) -> None:
        self.heard += 1
        self.step(e.MessageReceived("scheduler", m.ReliableMessage(self.heard, 0, body)))

    def view(self, epoch: int = 2, **more: Any) -> None:
        values: dict[str, Any] = {"members": MEMBERS, "resting": (), "losses": (), "servers": SERVERS, **more}
        self.hear(m.ViewNotice(3, epoch, **values))

    def submit(self, op: Any, *parts: tuple[int, m.RecordKind, int]) -> None:
        record = [
            e.SliceRequest(server, m.Record(kind, slice_, 0), "payload") for server, kind, slice_ in parts
        ]
        self.step(e.SubmitRequests(op, record))

    def reply(self, server: int, *records: tuple[m.RecordKind, int], frames: tuple[Any, ...] = ()) -> None:
        found = [
            m.Record(kind, 0, sequence, 1, nbytes=len(frames[0]) if frames else 0)
            for kind, sequence in records
        ]
        self.step(e.MessageReceived(server, m.Batch(3, 0, 100, 1, found, frames)))

    def sent(self, peer: Any) -> list[Any]:
        return [one.message for one in self.actions if isinstance(one, e.SendMessage) and one.peer == peer]

    def done(self) -> list[e.OperationDone]:
        return [one for one in self.actions if isinstance(one, e.OperationDone)]

    def pass_time(self, seconds: float) -> list[e.Action]:
        found = []
        for _ in range(int(seconds / 0.25)):
            self.now += 0.25
            found += self.step(e.TickEvent())
        return found


def test_it_says_hello_connects_and_attaches() -> None:
    store = Store(attach=False)
    kinds = [type(one) for one in store.actions]
    assert kinds[:2] == [m.WelcomeNotice, e.ConnectServer]
    assert store.sent(0)[0] == m.AttachRequest(3, 0, 100, 1, "job")
    again = [one for one in store.pass_time(1.0) if isinstance(one, e.SendMessage) and one.peer == 1]
    assert isinstance(again[0].message, m.AttachRequest)


def test_nothing_is_sent_before_the_server_has_let_it_in() -> None:
    store = Store(attach=False)
    store.submit("a", (0, K.PULL, 0))
    assert store.sent(0) == []
    store.step(e.MessageReceived(0, m.AttachReply(9, epoch=1)))  # of a server that was there before
    assert store.sent(0) == []
    store.step(e.MessageReceived(0, m.AttachReply(1, epoch=1)))
    assert [record.kind for record in store.sent(0)[0].records] == [K.PULL]


def test_an_operation_is_done_when_all_its_parts_are() -> None:
    store = Store()
    store.submit("a", (0, K.PUSHPULL, 0), (1, K.PUSH, 1))
    assert [store.sent(rank)[0].records[0].round for rank in (0, 1)] == [1, 1]
    store.reply(0, (K.VALUE, 1))
    [got] = [one for one in store.actions if isinstance(one, e.SliceReceived)]
    assert (got.op, got.index, store.done()) == ("a", 0, [])
    assert [server for server, _ in store.machine.pending("a")] == [1]
    store.reply(1, (K.DONE, 1))
    assert store.done() == [e.OperationDone("a")]
    assert not store.machine.is_busy


def test_pulls_count_the_pushes_before_them() -> None:
    store = Store()
    store.submit("a", (0, K.PUSH, 0))
    store.submit("b", (0, K.PULL, 0))
    store.submit("c", (0, K.PUSH, 0))
    assert store.sent(0) == []  # the value that was asked for must not change before it is there
    store.reply(0, (K.VALUE, 2))
    assert [one.round for one in store.sent(0)[0].records] == [2]
    store.submit("d", (0, K.PULL, 9))
    assert [one.round for one in store.sent(0)[0].records] == [0]


def test_a_failure_is_told_with_its_reason() -> None:
    store = Store()
    store.submit("a", (0, K.PUSH, 0))
    failure = m.Failure("UpdaterError", "bad")
    store.reply(0, (K.FAILED, 1), frames=(msgspec.msgpack.encode(failure),))
    assert store.done() == [e.OperationDone("a", failure)]
    store.submit("b", (0, K.PUSH, 0))
    store.reply(0, (K.FAILED, 2), frames=(b"\xff\xff",))
    [done] = store.done()
    assert done.error is not None
    assert done.error.error == "ProtocolError"


def test_an_empty_operation_is_done_at_once() -> None:
    store = Store()
    store.submit("a")
    assert store.done() == [e.OperationDone("a")]


@pytest.mark.parametrize("error", [None, m.Failure("UpdaterError", "another part failed")])
def test_a_value_is_asked_for_again_in_a_frame(error: m.Failure | None) -> None:
    store = Store()
    store.submit("a", (0, K.PUSHPULL, 0))
    store.reply(0, (K.VALUE, 1))
    store.step(e.RetrySlice("a", 0, e.SliceRequest(0, m.Record(K.PUSHPULL, 0, 0, 1), "payload"), error))
    [batch] = store.sent(0)
    assert [(one.kind, one.round, one.flags) for one in batch.records] == [(K.PULL, 1, m.BY_FRAME)]
    store.reply(0, (K.VALUE, 2))
    assert [type(one) for one in store.actions] == [e.SliceReceived, e.OperationDone]
    assert store.done() == [e.OperationDone("a", error)]


def test_a_value_is_asked_for_again_of_its_round() -> None:
    store = Store()
    for name in ("a", "b", "c"):
        store.submit(name, (0, K.PUSHPULL, 0))
    store.reply(0, (K.VALUE, 1))
    [got] = [one for one in store.actions if isinstance(one, e.SliceReceived)]
    assert got.asked == 1
    record = m.Record(K.PUSHPULL, 0, 0, got.asked)
    store.step(e.RetrySlice("a", 0, e.SliceRequest(0, record, "payload")))
    [batch] = store.sent(0)
    assert [(one.kind, one.round) for one in batch.records] == [(K.PULL, 1)]


def test_without_rounds_pushes_go_out_when_values_are_taken() -> None:
    store = Store(mode="async")
    store.submit("a", (0, K.PULL, 0))
    store.submit("b", (0, K.PUSH, 0))
    shared = m.Record(K.VALUE, 0, 1, 1, place=m.PayloadLocation.SHARED)
    store.step(e.MessageReceived(0, m.Batch(3, 0, 100, 1, [shared], ())))
    taken = e.ReadsCopied(0, ((0, 0),))
    assert [type(one) for one in store.actions[-3:]] == [e.SliceReceived, e.OperationDone, e.ReadsCopied]
    assert store.actions[-1] == taken
    store.step(e.RetrySlice("a", 0, e.SliceRequest(0, m.Record(K.PULL, 0, 0, 0))))
    assert [(one.kind, one.sequence) for one in store.sent(0)[0].records] == [(K.PULL, 2)]
    store.step(taken)
    assert store.sent(0) == []
    store.reply(0, (K.VALUE, 2))
    assert [(one.kind, one.sequence) for one in store.sent(0)[0].records] == [(K.PUSH, 3)]


def test_questions_get_their_answers() -> None:
    store = Store()
    store.step(e.SchedulerRequest("b", m.BarrierRequest(0, 0, 1)))
    message = store.sent("scheduler")[0]
    assert message.body == m.BarrierRequest(1, 3, 1)
    store.hear(m.MemberReply(1))
    assert [one.op for one in store.done()] == ["b"]
    store.step(e.SchedulerRequest("l", m.LeaveNotice(0)))
    number = store.sent("scheduler")[0].number
    store.step(e.MessageReceived("scheduler", m.ReliableMessage(0, number, None)))
    assert store.done() == [e.OperationDone("l")]


def test_a_broken_store_ends_what_is_under_way_and_still_reads() -> None:
    store = Store()
    store.submit("a", (0, K.PUSHPULL, 0))
    store.view(losses=(m.Loss("worker", 1, 6.0),), broken=True)
    [done] = store.done()
    assert done.error is not None
    assert (done.error.error, done.error.role, done.error.rank) == ("PeerLostError", "worker", 1)
    store.submit("b", (0, K.PUSH, 0))
    assert store.done()[0].error == done.error
    store.submit("c", (0, K.PULL, 0))
    assert [one.round for one in store.sent(0)[0].records] == [0]


def test_nothing_is_asked_of_a_lost_server() -> None:
    store = Store()
    store.submit("a", (0, K.PULL, 0), (1, K.PULL, 1))
    store.view(losses=(m.Loss("server", 1, 6.0),), broken=True)
    assert [one.op for one in store.done()] == ["a"]
    store.submit("b", (1, K.PULL, 1))
    [done] = store.done()
    assert done.error is not None
    assert done.error.role == "server"
    store.submit("c", (0, K.PULL, 0))
    assert store.sent(0)


def test_a_new_server_gets_what_the_old_one_has_not_answered() -> None:
    store = Store()
    store.submit("a", (0, K.PUSH, 0), (0, K.PUSH, 5))
    store.step(
        e.MessageReceived(0, m.Batch(3, 0, 100, 1, [m.Record(K.DONE, 0, 1, 0)])),
    )
    store.view(servers=(m.Member(0, 2, "tcp://c"), SERVERS[1]))
    assert e.ConnectServer(0, "tcp://c", 2) in store.actions
    [attach] = store.sent(0)
    assert (attach.accepted, attach.met) == (((0, 1),), True)
    assert (attach.next, attach.unanswered) == (3, (2,))
    store.step(e.MessageReceived(0, m.AttachReply(2, epoch=2)))
    assert [(one.slice, one.sequence) for one in store.sent(0)[0].records] == [(5, 2)]


def told(store: Store) -> list[Any]:
    return [one.body for one in store.sent("scheduler") if one.body is not None]


def test_it_says_where_it_is_when_it_reaches_the_first_slice_of_a_new_worker() -> None:
    store = Store()
    store.submit("a", (0, K.PUSH, 0), (1, K.PUSH, 5))
    store.view(2, begin=5)
    assert told(store) == []
    store.submit("b", (0, K.PUSH, 0), (1, K.PULL, 5))
    assert told(store) == []
    assert [one.epoch for one in store.sent(0)] == [1]
    store.reply(1, (K.VALUE, 2))
    store.submit("c", (1, K.PUSHPULL, 5))
    assert told(store) == [m.JoinPointNotice(3, 2, ((0, 2), (5, 1)))]
    assert [one.epoch for one in store.sent(1)] == [2]
    store.submit("d", (1, K.PUSHPULL, 5))
    assert told(store) == []
    store.view(3, begin=5)  # once more: another worker is lost
    store.submit("e", (1, K.PUSHPULL, 5))
    assert told(store) == [m.JoinPointNotice(3, 3, ((0, 2), (5, 3)))]


def returned() -> Store:
    """A worker that took the place of a lost one."""
    store = Store.__new__(Store)
    store.machine = WorkerMachine(
        m.HelloRequest("worker", -1, 100, "w", "job", m.PROTOCOL), WorkerOptions(control_resend=0.5)
    )
    store.now, store.heard, store.actions = 0.0, 0, []
    store.step(e.StartEvent())
    store.hear(m.WelcomeNotice(3, 0, 2, 4, MEMBERS, SERVERS, True, late=(0,)))
    assert [one.late for one in store.sent(0)] == [True]
    for rank in (0, 1):
        store.step(e.MessageReceived(rank, m.AttachReply(1, epoch=4)))
    return store


def test_its_pushes_wait_until_the_others_are_where_it_begins() -> None:
    store = returned()
    store.submit("a", (0, K.PULL, 0))
    assert [one.kind for one in store.sent(0)[0].records] == [K.PULL]
    store.submit("b", (0, K.PUSH, 7), (1, K.PUSH, 5))
    assert (told(store), store.sent(0)) == ([m.RejoinBeginNotice(3, 7)], [])
    store.submit("c", (1, K.PULL, 5))
    store.submit("d", (0, K.PUSH, 7))
    assert store.actions == []
    store.submit("e", (1, K.ASSIGN, 6))  # other workers may wait for it
    assert [one.slice for one in store.sent(1)[0].records] == [6]
    store.view(5, late=(0,), begin=7)
    store.view(6, begun=0, bases=((7, 3), (5, 2)))
    assert [(one.epoch, one.late, one.met) for one in store.sent(0)] == [(6, False, False)]
    store.step(e.MessageReceived(0, m.AttachReply(1, epoch=4)))  # to its earlier message
    assert store.sent(0) == []
    store.step(e.MessageReceived(0, m.AttachReply(1, epoch=6, bases=((7, 3),))))
    assert [(one.slice, one.round) for one in store.sent(0)[0].records] == [(7, 4), (7, 5)]
    assert store.sent(0)[0].epoch == 6
    store.step(e.MessageReceived(1, m.AttachReply(1, epoch=6, bases=((5, 2),))))
    found = [(one.kind, one.round) for one in store.sent(1)[0].records]
    assert found == [(K.PUSH, 3), (K.PULL, 3)]


def test_a_new_worker_says_where_it_is_once_it_knows_its_rounds() -> None:
    store = returned()
    store.view(5, begun=0, bases=((0, 3),))
    store.view(6, late=(1,), begin=0)
    store.step(e.MessageReceived(0, m.AttachReply(1, epoch=5, bases=((0, 3),))))
    store.submit("a", (0, K.PUSH, 0))
    assert (told(store), store.sent(0)[0].epoch) == ([], 5)
    store.step(e.MessageReceived(1, m.AttachReply(1, epoch=5, bases=((7, 2),))))
    store.submit("b", (0, K.PUSH, 0))
    assert told(store) == [m.JoinPointNotice(3, 6, ((0, 4), (7, 2)))]


def test_pushes_that_wait_for_the_others_end_with_the_store() -> None:
    ends: list[Any] = [
        lambda store: store.view(5, losses=(m.Loss("server", 1, 6.0),), broken=True),
        lambda store: store.hear(m.FenceNotice(4, "gone")),
        lambda store: store.step(e.SchedulerRequest("l", m.LeaveNotice(0))),
    ]
    for end in ends:
        store = returned()
        store.submit("a", (0, K.PUSH, 0))
        assert store.machine.is_busy
        end(store)
        [done] = store.done()
        assert done.op == "a"
        assert done.error is not None


def test_a_silent_scheduler_is_lost_only_to_waiting_workers() -> None:
    store = Store()
    assert not any(isinstance(one, e.ProcessFailed) for one in store.pass_time(30.0))
    store.step(e.SchedulerRequest("b", m.BarrierRequest(0, 0, 1)))
    waited = store.pass_time(4.0)
    assert any(
        isinstance(one, e.SendMessage) and isinstance(one.message.body, m.PingRequest) for one in waited
    )  # type: ignore[union-attr]
    assert not any(isinstance(one, e.ProcessFailed) for one in waited)
    [failed] = [one for one in store.pass_time(3.0) if isinstance(one, e.ProcessFailed)]
    assert failed.failure.role == "scheduler"
    store.submit("c", (0, K.PULL, 0))
    assert store.done()[0].error == failed.failure


def test_a_worker_that_waits_elsewhere_can_miss_the_scheduler() -> None:
    store = Store()
    store.machine.listeners.add("a wait")
    [failed] = [one for one in store.pass_time(7.0) if isinstance(one, e.ProcessFailed)]
    assert failed.failure.role == "scheduler"


def test_a_fenced_or_refused_worker_is_out() -> None:
    for body, error in (
        (m.FenceNotice(4, "gone"), "FencedError"),
        (m.RefusalNotice("ConfigError", "no"), "ConfigError"),
    ):
        store = Store()
        store.submit("a", (0, K.PULL, 0))
        store.step(e.SchedulerRequest("b", m.BarrierRequest(0, 0, 1)))
        store.hear(body)
        assert {one.op: one.error.error for one in store.done() if one.error} == {"a": error, "b": error}
        assert any(isinstance(one, e.ProcessFailed) for one in store.actions)


def test_messages_that_are_none_of_its_business_do_nothing() -> None:
    store = Store()
    store.submit("a", (0, K.PUSH, 0))
    store.step(e.MessageReceived(0, m.Batch(3, 0, 99, 1, [m.Record(K.DONE, 0, 1)])))
    store.step(e.MessageReceived(7, m.Batch(3, 0, 100, 1, [m.Record(K.DONE, 0, 1)])))
    store.reply(0, (K.DONE, 55))
    assert store.actions == []
    store.view(epoch=1)
    assert not any(isinstance(one, m.ViewNotice) for one in store.actions)
