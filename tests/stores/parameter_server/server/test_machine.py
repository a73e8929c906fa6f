"""A server: rounds of one store, as its requests and their answers."""

from __future__ import annotations

from typing import Any

import pytest

from kvstore.stores.parameter_server.protocol import events as e
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.server.machine import ServerMachine, ServerOptions
from kvstore.stores.parameter_server.server.slice_rounds import SliceRounds

ENTRY = m.KeyEntry(m.KeySpec("w", (8,), "float32"), 0, (m.Slice(0, 0, 0, 8),), ready=False)
K = m.RecordKind


class Machine:
    """A server with one slice, and two workers."""

    def __init__(self, workers: int = 2, mode: str = "sync", restarted: bool = False, **more: Any) -> None:
        self.mode = mode
        hello = m.HelloRequest("server", 0, 1, "s", "job", m.PROTOCOL, restarted=restarted)
        snapshot = more.pop("snapshot", None)
        self.machine = ServerMachine(hello, ServerOptions(report=1, **more), snapshot)
        self.actions: list[e.Action] = []
        self.numbers: dict[int, int] = {}
        self.messages = 0
        self.members = {rank: 100 + rank for rank in range(workers)}
        self.from_scheduler(m.WelcomeNotice(-1, 0, 1, 0, (), ()))
        self.from_scheduler(m.SlicesNotice(0, (ENTRY,)))
        self.view(1)

    def step(self, event: e.Event) -> list[e.Action]:
        self.actions = self.machine.step(event, 0.0)
        return self.actions

    def from_scheduler(self, body: Any) -> None:
        self.messages += 1
        self.step(e.MessageReceived("scheduler", m.ReliableMessage(self.messages, 0, body)))

    def view(self, epoch: int, resting: tuple[int, ...] = (), **more: Any) -> None:
        members = tuple(m.Member(rank, one) for rank, one in sorted(self.members.items()))
        more.setdefault("losses", ())
        self.from_scheduler(m.ViewNotice(0, epoch, members, resting, servers=(), mode=self.mode, **more))

    def attach(self, rank: int, epoch: int = 1, **more: Any) -> m.AttachReply | None:
        self.step(e.MessageReceived(rank, m.AttachRequest(0, rank, self.members[rank], epoch, "job", **more)))
        found = [one.message for one in self.actions if isinstance(one, e.SendMessage) and one.peer == rank]
        return found[-1] if found else None  # type: ignore[return-value]

    def ask(
        self, rank: int, kind: m.RecordKind, round_: int = 0, sequence: int | None = None, **more: Any
    ) -> None:
        if sequence is None:
            sequence = self.numbers[rank] = self.numbers.get(rank, 0) + 1
        place = m.PayloadLocation.FRAME if kind in (K.PUSH, K.PUSHPULL, K.INIT) else m.PayloadLocation.NONE
        epoch = more.pop("epoch", 1)
        record = m.Record(kind, 0, sequence, round_, **{"place": place, "nbytes": 4, **more})
        batch = m.Batch(0, rank, self.members[rank], epoch, [record], (f"{rank}:{round_}",))
        self.step(e.MessageReceived(rank, batch))

    def start(self) -> None:
        for rank in self.members:
            assert self.attach(rank) is not None
        self.ask(0, K.INIT)
        self.applied()

    def applied(self, failure: m.Failure | None = None) -> None:
        self.step(e.JobsApplied(0, [(0, failure)]))

    def answers(self) -> dict[Any, list[tuple[m.RecordKind, int]]]:
        """Kind and sequence of each worker's replies."""
        found: dict[Any, list[tuple[m.RecordKind, int]]] = {}
        for action in self.actions:
            if isinstance(action, e.SendReplies) and action.answers:
                found[action.peer] = [(one[0], one[1].sequence) for one in action.answers]
        return found

    def failures(self) -> dict[Any, list[str]]:
        """The failures that each worker is notified of."""
        found: dict[Any, list[str]] = {}
        for action in self.actions:
            for kind, _, _, detail in action.answers if isinstance(action, e.SendReplies) else ():
                if kind == K.FAILED:
                    found.setdefault(action.peer, []).append(detail.text)  # type: ignore[union-attr]
        return found

    def rounds(self) -> SliceRounds:
        return self.machine._stores[0].requests.slices[0]

    def jobs(self) -> list[tuple[int, list[str]]]:
        """Round and payloads of the sums to compute."""
        jobs = [job for action in self.actions if isinstance(action, e.ApplyRounds) for job in action.jobs]
        return [(job.round, [frames[0] for _, _, frames in job.parts]) for job in jobs]


def test_a_round_is_summed_in_rank_order_when_all_have_pushed() -> None:
    server = Machine()
    server.start()
    server.ask(1, K.PUSHPULL, 1)
    assert (server.answers(), server.jobs()) == ({}, [])
    server.ask(0, K.PUSH, 1)
    assert server.answers() == {0: [(K.DONE, 2)]}
    assert server.jobs() == [(1, ["0:1", "1:1"])]
    server.applied()
    assert server.answers() == {1: [(K.VALUE, 1)]}


def with_slices(count: int) -> Machine:
    """Return a machine with so many slices, which have no values yet."""
    server = Machine()
    for rank in server.members:
        server.attach(rank)
    entries = (
        m.KeyEntry(m.KeySpec(f"k{at}", (8,), "float32"), at, (m.Slice(at, 0, 0, 8),), ready=False)
        for at in range(1, count)
    )
    server.from_scheduler(m.SlicesNotice(0, tuple(entries)))
    return server


