"""Streams over real sockets: messages arrive whole and in order, and an invalid one ends the stream."""

from __future__ import annotations

import fcntl
import gc
import os
import random
import select
import socket
import struct
import sys
import termios
import threading
import time
from collections.abc import Iterator

import numpy as np
import pace
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.stores.parameter_server.native._native import (
    Effects,
    Link,
    Members,
    Session,
    SliceState,
    SliceTable,
    Sums,
)
from kvstore.stores.parameter_server.transport import ciphers
from kvstore.stores.parameter_server.transport.native._streams import Sender, Stream, StreamSet

LIMIT = 1 << 22
MAGIC = b"KVST"
SIZES = st.one_of(st.integers(0, 40), st.sampled_from([4096, 32768, 32769, 65536, 65537, 200_000]))
MESSAGES = st.lists(st.lists(SIZES, min_size=1, max_size=4), min_size=1, max_size=5)
Frames = list[bytes]


_cipher: int | None = None  # of `pair`
_family: int = socket.AF_UNIX


@pytest.fixture(
    scope="module",
    params=[(socket.AF_INET, None), *((socket.AF_UNIX, one) for one in (None, *ciphers.available_ciphers()))],
    ids=lambda param: f"{param[0].name}-{param[1]}",
)
def sender(request: pytest.FixtureRequest) -> Iterator[Sender]:
    global _cipher, _family
    _family, _cipher = request.param
    made = Sender()
    yield made
    made.close()


def pair(sender: Sender) -> tuple[Stream, Stream]:
    (ours, theirs), own = sockets(), (None, None)
    if _cipher is not None:
        handshake = ciphers.StreamHandshake(bytes(32), os.urandom(57), os.urandom(32), _cipher)
        own = handshake.worker_cipher(), handshake.server_cipher()
    return Stream(sender, ours.detach(), LIMIT, own[0]), Stream(sender, theirs.detach(), LIMIT, own[1])


def sockets() -> tuple[socket.socket, socket.socket]:
    if _family == socket.AF_UNIX:
        both = socket.socketpair()
    else:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            made = socket.create_connection(listener.getsockname())
            both = listener.accept()[0], made
    for one in both:
        one.setblocking(False)
        if _family == socket.AF_INET:
            one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return both


def received(stream: Stream, count: int) -> list[Frames]:
    found: list[Frames] = []
    end = pace.deadline(20)
    while len(found) < count:
        assert time.monotonic() < end, f"{len(found)} of {count} messages"
        select.select([stream], [], [], 0.1)
        found += [[bytes(memoryview(frame)) for frame in frames] for frames in stream.receive()]
    return found


def raw(*frames: bytes) -> bytes:
    sizes = b"".join(struct.pack("<Q", len(frame)) for frame in frames)
    return MAGIC + struct.pack("<I", len(frames)) + sizes + b"".join(frames)


@given(MESSAGES)
@settings(max_examples=60, deadline=None)
def test_messages_come_as_they_were_sent(sender: Sender, shapes: list[list[int]]) -> None:
    messages = [[os.urandom(size) for size in sizes] for sizes in shapes]
    one, other = pair(sender)
    for frames in messages:
        assert one.send(list(frames))
    assert received(other, len(messages)) == messages
    assert one.sent and not other.receive()
    one.close()
    other.close()


@given(MESSAGES, st.integers(0, 1 << 32), st.sampled_from([3, 100, 5000, 100_000]))
@settings(max_examples=60, deadline=None)
def test_messages_come_however_they_are_cut(
    sender: Sender, shapes: list[list[int]], seed: int, most: int
) -> None:
    draw = random.Random(seed)
    messages = [[os.urandom(size) for size in sizes] for sizes in shapes]
    ours, theirs = sockets()
    stream, found = Stream(sender, theirs.detach(), LIMIT), []
    rest = b"".join(raw(*frames) for frames in messages)
    while rest:
        longest = most if len(rest) < 2000 else max(most, 5000)
        rest = rest[ours.send(rest[: draw.randint(1, longest)]) :]
        found += [[bytes(memoryview(frame)) for frame in frames] for frames in stream.receive()]
    assert found == messages
    stream.close()
    ours.close()


