"""The streams of a server's workers."""

from __future__ import annotations

import socket
import time
from collections.abc import Hashable
from typing import Any

from ....settings.roles import Roles
from .channel import Poller
from .frames import Buffer
from .native._streams import Frame, Sender, Stream
from .stream_listener import StreamListener
from .streams import open_stream

Received = list[tuple[Hashable, list[Frame]]]


class ServerStreams:
    """Takes in streams, by the name that ZeroMQ has for their worker; sends and receives over them."""

    def __init__(self, roles: Roles, poller: Poller) -> None:
        self._poller = poller
        self._sender = Sender()
        self._listener = StreamListener(roles)
        self._streams: dict[Hashable, Stream] = {}
        self._peers: dict[Stream, Hashable] = {}
        poller.watch(self._listener.fileno(), self._listener)

    def offer(self, peer: Hashable) -> str:
        """Return what a worker has to know to open a stream."""
        return self._listener.offer(peer)

    def forget(self, peer: Hashable) -> None:
        """Close a worker's stream, and let it open none again."""
        self._listener.withdraw(peer)
        self._drop(peer)

    def send(self, peer: Hashable, frames: list[Buffer]) -> bool:
        """Send a message; False: the worker has no stream, or has not read for long."""
        stream = self._streams.get(peer)
        return stream is not None and stream.send(frames)

    def receive(self, item: Any) -> Received:
        """Serve an item that the poller has returned; return messages, each with its sender."""
        if item is self._listener:
            for connection in self._listener.accept():
                self._poller.watch(connection.fileno(), connection)
        elif isinstance(item, socket.socket):
            self._greet(item)
        elif item in self._peers:
            return self._receive(item)
        return []

    def close_late(self) -> None:
        """Close connections that have not said who they are for too long."""
        for connection in self._listener.late():
            self._end(connection)

    def _greet(self, connection: socket.socket) -> None:
        done, peer = self._listener.greet(connection)
        if not done:
            return
        if peer is None:
            self._end(connection)
            return
        self._poller.unwatch(connection.fileno())
        self._drop(peer)
        stream = self._streams[peer] = open_stream(connection, self._sender)
        self._peers[stream] = peer
        self._poller.watch(stream.fileno(), stream)

    def _receive(self, stream: Stream) -> Received:
        peer = self._peers[stream]
        try:
            return [(peer, frames) for frames in stream.receive()]
        except ConnectionError:
            self._drop(peer)
            return []

    def _drop(self, peer: Hashable) -> None:
        stream = self._streams.pop(peer, None)
        if stream is not None:
            del self._peers[stream]
            self._poller.unwatch(stream.fileno())
            stream.close()

    def _end(self, connection: socket.socket) -> None:
        self._poller.unwatch(connection.fileno())
        connection.close()

    def close(self, linger: float) -> None:
        """Close all; messages that the kernel has not taken are tried for `linger` seconds more."""
        end = time.monotonic() + linger
        while time.monotonic() < end and not all(stream.sent for stream in self._peers):
            time.sleep(0.001)
        for peer in list(self._streams):
            self._drop(peer)
        self._poller.unwatch(self._listener.fileno())
        self._listener.close()
        self._sender.close()