def send(server: Machine, first: int, *kinds: m.RecordKind) -> list[e.Action]:
    """Ask for one thing of each slice in one message of worker 0, with sequences from `first`."""
    places = [m.PayloadLocation.FRAME if kind == K.ASSIGN else m.PayloadLocation.NONE for kind in kinds]
    records = [
        m.Record(kind, at, first + at, place=place, nbytes=4)
        for at, (kind, place) in enumerate(zip(kinds, places, strict=True))
    ]
    return server.step(e.MessageReceived(0, m.Batch(0, 0, 100, 1, records, ("all",))))


def test_what_one_message_writes_has_one_answer() -> None:
    count = 5
    server = with_slices(count)
    (write,) = (one for one in send(server, 1, *[K.ASSIGN] * count) if isinstance(one, e.WriteSlices))
    assert [one.slice for one in write.writes] == list(range(count))
    failure = m.Failure("ShapeError", "on demand")
    server.step(e.JobsApplied(0, [(at, failure if at == 2 else None) for at in range(count)]))
    (reply,) = (one for one in server.actions if isinstance(one, e.SendReplies))
    kinds = [K.DONE, K.DONE, K.FAILED, K.DONE, K.DONE]
    assert sorted((one[1].slice, one[0]) for one in reply.answers) == list(enumerate(kinds))


def test_what_is_forgotten_between_two_writes_keeps_its_place() -> None:
    server = with_slices(3)
    send(server, 1, *[K.ASSIGN] * 3)
    server.step(e.JobsApplied(0, [(at, None) for at in range(3)]))
    actions = send(server, 4, K.ASSIGN, K.FORGET, K.ASSIGN)
    first, forget, second = (one for one in actions if isinstance(one, e.WriteSlices | e.ForgetSlices))
    assert isinstance(first, e.WriteSlices)
    assert isinstance(second, e.WriteSlices)
    assert ([one.slice for one in first.writes], [one.slice for one in second.writes]) == ([0], [2])
    assert forget == e.ForgetSlices(0, (1,))


@pytest.mark.parametrize("ready", [True, False])
def test_what_is_not_in_the_protocol_is_answered_as_often_as_it_comes(ready: bool) -> None:
    server = Machine()
    server.start()
    server.rounds().ready = ready
    for forgotten in (False, True):
        for _ in range(2):
            server.ask(0, K.BAD, 1, sequence=2, place=m.PayloadLocation.NONE, nbytes=0)
            assert server.answers() == {0: [(K.FAILED, 2)]}
            assert "worker 0, slice 0" in server.failures()[0][0]
        if forgotten or not ready:
            break
        server.machine._stores[0].sessions.by_rank[0].failures.clear()
    server.rounds().ready = True
    server.ask(0, K.PULL, sequence=3)
    assert server.answers() == {0: [(K.VALUE, 3)]}


def test_a_pull_waits_for_its_round_and_a_third_push_too() -> None:
    server = Machine()
    server.start()
    for round_ in (1, 2):
        server.ask(0, K.PUSH, round_)
        assert server.answers() == {0: [(K.DONE, round_ + 1)]}
    server.ask(0, K.PUSH, 3)
    assert server.answers() == {}
    server.ask(1, K.PULL, 0)
    assert server.answers() == {1: [(K.VALUE, 1)]}
    server.ask(1, K.PUSH, 1)
    server.ask(1, K.PULL, 1)
    assert server.answers() == {}  # the round is being summed
    server.applied()
    assert server.answers() == {0: [(K.DONE, 4)], 1: [(K.VALUE, 3)]}


def test_a_repeated_request_is_answered_again_and_never_done_again() -> None:
    server = Machine(1)
    server.start()
    server.ask(0, K.PUSHPULL, 1)
    assert server.jobs() == [(1, ["0:1"])]
    server.ask(0, K.PUSHPULL, 1, sequence=2)
    assert (server.answers(), server.jobs()) == ({}, [])
    server.applied()
    for _ in range(2):
        server.ask(0, K.PUSHPULL, 1, sequence=2)
        assert (server.answers(), server.jobs()) == ({0: [(K.VALUE, 2)]}, [])
    server.ask(0, K.INIT, sequence=1)
    assert server.answers() == {0: [(K.DONE, 1)]}


def test_a_probe_tells_what_never_came() -> None:
    server = Machine()
    server.start()
    server.ask(0, K.PUSHPULL, 1, flags=m.PROBE, place=m.PayloadLocation.NONE, nbytes=0)
    assert server.answers() == {0: [(K.UNKNOWN, 2)]}
    server.ask(0, K.PUSHPULL, 1, sequence=2)
    server.ask(0, K.PUSHPULL, 1, sequence=2, flags=m.PROBE, place=m.PayloadLocation.NONE, nbytes=0)
    assert server.answers() == {}
    assert any(isinstance(one, e.SendReplies) and one.batch.received == 8 for one in server.actions)


def test_a_failed_round_fails_its_requests_and_counts() -> None:
    server = Machine()
    server.start()
    server.ask(0, K.PUSHPULL, 1)
    server.ask(1, K.PUSH, 1)
    server.applied(m.Failure("UpdaterError", "bad"))
    assert server.answers() == {0: [(K.FAILED, 2)]}
    server.ask(1, K.PULL, 1)
    assert server.answers() == {1: [(K.FAILED, 2)]}
    server.ask(0, K.PUSHPULL, 1, sequence=2)
    assert server.answers() == {0: [(K.FAILED, 2)]}
    server.ask(0, K.PUSH, 2)
    server.ask(1, K.PUSHPULL, 2)
    assert server.jobs() == [(2, ["0:2", "1:2"])]


