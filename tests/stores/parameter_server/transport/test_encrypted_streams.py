"""Streams of jobs with keys: without the secret none is opened, and an attacker between reads nothing."""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pace
import pytest

from kvstore.settings import addresses
from kvstore.settings.keys import JobKeys
from kvstore.settings.roles import Roles
from kvstore.stores.parameter_server.protocol.messages import AttachReply
from kvstore.stores.parameter_server.transport import (
    ciphers,
    sockets,
    stream_client,
    stream_listener,
    streams,
)
from kvstore.stores.parameter_server.transport.channel import ChannelPoller
from kvstore.stores.parameter_server.transport.native._streams import Sender
from kvstore.stores.parameter_server.transport.server_streams import ServerStreams
from kvstore.stores.parameter_server.transport.stream_client import StreamClient
from kvstore.stores.parameter_server.transport.streams import (
    ANSWER_BYTES,
    ENCRYPTED_HELLO_BYTES,
    StreamOffer,
)

PEER = b"worker 0"
PROOF_BYTES = ciphers.PROOF_BYTES

Alter = Callable[[bool, int, bytes], bytes]


class Job:
    """A server's end, a worker's, and an attacker between."""

    def __init__(self) -> None:
        self.poller, self.sender = ChannelPoller(), Sender()
        roles: Any = SimpleNamespace(ipc=False, host="127.0.0.1", keys=object())
        self.server_poller = ChannelPoller()
        self.server = ServerStreams(roles, self.server_poller)
        self.came: list[bytes] = []
        self.clients: list[StreamClient] = []
        self.between: list[Between] = []

    @property
    def offer(self) -> StreamOffer:
        found = StreamOffer.parse_text(self.server.offer_stream(PEER), True)
        assert found is not None
        return found

    def client(self, offer: str = "", encrypted: bool = True) -> StreamClient:
        made = StreamClient(
            offer or self.server.offer_stream(PEER), lambda: self.sender, self.poller, encrypted
        )
        self.clients.append(made)
        made.advance_open()
        return made

    def through(self, alter: Alter = lambda up, at, data: data) -> tuple[StreamClient, Between]:
        """Make a client whose connections pass through an attacker."""
        between = Between(self.server._listener.address, alter)
        self.between.append(between)
        offer = self.offer
        return self.client(
            StreamOffer(between.address, offer.token, offer.secret, offer.ciphers).as_text()
        ), between

    def turn(self) -> None:
        for between in self.between:
            between.turn()
        for item in self.server_poller.wait(0.0):
            self.server.handle_item(item)
        self.server.close_late()
        self.came += [bytes(memoryview(frames[0])) for _, _, frames in self.server.receive(0.001)]

    def answers(self) -> list[bytes]:
        return [bytes(memoryview(frames[0])) for item in self.poller.wait(0.0) for frames in item.receive()]

    def until(self, true: Callable[[], object]) -> None:
        end = pace.deadline(20)
        while not true():
            assert time.monotonic() < end
            self.turn()

    def close(self) -> None:
        for one in (*self.clients, *self.between):
            one.close()
        self.server.close(0.0)
        self.sender.close()
        self.poller.close()
        self.server_poller.close()


class Between:
    """Passes on what workers and a server send, and keeps it; `alter(up, at, data)` may change it."""

    def __init__(self, target: str, alter: Alter) -> None:
        host, port = addresses.split_address(target)
        self._target = host, port
        self._alter = alter
        self._listening = socket.create_server(("127.0.0.1", 0))
        self._listening.setblocking(False)
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        self._pairs: list[dict[bool, socket.socket]] = []
        #: The bytes that each connection's worker (True) and server have sent.
        self.sent: list[dict[bool, bytes]] = []

    def turn(self) -> None:
        try:
            near, _ = self._listening.accept()
        except BlockingIOError:
            pass
        else:
            far = socket.create_connection(self._target)
            near.setblocking(False)
            far.setblocking(False)
            self._pairs.append({True: near, False: far})
            self.sent.append({True: b"", False: b""})
        for pair, sent in zip(self._pairs, self.sent, strict=True):
            for up in (True, False):
                self._pass(pair, sent, up)

    def _pass(self, pair: dict[bool, socket.socket], sent: dict[bool, bytes], up: bool) -> None:
        try:
            data = pair[up].recv(1 << 20)
            if data:
                pair[not up].sendall(self._alter(up, len(sent[up]), data))
                sent[up] += data
                return
        except BlockingIOError:
            return
        except OSError:
            pass
        for one in pair.values():
            one.close()

    def close(self) -> None:
        self._listening.close()
        for pair in self._pairs:
            for one in pair.values():
                one.close()


