"""A worker's end of a stream to one server."""

from __future__ import annotations

import hmac
import logging
import math
import secrets
import socket
import time
from collections.abc import Callable
from typing import Any

from ....observe.native._observe import Counters
from ....settings import addresses
from .channel import ChannelPoller
from .ciphers import SALT_BYTES, StreamHandshake, choose_cipher
from .frames import Buffer
from .native._streams import Frame, Sender, Stream
from .streams import (
    ANSWER_BYTES,
    ENCRYPTED_MAGIC,
    HANDSHAKE,
    MAGIC,
    StreamOffer,
    note_altered,
    open_stream,
    tune_connection,
)

log = logging.getLogger("kvstore.ps")

_AGAIN, _AGAIN_MOST = 0.05, 1.0  # seconds between two attempts to connect
# And after an encrypted stream that ended sooner: the network may alter its bytes. Messages that are lost
# with a stream have to be requested and sent again, so each such attempt doubles the pause.
_MISTRUST, _MISTRUST_MOST = 30.0, 3600.0


class StreamClient:
    """A worker's stream to one server, opened again whenever it breaks.

    `offer` is the server's text; the poller returns this object when there are bytes to receive. Where the
    stream has to be `encrypted`, and the offer has no cipher, no stream is opened. `limits_in_flight`: the
    worker shares few cores with others, and has fewer bytes in flight to a server of its host.
    """

    def __init__(
        self,
        offer: str,
        sender: Callable[[], Sender],
        poller: ChannelPoller,
        encrypted: bool = False,
        limits_in_flight: bool = False,
    ) -> None:
        self.offer, self._limits_in_flight = offer, limits_in_flight
        self._offer = StreamOffer.parse_text(offer, encrypted)
        self._cipher = choose_cipher(self._offer.ciphers) if self._offer is not None and encrypted else None
        if encrypted and self._cipher is None:
            self._offer = None
        self._hello = self._answer = b""
        self._answers = False  # the hello was sent, and the server's answer has not arrived
        self._opened = -math.inf
        self._sender, self._poller = sender, poller
        self._connecting: socket.socket | None = None
        self._attempted, self._pause = -math.inf, _AGAIN
        self._mistrusts = 0  # successive streams that ended soon
        self._stream: Stream | None = None
        self._counters: Counters | None = None
        #: Whether a stream has ended since this was set to False.
        self.has_lost = False

    def observe(self, counters: Counters) -> None:
        """Record times in `counters` from now on."""
        self._counters = counters
        if self._stream is not None:
            self._stream.observe(counters)

    @property
    def stream(self) -> Stream | None:
        """The stream, if there is one."""
        return self._stream

    def send(self, frames: list[Buffer]) -> bool:
        """Send a message; False: there is no stream now."""
        if self._stream is None:
            self.advance_open()
        if self._stream is None:
            return False
        if self._stream.send(frames):
            return True
        self._close_stream()
        return False

    def receive(self) -> list[list[Frame]]:
        """Return messages that have arrived; none when the stream has ended."""
        if self._stream is None:
            if self._answers:
                self._read_answer()
            return []
        try:
            found: list[list[Frame]] = self._stream.receive()
        except ConnectionError as error:
            note_altered(error)
            self._close_stream()
            return []
        if self._cipher is None:
            self._pause = _AGAIN
        return found

    def wait_sent(self, seconds: float) -> None:
        """Wait until all messages are passed to the kernel, which sends them even if this process ends."""
        end = time.monotonic() + seconds
        while self._stream is not None and not self._stream.sent and time.monotonic() < end:
            time.sleep(0.001)

    def close(self) -> None:
        """Close it. A second call does nothing."""
        self._close_stream()
        self._close_connecting()

    def _close_stream(self) -> None:
        if self._stream is not None:
            self._poller.unwatch_descriptor(self._stream.fileno())
            self._stream.close()
            self._stream, self.has_lost = None, True
            log.debug("stream closed")
            if self._cipher is not None:
                self._choose_pause(time.monotonic())

    def _choose_pause(self, now: float) -> None:
        """Set the pause before the next attempt after an encrypted stream has ended."""
        self._attempted = now
        if now - self._opened > _MISTRUST:
            self._pause, self._mistrusts = _AGAIN, 0
        else:
            self._pause = min(2**self._mistrusts * _MISTRUST, _MISTRUST_MOST)
            self._mistrusts += 1

    def _close_connecting(self) -> None:
        """Close the connection that is not a stream yet."""
        if self._connecting is not None:
            if self._answers:
                self._poller.unwatch_descriptor(self._connecting.fileno())
            self._connecting.close()
            self._connecting, self._answers = None, False

    def advance_open(self) -> None:
        """Do the next step to open a stream, without blocking: connect, or send the hello once connected."""
        if self._offer is None:
            return
        if self._answers:
            self._read_answer()
            return
        if self._connecting is None:
            now = time.monotonic()
            if now - self._attempted < self._pause:
                return
            self._attempted, self._pause = now, min(2 * self._pause, _AGAIN_MOST)
            self._connecting = _begin_connect(self._offer.address)
            self._hello = self._new_hello(self._offer)
        if self._connecting is None:
            return
        try:
            sender = self._sender()
            self._connecting.send(self._hello)  # so few bytes are sent completely or not at all
        except BlockingIOError:
            if time.monotonic() - self._attempted >= HANDSHAKE:
                self._close_connecting()
        except OSError:  # also without a descriptor: data is sent over ZeroMQ until there is a stream
            self._close_connecting()
        else:
            self._poller.watch_descriptor(self._connecting.fileno(), self)
            if self._cipher is None:
                self._stream = open_stream(
                    self._connecting, sender, None, self._counters, self._limits_in_flight
                )
                self._connecting = None
                log.debug("stream opened to %s", self._offer.address)
            else:
                self._answers, self._answer = True, b""

    def _new_hello(self, offer: StreamOffer) -> bytes:
        if self._cipher is None:
            return MAGIC + offer.token
        return ENCRYPTED_MAGIC + offer.token + bytes([self._cipher]) + secrets.token_bytes(SALT_BYTES)

    def _read_answer(self) -> None:
        """Read the server's salt and proof; when both are complete and right, open the stream."""
        if self._connecting is None or self._offer is None or self._cipher is None:
            return
        # The server closes a connection without a proof after HANDSHAKE: a late stream would lose messages.
        late = time.monotonic() - self._attempted > HANDSHAKE / 2
        try:
            got = self._connecting.recv(ANSWER_BYTES - len(self._answer))
            self._answer += got
            if late or not got:
                self._close_connecting()
            elif len(self._answer) == ANSWER_BYTES:
                self._finish_handshake(self._connecting, self._offer.secret, self._cipher)
        except BlockingIOError:
            if late:
                self._close_connecting()
        except OSError:
            self._close_connecting()

    def _finish_handshake(self, connection: socket.socket, secret: bytes, cipher: int) -> None:
        salt, proof = self._answer[:SALT_BYTES], self._answer[SALT_BYTES:]
        handshake = StreamHandshake(secret, self._hello, salt, cipher)
        if not hmac.compare_digest(proof, handshake.server_proof()):
            self._close_connecting()
            return
        sender = self._sender()
        connection.send(handshake.worker_proof())  # so few bytes are sent completely or not at all
        self._connecting, self._answers, self._opened = None, False, time.monotonic()
        self._stream = open_stream(
            connection, sender, handshake.worker_cipher(), self._counters, self._limits_in_flight
        )
        log.debug("encrypted stream opened")


def _begin_connect(address: str) -> socket.socket | None:
    """Begin to connect; None: it failed at once."""
    try:
        family, where = _socket_target(address)
        made = socket.socket(family)
    except OSError:
        return None
    try:
        tune_connection(made, str(where[0]))
        made.connect(where)
    except BlockingIOError:  # in progress
        return made
    except OSError:
        made.close()
        return None
    return made


def _socket_target(address: str) -> tuple[int, Any]:
    """Return the address family and the address in the form that a socket needs."""
    if address.startswith("ipc://@"):
        return socket.AF_UNIX, "\0" + address.removeprefix("ipc://@")
    host, port = addresses.split_address(address)
    family, _, _, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    return family, where