BAD, WORSE = m.Failure("UpdaterError", "bad"), m.Failure("UpdaterError", "worse")


def test_every_failed_round_is_reported_once_to_each_of_its_workers() -> None:
    server = Machine()
    server.start()
    for round_, failure in ((1, BAD), (2, WORSE), (3, None)):
        for rank in (0, 1):
            server.ask(rank, K.PUSH, round_)
        server.applied(failure)
    for rank in (1, 0):
        for round_, text in ((1, "bad; that was in round 1"), (2, "worse; that was in round 2")):
            server.ask(rank, K.PULL, 3)
            assert server.failures() == {rank: [text]}, round_
        server.ask(rank, K.PULL, 3)
        assert server.answers() == {rank: [(K.VALUE, server.numbers[rank])]}
    assert server.rounds().failures == {}


def test_a_pull_is_not_told_of_later_rounds_nor_of_rounds_of_others() -> None:
    server = Machine(3)
    server.start()
    server.view(2, resting=(2,))
    server.ask(0, K.PULL, 0)
    for rank in (0, 1):
        server.ask(rank, K.PUSH, 1)
    server.applied(BAD)
    for rank in (0, 2):
        server.ask(rank, K.PULL, 0)
        assert [kind for kind, _ in server.answers()[rank]] == [K.VALUE]
    server.ask(2, K.PULL, 1)  # of the same round, into which it has not pushed
    assert [kind for kind, _ in server.answers()[2]] == [K.VALUE]
    server.ask(0, K.PUSHPULL, 2)
    server.ask(1, K.PUSH, 2)
    server.applied(WORSE)
    assert server.failures() == {0: ["bad; that was in round 1"]}
    server.ask(0, K.PULL, 2)
    assert server.failures() == {0: ["worse"]}


def test_failed_rounds_are_forgotten_with_leaving_workers_and_are_never_too_many() -> None:
    server = Machine()
    server.start()
    for round_ in range(1, 101):
        for rank in (0, 1):
            server.ask(rank, K.PUSH, round_)
        server.applied(m.Failure("UpdaterError", str(round_)))
    assert list(server.rounds().failures) == list(range(37, 101))
    for round_ in range(37, 100):
        server.ask(0, K.PULL, round_)
        assert server.failures() == {0: [str(round_)]}
    del server.members[1]
    server.view(2)
    assert list(server.rounds().failures) == [100]
    server.ask(0, K.PULL, 100)
    assert server.rounds().failures == {}


def test_a_failed_round_is_reported_to_the_present_owner_of_the_rank_only() -> None:
    server = Machine()
    server.start()
    server.ask(1, K.PULL, 1)  # waits, and its worker is lost
    server.members[1], server.numbers[1] = 201, 0
    server.view(2)
    server.attach(1, 2)
    for rank in (0, 1):
        server.ask(rank, K.PUSH, 1, epoch=2)
    server.applied(BAD)
    assert server.answers() == {}
    for rank in (0, 1):
        server.ask(rank, K.PULL, 1, epoch=2)
        assert server.failures() == {rank: ["bad"]}


def test_async_pushes_are_applied_one_at_a_time() -> None:
    server = Machine(mode="async")
    server.start()
    server.ask(0, K.PUSH, 1)
    assert server.jobs() == [(1, ["0:1"])]
    server.ask(1, K.PUSHPULL, 1)
    server.ask(1, K.PULL, 1)
    assert (server.jobs(), server.answers()) == ([], {})
    server.applied()
    assert server.answers() == {0: [(K.DONE, 2)]}
    assert server.jobs() == [(2, ["1:1"])]
    server.applied()
    assert server.answers() == {1: [(K.VALUE, 1), (K.VALUE, 2)]}


@pytest.mark.parametrize("kind", [K.PULL, K.PULL_ROWS, K.FETCH_STATE])
def test_an_async_read_has_what_its_worker_had_pushed_before(kind: m.RecordKind) -> None:
    server = Machine(mode="async")
    server.start()
    server.ask(1, K.PUSH, 1)
    server.ask(1, K.PUSH, 2)
    server.ask(1, kind)
    server.ask(1, K.PUSH, 3)
    server.applied()
    assert (server.answers(), server.jobs()) == ({1: [(K.DONE, 1)]}, [(2, ["1:2"])])
    server.applied()
    assert (server.answers(), server.jobs()) == ({1: [(K.DONE, 2), (K.VALUE, 3)]}, [(3, ["1:3"])])
    server.applied()
    assert server.answers() == {1: [(K.DONE, 4)]}


def test_an_async_pushpull_that_comes_again_while_another_is_applied_is_not_done_again() -> None:
    server = Machine(mode="async")
    server.start()
    server.ask(1, K.PUSHPULL, 1)
    server.applied()
    server.ask(0, K.PUSH, 1)
    server.ask(1, K.PUSHPULL, 1, sequence=1)
    server.applied()
    assert (server.answers(), server.jobs()) == ({0: [(K.DONE, 2)], 1: [(K.VALUE, 1)]}, [])


