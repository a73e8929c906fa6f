"""A worker's end of a stream to one server."""

from __future__ import annotations

import math
import socket
import time
from collections.abc import Callable
from typing import Any

from ....settings import addresses
from .channel import Poller
from .frames import Buffer
from .native._streams import Frame, Sender, Stream
from .streams import HANDSHAKE, MAGIC, open_stream, tune

_AGAIN, _AGAIN_MOST = 0.05, 1.0  # seconds between two attempts to connect


class StreamClient:
    """A worker's stream to one server, opened again whenever it breaks.

    `offer` is what the server has told; the poller returns this object when there is something to receive.
    """

    def __init__(self, offer: str, sender: Callable[[], Sender], poller: Poller) -> None:
        self.offer = offer
        self._address, _, token = offer.rpartition("/")
        self._hello = MAGIC + bytes.fromhex(token)
        self._sender, self._poller = sender, poller
        self._connecting: socket.socket | None = None
        self._attempted, self._pause = -math.inf, _AGAIN
        self._stream: Stream | None = None

    @property
    def stream(self) -> Stream | None:
        """The stream, if there is one now."""
        return self._stream

    def send(self, frames: list[Buffer]) -> bool:
        """Send a message; False: there is no stream now."""
        if self._stream is None:
            self.open()
        if self._stream is None:
            return False
        if self._stream.send(frames):
            return True
        self._drop()
        return False

    def receive(self) -> list[list[Frame]]:
        """Return messages that have come; none when the stream is at its end."""
        if self._stream is None:
            return []
        try:
            found: list[list[Frame]] = self._stream.receive()
        except ConnectionError:
            self._drop()
            return []
        self._pause = _AGAIN
        return found

    def finish(self, seconds: float) -> None:
        """Wait until all messages are with the kernel, which sends them whatever becomes of this process."""
        end = time.monotonic() + seconds
        while self._stream is not None and not self._stream.sent and time.monotonic() < end:
            time.sleep(0.001)

    def close(self) -> None:
        """Close it. A second call does nothing."""
        self._drop()
        if self._connecting is not None:
            self._connecting.close()
            self._connecting = None

    def _drop(self) -> None:
        if self._stream is not None:
            self._poller.unwatch(self._stream.fileno())
            self._stream.close()
            self._stream = None

    def open(self) -> None:
        """Take one step towards a stream, without waiting: connect, or send the token once that is done."""
        if self._connecting is None:
            now = time.monotonic()
            if now - self._attempted < self._pause:
                return
            self._attempted, self._pause = now, min(2 * self._pause, _AGAIN_MOST)
            self._connecting = _connect(self._address)
        if self._connecting is None:
            return
        try:
            sender = self._sender()
            self._connecting.send(self._hello)  # so few bytes go at once or not at all
        except BlockingIOError:
            if time.monotonic() - self._attempted < HANDSHAKE:
                return
            self._connecting.close()
        except OSError:  # no descriptors either: data goes over ZeroMQ meanwhile
            self._connecting.close()
        else:
            self._stream = open_stream(self._connecting, sender)
            self._poller.watch(self._stream.fileno(), self)
        self._connecting = None


def _connect(address: str) -> socket.socket | None:
    """Begin to connect; None: that failed at once."""
    try:
        family, where = _target(address)
        made = socket.socket(family)
    except OSError:
        return None
    try:
        tune(made)
        made.connect(where)
    except BlockingIOError:  # it is being made
        return made
    except OSError:
        made.close()
        return None
    return made


def _target(address: str) -> tuple[int, Any]:
    """Return family and address as sockets take them."""
    if address.startswith("ipc://@"):
        return socket.AF_UNIX, "\0" + address.removeprefix("ipc://@")
    host, port = addresses.split(address)
    family, _, _, _, where = socket.getaddrinfo(host.strip("[]"), port, type=socket.SOCK_STREAM)[0]
    return family, where
