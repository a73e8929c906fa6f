"""The table of requests: order, credit, and repeated requests."""

from __future__ import annotations

import heapq
import itertools
import random
from unittest import mock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.settings.roles import Roles
from kvstore.stores.parameter_server.protocol.messages import (
    PROBE,
    SPAN,
    Batch,
    PayloadLocation,
    Record,
    RecordKind,
)
from kvstore.stores.parameter_server.transport.frames import MessageCodec, MessageLimits
from kvstore.stores.parameter_server.worker.process import WorkerProcess
from kvstore.stores.parameter_server.worker.state_machine import request_table
from kvstore.stores.parameter_server.worker.state_machine.options import WorkerOptions
from kvstore.stores.parameter_server.worker.state_machine.request_table import (
    OperationProgress,
    RequestInFlight,
    RequestTable,
)

BIG = 100_000


def table(credit: int = 1 << 30, batch: int = 1 << 30, in_rounds: bool = True) -> RequestTable:
    return RequestTable(WorkerOptions(credit, batch, resend=1.0), in_rounds)


def add(
    requests: RequestTable,
    slice_: int,
    nbytes: int = 0,
    priority: int = 0,
    kind: RecordKind = RecordKind.PUSH,
) -> RequestInFlight:
    place = PayloadLocation.FRAME if nbytes else PayloadLocation.NONE
    record = Record(kind, slice_, 0, 1, place=place, nbytes=nbytes)
    request = RequestInFlight(OperationProgress(slice_, 1), 0, record, f"payload {slice_}")
    requests.add(request, priority)
    return request


def pump(requests: RequestTable, now: float = 0.0) -> list[Record]:
    return [record for records, _ in requests.pump(now) for record in records]


def reply(*sequences: int, kind: RecordKind = RecordKind.DONE, received: int = 0) -> Batch:
    return Batch(0, 0, 0, 1, [Record(kind, 0, one) for one in sequences], (), received)


@given(st.lists(st.integers(-3, 3), max_size=40))
def test_higher_priority_first_then_older(priorities: list[int]) -> None:
    requests = table()
    for at, priority in enumerate(priorities):
        add(requests, at, priority=priority)
    wanted = sorted(range(len(priorities)), key=lambda at: (-priorities[at], at))
    sent = pump(requests)
    assert [record.slice for record in sent] == wanted
    assert [record.sequence for record in sent] == list(range(1, len(sent) + 1))


def in_turn(requests: RequestTable) -> list[tuple[RecordKind, int]]:
    """Answer each request as it arrives; return the order in which they were sent."""
    found = []
    while sent := pump(requests):
        found += [(record.kind, record.slice) for record in sent]
        requests.answered(reply(*(record.sequence for record in sent)), 0.0)
    return found


def test_no_priority_overtakes_a_request_of_the_slice_that_is_queued() -> None:
    requests = table(credit=10)
    for slice_ in (5, 6, 7):
        add(requests, slice_, 10)
    [first] = pump(requests)
    add(requests, 5, kind=RecordKind.PULL, priority=1)  # its push is sent
    add(requests, 7, kind=RecordKind.PULL, priority=2)
    add(requests, 7, 10, priority=3)
    add(requests, 8, kind=RecordKind.PULL, priority=1)
    assert [(one.kind, one.slice) for one in pump(requests)] == [(RecordKind.PULL, 5), (RecordKind.PULL, 8)]
    requests.answered(reply(first.sequence, 2, 3), 0.0)
    assert in_turn(requests) == [
        (RecordKind.PUSH, 6),
        (RecordKind.PUSH, 7),
        (RecordKind.PULL, 7),
        (RecordKind.PUSH, 7),
    ]
    add(requests, 6)
    add(requests, 7, priority=1)
    assert in_turn(requests) == [(RecordKind.PUSH, 7), (RecordKind.PUSH, 6)]