def test_an_async_push_waits_for_one_that_it_has_overtaken() -> None:
    """Else the older one would be the value, or a pull would lack an earlier push."""
    server = Machine(mode="async")
    server.start()
    for sequence in (3, 2):
        server.ask(1, K.PUSHPULL, sequence, sequence=sequence)
        assert (server.jobs(), server.answers()) == ([], {})
    server.ask(1, K.PUSHPULL, 2, sequence=2, flags=m.PROBE)
    assert server.answers() == {1: [(K.UNKNOWN, 2)]}
    server.ask(1, K.PUSH, 1, sequence=1)
    assert server.jobs() == [(1, ["1:1"])]
    server.applied()
    assert (server.answers(), server.jobs()) == ({1: [(K.DONE, 1)]}, [(2, ["1:2"])])
    server.applied()
    assert (server.answers(), server.jobs()) == ({1: [(K.VALUE, 2)]}, [(3, ["1:3"])])


def test_the_sum_of_the_living() -> None:
    server = Machine(3)
    server.start()
    server.ask(0, K.PUSH, 1)
    server.ask(2, K.PUSH, 1)
    del server.members[2]
    server.view(2, losses=(m.Loss("worker", 2, 5.0),))
    assert server.jobs() == []
    server.ask(1, K.PUSH, 1)
    assert server.jobs() == [(1, ["0:1", "1:1"])]


def test_a_worker_that_has_left_or_rests_counts_but_is_not_waited_for() -> None:
    server = Machine(3)
    server.start()
    server.ask(1, K.PUSH, 1)
    server.ask(2, K.PUSH, 1)
    del server.members[2]
    server.view(2, resting=(0,))
    assert server.jobs() == [(1, ["1:1", "2:1"])]


SEATS = ((0, 0), (1, 1), (2, 1))
LOST = m.Loss("worker", 2, 0.0)


@pytest.mark.parametrize("told", [[(2,), (1,)], [(1,), (2,)], [(1, 2)]])
@pytest.mark.parametrize("end", ["last", "left", "lost"])
def test_what_a_host_has_pushed_counts_where_its_last_worker_has_left(
    end: str, told: list[tuple[int, ...]]
) -> None:
    """Worker 2 is lost, and worker 1 leaves as the last of its host, or not, or is lost, too."""
    server = Machine(3)
    server.view(2, seats=SEATS)
    server.start()
    server.ask(1, K.PUSH, 1)
    losses = [LOST, m.Loss("worker", 1, 0.0)] if end == "lost" else [LOST]
    for epoch, ranks in enumerate([*told, ()], 3):
        for rank in ranks:
            del server.members[rank]
        there = tuple(one for one in losses if one.rank not in server.members)
        whole = (1,) if end == "last" and 1 not in server.members else ()
        server.view(epoch, losses=there, seats=SEATS, whole=whole)
    server.ask(0, K.PUSH, 1)
    counts = end == "last" or (end, told[0]) == ("left", (2,))
    assert server.jobs() == [(1, ["0:1", "1:1"] if counts else ["0:1"])]


def test_a_broken_store_reads_and_does_not_write() -> None:
    server = Machine()
    server.start()
    server.ask(0, K.PUSHPULL, 1)
    del server.members[1]
    server.view(2, losses=(m.Loss("worker", 1, 5.0),), broken=True)
    assert server.answers() == {0: [(K.FAILED, 2)]}
    server.ask(0, K.PUSH, 2)
    assert server.answers() == {0: [(K.FAILED, 3)]}
    server.ask(0, K.PULL, 0)
    assert server.answers() == {0: [(K.VALUE, 4)]}
    server.ask(0, K.FETCH_STATE, 0)
    assert server.answers() == {0: [(K.VALUE, 5)]}
    server.ask(0, K.ASSIGN, 0)
    assert any(isinstance(one, e.WriteSlices) for one in server.actions)


def test_an_older_view_changes_nothing() -> None:
    server = Machine(3)
    server.start()
    lost = server.members.pop(2)
    server.view(3, losses=(m.Loss("worker", 2, 5.0),))
    server.members[2] = lost
    server.view(2)
    server.ask(0, K.PUSH, 1)
    server.ask(1, K.PUSH, 1)
    assert server.jobs() == [(1, ["0:1", "1:1"])]


def test_a_request_too_far_ahead_is_not_taken() -> None:
    server = Machine()
    server.start()
    server.ask(1, K.PUSH, 1, sequence=300_000)
    assert (server.answers(), server.jobs()) == ({}, [])
    server.ask(0, K.PUSH, 1)
    assert server.jobs() == []
    server.ask(1, K.PUSH, 1)
    assert server.jobs() == [(1, ["0:1", "1:1"])]


def test_a_push_of_a_worker_that_has_left_is_in_no_round_of_its_successor() -> None:
    server = Machine()
    server.start()
    for round_ in (1, 2):
        server.ask(1, K.PUSH, round_)
    del server.members[1]
    server.view(2)
    server.members[1] = 201
    server.view(3, late=(1,))
    server.view(4, begun=1, bases=((0, 1),))
    assert isinstance(server.attach(1, 4), m.AttachReply)
    server.ask(0, K.PUSH, 1, epoch=4)
    assert server.jobs() == [(1, ["0:1", "1:1"])]
    server.applied()
    server.ask(0, K.PUSH, 2, epoch=4)
    assert server.jobs() == []
    server.ask(1, K.PUSH, 2, epoch=4, sequence=1)
    assert server.jobs() == [(2, ["0:2", "1:2"])]