@pytest.mark.parametrize(
    "text",
    [
        b"GET / HTTP/1.1\r\n",
        MAGIC + struct.pack("<I", 0),
        MAGIC + struct.pack("<I", (1 << 18) + 1),
        MAGIC + struct.pack("<IQ", 1, LIMIT + 1),
        MAGIC + struct.pack("<IQ", 1, (1 << 64) - 1),
        MAGIC + struct.pack("<I", 300) + struct.pack("<Q", LIMIT) * 300,
    ],
    ids=["foreign", "no frame", "many frames", "large frame", "huge frame", "large message"],
)
def test_what_is_no_message_ends_the_stream(sender: Sender, text: bytes) -> None:
    ours, theirs = sockets()
    stream = Stream(sender, theirs.detach(), LIMIT)
    ours.send(raw(b"good") + text)
    assert received(stream, 1) == [[b"good"]], "earlier messages count"
    with pytest.raises(ConnectionError, match="invalid header, or is too large"):
        stream.receive()
        stream.receive()
    stream.close()
    ours.close()


@pytest.mark.parametrize("cut", [1, 7, 8, 20, 50_000])
def test_a_message_that_is_cut_off_never_comes(sender: Sender, cut: int) -> None:
    ours, theirs = sockets()
    stream = Stream(sender, theirs.detach(), LIMIT)
    ours.send(raw(b"x" * 100_000)[:cut])
    assert stream.receive() == []
    ours.close()
    with pytest.raises(ConnectionError, match="closed"):
        stream.receive()
    stream.close()


def test_what_the_socket_does_not_take_is_sent_in_the_background(sender: Sender) -> None:
    one, other = pair(sender)
    messages = [[np.full(LIMIT, i, np.uint8).data] for i in range(8)]
    for frames in messages:
        assert one.send(frames)
    assert not one.sent
    found: list[int] = []
    end = pace.deadline(20)
    while len(found) < 8:  # one.send is not called again
        assert time.monotonic() < end
        found += [int(memoryview(frames[0])[-1]) for frames in other.receive()]
    assert found == list(range(8))
    assert one.sent
    one.close()
    other.close()


def test_memory_stays_until_it_is_sent_and_is_let_go_then(sender: Sender) -> None:
    one, other = pair(sender)
    array = np.ones(LIMIT, np.uint8)
    before = sys.getrefcount(array)
    assert one.send([array.data]) and one.send([array.data])
    assert sys.getrefcount(array) > before
    received(other, 2)
    end = pace.deadline(20)
    while sys.getrefcount(array) != before:  # the sender may not have returned from its last call
        assert time.monotonic() < end
        one.receive()  # the thread that holds the interpreter's lock releases it
        gc.collect()
    assert one.send([array.data]) and one.send([array.data])
    one.close()
    assert sys.getrefcount(array) == before
    other.close()


def test_a_peer_that_does_not_read_is_refused_more(sender: Sender) -> None:
    one, other = pair(sender)
    one.send([bytes(LIMIT)])
    sent = 0
    while one.send([b"x"]):
        sent += 1
        assert sent < 1 << 17
    assert sent > 1000
    received(other, sent + 1)
    assert one.send([b"and on"])
    one.close()
    other.close()


def test_a_server_keeps_no_more_than_a_message_for_a_peer_that_does_not_read(sender: Sender) -> None:
    one, other = pair(sender)
    streams, frame = StreamSet(), bytes(1 << 26)  # the same memory each time
    streams.add(one)
    sent = 0
    while one.send([frame]):
        sent += 1
        assert sent < 20
    assert sent > 15 and one.is_full and not one.closed
    streams.remove(one.fileno())
    one.close()
    assert not one.is_full
    streams.close()
    other.close()


def test_a_peer_that_is_gone_is_noticed(sender: Sender) -> None:
    one, other = pair(sender)
    other.close()
    end = pace.deadline(20)
    while one.send([bytes(100_000)]):
        assert time.monotonic() < end
    with pytest.raises(ConnectionError):
        one.receive()
    assert one.sent, "nothing can be sent any more"
    one.close()
    assert one.fileno() == -1 and not one.send([b""])
    with pytest.raises(ConnectionError):
        one.receive()