def test_nothing_overtakes_a_push_that_waits_for_an_older_value() -> None:
    requests = table()
    for round_ in (1, 2):
        for kind, priority in ((RecordKind.PUSH, 0), (RecordKind.PULL, round_)):
            record = Record(kind, 7, 0, round_)
            requests.add(RequestInFlight(OperationProgress(round_, 1), 0, record, None), priority)
    assert [(one.kind, one.round) for one in pump(requests)] == [(RecordKind.PUSH, 1), (RecordKind.PULL, 1)]
    requests.answered(reply(1), 0.0)
    assert pump(requests) == []
    again = RequestInFlight(OperationProgress("again", 1), 0, Record(RecordKind.PULL, 7, 0, 1), None)
    requests.add_first(again)  # a value that is asked for once more is older than what waits
    assert [(one.kind, one.round) for one in pump(requests)] == [(RecordKind.PULL, 1)]
    requests.answered(reply(2, 3, kind=RecordKind.VALUE), 0.0)
    assert [(one.kind, one.round) for one in pump(requests)] == [(RecordKind.PUSH, 2), (RecordKind.PULL, 2)]
    assert len(requests) == 2


def read_and_push(in_rounds: bool, kind: RecordKind) -> RequestTable:
    """Have a read answered with a value in the server's memory; a push was called after it."""
    requests = table(in_rounds=in_rounds)
    for number, one in enumerate((kind, RecordKind.PUSH), 1):
        request = RequestInFlight(OperationProgress(number, 1), 0, Record(one, 7, 0, number), None)
        requests.add(request, 0)
    assert [one.kind for one in pump(requests)] == [kind]
    answer = Record(RecordKind.VALUE, 7, 1, 1, place=PayloadLocation.SHARED)
    requests.answered(Batch(0, 0, 0, 1, [answer], ()), 0.0)
    return requests


@pytest.mark.parametrize("kind", [RecordKind.PULL, RecordKind.PUSHPULL])
def test_without_rounds_a_push_waits_until_the_value_before_it_is_copied(kind: RecordKind) -> None:
    requests = read_and_push(in_rounds=False, kind=kind)
    assert pump(requests) == []
    assert requests.untaken == [(7, 1)]
    requests.end_reads(requests.untaken)
    assert [one.round for one in pump(requests)] == [2]
    in_rounds = read_and_push(in_rounds=True, kind=kind)
    assert in_rounds.untaken == []
    assert [one.round for one in pump(in_rounds)] == [2]  # no round changes the value without this push


def test_without_rounds_a_push_goes_out_behind_the_value_that_is_asked_for_again() -> None:
    requests = read_and_push(in_rounds=False, kind=RecordKind.PULL)
    again = RequestInFlight(OperationProgress("again", 1), 0, Record(RecordKind.PULL, 7, 0, 1), None)
    requests.add_first(again)
    requests.end_reads(requests.untaken)
    assert [(one.kind, one.sequence) for one in pump(requests)] == [(RecordKind.PULL, 2)]
    requests.answered(reply(2, kind=RecordKind.VALUE), 0.0)
    assert [(one.kind, one.sequence) for one in pump(requests)] == [(RecordKind.PUSH, 3)]


ADDED = st.tuples(st.integers(0, 3), st.sampled_from([RecordKind.PUSH, RecordKind.PULL]), st.integers(-3, 3))


@given(st.lists(st.tuples(ADDED, st.integers(0, 2)), max_size=40), st.integers(1, 60))
def test_order_of_the_calls_within_a_slice_and_of_priorities_between_slices(
    program: list[tuple[tuple[int, RecordKind, int], int]], credit: int
) -> None:
    """Some of the queued requests are sent before the next call, so that a slice does not wait for long."""
    requests = table(credit)
    queued: list[tuple[int, int, int]] = []  # less the priority that counts; which call; slice
    called: list[list[int]] = [[] for _ in range(4)]
    sent: list[list[int]] = [[] for _ in range(4)]

    def turn() -> None:
        records = pump(requests)
        for record in records:
            queued.remove(first := min(queued))
            assert record.clock == first[1]
            sent[record.slice].append(record.clock)
        requests.answered(reply(*(record.sequence for record in records)), 0.0)

    for call, ((slice_, kind, priority), turns) in enumerate(program):
        queued.append((max([-priority, *(one[0] for one in queued if one[2] == slice_)]), call, slice_))
        called[slice_].append(call)
        nbytes = 20 if kind == RecordKind.PUSH else 0
        record = Record(kind, slice_, 0, 0, clock=call, place=PayloadLocation(nbytes // 20), nbytes=nbytes)
        requests.add(RequestInFlight(OperationProgress(call, 1), 0, record, b""), priority)
        for _ in range(turns):
            turn()
    while queued:
        turn()
    assert sent == called
    assert requests.is_empty and not requests._last


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 60), st.integers(0, 1 << 30))
def test_credit_is_never_exceeded_and_everything_goes_out(sizes: list[int], credit: int, seed: int) -> None:
    requests = table(credit)
    for at, size in enumerate(sizes):
        add(requests, at, size)
    received, out = 0, []
    for _ in range(len(sizes) + 1):
        sent = pump(requests)
        on_the_way = sum(record.nbytes for record in sent)
        assert on_the_way <= max(credit, max(sizes))
        assert on_the_way <= credit or len(sent) == 1
        out += sent
        received += on_the_way
        requests.answered(reply(received=received), 0.0)
    assert [record.slice for record in out] == list(range(len(sizes)))


