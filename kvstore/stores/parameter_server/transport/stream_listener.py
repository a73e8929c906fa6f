"""The address at which the workers of a server open their streams, and the check that they may."""

from __future__ import annotations

import contextlib
import errno
import hmac
import ipaddress
import os
import secrets
import socket
import struct
import time
from collections import deque
from collections.abc import Hashable
from dataclasses import dataclass

from ....settings import addresses
from ....settings.ports import bound_in_range
from ....settings.roles import Roles
from .ciphers import PROOF_BYTES, SALT_BYTES, SECRET_BYTES, StreamHandshake, available_ciphers
from .native._streams import Cipher
from .process_limits import DescriptorReserve
from .refusals import RefusalLog
from .streams import (
    ENCRYPTED_HELLO_BYTES,
    ENCRYPTED_MAGIC,
    HANDSHAKE,
    HELLO_BYTES,
    MAGIC,
    TOKEN_BYTES,
    StreamOffer,
    stop_pacing,
    tune_connection,
)

_STRANGERS = 64  # connections with an incomplete hello
_FEW = 8  # the same where there are few descriptors
_UNPROVEN = 4  # connections with the same token, and without proof so far
_LEFT = 1024  # tokens of workers that have left; a connection with one is refused without a log line
_BACKLOG = 4096

_refusals = RefusalLog()


@dataclass
class _UnprovenStream:
    """A connection that has sent its hello and has to prove that it knows the secret of its token."""

    since: float
    token: bytes
    handshake: StreamHandshake
    read: bytes = b""