def test_a_peer_that_is_gone_costs_nothing(sender: Sender) -> None:
    one, other = pair(sender)
    one.send([b"x"])
    other.close()
    before = time.process_time()
    time.sleep(0.5)  # its owner computes, and does not look
    assert time.process_time() - before < 0.25
    one.close()


def test_a_fork_disturbs_no_process(sender: Sender) -> None:
    one, other = pair(sender)
    one.send([bytes(LIMIT)])
    one.send([bytes(LIMIT)])
    child = os.fork()
    if not child:
        one.close()
        other.close()
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert [len(frames[0]) for frames in received(other, 2)] == [LIMIT, LIMIT]
    one.close()
    other.close()


def test_what_is_no_buffer_is_an_error_and_sends_nothing(sender: Sender) -> None:
    one, other = pair(sender)
    with pytest.raises(TypeError):
        one.send([b"a", 3])
    one.send([b"b"])
    assert received(other, 1) == [[b"b"]]
    one.close()
    other.close()


# ------------------------------------------------------------------------------------ streams served together

Served = tuple[StreamSet, list[tuple[Stream, Stream]]]


@pytest.fixture(params=[False, True], ids=["one thread", "two threads"])
def served(sender: Sender, request: pytest.FixtureRequest) -> Iterator[Served]:
    """Wait for three streams together; also return each with the peer's end."""
    together = StreamSet(two_threads=request.param)
    pairs = [pair(sender) for _ in range(3)]
    for ours, _ in pairs:
        together.add(ours)
    yield together, pairs
    for ours, theirs in pairs:
        if not ours.closed:
            together.remove(ours.fileno())
        ours.close()
        theirs.close()
    together.close()


def link_to(session: Session, report: int = 1) -> Link:
    members, slices = Members(), SliceTable[SliceState]()
    members.set([session.rank], True)
    return Link(Effects(), members, session, slices, Sums(), report, 3, 77)


def batch(session: Session, records: int = 0) -> bytes:
    head = struct.pack("<4sHBBQiiQQQI", b"KVST", 3, 2, 0, 77, session.store, session.rank, 9, 0, 0, records)
    return head + bytes(79) * records


def test_streams_with_messages_are_returned_and_no_others(served: Served) -> None:
    together, pairs = served
    assert together.serve(0) == []
    pairs[0][1].send([b"a"])
    pairs[2][1].send([b"b", b"c"])
    assert set(together.serve(20)) == {pairs[0][0], pairs[2][0]}
    assert [[bytes(memoryview(f)) for f in frames] for _, frames in pairs[2][0].take_messages()] == [
        [b"b", b"c"]
    ]
    assert [handled for handled, _ in pairs[0][0].take_messages()] == [0]
    assert pairs[0][0].take_messages() == [] and together.serve(0) == []


def test_a_stream_at_its_end_is_returned_until_it_is_removed(served: Served) -> None:
    together, pairs = served
    ours, theirs = pairs[1]
    theirs.send([b"last"])
    theirs.close()
    assert together.serve(20) == [ours]
    assert len(ours.take_messages()) == 1
    assert together.serve(20) == [ours]
    with pytest.raises(ConnectionError, match="closed"):
        ours.take_messages()
    together.remove(ours.fileno())
    ours.close()
    assert together.serve(0) == []