@given(st.lists(st.integers(1, 50), min_size=1, max_size=60), st.integers(1, 60))
def test_answers_count_against_the_credit_where_none_waits_for_others(sizes: list[int], credit: int) -> None:
    requests = RequestTable(WorkerOptions(credit, 1 << 30, resend=1.0, counts_answers=True))
    for at, size in enumerate(sizes):
        record = Record(RecordKind.PULL, at, 0)
        requests.add(RequestInFlight(OperationProgress(at, 1), 0, record, None, size), 0)
    out: list[Record] = []
    due = pump(requests)
    while due:
        awaited = sum(sizes[record.slice] for record in due)
        assert awaited <= credit or len(due) == 1
        out.append(due.pop(0))
        requests.answered(reply(out[-1].sequence, kind=RecordKind.VALUE), 0.0)
        due += pump(requests)
    assert [record.slice for record in out] == list(range(len(sizes)))


def test_no_message_is_larger_than_a_stream_takes() -> None:
    """Whatever slice_bytes is: four frames of 256 MB, the largest possible, with heads are more than 1 GB."""
    worker = WorkerProcess(Roles("worker", 0, 1, 1, "job", "tcp://127.0.0.1:1", "127.0.0.1", 0, None, False))
    frame = MessageLimits().frame
    for slice_bytes in (4096, 1 << 20, frame, 1 << 30):
        requests = RequestTable(worker.worker_options(1 << 40, slice_bytes, True))
        added = [add(requests, slice_, frame) for slice_ in range(4)]
        for batches in (requests.pump(0.0), requests.repeats(added)):
            assert sum(len(records) for records, _ in batches) == 4
            assert all(sum(one.nbytes for one in records) <= 1 << 29 for records, _ in batches)


def test_a_server_is_not_asked_for_rounds_far_ahead() -> None:
    requests = table()
    for _ in range(100):
        add(requests, 7)
    add(requests, 8)
    add(requests, 7, kind=RecordKind.PULL)
    first = pump(requests)
    pushes = [one for one in first if (one.kind, one.slice) == (RecordKind.PUSH, 7)]
    assert len(first) == len(pushes) + 1 < 64  # the pull is sent after all pushes
    assert len(requests) == 102
    assert pump(requests) == []
    answers = [Record(RecordKind.DONE, 7, one.sequence) for one in pushes]
    requests.answered(reply()._replace(records=answers[:10]), 0.0)
    assert len(pump(requests)) == 10
    requests.answered(reply()._replace(records=answers[10:]), 0.0)
    assert len(pump(requests)) == len(pushes) - 10


def test_steps_of_many_pushes_into_a_slice_grow_with_their_number() -> None:
    """Each answer let all go that waited, and all but a few were put back: n squared steps."""
    requests, count = table(), 500
    with mock.patch.object(request_table.heapq, "heappush", wraps=heapq.heappush) as steps:
        for _ in range(count):
            add(requests, 1)
            pump(requests)
        assert 0 < len(requests.unanswered()[1]) < 100, "so many are on the way at a time"
        for sequence in range(1, count + 1):
            requests.answered(reply(sequence), 0.0)
            pump(requests)
    assert requests.is_empty
    assert steps.call_count < 5 * count