class StreamListener:
    """Accepts the streams of a server's workers; they are encrypted where there are keys.

    `address` is ``tcp://host:port`` with a port of its own, or ``ipc://@name`` for jobs on unix sockets.
    """

    def __init__(self, roles: Roles) -> None:
        if roles.ipc:
            name = f"kvstore/{secrets.token_hex(16)}/streams"
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            self._socket.bind("\0" + name)
            self.address = f"ipc://@{name}"
        else:
            host = roles.host.strip("[]")
            family = socket.AF_INET6 if ":" in host else socket.AF_INET

            def bound(port: int) -> socket.socket:
                return socket.create_server((host, port), family=family)

            self._socket = bound_in_range(bound, OSError, host) or bound(0)
            if ipaddress.ip_address(self._socket.getsockname()[0]).is_loopback:
                stop_pacing(self._socket)
            self.address = addresses.tcp_address(roles.host, self._socket.getsockname()[1])
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self._spare = _open_spare()
        self._reserve = DescriptorReserve()
        self._encrypted = roles.keys is not None
        self._hello_bytes = ENCRYPTED_HELLO_BYTES if self._encrypted else HELLO_BYTES
        self._peers: dict[bytes, Hashable] = {}  # by token
        self._offers: dict[Hashable, StreamOffer] = {}
        self._left: deque[bytes] = deque(maxlen=_LEFT)
        self._strangers: dict[socket.socket, tuple[float, bytes]] = {}
        self._unproven: dict[socket.socket, _UnprovenStream] = {}

    def fileno(self) -> int:
        """Return the descriptor, which is readable when a connection can be accepted."""
        return self._socket.fileno()

    def offer_stream(self, peer: Hashable) -> str:
        """Return the text that a peer needs to open its stream; it must be sent over ZeroMQ."""
        offer = self._offers.get(peer)
        if offer is None:
            token = secrets.token_bytes(TOKEN_BYTES)
            secret = secrets.token_bytes(SECRET_BYTES) if self._encrypted else b""
            offer = self._offers[peer] = StreamOffer(
                self.address, token, secret, available_ciphers() if self._encrypted else ()
            )
            self._peers[token] = peer
        return offer.as_text()

    def withdraw_offer(self, peer: Hashable) -> None:
        """Refuse streams of a peer from now on."""
        offer = self._offers.pop(peer, None)
        if offer is not None:
            del self._peers[offer.token]
            self._left.append(offer.token)

    def accept_connections(self) -> list[socket.socket]:
        """Return new connections, of unknown peers; the caller calls `read_handshake` for them."""
        accepted: list[socket.socket] = []
        if self._spare < 0:
            self._spare = _open_spare()
        while True:
            try:
                connection, where = self._socket.accept()
            except BlockingIOError:
                return accepted
            except OSError as error:
                if error.errno not in (errno.ECONNABORTED, errno.EPROTO):
                    self._refuse_next(error)
                    return accepted
                continue
            self._reserve.note_opened(1)
            most = _FEW if self._reserve.missing_descriptors else _STRANGERS
            if len(self._strangers) >= most or not _is_own_user(connection):
                _refusals.note_refusal(
                    "a connection", "too many have not finished the handshake, or another user's"
                )
                connection.close()
                continue
            try:
                tune_connection(connection, str(where[0]) if where else "")
            except OSError:  # already broken
                connection.close()
                continue
            self._strangers[connection] = time.monotonic(), b""
            accepted.append(connection)

    @property
    def is_stuck(self) -> bool:
        """Whether connections can be neither accepted nor refused, because no descriptor is left."""
        return self._spare < 0

    def _refuse_next(self, error: OSError) -> None:
        """Close a connection that cannot be accepted: its worker then uses ZeroMQ at once."""
        why = f"it could not be accepted: {error.strerror}"
        if error.errno in (errno.EMFILE, errno.ENFILE):
            why += ". Its worker uses ZeroMQ, which is slower; raise the limit (ulimit -n)"
            if self._spare >= 0:
                os.close(self._spare)
            with contextlib.suppress(OSError):
                self._socket.accept()[0].close()
            self._spare = _open_spare()
        _refusals.note_refusal("a connection", why)

    def read_handshake(self, connection: socket.socket) -> tuple[bool, Hashable, Cipher | None]:
        """Read the handshake of a connection; return whether it has ended, its peer or None, and its cipher.

        When it has ended, the connection belongs to the caller.
        """
        since, read = self._strangers.get(connection, (0.0, b""))
        unproven = self._unproven.get(connection)
        if unproven is not None:
            read, wanted = unproven.read, PROOF_BYTES
        else:
            wanted = self._hello_bytes
        try:
            got = connection.recv(wanted - len(read))
        except BlockingIOError:
            return False, None, None
        except OSError:
            got = b""
        read += got
        if got and len(read) < wanted and (unproven is not None or self._may_be_hello(read)):
            if unproven is None:
                self._strangers[connection] = since, read
            else:
                unproven.read = read
            return False, None, None
        if unproven is not None:
            return self._check_proof(connection, unproven, read)
        del self._strangers[connection]
        if self._encrypted:
            try:
                if self._answer_hello(connection, since, read):
                    return False, None, None
            except OSError:  # the worker has ended
                return True, None, None
        peer = self._peers.get(read[len(MAGIC) :]) if read.startswith(MAGIC) and not self._encrypted else None
        # A worker that has ended sends nothing.
        if peer is None and read and read[len(MAGIC) :][:TOKEN_BYTES] not in self._left:
            _refusals.note_refusal("a connection", "its first bytes are not those of a worker of this job")
        return True, peer, None

    def _may_be_hello(self, read: bytes) -> bool:
        """Return whether these bytes can be the beginning of a hello."""
        magic = ENCRYPTED_MAGIC if self._encrypted else MAGIC
        return magic.startswith(read[: len(magic)])

    def _answer_hello(self, connection: socket.socket, since: float, hello: bytes) -> bool:
        """Answer the hello of an encrypted stream; False: it is invalid, or too many have its token.

        Raises OSError where the worker has closed the connection.
        """
        token = hello[len(ENCRYPTED_MAGIC) :][:TOKEN_BYTES]
        if len(hello) != ENCRYPTED_HELLO_BYTES or not hello.startswith(ENCRYPTED_MAGIC):
            return False
        cipher = hello[len(ENCRYPTED_MAGIC) + TOKEN_BYTES]
        if token not in self._peers or cipher not in available_ciphers():
            return False
        if sum(one.token == token for one in self._unproven.values()) >= _UNPROVEN:
            return False
        salt = secrets.token_bytes(SALT_BYTES)
        handshake = StreamHandshake(self._offers[self._peers[token]].secret, hello, salt, cipher)
        answer = salt + handshake.server_proof()
        if connection.send(answer) < len(answer):  # so few bytes are sent completely or not at all
            return False
        self._unproven[connection] = _UnprovenStream(since, token, handshake)
        return True

    def _check_proof(
        self, connection: socket.socket, unproven: _UnprovenStream, proof: bytes
    ) -> tuple[bool, Hashable, Cipher | None]:
        del self._unproven[connection]
        if len(proof) < PROOF_BYTES:  # the worker has ended
            return True, None, None
        if not hmac.compare_digest(proof, unproven.handshake.worker_proof()):
            _refusals.note_refusal("a connection", "it does not prove that it is a worker of this job")
            return True, None, None
        return True, self._peers.get(unproven.token), unproven.handshake.server_cipher()

    def pop_late(self) -> list[socket.socket]:
        """Return connections with an overdue handshake; they belong to the caller then."""
        if not self._strangers and not self._unproven:
            return []
        before = time.monotonic() - HANDSHAKE
        late = [one for one, (since, _) in self._strangers.items() if since < before]
        late += [one for one, unproven in self._unproven.items() if unproven.since < before]
        for one in late:
            self._strangers.pop(one, None)
            self._unproven.pop(one, None)
        return late

    def close(self) -> None:
        """Close the listener. A second call does nothing."""
        for connection in (*self._strangers, *self._unproven):
            connection.close()
        self._strangers.clear()
        self._unproven.clear()
        self._socket.close()
        if self._spare >= 0:
            os.close(self._spare)
            self._spare = -1


def _open_spare() -> int:
    """Open a spare descriptor, to be closed where no other is left; -1: there is none."""
    try:
        return os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return -1


def _is_own_user(connection: socket.socket) -> bool:
    """Return whether a connection is of this user: a unix socket without a file has no permissions."""
    if connection.family != socket.AF_UNIX:
        return True
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", told)[1] == os.getuid())