def test_a_large_message_is_returned_before_the_next_one_is_received() -> None:
    """Both are there, and the first one is handled while the second one is on its way through the kernel."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 1 << 20)
    accepted.setblocking(False)
    together, stream = StreamSet(), Stream(Sender(), accepted.detach(), LIMIT)
    together.add(stream)
    first, second = os.urandom(100_000), os.urandom(100_000)
    both = raw(first) + raw(second)
    made.sendall(both)
    there, end = bytearray(4), pace.deadline(20)
    while int.from_bytes(there, sys.byteorder) < len(both):
        assert time.monotonic() < end
        fcntl.ioctl(stream, termios.FIONREAD, there)
    for text in (first, second):
        assert together.serve(20) == [stream]
        assert [bytes(memoryview(frame)) for _, frames in stream.take_messages() for frame in frames] == [
            text
        ]
    together.remove(stream.fileno())
    stream.close()
    together.close()
    made.close()


def test_a_descriptor_that_is_no_stream_ends_the_wait(served: Served) -> None:
    together, _ = served
    reads, writes = os.pipe()
    together.watch(reads)
    os.write(writes, b"x")
    assert together.serve(1000) == []
    together.remove(reads)
    os.close(reads)
    os.close(writes)


def test_more_streams_than_one_look_returns(sender: Sender) -> None:
    together, pairs = StreamSet(), [pair(sender) for _ in range(150)]
    for ours, theirs in pairs:
        together.add(ours)
        theirs.send([b"x"])
    found: set[Stream] = set()
    while len(found) < len(pairs):
        some = together.serve(20)
        assert 0 < len(some) <= 64
        found.update(some)
        assert all(len(one.take_messages()) == 1 for one in some)
    for ours, theirs in pairs:
        ours.close()
        theirs.close()
    together.close()


def test_what_a_link_handles_is_not_left_and_the_rest_is_in_order(served: Served) -> None:
    together, pairs = served
    ours, theirs = pairs[0]
    session = Session(0, 1, 9)
    ours.set_link(link_to(session))
    theirs.send([batch(session)])
    assert together.serve(0) == []
    theirs.send([batch(session)])
    theirs.send([batch(session, 1)])  # of a kind that there is not
    theirs.send([batch(session)])
    assert together.serve(20) == [ours]
    assert [len(frames[0]) for _, frames in ours.take_messages()] == [52 + 79, 52]


def test_serving_ends_with_its_time_though_there_is_always_more(
    served: Served, request: pytest.FixtureRequest
) -> None:
    together, pairs = served
    ours, theirs = pairs[0]
    together.add(theirs)
    for one in (ours, theirs):  # each answers whatever the other one answers
        one.set_link(link_to(Session(0, 1, 9), report=0))
    reads, writes = os.pipe()
    together.watch(reads)
    late = threading.Timer(pace.seconds(10), os.write, (writes, b"x"))  # else a failure would be a hang
    late.start()
    theirs.send([batch(Session(0, 1, 9))])
    for _ in range(3):
        assert together.serve(0.02) == []
    assert not select.select([reads], [], [], 0)[0], "it went on as long as there was something to serve"
    if "one thread" in request.node.callspec.id:  # of two, the other one may just have received it
        assert select.select([ours, theirs], [], [], 0)[0]
    late.cancel()
    late.join()
    together.remove(theirs.fileno())
    together.remove(reads)
    os.close(reads)
    os.close(writes)


def test_a_stream_with_another_link_is_the_first_ones_no_more(served: Served) -> None:
    together, pairs = served
    ours, theirs = pairs[0]
    effects, members, slices = Effects(), Members(), SliceTable[SliceState]()
    members.set([1], True)
    first, second = Session(0, 1, 9), Session(0, 1, 9)
    links = [Link(effects, members, one, slices, Sums(), 0, 3, 77) for one in (first, second)]
    ours.set_link(links[0])
    theirs.send([batch(first)])
    assert together.serve(0) == []
    assert len(received(theirs, 1)) == 1
    ours.set_link(links[1])
    effects.report(first)
    assert len(effects.replies()) == 1, "Python has to answer, for the stream is another's"
    together.remove(ours.fileno())
    ours.close()
    effects.report(first)
    assert len(effects.replies()) == 1


class Answered:
    """A stream of two threads' set, whose messages a link answers, and the peer's end."""

    def __init__(self, sender: Sender, together: StreamSet) -> None:
        self.together, self.session = together, Session(0, 1, 9)
        self.ours, self.theirs = pair(sender)
        self.ours.set_link(link_to(self.session, report=0))
        together.add(self.ours)

    def send(self, *more: bytes) -> None:
        self.theirs.send([batch(self.session), *more])

    def await_answer(self) -> None:
        self.await_answers(1)

    def await_answers(self, n: int) -> None:
        end, got = time.monotonic() + pace.seconds(20), len(self.theirs.receive())
        while got < n:
            assert time.monotonic() < end
            assert self.together.serve(0.01) == []
            got += len(self.theirs.receive())
        assert got == n

    def is_received_by_second(self, seconds: float = 20) -> bool:
        """Whether the peer's next message is received though no thread serves; then have it answered."""
        self.send()
        end = time.monotonic() + seconds
        while is_readable(self.ours, 0) and time.monotonic() < end:
            time.sleep(0.001)
        received = not is_readable(self.ours, 0)
        self.await_answer()
        return received

    def close(self) -> None:
        if not self.ours.closed:
            self.together.remove(self.ours.fileno())
        self.ours.close()
        self.theirs.close()


