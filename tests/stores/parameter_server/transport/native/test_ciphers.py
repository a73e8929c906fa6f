"""Encrypted streams over real sockets: altered, missing, repeated or cut data is never received."""

from __future__ import annotations

import ctypes
import os
import socket
import struct
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from kvstore.stores.parameter_server.transport import ciphers
from kvstore.stores.parameter_server.transport.native._streams import Cipher, Sender, Stream

LIMIT = 1 << 22
HEAD, CHUNK = 4, 64 * 1024
TAG = 32  # at most
TO, FROM = bytes(range(32)), bytes(range(32, 64))


@pytest.fixture(scope="module")
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.close()


@pytest.fixture(params=ciphers.available_ciphers())
def number(request: pytest.FixtureRequest) -> int:
    return int(request.param)


def cipher(number: int, goes: bytes = TO, comes: bytes = FROM, **options: int) -> Cipher:
    return Cipher(ciphers._find_aeads()[number], goes, comes, **options)


def sockets() -> tuple[socket.socket, socket.socket]:
    both = socket.socketpair()
    for one in both:
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4 << 20)
    return both


@pytest.fixture
def sent(sender: Sender, number: int) -> Callable[..., list[bytes]]:
    """Record the chunks of messages of one frame each, sent with the same keys each time."""

    def record(*messages: bytes, **options: int) -> list[bytes]:
        ours, theirs = sockets()
        stream = Stream(sender, theirs.detach(), LIMIT, cipher(number, **options))
        found, tag = [], ciphers._find_aeads()[number].tag_bytes
        for message in messages:
            assert stream.send([message])
            assert stream.sent
            raw = ours.recv(1 << 20)
            while raw:
                end = HEAD + int.from_bytes(raw[:HEAD], "little") + tag
                found.append(raw[:end])
                raw = raw[end:]
        stream.close()
        ours.close()
        return found

    return record


@pytest.fixture
def receive(sender: Sender, number: int) -> Callable[..., tuple[list[bytes], type[Exception] | None]]:
    """Receive bytes that were recorded: the messages, and how the stream ended."""

    def replay(raw: bytes, **options: int) -> tuple[list[bytes], type[Exception] | None]:
        ours, theirs = sockets()
        stream, found = Stream(sender, theirs.detach(), LIMIT, cipher(number, FROM, TO, **options)), []
        ours.sendall(raw)
        error: type[Exception] | None = None
        try:
            for _ in range(3):
                found += [bytes(memoryview(frames[0])) for frames in stream.receive()]
        except ConnectionError as ended:
            error = type(ended)
            with pytest.raises(ConnectionError):
                stream.receive()
        stream.close()
        ours.close()
        return found, error

    return replay


ALTERED = ([], ConnectionAbortedError)


def test_what_was_sent_is_received(sent: Callable[..., list[bytes]], receive: Callable[..., object]) -> None:
    messages = [b"", b"one", os.urandom(200_000), b"two"]
    assert receive(b"".join(sent(*messages))) == (messages, None)


@pytest.mark.parametrize("rest", [1, 9, 12])
def test_small_chunks_come_with_full_ones(sender: Sender, number: int, rest: int) -> None:
    """Where tags are short, two full chunks leave room for a third one; see it with a sanitizer."""
    sizes = [32_000] * 4
    sizes.append(2 * CHUNK + rest - sum(sizes) - 8 - 8 * (len(sizes) + 1))
    frames = [os.urandom(size) for size in sizes]
    ours, theirs = sockets()
    stream, raw = Stream(sender, theirs.detach(), LIMIT, cipher(number)), b""
    assert stream.send(frames)
    assert stream.sent
    tag = ciphers._find_aeads()[number].tag_bytes
    while len(raw) < 2 * CHUNK + rest + 3 * (HEAD + tag):
        raw += ours.recv(1 << 20)
    stream.close()
    peer, other = sockets()
    peer.sendall(raw)
    reader = Stream(sender, other.detach(), LIMIT, cipher(number, FROM, TO))
    found = [bytes(memoryview(one)) for _ in range(3) for message in reader.receive() for one in message]
    assert found == frames
    reader.close()
    for one in (ours, peer):
        one.close()