def test_a_server_that_has_come_back_gets_what_was_held() -> None:
    requests = table()
    for _ in range(50):
        add(requests, 7)
    sent = len(pump(requests))
    requests.begin_again()
    again = [one.sequence for one in pump(requests)]
    assert again == list(range(1, sent + 1))
    requests.answered(reply()._replace(records=[Record(RecordKind.DONE, 7, one) for one in again]), 0.0)
    assert len(pump(requests)) == 50 - sent


def test_answers_give_credit_back_even_if_reports_are_lost() -> None:
    requests = table(credit=10)
    add(requests, 0, 10)
    add(requests, 1, 10)
    assert [one.slice for one in pump(requests)] == [0]
    requests.answered(reply(1), 0.0)
    assert [one.slice for one in pump(requests)] == [1]


def test_batches_are_cut_by_bytes_and_frames_are_counted() -> None:
    requests = table(batch=10)
    for at in range(4):
        add(requests, at, 5)
    batches = requests.pump(0.0)
    assert [[one.frame for one in records] for records, _ in batches] == [[0, 1], [0, 1]]
    assert [frames for _, frames in batches] == [["payload 0", "payload 1"], ["payload 2", "payload 3"]]


def test_sequences_stay_within_the_servers_window() -> None:
    requests = table()
    for at in range(SPAN + 10):
        add(requests, at)
    assert len(pump(requests)) == SPAN
    requests.answered(reply(*range(2, 100)), 0.0)
    assert pump(requests) == []  # the first has no answer yet
    requests.answered(reply(1), 0.0)
    assert len(pump(requests)) == 10


def test_adopted_requests_stay_within_the_servers_window_too() -> None:
    requests = table()
    first, _, _ = requests.begin_exchange(list(range(SPAN + 10)))
    made = [
        RequestInFlight(OperationProgress(at, 1), 0, Record(RecordKind.PUSH, at, 0, 1), ())
        for at in range(SPAN + 10)
    ]
    for at, request in enumerate(made):
        request.sequence = first + at
    requests.adopt(made, first + 5, 0.0)
    sent = pump(requests)
    assert [one.sequence for one in sent] == list(range(first + 5, first + SPAN))
    requests.answered(reply(*range(first + 1, first + 100)), 0.0)
    assert pump(requests) == []  # the first has no answer yet
    requests.answered(reply(first), 0.0)
    assert [one.sequence for one in pump(requests)] == list(range(first + SPAN, first + SPAN + 10))


def test_large_requests_are_probed_and_small_ones_repeated() -> None:
    requests = table()
    add(requests, 0, BIG)
    add(requests, 1, 8)
    pump(requests)
    assert requests.overdue(0.5) == []
    overdue = requests.overdue(1.0)
    [(records, frames)] = requests.probes(overdue)
    assert [(one.flags, one.nbytes) for one in records] == [(PROBE, 0), (0, 8)]
    assert frames == ["payload 1"]
    assert requests.overdue(1.5) == []
    assert len(requests.overdue(2.5)) == 2


def test_what_may_have_gone_with_a_stream_is_overdue_at_once() -> None:
    requests = table()
    add(requests, 0, BIG)
    pump(requests)
    assert requests.overdue(0.1) == []
    requests.suspect()
    assert len(requests.overdue(0.2)) == 1
    assert requests.overdue(0.9) == []


def test_a_probe_of_rows_can_be_read() -> None:
    """It has none of them; a record that counts rows without bytes would be refused, and fail the request."""
    requests = table()
    record = Record(RecordKind.PUSH, 5, 0, 1, rows=3000, place=PayloadLocation.FRAME, nbytes=3000 * 12)
    frames = (bytes(3000 * 8), bytes(3000 * 4))
    requests.add(RequestInFlight(OperationProgress(1, 1), 0, record, frames), 0)
    pump(requests)
    [(records, payloads)] = requests.probes(requests.overdue(1.0))
    codec = MessageCodec("job", marks=True)
    found = codec.decode([bytes(one) for one in codec.encode(Batch(0, 0, 1, 1, records, tuple(payloads)))])
    assert isinstance(found, Batch)
    assert [(one.kind, one.slice, one.flags, one.nbytes) for one in found.records] == [
        (RecordKind.PUSH, 5, PROBE, 0)
    ]