SMALL, MIDDLE, LARGE = 1_000, 100_000, 600_000


def bring(one: Answered, nbytes: int, times: int) -> None:
    for _ in range(times):
        one.send(bytes(nbytes))
        one.await_answer()


@pytest.fixture
def four(sender: Sender) -> Iterator[list[Answered]]:
    """Have four streams served by two threads; the second one has two of them."""
    together = StreamSet(two_threads=True)
    made = [Answered(sender, together) for _ in range(4)]
    for one in made:
        bring(one, MIDDLE, 10)
    yield made
    for one in made:
        one.close()
    together.close()


def test_a_second_thread_has_every_other_stream_that_brings_messages_of_some_size(
    four: list[Answered],
) -> None:
    assert [one.is_received_by_second(20 if at % 2 else 0.1) for at, one in enumerate(four)] == [0, 1, 0, 1]
    for one in four[:2]:
        bring(one, LARGE, 10)
    own, second, *_ = four
    assert second.is_received_by_second() and not own.is_received_by_second(0.1)


def test_a_second_thread_keeps_a_stream_whose_messages_are_small_in_between(four: list[Answered]) -> None:
    second = four[1]
    for _ in range(10):
        bring(second, SMALL, 3)
        bring(second, MIDDLE, 1)
    assert second.is_received_by_second()


def test_a_second_thread_gives_up_a_stream_that_brings_small_messages(four: list[Answered]) -> None:
    second = four[1]
    bring(second, SMALL, 10)
    assert not second.is_received_by_second(0.1)
    bring(second, SMALL, 10)
    assert not second.is_received_by_second(0.1), "small messages do not bring it back"
    bring(second, MIDDLE, 10)
    assert second.is_received_by_second()


def test_what_is_for_python_comes_in_order_from_a_second_thread(four: list[Answered]) -> None:
    together, one, other = four[1].together, four[1], four[3]
    for text in (b"a", b"b"):
        one.send()
        one.theirs.send([text])
        one.send()
        assert together.serve(20) == [one.ours]
        left = [bytes(memoryview(frames[0])) for _, frames in one.ours.take_messages()]
        assert left[0] == text
        if len(left) == 1:  # the last arrived when Python had received that: it is answered
            one.await_answers(2)
        else:
            assert left[1:] == [batch(one.session)]
            one.await_answers(1)
    other.send()
    other.await_answer()
    one.theirs.close()
    for _ in range(2):
        assert together.serve(20) == [one.ours]
        with pytest.raises(ConnectionError, match="closed"):
            one.ours.take_messages()


def test_a_stream_of_a_second_thread_is_removed_while_it_receives(four: list[Answered]) -> None:
    for one in (four[1], four[3]):
        for _ in range(5):
            one.send()
        one.close()
    four[0].send()
    four[0].await_answer()


def test_a_receiver_is_woken_when_enough_of_a_large_frame_has_arrived() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        made = socket.create_connection(listener.getsockname())
        accepted, _ = listener.accept()
    accepted.setblocking(False)
    stream = Stream(Sender(), accepted.detach(), LIMIT)
    large, small = os.urandom(3_000_000), b"after it"
    message = raw(large)
    made.sendall(message[:100_000])
    is_readable(stream, 20)
    assert not stream.receive()
    made.sendall(message[100_000:300_000])
    assert not is_readable(stream, 0.2)
    rest = threading.Thread(target=made.sendall, args=(message[300_000:],))
    rest.start()
    assert received(stream, 1) == [[large]]
    rest.join()
    made.sendall(raw(small))
    assert received(stream, 1) == [[small]]
    made.sendall(message[:100_000])
    is_readable(stream, 20)
    assert not stream.receive()
    made.close()
    assert is_readable(stream, 20)
    with pytest.raises(ConnectionError):
        stream.receive()
    stream.close()


def is_readable(stream: Stream, seconds: float) -> bool:
    return bool(select.select([stream], [], [], seconds)[0])