def test_an_old_process_is_fenced() -> None:
    server = Machine()
    server.start()
    old = server.members[1]
    server.members[1] = 201
    server.view(2)
    server.members[1] = old
    server.ask(1, K.PUSH, 1)
    assert [type(one.message) for one in server.actions if isinstance(one, e.SendMessage)] == [m.FenceNotice]
    assert isinstance(server.attach(1, 2), m.FenceNotice)


def test_a_rejoined_worker_reads_at_once_and_is_waited_for_from_its_join_point_on() -> None:
    server = Machine()
    server.start()
    server.ask(0, K.PUSH, 1)
    server.members[1] = 201
    server.view(2, late=(1,))
    assert server.jobs() == [(1, ["0:1"])]
    server.applied()
    attached = server.attach(1, 2, late=True)
    assert isinstance(attached, m.AttachReply)
    assert attached.bases == ()
    server.ask(1, K.PULL, 0)
    assert server.answers() == {1: [(K.VALUE, 1)]}
    server.view(3, late=(1,), begin=0)
    server.view(4, begun=1, bases=((0, 2),))
    attached = server.attach(1, 4)
    assert isinstance(attached, m.AttachReply)
    assert (attached.epoch, attached.bases) == (4, ((0, 2),))
    server.ask(0, K.PUSH, 2, epoch=4)
    assert server.jobs() == [(2, ["0:2"])]
    server.applied()
    server.ask(0, K.PUSH, 3, epoch=4)
    assert server.jobs() == []
    server.ask(1, K.PUSH, 3, epoch=4)
    assert server.jobs() == [(3, ["0:3", "1:3"])]


def test_rounds_continue_until_all_others_are_at_the_join_point() -> None:
    server = Machine(3)
    server.start()
    server.members[2] = 202
    server.view(2, late=(2,), begin=0)
    server.ask(0, K.PUSH, 1, epoch=2)  # it has reached the slice, and waits for no worker that has not
    server.ask(1, K.PUSH, 1)
    assert server.jobs() == [(1, ["0:1", "1:1"])]
    server.applied()
    server.ask(0, K.PUSH, 2, epoch=2)
    server.ask(1, K.PUSH, 2, epoch=2)  # now both have: this round may be the first that waits
    assert server.jobs() == []
    server.view(3, begun=2, bases=((0, 1),))
    assert server.jobs() == []
    assert isinstance(server.attach(2, 3), m.AttachReply)
    server.ask(2, K.PUSH, 2, epoch=3)
    assert server.jobs() == [(2, ["0:2", "1:2", "2:2"])]


def test_a_worker_that_begins_alone_follows_the_rounds_of_the_server() -> None:
    server = Machine(1)
    server.start()
    server.ask(0, K.PUSH, 1)
    server.members[0] = 200
    server.view(2, late=(0,))
    server.applied()
    server.view(3, begun=0)
    attached = server.attach(0, 3)
    assert isinstance(attached, m.AttachReply)
    assert attached.bases == ((0, 1),)


def test_a_server_that_comes_back_asks_one_that_has_rejoined_for_its_rounds() -> None:
    first = Machine(2)
    first.start()
    server = Machine(2, restarted=True, snapshot=first.machine.snapshot_state())
    assert server.attach(0, accepted=((0, 3),), met=True) is None
    assert server.attach(1, late=True) is None  # it does not know its join point yet
    assert server.attach(0, accepted=((0, 3),), met=True) is None
    attached = server.attach(1, accepted=((0, 2),))
    assert isinstance(attached, m.AttachReply)
    assert attached.bases == ((0, 2),)
    assert server.jobs() == [(2, [])]
    server.applied()
    server.ask(1, K.PUSH, 3)
    assert server.jobs() == [(3, ["1:3"])]


def test_an_early_attach_waits_for_its_view() -> None:
    server = Machine()
    assert server.attach(0, 5) is None
    server.view(5)
    assert any(isinstance(one, e.SendMessage) and one.peer == 0 for one in server.actions)


def test_an_init_waits_until_it_is_in_a_snapshot() -> None:
    server = Machine(1, saves=True)
    server.attach(0)
    server.ask(0, K.INIT)
    server.applied()
    assert server.answers() == {}
    assert any(isinstance(one, e.SaveSnapshot) for one in server.step(e.TickEvent()))
    server.step(e.SnapshotSaved())
    assert server.answers() == {}  # that one was begun before the value was there
    assert server.machine.snapshot_state()["stores"][0]["rounds"] == [[0, 0]]
    server.step(e.SnapshotSaved())
    assert server.answers() == {0: [(K.DONE, 1)]}


def test_an_init_that_is_in_no_snapshot_fails() -> None:
    server = Machine(1, saves=True)
    server.attach(0)
    server.ask(0, K.INIT)
    server.applied()
    server.machine.snapshot_state()
    server.step(e.SnapshotSaved(m.Failure("StateFileError", "there is no snapshot")))
    assert server.failures() == {0: ["there is no snapshot"]}


def test_a_server_goes_on_from_its_snapshot_where_the_workers_are() -> None:
    first = Machine(2)
    first.start()
    for rank in (0, 1):
        first.ask(rank, K.PUSH, 1)
    first.applied()
    assert first.machine.is_quiet()
    server = Machine(2, restarted=True, snapshot=first.machine.snapshot_state())
    assert server.attach(0, accepted=((0, 3),), met=True) is None
    attached = server.attach(1, accepted=((0, 2),), met=True)
    assert isinstance(attached, m.AttachReply)
    assert server.jobs() == [(2, [])]  # the round is lost, and passed over
    server.applied()
    server.ask(1, K.PUSHPULL, 2)
    assert (server.answers(), server.jobs()) == ({1: [(K.VALUE, 1)]}, [])
    server.ask(1, K.PUSHPULL, 3)  # worker 0's push is lost; no worker waits for it
    assert server.jobs() == [(3, ["1:3"])]


