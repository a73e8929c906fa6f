"""Streams: connections beside ZeroMQ's, over which the batches of a worker and a server go.

A server listens at a second address. It tells a worker over ZeroMQ where that is, with a token that only the
two know; the worker connects and sends the token first. A batch goes over the stream while there is one, and
over ZeroMQ otherwise: what is lost with a stream is asked for again, as after any broken connection.

Where there are keys, streams are encrypted (`ciphers`). The token then only says which secret is meant: it is
followed by the cipher and the worker's salt; the server answers with its salt and proof, and the worker's
proof makes the connection a stream.
"""

from __future__ import annotations

import socket
from contextlib import suppress
from dataclasses import dataclass, field

from ....observe.native._observe import Counters
from .ciphers import PROOF_BYTES, SALT_BYTES, SECRET_BYTES
from .frames import Limits
from .native._streams import Cipher, Sender, Stream
from .refusals import Refusals

#: What a worker sends first, before its token.
MAGIC = b"KVSTREAM"
ENCRYPTED_MAGIC = b"KVCIPHER"
TOKEN_BYTES = 16
#: What each side sends in a handshake: the worker, the server, and the worker again where there are keys.
HELLO_BYTES = len(MAGIC) + TOKEN_BYTES
ENCRYPTED_HELLO_BYTES = len(ENCRYPTED_MAGIC) + TOKEN_BYTES + 1 + SALT_BYTES
ANSWER_BYTES = SALT_BYTES + PROOF_BYTES
#: Seconds for a connection to be made and the token to be sent.
HANDSHAKE = 10.0

_DEAD_AFTER = 15_000  # ms without an acknowledgement of what was sent; as ZeroMQ's own connections
_LARGEST = Limits().frame + 128 * Limits().records  # bytes of a frame: payload, or head and records

_refusals = Refusals()


@dataclass(frozen=True)
class Offer:
    """What a worker has to know to open a stream; without ciphers it is not encrypted."""

    address: str
    token: bytes = field(repr=False)
    secret: bytes = field(default=b"", repr=False)
    ciphers: tuple[int, ...] = ()

    def text(self) -> str:
        """Write it for a message."""
        secret = f"-{self.secret.hex()}-{'.'.join(map(str, self.ciphers))}" if self.ciphers else ""
        return f"{self.address}/{self.token.hex()}{secret}"

    @classmethod
    def read(cls, text: str, encrypted: bool) -> Offer | None:
        """Read what `text` wrote; None: it is none, or not of the kind that is wanted."""
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
    takes_turns: bool = False,
) -> Stream:
    """Make a stream of a connection after the handshake; the connection is the stream's then."""
    near = is_near(connection)
    made = Stream(sender, connection.detach(), _LARGEST, cipher)
    made.is_near, made.takes_turns = near, takes_turns
    if counters is not None and counters.number >= 0:  # else those of its store are yet to come
        made.observe(counters)
    return made


def note_altered(error: ConnectionError) -> None:
    """Say if a stream has ended because of what came over it."""
    if isinstance(error, ConnectionAbortedError):
        _refusals.note("a stream", str(error))


def tune(connection: socket.socket, peer: str = "") -> None:
    """Set the options of a connection: small messages go at once, and a dead peer is noticed.

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
    except OSError:  # it is broken by now
        return False


def stop_pacing(connection: socket.socket) -> None:
    """Have what does not leave this host sent as fast as it is taken.

    There is no link that could be congested; a control that paces, as BBR does, halves the speed. Reno is a
    part of every Linux kernel, and anybody may choose it. What a listener accepts has the listener's control.
    """
    with suppress(OSError):
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, b"reno")
