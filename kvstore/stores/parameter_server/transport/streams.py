"""Streams: plain connections beside ZeroMQ's, over which the batches of a worker and a server go.

A server listens at a second address. It tells a worker over ZeroMQ where that is, with a token that only the
two know; the worker connects and sends the token first. A batch goes over the stream while there is one, and
over ZeroMQ otherwise: what is lost with a stream is asked for again, as after any broken connection. Where
there are keys, there are no streams, for these are not encrypted.
"""

from __future__ import annotations

import socket

from .frames import Limits
from .native._streams import Sender, Stream

#: What a worker sends first, before its token.
MAGIC = b"KVSTREAM"
TOKEN_BYTES = 16
#: Seconds for a connection to be made and the token to be sent.
HANDSHAKE = 10.0

_DEAD_AFTER = 15_000  # ms without an acknowledgement of what was sent; as ZeroMQ's own connections
_LARGEST = Limits().frame + 128 * Limits().records  # bytes of a frame: payload, or head and records


def open_stream(connection: socket.socket, sender: Sender) -> Stream:
    """Make a stream of a connection over which the token has gone; the connection is the stream's then."""
    return Stream(sender, connection.detach(), _LARGEST)


def tune(connection: socket.socket) -> None:
    """Set the options of a connection: small messages go at once, and a dead peer is noticed."""
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        return
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_USER_TIMEOUT, _DEAD_AFTER),
        (socket.TCP_KEEPIDLE, 5),  # seconds
        (socket.TCP_KEEPINTVL, 2),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)