def test_an_async_server_does_not_apply_again_what_its_snapshot_has() -> None:
    first = Machine(1, mode="async")
    first.start()
    first.ask(0, K.PUSH, 1)
    first.applied()
    server = Machine(1, mode="async", restarted=True, snapshot=first.machine.snapshot_state())
    server.attach(0, met=True, accepted=())
    server.ask(0, K.PUSH, 1, sequence=2)
    assert (server.answers(), server.jobs()) == ({0: [(K.DONE, 2)]}, [])
    server.ask(0, K.PUSH, 2, sequence=3)
    assert server.jobs() == [(2, ["0:2"])]


def test_an_async_server_that_was_restarted_waits_for_no_request_that_it_had_answered() -> None:
    first = Machine(1, mode="async")
    first.start()
    server = Machine(1, mode="async", restarted=True, snapshot=first.machine.snapshot_state())
    server.attach(0, met=True, accepted=())
    server.ask(0, K.PUSH, 2, sequence=3)  # the second was answered, and is lost
    assert server.jobs() == [(1, ["0:2"])]


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_a_server_that_was_restarted_takes_requests_for_ever(mode: str) -> None:
    first = Machine(1, mode=mode)
    first.start()
    first.machine.step(e.SnapshotSaved(), 0.0)
    server = Machine(1, mode=mode, restarted=True, snapshot=first.machine.snapshot_state())
    unanswered = (7, m.SPAN, m.SPAN + 5)
    assert isinstance(server.attach(0, met=True, next=m.SPAN + 6, unanswered=unanswered), m.AttachReply)
    for sequence in (*unanswered, *range(m.SPAN + 6, m.SPAN + 9), 2 * m.SPAN + 8):
        server.ask(0, K.PULL, sequence=sequence)
        assert server.answers() == {0: [(K.VALUE, sequence)]}
    session = server.machine._stores[0].sessions.by_rank[0]
    assert (session.low, session.above) == (m.SPAN + 8, [2 * m.SPAN + 8])


def test_the_missing_workers() -> None:
    server = Machine(3)
    server.start()
    server.ask(1, K.PUSH, 1)
    server.step(e.MessageReceived(1, m.MissingRequest(0, 0, 1)))
    [action] = server.actions
    assert isinstance(action, e.SendMessage)
    assert action.message == m.MissingReply(0, 0, 1, (0, 2))


def test_settings_are_installed_once_and_acknowledged() -> None:
    server = Machine()
    server.from_scheduler(m.InstallRequest(0, 4, "settings", "sgd", since=9))
    assert any(isinstance(one, m.InstallRequest) for one in server.actions)
    server.step(e.InstallDone(0, 4))
    server.from_scheduler(m.InstallRequest(0, 4, "settings", "sgd", since=9))
    assert not any(isinstance(one, m.InstallRequest) for one in server.actions)


def test_rules_are_kept() -> None:
    server = Machine()
    server.start()
    server.ask(0, K.PUSH, 1)
    server.ask(0, K.PUSH, 1)
    assert server.answers() == {0: [(K.FAILED, 3)]}
    server.ask(0, K.PUSH, 500)
    assert server.answers() == {0: [(K.FAILED, 4)]}
    server.ask(0, K.DONE, 0)
    assert server.answers() == {0: [(K.FAILED, 5)]}


def test_forgotten_slices_fail_waiting_requests() -> None:
    server = Machine()
    server.start()
    server.ask(0, K.PUSHPULL, 1)
    server.from_scheduler(m.InstallRequest(0, 0, "drop", "0"))
    assert server.answers() == {0: [(K.FAILED, 2)]}
    assert e.ForgetSlices(0, (0,)) in server.actions
    server.from_scheduler(m.InstallRequest(0, 0, "drop", ""))
    assert e.ForgetSlices(0, None) in server.actions
    assert server.machine.store_numbers() == []


def test_what_was_pushed_in_a_newer_epoch_waits_for_its_view() -> None:
    server = Machine(1)
    server.start()
    record = m.Record(K.PUSH, 0, 2, 1, place=m.PayloadLocation.FRAME, nbytes=4)
    server.step(e.MessageReceived(0, m.Batch(0, 0, 100, 2, [record], ("0:1",))))
    assert server.actions == []
    server.members[1] = 101
    server.view(2)
    assert server.answers() == {0: [(K.DONE, 2)]}
    assert server.jobs() == []  # it waits for the new worker


def test_a_resting_worker_reads_after_what_it_pushed_was_lost_with_the_server() -> None:
    first = Machine(1)
    first.start()
    server = Machine(1, restarted=True, snapshot=first.machine.snapshot_state())
    server.view(2, resting=(0,))
    assert server.attach(0, 2, accepted=((0, 2),), met=True) is not None
    assert server.jobs() == [(2, [])]
    server.ask(0, K.PULL, 2)
    server.applied()
    assert server.answers() == {0: [(K.VALUE, 1)]}


