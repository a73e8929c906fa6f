"""Streams: connections for the batches of a worker and a server, in addition to ZeroMQ's.

A server listens at a second address. It sends the address to a worker over ZeroMQ, with a token that only
the two know; the worker connects and sends the token first. A batch is sent over the stream if there is one,
and over ZeroMQ otherwise: messages that are lost with a stream are repeated, as after any broken connection.

Where there are keys, streams are encrypted (`ciphers`). The token then only names the secret: the worker
sends it with the cipher and its salt, the server answers with its salt and proof, and the worker's proof
completes the handshake. `stream_listener` decides which connections become streams.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass, field

from ....observe.native._observe import Counters
from .ciphers import PROOF_BYTES, SALT_BYTES, SECRET_BYTES
from .frames import MessageLimits
from .native._streams import Cipher, Sender, Stream
from .refusals import RefusalLog

#: The first bytes of a worker, before its token.
MAGIC = b"KVSTREAM"
ENCRYPTED_MAGIC = b"KVCIPHER"
TOKEN_BYTES = 16
#: Bytes of each message of a handshake: the worker's, the server's, and with keys the worker's second.
HELLO_BYTES = len(MAGIC) + TOKEN_BYTES
ENCRYPTED_HELLO_BYTES = len(ENCRYPTED_MAGIC) + TOKEN_BYTES + 1 + SALT_BYTES
ANSWER_BYTES = SALT_BYTES + PROOF_BYTES
#: Seconds for a connection to be made and the token to be sent.
HANDSHAKE = 10.0

_DEAD_AFTER = 15_000  # ms without an acknowledgement of sent bytes; as ZeroMQ's own connections
_LARGEST = (
    MessageLimits().frame + 128 * MessageLimits().records
)  # bytes of a frame: payload, or head and records

_refusals = RefusalLog()


@dataclass(frozen=True)
class StreamOffer:
    """The data that a worker needs to open a stream; without ciphers the stream is not encrypted."""

    address: str
    token: bytes = field(repr=False)
    secret: bytes = field(default=b"", repr=False)
    ciphers: tuple[int, ...] = ()

    def as_text(self) -> str:
        """Return the offer as text for a message."""
        secret = f"-{self.secret.hex()}-{'.'.join(map(str, self.ciphers))}" if self.ciphers else ""
        return f"{self.address}/{self.token.hex()}{secret}"

    @classmethod
    def parse_text(cls, text: str, encrypted: bool) -> StreamOffer | None:
        """Read the text of an offer; None: it is invalid, or not encrypted as required."""
        address, _, rest = text.rpartition("/")
        token, *more = rest.split("-")
        try:
            if not more:
                return None if encrypted else cls(address, bytes.fromhex(token))
            secret, ciphers = more
            made = cls(address, bytes.fromhex(token), bytes.fromhex(secret), (*map(int, ciphers.split(".")),))
        except ValueError:
            return None
        return made if encrypted and len(made.secret) == SECRET_BYTES else None


def open_stream(
    connection: socket.socket,
    sender: Sender,
    cipher: Cipher | None = None,
    counters: Counters | None = None,
    limits_in_flight: bool = False,
) -> Stream:
    """Make a stream of a connection after the handshake; the stream then owns the descriptor."""
    near = is_near(connection)
    made = Stream(sender, connection.detach(), _LARGEST, cipher)
    made.is_near, made.limits_in_flight = near, limits_in_flight
    if counters is not None and counters.number >= 0:  # otherwise the store sets its counters later
        made.observe(counters)
    return made


def note_altered(error: ConnectionError) -> None:
    """Log that a stream has ended because of the bytes that it received."""
    if isinstance(error, ConnectionAbortedError):
        _refusals.note_refusal("a stream", str(error))


def tune_connection(connection: socket.socket, peer: str = "") -> None:
    """Set the options of a connection: small messages are sent at once, and a dead peer is detected.

    `peer` is the address of the other end, where there is one.
    """
    connection.setblocking(False)
    if connection.family == socket.AF_UNIX:
        return
    if is_own_address(connection.family, peer):
        stop_pacing(connection)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    for option, value in (
        (socket.TCP_USER_TIMEOUT, _DEAD_AFTER),
        (socket.TCP_KEEPIDLE, 5),  # seconds
        (socket.TCP_KEEPINTVL, 2),
    ):
        connection.setsockopt(socket.IPPROTO_TCP, option, value)


def is_own_address(family: int, address: str) -> bool:
    """Return whether an internet address is one of this host."""
    try:
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.bind((address.split("%")[0], 0))
    except OSError:
        return False
    return bool(address)


def is_near(connection: socket.socket) -> bool:
    """Return whether the other end of a connection is known to be on this host."""
    if connection.family == socket.AF_UNIX:
        return True
    try:
        return is_own_address(connection.family, connection.getpeername()[0])
    except OSError:  # already broken
        return False


def stop_pacing(connection: socket.socket) -> None:
    """Have bytes that do not leave this host sent without pacing.

    There is no link that could be congested; a congestion control that paces, as BBR does, halves the speed.
    Reno is part of every Linux kernel, and needs no privilege. An accepted connection inherits the control of
    its listener.
    """
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