def test_every_byte_counts(sent: Callable[..., list[bytes]], receive: Callable[..., object]) -> None:
    (chunk,) = sent(b"a message")
    for at in range(len(chunk)):
        for bit in (0, 7):
            altered = bytearray(chunk)
            altered[at] ^= 1 << bit
            # Behind it is enough for any length that it could claim now.
            assert receive(bytes(altered) + bytes(CHUNK + TAG)) == ALTERED, (at, bit)


def test_bytes_of_large_chunks_count(
    sent: Callable[..., list[bytes]], receive: Callable[..., object]
) -> None:
    """These are decrypted where the frame stays."""
    chunks = sent(os.urandom(300_000))
    assert len(chunks) > 4
    for which in range(1, len(chunks)):
        for at in (0, 2, HEAD, HEAD + 9, len(chunks[which]) // 2, -16, -1):
            altered = bytearray(chunks[which])
            altered[at] ^= 1
            raw = b"".join([*chunks[:which], bytes(altered), *chunks[which + 1 :], bytes(CHUNK + TAG)])
            assert receive(raw) == ALTERED, (which, at)


def test_chunks_come_once_and_in_order(
    sent: Callable[..., list[bytes]], receive: Callable[..., object]
) -> None:
    one, two, three = sent(b"one", b"two", b"three")
    assert receive(one + two + three) == ([b"one", b"two", b"three"], None)
    assert receive(two + three) == ALTERED, "the first is left out"
    for raw in (one + three, one + one + two, one + three + two):
        assert receive(raw) == ([b"one"], ConnectionAbortedError)


def test_chunks_that_are_cut_are_not_received(
    sent: Callable[..., list[bytes]], receive: Callable[..., object]
) -> None:
    one, two = sent(b"one", b"two")
    for cut in range(1, len(two)):
        assert receive(one + two[:cut]) == ([b"one"], None), "the rest may come"
        assert receive(one + two[:cut] + bytes(CHUNK + TAG)) == ([b"one"], ConnectionAbortedError)


@pytest.mark.parametrize("length", [0, CHUNK + 1, (1 << 32) - 1])
def test_chunks_of_impossible_lengths_end_the_stream(receive: Callable[..., object], length: int) -> None:
    assert receive(struct.pack("<I", length)) == ALTERED


def test_plain_messages_end_an_encrypted_stream(receive: Callable[..., object]) -> None:
    plain = b"KVST" + struct.pack("<IQ", 1, 70_000) + bytes(70_000)
    assert receive(plain) == ALTERED


def test_other_keys_end_the_stream(sender: Sender, number: int, sent: Callable[..., list[bytes]]) -> None:
    (chunk,) = sent(b"a message")
    for comes in (FROM, bytes(32)):  # the key of the other direction, and of another connection
        ours, theirs = sockets()
        stream = Stream(sender, theirs.detach(), LIMIT, cipher(number, b"x" * 32, comes))
        ours.sendall(chunk)
        with pytest.raises(ConnectionAbortedError):
            stream.receive()
        stream.close()
        ours.close()


def test_what_is_sent_shows_nothing(sent: Callable[..., list[bytes]]) -> None:
    text = b"what nobody else may read"
    raw = b"".join(sent(text * 1000, bytes(100_000), text))
    assert text not in raw and b"KVST" not in raw
    for chunk in sent(bytes(100_000)):
        blocks = [chunk[at : at + 16] for at in range(HEAD, len(chunk) - 16, 16)]
        assert len(set(blocks)) == len(blocks), "equal blocks look different"
    first, second, _ = sent(b"same", b"same", b"same")
    assert first != second, "and so do equal chunks"


def test_chunks_are_those_of_the_standard(number: int, sent: Callable[..., list[bytes]]) -> None:
    """The library's own function for a whole text decrypts them: the key, the number as nonce, the length."""
    name, aead = ciphers._NAMES[number], ciphers._find_aeads()[number]
    maps = Path("/proc/self/maps").read_text()
    path = next(line.split()[-1] for line in maps.splitlines() if "libsodium" in line)
    decrypt = getattr(ctypes.CDLL(path), f"crypto_aead_{name}_decrypt")
    message = os.urandom(150_000)
    text = b""
    for at, chunk in enumerate(sent(message, b"and on")):
        n = len(chunk) - HEAD - aead.tag_bytes
        out, size = ctypes.create_string_buffer(n), ctypes.c_ulonglong()
        nonce = struct.pack("<Q", at).rjust(aead.nonce_bytes, b"\0")
        ad, sealed = chunk[:HEAD], chunk[HEAD:]
        length, head = ctypes.c_ulonglong(len(sealed)), ctypes.c_ulonglong(HEAD)
        assert decrypt(out, ctypes.byref(size), None, sealed, length, ad, head, nonce, TO) == 0
        assert size.value == n
        text += out.raw
    assert message in text and text.endswith(b"and on")


def test_keys_are_replaced(sent: Callable[..., list[bytes]], receive: Callable[..., object]) -> None:
    messages = [b"%d" % n for n in range(20)]
    replaced = sent(*messages, chunks_of_key=4)
    assert receive(b"".join(replaced), chunks_of_key=4) == (messages, None)
    assert receive(b"".join(replaced)) == (messages[:4], ConnectionAbortedError)
    kept = sent(*messages)
    assert replaced[:4] == kept[:4] and not set(replaced[4:]) & set(kept)
    assert receive(b"".join(kept), chunks_of_key=4) == (messages[:4], ConnectionAbortedError)


def test_a_cipher_serves_one_stream_only(sender: Sender, number: int) -> None:
    ours, theirs = sockets()
    own = cipher(number)
    stream = Stream(sender, ours.detach(), LIMIT, own)
    with pytest.raises(ValueError, match="one stream only"):
        Stream(sender, theirs.detach(), LIMIT, own)
    stream.close()


def test_a_cipher_has_two_keys(number: int) -> None:
    aead = ciphers._find_aeads()[number]
    for goes, comes in ((TO, TO), (TO[:31], FROM), (TO, FROM + b"x"), (b"", b"")):
        with pytest.raises(ValueError, match="two keys"):
            Cipher(aead, goes, comes)
    with pytest.raises(ValueError, match="two keys"):
        Cipher(aead, TO, FROM, 0)


def test_a_cipher_has_all_functions_and_sizes_that_fit(number: int) -> None:
    aead = ciphers._find_aeads()[number]
    for wrong in (aead[:3], aead._replace(hash=0)):
        with pytest.raises(ValueError, match="three functions"):
            Cipher(wrong, TO, FROM)
    for wrong in (aead._replace(nonce_bytes=7), aead._replace(nonce_bytes=33), aead._replace(tag_bytes=33)):
        with pytest.raises(ValueError, match="a nonce has 8 to 32 bytes"):
            Cipher(wrong, TO, FROM)


def test_a_fork_sends_nothing(sender: Sender, number: int) -> None:
    """It would use the numbers that its parent uses."""
    ours, theirs = sockets()
    stream = Stream(sender, theirs.detach(), LIMIT, cipher(number))
    child = os.fork()
    if not child:
        os._exit(1 if stream.send([b"twice"]) else 0)
    assert os.waitpid(child, 0)[1] == 0
    with pytest.raises(BlockingIOError):
        ours.recv(1)
    assert stream.send([b"once"]) and ours.recv(100)
    stream.close()
    ours.close()