def test_a_scheduler_that_was_never_there_is_not_lost() -> None:
    """But one that was, before the server was started again, is."""
    found = {}
    for restarted in (False, True):
        hello = m.HelloRequest("server", 0, 1, "s", "job", m.PROTOCOL, restarted=restarted)
        machine = ServerMachine(hello, ServerOptions(start=1, where="tcp://127.0.0.1:1"))
        machine.step(e.StartEvent(), 0.0)
        ends = [
            one
            for at in (0.5, 1.5, 2.5)
            for one in machine.step(e.TickEvent(), at)
            if isinstance(one, e.JobEnded)
        ]
        (end,) = ends
        assert end.error is not None
        found[restarted] = end.error
    assert found[False].error == "TimeoutError"
    assert "no scheduler has answered at tcp://127.0.0.1:1 for 2.5 s" in found[False].text
    assert found[True].error == "PeerLostError"


def broken(machine: Machine, epoch: int = 2) -> None:
    """Lose worker 1."""
    del machine.members[1]
    machine.view(epoch, losses=(m.Loss("worker", 1, 5.0),), broken=True)


def told(machine: Machine) -> list[tuple[m.RecordKind, int]]:
    """Kind and round of the answers of the last step to worker 0."""
    replies = [one for one in machine.actions if isinstance(one, e.SendReplies) and one.peer == 0]
    return [(answer[0], answer[2]) for reply in replies for answer in reply.answers]


def test_the_last_round_is_told_once_there_are_no_more() -> None:
    machine = Machine()
    machine.start()
    machine.ask(0, K.LAST_ROUND)
    assert told(machine) == []
    machine.ask(0, K.PUSH, 1)
    machine.ask(1, K.PUSH, 1)
    machine.applied()
    assert told(machine) == []
    broken(machine)
    assert told(machine) == [(K.DONE, 1)]
    machine.ask(0, K.LAST_ROUND)
    assert told(machine) == [(K.DONE, 1)]


def test_a_round_that_is_being_done_at_a_loss_is_the_last_one() -> None:
    machine = Machine()
    machine.start()
    machine.ask(0, K.PUSH, 1)
    machine.ask(1, K.PUSH, 1)
    broken(machine)
    assert e.AbortJobs(0) in machine.actions
    machine.ask(0, K.LAST_ROUND)
    assert told(machine) == []
    machine.applied()
    assert told(machine) == [(K.DONE, 1)]


def test_a_round_that_is_given_up_never_was() -> None:
    machine = Machine()
    machine.start()
    machine.ask(0, K.PUSH, 1)
    machine.ask(1, K.PUSH, 1)
    broken(machine)
    machine.ask(0, K.LAST_ROUND)
    machine.ask(0, K.PULL)
    machine.step(e.JobsApplied(0, [], [0]))
    assert told(machine) == [(K.DONE, 0), (K.VALUE, 0)]


def left_out(machine: Machine) -> list[m.LeftOutNotice]:
    sent = [one.message for one in machine.actions if isinstance(one, e.SendMessage)]
    return [one for one in sent if isinstance(one, m.LeftOutNotice)]


def one_round(machine: Machine, number: int, *ranks: int) -> list[m.LeftOutNotice]:
    found = []
    for rank in ranks:
        machine.ask(rank, K.PUSH, number)
        found += left_out(machine)
    machine.applied()
    return found


def test_a_worker_that_leaves_without_join_is_reported_with_the_first_round_without_it() -> None:
    machine = Machine(workers=3)
    machine.start()
    assert one_round(machine, 1, 0, 1, 2) == []
    machine.ask(1, K.PUSH, 2)  # ahead of the other workers
    del machine.members[1]
    machine.view(2)
    assert one_round(machine, 2, 0, 2) == []
    assert one_round(machine, 3, 0, 2) == [m.LeftOutNotice(0, 0, 1, 2)] * 2
    assert one_round(machine, 4, 0, 2) == []


def test_a_leaving_worker_was_in_the_round_that_a_restart_of_the_server_has_lost() -> None:
    first = Machine(workers=3)
    first.start()
    one_round(first, 1, 0, 1, 2)
    machine = Machine(3, restarted=True, snapshot=first.machine.snapshot_state())
    for rank, pushed in enumerate((1, 2, 1)):
        machine.attach(rank, accepted=((0, pushed),), met=True)
    del machine.members[1]
    machine.view(2)
    assert one_round(machine, 2, 0, 2) == []
    assert one_round(machine, 3, 0, 2) == [m.LeftOutNotice(0, 0, 1, 2)] * 2


def test_a_worker_that_has_joined_is_lost_or_never_pushed_is_not_reported() -> None:
    for how in ("joined", "lost", "never pushed"):
        machine = Machine(workers=3)
        machine.start()
        if how != "never pushed":
            one_round(machine, 1, 0, 1, 2)
        epoch = 2
        if how == "joined":
            machine.view(2, resting=(1,))
            epoch = 3
        del machine.members[1]
        machine.view(epoch, losses=(m.Loss("worker", 1, 5.0),) if how == "lost" else ())
        number = 1 + (how != "never pushed")
        assert one_round(machine, number, 0, 2) == [], how
        assert one_round(machine, number + 1, 0, 2) == [], how