def test_a_slow_server_is_not_buried_under_repetitions_and_a_lost_batch_is_found_at_once() -> None:
    requests = table()
    for at in range(20_000):
        add(requests, at, 8)
    pump(requests)
    overdue = requests.overdue(1.0)
    assert 256 < len(overdue) <= 512
    assert all(len(frames) == 0 for _, frames in requests.probes(overdue))
    numbers = [one.sequence for one in overdue]
    assert max(b - a for a, b in itertools.pairwise(numbers)) < 100  # no lost batch lies between two of them
    others = requests.overdue(1.5)
    assert not {one.sequence for one in others} & set(numbers)
    requests.answered(reply(numbers[3], kind=RecordKind.UNKNOWN), 1.6)
    assert len(requests.overdue(1.9)) == 20_000 - len(overdue) - len(others)


def test_lost_answers_are_found_in_a_few_looks() -> None:
    requests = table()
    for at in range(20_000):
        add(requests, at, 8)
    pump(requests)
    now, looks = 0.75, 0
    while len(requests):
        now += 0.25
        looks += 1
        requests.answered(reply(*(one.sequence for one in requests.overdue(now))), now)
    assert looks <= 8
    add(requests, 0, 8)
    pump(requests, now)
    assert len(requests.overdue(now + 1.0)) == 1


def test_a_server_that_answers_nothing_is_asked_no_more_often() -> None:
    requests = table()
    for at in range(20_000):
        add(requests, at, 8)
    pump(requests)
    assert max(len(requests.overdue(1.0 + look / 4)) for look in range(20)) <= 512


def test_what_the_server_does_not_know_is_sent_whole() -> None:
    requests = table()
    request = add(requests, 0, BIG)
    pump(requests)
    done, unknown = requests.answered(reply(1, kind=RecordKind.UNKNOWN), 3.0)
    assert (done, unknown) == ([], [request])
    [(records, frames)] = requests.repeats(unknown)
    assert (records[0].sequence, records[0].nbytes, frames) == (1, BIG, ["payload 0"])
    assert requests.answered(reply(1), 3.0)[0][0][0] is request
    assert requests.answered(reply(1), 3.0) == ([], [])


def test_a_new_server_gets_what_is_open_first_and_with_its_numbers() -> None:
    requests = table(credit=20)
    for at in range(3):
        add(requests, at, 10)
    pump(requests)
    requests.answered(reply(1, received=10), 0.0)
    add(requests, 9, 1, priority=99)
    requests.begin_again()
    sent = pump(requests)
    assert [(one.slice, one.sequence) for one in sent] == [(1, 2), (9, 3)] or [
        (one.slice, one.sequence) for one in sent
    ] == [(1, 2), (2, 3)]
    assert requests.outstanding() <= 20


def test_a_late_answer_takes_no_push_back() -> None:
    requests = table()
    for round_ in (1, 2, 3):
        add(requests, 7).record = Record(RecordKind.PUSH, 7, 0, round_)
    pump(requests)
    for sequence, last in ((2, 2), (1, 2), (3, 3)):
        requests.answered(Batch(0, 0, 0, 1, [Record(RecordKind.DONE, 7, sequence)]), 0.0)
        assert requests.accepted == {7: last}
    assert requests.begin_exchange([7]) == (4, 0, [1])
    requests.end_exchange([7], [1], [3], 0, 0)
    assert requests.accepted == {7: 3}


def test_a_rejoined_worker_counts_from_its_base() -> None:
    requests = table()
    requests.first_rounds[0] = 7
    requests.pushes[0] = 1
    add(requests, 0, 8)
    [record] = pump(requests)
    assert record.round == 8
    requests.answered(reply(1), 0.0)
    assert requests.accepted == {0: 8}
    assert requests.pushed() == ((0, 8),)


def test_given_up_requests_still_get_their_answers_but_do_no_harm() -> None:
    requests = table()
    add(requests, 0, BIG)
    pump(requests)
    add(requests, 1, BIG)
    operations = requests.disown()
    assert sorted(one.name for one in operations) == [0, 1]  # type: ignore[type-var]
    assert pump(requests) == []
    [(records, frames)] = requests.probes(requests.overdue(5.0))
    assert [(one.kind, one.sequence, one.nbytes, one.flags) for one in records] == [
        (RecordKind.PULL, 1, 0, 0)
    ]
    assert frames == []
    requests.answered(reply(1), 5.0)
    assert len(requests) == 0