@pytest.fixture
def job() -> Iterator[Job]:
    made = Job()
    yield made
    made.close()


def flip(up: bool, at: int) -> Alter:
    """Flip one bit of one direction of each connection."""

    def alter(to_server: bool, begin: int, data: bytes) -> bytes:
        changed = bytearray(data)
        if to_server == up and begin <= at < begin + len(data):
            changed[at - begin] ^= 1
        return bytes(changed)

    return alter


def never(job: Job, client: StreamClient, tries: int = 150) -> None:
    for _ in range(tries):
        job.turn()
        job.poller.wait(0.0)
        assert not client.send([b"x"])
    assert not job.came and not job.server.has_stream(PEER)


def test_an_attacker_between_reads_nothing(job: Job) -> None:
    client, between = job.through()
    job.until(lambda: client.send([b"a secret of the worker"]))
    job.until(lambda: job.came)
    assert job.server.send(PEER, [b"a secret of the server"])
    found: list[bytes] = []
    job.until(lambda: found.extend(job.answers()) or found)
    assert (job.came, found) == ([b"a secret of the worker"], [b"a secret of the server"])
    (sent,) = between.sent
    assert len(sent[True]) > ENCRYPTED_HELLO_BYTES + PROOF_BYTES and len(sent[False]) > ANSWER_BYTES
    for text in sent.values():
        assert b"secret of" not in text and b"KVST" not in text
        assert job.offer.secret not in text and job.offer.secret.hex().encode() not in text


@pytest.mark.parametrize(
    ("up", "last"), [(True, ENCRYPTED_HELLO_BYTES - 1), (False, ANSWER_BYTES - 1)], ids=["hello", "answer"]
)
@pytest.mark.parametrize("part", [0.0, 0.1, 0.3, 0.41, 0.45, 0.7, 1.0])
def test_an_attacker_that_alters_the_handshake_prevents_a_stream(
    job: Job, up: bool, last: int, part: float
) -> None:
    client, between = job.through(flip(up, round(part * last)))
    job.until(lambda: between.sent and between.sent[0][True])
    never(job, client)


def test_an_attacker_that_asks_for_another_cipher_prevents_a_stream(job: Job) -> None:
    if len(job.offer.ciphers) < 2:
        pytest.skip("this process has one cipher only")
    best, *_, other = job.offer.ciphers
    at = ENCRYPTED_HELLO_BYTES - ciphers.SALT_BYTES - 1

    def weaker(up: bool, begin: int, data: bytes) -> bytes:
        if not up or begin > at:
            return data
        assert data[at] == best
        return data[:at] + bytes([other]) + data[at + 1 :]

    client, between = job.through(weaker)
    job.until(lambda: between.sent and len(between.sent[0][False]) == ANSWER_BYTES)
    never(job, client)


@pytest.mark.parametrize("at", [0, PROOF_BYTES - 1])
def test_an_attacker_that_alters_the_proof_prevents_a_stream(job: Job, at: int) -> None:
    client, _ = job.through(flip(True, ENCRYPTED_HELLO_BYTES + at))
    job.until(lambda: client.send([b"lost"]))  # the worker cannot know yet
    job.until(lambda: client.receive() or client._stream is None)
    assert not job.came and not job.server.has_stream(PEER)


