"""Letters arrive once and in order, whatever the network does to them."""

from __future__ import annotations

import random

from hypothesis import given
from hypothesis import strategies as st

from kvstore.stores.parameter_server.protocol.messages import PingReply, ReliableMessage
from kvstore.stores.parameter_server.protocol.reliable_link import ReliableLink


@given(st.integers(0, 1 << 32), st.integers(1, 30))
def test_once_and_in_order(seed: int, count: int) -> None:
    rng = random.Random(seed)
    here, there = ReliableLink(1.0), ReliableLink(1.0)
    wire = [(there, here.write(number, 0.0)) for number in range(count)]
    come: list[int] = []
    now = 0
    while here.last_acknowledged < count:
        now += 1
        rng.shuffle(wire)
        coming, wire = wire, []
        for link, message in coming:
            for _ in range(rng.choice((0, 1, 1, 2))):
                come += link.read(message, now)
            pending = link.pending_ack()
            if pending is not None:
                wire.append((here if link is there else there, pending))
        wire += [(there, message) for message in here.overdue_messages(now)]
    assert come == list(range(count))


def test_a_letter_aside_is_handled_at_once_and_never_again() -> None:
    link = ReliableLink(1.0)
    assert link.read(ReliableMessage(0, 0, PingReply(1)), 0.0) == [PingReply(1)]
    assert link.pending_ack() is None
    assert link.overdue_messages(10.0) == []


def test_early_letters_wait_for_their_turn() -> None:
    link = ReliableLink(1.0)
    assert link.read(ReliableMessage(2, 0, "b"), 0.0) == []  # type: ignore[arg-type]
    assert link.read(ReliableMessage(1, 0, "a"), 0.0) == ["a", "b"]  # type: ignore[arg-type]
    assert link.read(ReliableMessage(1, 0, "a"), 0.0) == []  # type: ignore[arg-type]
    pending = link.pending_ack()
    assert pending is not None
    assert pending.seen == 2


def test_what_is_far_ahead_is_not_kept() -> None:
    link = ReliableLink(1.0)
    for number in range(2, 100_000):
        link.read(ReliableMessage(number, 0, number), 0.0)  # type: ignore[arg-type]
    assert len(link._early) <= 1024


def test_letters_are_sent_again_after_a_while_and_not_before() -> None:
    link = ReliableLink(1.0)
    first = link.write("a", 0.0)
    assert link.overdue_messages(0.9) == []
    assert link.overdue_messages(1.0) == [first]
    assert link.overdue_messages(1.5) == []
    link.read(ReliableMessage(0, 1, None), 1.6)
    assert link.overdue_messages(9.0) == []


def test_a_slow_peer_is_not_flooded_with_repetitions() -> None:
    link = ReliableLink(1.0)
    link.write("a", 0.0)
    times = [now for now in range(100) if link.overdue_messages(float(now))]
    assert times == [1, 3, 7, 15, 23, 31, 39, 47, 55, 63, 71, 79, 87, 95]
    link.read(ReliableMessage(0, 1, None), 100.0)
    second = link.write("b", 100.0)
    assert link.overdue_messages(101.0) == [second]