def test_given_up_requests_whose_message_was_lost_hold_up_nothing() -> None:
    requests = table(credit=1000)
    for at in range(3):
        add(requests, at, 400)
    assert len(pump(requests)) == 2  # and neither arrives
    requests.disown()
    add(requests, 0, kind=RecordKind.PULL)
    assert [record.kind for record in pump(requests)] == [RecordKind.PULL]
    requests.answered(reply(1, 2, 3), 1.0)
    assert requests.outstanding() == 0
    add(requests, 1, 400)
    add(requests, 2, 400)
    assert len(pump(requests)) == 2


def test_a_lost_server_is_asked_nothing() -> None:
    requests = table()
    add(requests, 0, 8)
    pump(requests)
    add(requests, 1, 8)
    assert len(requests.drop()) == 2
    assert (len(requests), pump(requests), requests.overdue(9.0)) == (0, [], [])


# ---------------------------------------------------------------------------------------------- exchanges

SLICES = [10, 11, 12]


def state(requests: RequestTable) -> dict[str, object]:
    found = {name: getattr(requests, name) for name in ("_next", "_sent", "_answered", "_received")}
    found |= {name: dict(getattr(requests, name)) for name in ("pushes", "accepted", "complete")}
    return found | {"flying": sum(requests._flying.values()), "left": len(requests)}


def pushpull(requests: RequestTable, slice_: int, sequence: int = 0) -> RequestInFlight:
    """Make a request with the count of the slice's pushes, which it is one of."""
    count = requests.pushes[slice_]
    record = Record(RecordKind.PUSHPULL, slice_, 0, count, place=PayloadLocation.FRAME, nbytes=100)
    made = RequestInFlight(OperationProgress("op", 1), 0, record, b"")
    made.sequence = sequence
    return made


def values(first: int, which: list[int], received: int) -> Batch:
    records = [Record(RecordKind.VALUE, SLICES[at], first + at, 50 + first + at) for at in which]
    return Batch(0, 0, 0, 1, records, (), received)


@given(st.lists(st.sets(st.sampled_from([0, 1, 2])), min_size=1, max_size=5), st.booleans())
def test_an_exchange_counts_as_requests_do(calls: list[set[int]], sent: bool) -> None:
    """Some of three slices are answered by the exchange, the other slices when the table has adopted them."""
    usual, quick = table(), table()
    for requests in (usual, quick):
        requests.first_rounds.update({10: 4, 12: 9})
    for answered in calls:
        for slice_ in SLICES:
            usual.pushes[slice_] = usual.pushes.get(slice_, 0) + 1
            usual.add(pushpull(usual, slice_), 0)
        wanted = pump(usual)
        assert quick.is_empty
        first, _, rounds = quick.begin_exchange(SLICES)
        assert [(first + at, rounds[at]) for at in range(3)] == [(one.sequence, one.round) for one in wanted]

        done = sorted(answered) if sent else []
        left = [at for at in range(3) if at not in done]
        usual.answered(values(first, done, 100 * len(done)), 0.0)
        complete = [50 + first + at for at in done]
        slices, nbytes = [SLICES[at] for at in done], 100 * len(done)
        quick.end_exchange(slices, [rounds[at] for at in done], complete, nbytes, nbytes)
        quick.adopt([pushpull(quick, SLICES[at], first + at) for at in left], first + 3 * sent, 0.0)
        resent = [] if sent else left
        assert [one.sequence for one in pump(quick)] == [first + at for at in resent]
        assert state(quick) == state(usual)
        if left:
            assert not quick.is_empty
        for requests in (usual, quick):
            requests.answered(values(first, left, 0), 0.0)
        assert state(quick) == state(usual)
    assert quick.pushed() == usual.pushed()