@pytest.mark.parametrize("up", [True, False])
def test_what_was_altered_is_noticed_and_no_stream_is_tried_for_some_time(
    job: Job, up: bool, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_refusals", streams.RefusalLog())
    begin = ENCRYPTED_HELLO_BYTES + PROOF_BYTES if up else ANSWER_BYTES
    client, between = job.through(flip(up, begin + 30))
    job.until(lambda: client.send([bytes(100)]))
    if not up:
        job.until(lambda: job.came)
        assert job.server.send(PEER, [bytes(100)])
    job.until(lambda: client.receive() or client._stream is None)
    job.until(lambda: "altered" in caplog.text and not job.server.has_stream(PEER))
    assert up != bool(job.came)
    connections = len(between.sent)
    for _ in range(50):
        job.turn()
        assert not client.send([b"over ZeroMQ"])
    assert len(between.sent) == connections
    monkeypatch.setattr(between, "_alter", lambda up, at, data: data)
    client._attempted -= stream_client._MISTRUST
    job.until(lambda: client.send([b"again"]))
    job.until(lambda: b"again" in job.came)


def test_a_stream_that_is_altered_repeatedly_is_tried_ever_more_seldom(
    job: Job, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(streams, "_refusals", streams.RefusalLog())
    client, between = job.through(flip(True, ENCRYPTED_HELLO_BYTES + PROOF_BYTES + 30))
    pauses = []
    for _ in range(9):
        job.until(lambda: client.send([bytes(100)]))
        job.until(lambda: client.receive() or client._stream is None)
        pauses.append(client._pause)
        client._attempted -= client._pause
    assert pauses == [30.0 * 2**n for n in range(7)] + [3600.0, 3600.0]
    monkeypatch.setattr(between, "_alter", lambda up, at, data: data)
    job.until(lambda: client.send([b"again"]))
    job.until(lambda: b"again" in job.came)
    client._opened -= 31
    client._close_stream()
    assert client._pause < 1
    job.until(lambda: client.send([b"and again"]))


def test_what_is_said_again_opens_no_stream_and_cuts_none(job: Job) -> None:
    client, between = job.through()
    job.until(lambda: client.send([b"one"]))
    job.until(lambda: job.came)
    said = between.sent[0][True]
    hello, proof = said[:ENCRYPTED_HELLO_BYTES], said[ENCRYPTED_HELLO_BYTES:][:PROOF_BYTES]
    replay = socket.create_connection(addresses.split_address(job.server._listener.address))
    replay.settimeout(0.01)
    replay.sendall(said)
    answer = b""

    def ended() -> bool:
        nonlocal answer
        try:
            got = replay.recv(1000)
        except TimeoutError:
            return False
        except OSError:
            return True
        answer += got
        return not got

    job.until(ended)
    replay.close()
    assert len(answer) == ANSWER_BYTES, "a client not known to be a stranger gets an answer"
    assert answer != between.sent[0][False][:ANSWER_BYTES] and hello and proof
    assert job.came == [b"one"]
    assert client.send([b"two"])
    job.until(lambda: len(job.came) == 2)
    assert job.server.send(PEER, [b"down"])
    found: list[bytes] = []
    job.until(lambda: found.extend(job.answers()) or found)


def test_a_server_that_only_repeats_gets_nothing(job: Job) -> None:
    client, between = job.through()
    job.until(lambda: client.send([b"one"]))
    answer = between.sent[0][False]

    def repeated(up: bool, at: int, data: bytes) -> bytes:
        return data if up else answer[at : at + len(data)]

    another, false = job.through(repeated)
    job.until(lambda: false.sent and len(false.sent[0][False]) == ANSWER_BYTES)
    for _ in range(50):
        job.turn()
        assert not another.send([b"for nobody else"])
    assert all(len(sent[True]) == ENCRYPTED_HELLO_BYTES for sent in false.sent)


def test_each_connection_has_other_keys(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Even those of a worker that repeats its salt: equal messages look different."""
    usual = stream_client.secrets.token_bytes
    client, between = job.through()
    monkeypatch.setattr(stream_client, "secrets", SimpleNamespace(token_bytes=lambda n: bytes(n)))
    assert stream_listener.secrets.token_bytes is usual
    monkeypatch.setattr(stream_client, "_MISTRUST", 0.0)
    found: list[bytes] = []
    for number in range(1, 4):
        job.until(lambda: client.send([bytes(1000)]))
        job.until(lambda n=number: len(job.came) == n)  # type: ignore[misc]
        assert job.server.send(PEER, [bytes(1000)])
        job.until(lambda n=number: found.extend(job.answers()) or len(found) == n)  # type: ignore[misc]
        client._close_stream()
        job.until(lambda: not job.server.has_stream(PEER))
    assert len(between.sent) == 3
    chunks = [sent[True][ENCRYPTED_HELLO_BYTES + PROOF_BYTES :] for sent in between.sent]
    chunks += [sent[False][ANSWER_BYTES:] for sent in between.sent]
    texts = [chunk[4:][:1000] for chunk in chunks]
    assert len(chunks[0]) > 1000
    for at in range(0, 1000 - 16, 16):
        assert len({text[at : at + 16] for text in texts}) == 6, "no two are encrypted alike"
    hellos = {sent[True][:ENCRYPTED_HELLO_BYTES] for sent in between.sent[1:]}
    assert len(hellos) == 1


def test_a_worker_with_another_secret_gets_no_stream(job: Job) -> None:
    offer = job.offer
    wrong = StreamOffer(offer.address, offer.token, bytes(32), offer.ciphers)
    never(job, job.client(wrong.as_text()))
    unknown = StreamOffer(offer.address, bytes(16), offer.secret, offer.ciphers)
    never(job, job.client(unknown.as_text()))


def test_a_worker_that_was_forgotten_gets_no_stream(job: Job) -> None:
    client, between = job.through()
    job.until(lambda: between.sent and len(between.sent[0][False]) == ANSWER_BYTES)
    job.server.forget_worker(PEER)  # between the hello and the proof
    client.send([b"x"])
    job.until(lambda: client.receive() or client._stream is None)
    assert not job.came and not job.server.has_stream(PEER)


def test_only_so_many_may_owe_a_proof_and_not_for_long(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    hello = streams.ENCRYPTED_MAGIC + job.offer.token + bytes([job.offer.ciphers[0]]) + bytes(32)
    many = []
    for _ in range(6):
        many.append(socket.create_connection(addresses.split_address(job.server._listener.address)))
        many[-1].sendall(hello)
    unproven = job.server._listener._unproven
    job.until(lambda: len(unproven) == 4)
    for _ in range(20):
        job.turn()
        assert len(unproven) == 4
    assert not job.server._listener._strangers
    monkeypatch.setattr(stream_listener, "HANDSHAKE", 0.05)
    job.until(lambda: not unproven)
    for one in many:
        one.close()


def test_a_handshake_that_was_slow_is_begun_again(job: Job) -> None:
    """The server may have closed the connection by then, and sent data would be lost."""
    client, between = job.through()
    job.until(lambda: between.sent and len(between.sent[0][False]) == ANSWER_BYTES)
    client._attempted -= streams.HANDSHAKE
    assert not client.send([b"over ZeroMQ"])
    job.until(lambda: client.send([b"one"]))
    job.until(lambda: job.came)
    assert len(between.sent) == 2


def test_offers_are_of_the_right_kind(job: Job) -> None:
    """Where there are keys no data is sent over an unencrypted stream, whatever a server offers."""
    offer = job.offer
    assert len(offer.secret) == 32 and offer.ciphers == ciphers.available_ciphers()
    assert "secret" not in repr(offer) and offer.token.hex() not in repr(offer)
    assert offer.secret.hex() not in repr(AttachReply(1, stream=offer.as_text()))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setblocking(False)
    address = f"tcp://127.0.0.1:{listener.getsockname()[1]}"
    plain = StreamOffer(address, offer.token).as_text()
    short = StreamOffer(address, offer.token, bytes(31), offer.ciphers).as_text()
    unknown = StreamOffer(address, offer.token, offer.secret, (99,)).as_text()
    for text in (plain, short, unknown, f"{plain}-", f"{plain}--", f"{plain}-00-1", f"{offer.as_text()}-"):
        never(job, job.client(text), 3)
    never(job, job.client(StreamOffer(address, offer.token, offer.secret, offer.ciphers).as_text(), False), 3)
    with pytest.raises(BlockingIOError):
        listener.accept()
    listener.close()


@pytest.mark.parametrize("found", [True, False])
def test_sockets_with_keys_offer_encrypted_streams_or_none(
    job_keys: dict[str, JobKeys], monkeypatch: pytest.MonkeyPatch, found: bool
) -> None:
    if not found:
        monkeypatch.setattr(sockets, "available_ciphers", lambda: ())
    scheduler = sockets.SchedulerSockets(roles("scheduler", "tcp://127.0.0.1:0", job_keys))
    for on in (True, False):
        server = sockets.ServerSockets(roles("server", scheduler.address, job_keys), 1, streams=on)
        offer = server.offer_stream(PEER)
        assert bool(offer) == (on and found)
        assert not offer or StreamOffer.parse_text(offer, True) is not None
        server.close()
    worker = sockets.WorkerSockets(
        roles("worker", scheduler.address, job_keys),
        sockets.HelloRequest("worker", 0, 1, "worker/0", "job", 1),
    )
    worker.open_stream(0, f"{server.address}/{'00' * 16}")
    assert worker._streams[0]._connecting is None
    worker.close()
    scheduler.close()


def roles(role: str, scheduler: str, keys: dict[str, JobKeys]) -> Roles:
    return Roles(role, 0, 1, 1, "job", scheduler, "127.0.0.1", 0, keys[role], False)


def test_without_libsodium_there_are_no_ciphers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ciphers, "_LIBRARY", ciphers.re.compile("(no such line)"))
    assert ciphers._find_aeads.__wrapped__() == {}


def test_a_processor_without_aes_has_the_other_cipher(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ciphers, "_has_cipher", lambda library, name: not name.startswith("ae"))
    assert list(ciphers._find_aeads.__wrapped__()) == [2]
    monkeypatch.setattr(ciphers, "available_ciphers", lambda: (2,))
    assert ciphers.choose_cipher((1, 2)) == 2 and ciphers.choose_cipher((1,)) is None
