"""A message to many receivers is encoded once, and is the same for each as an own message."""

from __future__ import annotations

import pytest

from kvstore.errors import ProtocolError
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.transport.fan_out import FanOut
from kvstore.stores.parameter_server.transport.frames import MessageCodec, MessageLimits

VIEW = m.ViewNotice(0, 3, tuple(m.Member(n, n + 7, "address") for n in range(20)), (), (), ())
ENTRIES = tuple(
    m.KeyEntry(m.KeySpec(f"k{n}", (4, 5), "float32"), n, (m.Slice(n, 0, 0, 20),), True) for n in range(9)
)
SLICES = m.SlicesNotice(0, ENTRIES)


@pytest.mark.parametrize("one", [VIEW, SLICES])
def test_each_gets_a_letter_of_its_own(one: object) -> None:
    codec = MessageCodec("a job")
    letters = [m.ReliableMessage(n, 2 * n, one) for n in range(1, 5)]
    assert [codec.decode(codec.encode(letter)) for letter in letters] == letters
    assert [codec.encode(letter) for letter in letters] == [
        MessageCodec("a job").encode(one) for one in letters
    ]


def test_answers_with_the_same_entries_keep_the_rest_apart() -> None:
    codec = MessageCodec("a job")
    answers = [m.MemberReply(n, ENTRIES, version=n, text=str(n)) for n in range(4)]
    letters = [m.ReliableMessage(n, 0, answer) for n, answer in enumerate(answers)]
    assert [codec.decode(codec.encode(letter)) for letter in letters] == letters


def test_what_comes_between_is_not_confused_with_it() -> None:
    codec, other = MessageCodec("a job"), m.ViewNotice(0, 4, (), (), (), ())
    bodies = [VIEW, VIEW, other, VIEW, m.MemberReply(1), VIEW, m.PingRequest(0), SLICES, VIEW]
    letters = [m.ReliableMessage(n, 0, body) for n, body in enumerate(bodies)]
    assert [codec.decode(codec.encode(letter)) for letter in letters] == letters


def test_only_what_was_remembered_is_not_new() -> None:
    fan_out = FanOut()
    first, second = (m.ReliableMessage(n, 0, VIEW) for n in (1, 2))
    assert fan_out.encode(first)[1]
    assert fan_out.encode(second)[1]
    fan_out.remember_body(second)
    assert not fan_out.encode(first)[1]
    assert fan_out.encode(m.ReliableMessage(3, 0, m.MemberReply(1)))[1]


def test_what_cannot_be_sent_is_refused_each_time() -> None:
    bad = m.SlicesNotice(0, (m.KeyEntry(m.KeySpec("k" * 2000, (1,), "float32"), 0, (), True),))
    large = MessageCodec("a job", MessageLimits(control=64))
    codec = MessageCodec("a job")
    for number in range(3):
        with pytest.raises(ProtocolError):
            codec.encode(m.ReliableMessage(number, 0, bad))
        with pytest.raises(ProtocolError):
            large.encode(m.ReliableMessage(number, 0, VIEW))