@pytest.mark.parametrize(("priority", "order"), [(0, [30, 12, 20, 21]), (2, [12, 20, 21, 30])])
@pytest.mark.parametrize("pumped", [False, True])
def test_what_chained_exchanges_have_not_sent_is_sent_by_its_priority(
    priority: int, order: list[int], pumped: bool
) -> None:
    """Two of five slices were sent, one was answered; the other slices get new numbers."""
    requests = table()
    requests.begin_exchange([10, 11, 12])
    requests.begin_exchange([20, 21])
    requests.end_exchange([10], [1], [1], 0, 0)
    requests.adopt([pushpull(requests, 11, 2), pushpull(requests, 12, 3)], 3, 0.0, priority)
    sent = pump(requests) if pumped else []
    requests.adopt([pushpull(requests, 20, 4), pushpull(requests, 21, 5)], 4, 0.0, priority)
    add(requests, 30, priority=1)
    sent += pump(requests)
    assert [one.slice for one in sent] == ([12] + [at for at in order if at != 12] if pumped else order)
    assert [one.sequence for one in sent] == [3, 4, 5, 6]
    assert requests.unanswered() == (7, (2, 3, 4, 5, 6))
    for sequence in (2, 3, 4, 5, 6):
        requests.answered(reply(sequence), 0.0)
    assert not len(requests)


def test_what_an_exchange_has_not_seen_answered_is_asked_for() -> None:
    requests = table()
    assert requests.begin_exchange(SLICES) == (1, 0, [1, 1, 1])
    requests.adopt([pushpull(requests, 11, 2)], 4, 10.0)
    assert requests.overdue(10.5) == []
    [(records, _)] = requests.probes(requests.overdue(11.0))
    assert [(one.kind, one.slice, one.sequence, one.round) for one in records] == [
        (RecordKind.PUSHPULL, 11, 2, 1)
    ]


def test_an_exchange_begins_only_where_nothing_is_under_way() -> None:
    requests = table()
    assert requests.is_empty
    add(requests, 5, kind=RecordKind.PULL)
    assert not requests.is_empty
    pump(requests)
    assert not requests.is_empty
    requests.answered(reply(1), 0.0)
    assert requests.is_empty and requests.begin_exchange(SLICES) == (2, 0, [1, 1, 1])


KINDS = st.sampled_from([RecordKind.PUSH, RecordKind.PULL, RecordKind.PUSHPULL])


@pytest.mark.parametrize("most", [2, 32])
@given(
    program=st.lists(st.tuples(KINDS, st.integers(0, 2), st.integers(-1, 1)), max_size=25), draw=st.randoms()
)
def test_no_push_goes_out_before_an_older_value_is_there(
    most: int, program: list[tuple[RecordKind, int, int]], draw: random.Random
) -> None:
    """Nor does a read keep a push waiting that it waits for itself: all are answered in the end.

    Requests of a slice are sent in the order of the calls; at most so many pushes are in flight.
    """
    with mock.patch.object(request_table, "_PUSHED", most):
        check_order(most, program, draw)


def check_order(most: int, program: list[tuple[RecordKind, int, int]], draw: random.Random) -> None:
    requests, counts = table(), [0, 0, 0]
    waiting: list[Record] = []
    last = [-1, -1, -1]
    pushed: set[tuple[int, int]] = set()

    def take() -> None:
        for record in pump(requests):
            assert record.clock > last[record.slice]
            last[record.slice] = record.clock
            if record.kind != RecordKind.PULL:
                reads = [one for one in waiting if one.slice == record.slice and one.kind != RecordKind.PUSH]
                assert all(one.round >= record.round for one in reads)
                pushed.add((record.slice, record.round))
            waiting.append(record)
            flying = [one.kind != RecordKind.PULL for one in waiting if one.slice == record.slice]
            assert sum(flying) <= most

    def answer() -> None:
        ready = [
            one for one in waiting if all((one.slice, round_) in pushed for round_ in range(1, one.round + 1))
        ]
        assert ready
        one = draw.choice(ready)
        waiting.remove(one)
        requests.answered(Batch(0, 0, 0, 1, [one._replace(kind=RecordKind.DONE)], ()), 0.0)

    for call, (kind, slice_, priority) in enumerate(program):
        counts[slice_] += kind != RecordKind.PULL
        record = Record(kind, slice_, 0, counts[slice_], clock=call)
        requests.add(RequestInFlight(OperationProgress(slice_, 1), 0, record, None), priority)
        take()
        if waiting and draw.random() < 0.5:
            answer()
            take()
    while waiting:
        answer()
        take()
    assert requests.is_empty
