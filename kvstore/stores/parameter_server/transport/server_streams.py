"""The streams of a server's workers."""

from __future__ import annotations

import logging
import math
import os
import socket
import time
from collections.abc import Hashable, Iterator
from typing import Any

from ....observe.native._observe import Counters
from ....settings.roles import Roles
from ..native._native import Link
from .channel import ChannelPoller
from .frames import Buffer
from .native._streams import Frame, Sender, Stream, StreamSet
from .stream_listener import StreamListener
from .streams import note_altered, open_stream

log = logging.getLogger("kvstore.ps")

_REST = 0.1  # seconds without polling a listener that has no descriptor for connections

#: A message: its sender, the number of its records that are already handled, and its frames.
Received = tuple[Hashable, int, list[Frame]]


class ServerStreams:
    """The streams of a server, by the ZeroMQ identity of their worker; sends and receives messages over them.

    `poller` waits for all other sockets.
    """

    def __init__(self, roles: Roles, poller: ChannelPoller) -> None:
        self._poller = poller
        self._sender = Sender()
        self._listener = StreamListener(roles)
        self._streams: dict[Hashable, Stream] = {}
        self._peers: dict[Stream, Hashable] = {}
        self._links: dict[Hashable, Link] = {}
        self._all = StreamSet(two_threads=len(os.sched_getaffinity(0)) > 1)
        self._counters: Counters | None = None
        self._rests_until = math.inf  # while it is finite, the listener is not polled
        poller.watch_descriptor(self._listener.fileno(), self._listener)
        self._all.watch(poller.fileno())

    def observe(self, counters: Counters, waits: Any) -> None:
        """Record times in `counters`; `waits` is a capsule that names the workers this server waits for."""
        self._counters = counters
        self._all.observe(counters, waits)

    def offer_stream(self, peer: Hashable) -> str:
        """Return the offer that a worker needs to open a stream."""
        return self._listener.offer_stream(peer)

    def forget_worker(self, peer: Hashable) -> None:
        """Close a worker's stream, and refuse new ones from it."""
        self._listener.withdraw_offer(peer)
        self._close_stream(peer)

    def send(self, peer: Hashable, frames: list[Buffer]) -> bool:
        """Send a message; False: no stream. If the stream is full, the message is dropped, to be repeated."""
        stream = self._streams.get(peer)
        return stream is not None and (stream.send(frames) or stream.is_full)

    def has_stream(self, peer: Hashable) -> bool:
        """Return whether a worker has a stream now."""
        return peer in self._streams

    def link_of(self, peer: Hashable) -> Link | None:
        """Return the link that handles a worker's messages in C, if there is one."""
        return self._links.get(peer)

    def set_link(self, peer: Hashable, link: Link) -> None:
        """Set the link that handles a worker's messages in C as far as it can."""
        stream = self._streams[peer]
        stream.set_link(link)
        self._links[peer] = link
        link.near = stream.is_near

    def handle_item(self, item: Any) -> None:
        """Handle an item that the poller has returned and that is no channel."""
        if item is self._listener:
            for connection in self._listener.accept_connections():
                self._poller.watch_descriptor(connection.fileno(), connection)
            if self._listener.is_stuck:
                self._poller.unwatch_descriptor(self._listener.fileno())
                self._rests_until = time.monotonic() + _REST
        elif isinstance(item, socket.socket):
            self._continue_handshake(item)

    def receive(self, timeout: float) -> Iterator[Received]:
        """Serve the streams until there are messages or poller events, at most `timeout` seconds."""
        for stream in self._all.serve(timeout):
            peer = self._peers[stream]
            try:
                for handled, frames in stream.take_messages():
                    yield peer, handled, frames
            except ConnectionError as error:
                note_altered(error)
                self._close_stream(peer)

    def close_late(self) -> None:
        """Close connections with an overdue handshake."""
        for connection in self._listener.pop_late():
            self._close_connection(connection)
        if time.monotonic() >= self._rests_until:
            self._rests_until = math.inf
            self._poller.watch_descriptor(self._listener.fileno(), self._listener)

    def _continue_handshake(self, connection: socket.socket) -> None:
        done, peer, cipher = self._listener.read_handshake(connection)
        if not done:
            return
        if peer is None:
            self._close_connection(connection)
            return
        self._poller.unwatch_descriptor(connection.fileno())
        self._close_stream(peer)
        stream = None
        try:
            stream = open_stream(connection, self._sender, cipher, self._counters)
            self._all.add(stream)
        except (OSError, MemoryError) as error:  # the worker tries again; until then it uses ZeroMQ
            log.warning(
                "no stream for a worker (%r): its data is sent over ZeroMQ until it connects again; check "
                "the memory of this server, and fs.epoll.max_user_watches",
                error,
            )
            if stream is not None:
                stream.close()
            connection.close()
            return
        self._streams[peer], self._peers[stream] = stream, peer

    def _close_stream(self, peer: Hashable) -> None:
        stream = self._streams.pop(peer, None)
        if stream is not None:
            del self._peers[stream]
            self._links.pop(peer, None)
            self._all.remove(stream.fileno())
            stream.close()

    def _close_connection(self, connection: socket.socket) -> None:
        self._poller.unwatch_descriptor(connection.fileno())
        connection.close()

    def close(self, linger: float) -> None:
        """Close all; waits up to `linger` seconds until all messages are passed to the kernel."""
        end = time.monotonic() + linger
        while time.monotonic() < end and not all(stream.sent for stream in self._peers):
            time.sleep(0.001)
        for peer in list(self._streams):
            self._close_stream(peer)
        self._poller.unwatch_descriptor(self._listener.fileno())
        self._listener.close()
        self._all.close()
        self._sender.close()