def test_a_sealed_slice_is_read_and_takes_no_push() -> None:
    machine = Machine()
    machine.start()
    for rank in (0, 1):
        machine.ask(rank, K.PUSH, 1)
    machine.applied()
    machine.ask(0, K.SEAL)
    assert told(machine) == [(K.DONE, 1)]
    machine.ask(1, K.PULL, 1)
    assert [kind for kind, _ in machine.answers()[1]] == [K.VALUE]
    for kind in (K.PUSH, K.PUSHPULL, K.PULL):
        machine.ask(1, kind, 2)
        assert "worker 1 has pushed" in machine.failures()[1][0]
    machine.ask(0, K.UNSEAL)
    machine.ask(1, K.PUSH, 2)
    assert [kind for kind, _ in machine.answers()[1]] == [K.DONE]


def test_a_slice_with_a_part_of_the_next_round_is_not_sealed() -> None:
    machine = Machine()
    machine.start()
    machine.ask(1, K.PUSH, 1)
    machine.ask(0, K.SEAL)
    assert "worker 1 has pushed" in machine.failures()[0][0]
    machine.ask(0, K.PUSH, 1)
    assert machine.jobs() == [(1, ["0:1", "1:1"])]


# ------------------------------------------------------------ settings of workers that have joined


def versions(server: Machine) -> list[tuple[int, int]]:
    """Carry out all rounds that are due; return each and the settings that it has."""
    found = []
    while jobs := [job for one in server.actions if isinstance(one, e.ApplyRounds) for job in one.jobs]:
        found += [(job.round, job.version) for job in jobs]
        server.applied()
    return found


def test_rounds_without_a_worker_that_has_joined_have_the_settings_that_it_changed() -> None:
    server = Machine()
    server.start()
    for round_ in (1, 2):
        server.ask(1, K.PUSH, round_, version=3)
    server.view(2, resting=(1,), settled=((1, 9),))  # it has changed them after its last push
    found = []
    for round_ in (1, 2, 3, 4):
        server.ask(0, K.PUSH, round_, version=4)
        found += versions(server)
    assert found[:3] == [(1, 4), (2, 4), (3, 9)]
    assert found[3][0] == 4
    assert not server.rounds().settled
    assert not server.rounds().special


def test_rounds_that_wait_for_a_worker_have_its_settings_when_it_has_joined() -> None:
    server = Machine()
    server.start()
    server.ask(1, K.PUSH, 1)
    for round_ in (1, 2, 3):
        server.ask(0, K.PUSH, round_, version=2)
        if round_ == 1:
            assert versions(server) == [(1, 2)]
    assert versions(server) == []
    server.view(2, resting=(1,), settled=((1, 9),))
    found = versions(server)
    assert [round_ for round_, _ in found] == [2, 3]
    assert found[0] == (2, 9)


def test_each_worker_that_has_joined_counts_from_the_last_round_that_it_is_in() -> None:
    server = Machine(4)
    server.start()
    for rank, last in ((1, 3), (2, 1)):
        for round_ in range(1, last + 1):
            server.ask(rank, K.PUSH, round_)
    server.view(2, resting=(2, 3), settled=((2, 5), (3, 0)))
    server.view(3, resting=(1, 2, 3), settled=((1, 8), (2, 5), (3, 0)))
    found = []
    for round_ in (1, 2, 3, 4):
        server.ask(0, K.PUSH, round_, version=2)
        found += versions(server)
    assert found == [(1, 2), (2, 5), (3, 2), (4, 8)]  # of a slice, no older settings than before hold


def test_a_worker_that_has_changed_nothing_changes_nothing_by_joining() -> None:
    server = Machine()
    server.start()
    server.view(2, resting=(1,), settled=((1, 0),))
    assert not server.rounds().special
    server.ask(0, K.PUSH, 1, version=2)
    assert versions(server) == [(1, 2)]


def test_a_later_view_says_nothing_new_of_a_worker_that_has_joined() -> None:
    server = Machine()
    server.start()
    server.view(2, resting=(1,), settled=((1, 9),))
    server.ask(0, K.PUSH, 1)
    assert versions(server) == [(1, 9)]
    server.view(3, resting=(1,), settled=((1, 9),))
    assert not server.rounds().special
    server.ask(0, K.PUSH, 2)
    assert [round_ for round_, _ in versions(server)] == [2]


def test_a_newer_push_than_what_a_joined_worker_knew_counts() -> None:
    server = Machine()
    server.start()
    server.view(2, resting=(1,), settled=((1, 9),))
    server.ask(0, K.PUSH, 1, version=12)
    assert versions(server) == [(1, 12)]


def test_slices_that_are_made_later_have_the_settings_of_workers_that_have_joined() -> None:
    server = Machine()
    server.start()
    server.view(2, resting=(1,), settled=((1, 9),))
    entry = m.KeyEntry(m.KeySpec("v", (8,), "float32"), 1, (m.Slice(1, 0, 0, 8),), ready=False)
    server.from_scheduler(m.SlicesNotice(0, (entry,)))
    rounds = server.machine._stores[0].requests.slices
    assert rounds[1].settled == rounds[0].settled == {1: (0, 9)}


def test_the_settings_of_a_host_whose_worker_has_joined() -> None:
    server = Machine(4)
    seats = ((0, 0), (1, 0), (2, 2), (3, 2))
    server.view(2, seats=seats)
    for rank in (0, 2):
        server.attach(rank, 2)
    server.ask(0, K.INIT, epoch=2)
    server.applied()
    server.ask(2, K.PUSH, 1, epoch=2)
    server.view(3, resting=(2, 3), seats=seats, settled=((2, 4), (3, 7)))
    found = []
    for round_ in (1, 2):
        server.ask(0, K.PUSH, round_, epoch=2)
        found += versions(server)
    assert found == [(1, 0), (2, 7)]
