"""The address at which the workers of a server open their streams."""

from __future__ import annotations

import errno
import os
import secrets
import socket
import struct
import time
from collections.abc import Hashable

from ....settings import addresses
from ....settings.roles import Roles
from .refusals import Refusals
from .streams import HANDSHAKE, MAGIC, TOKEN_BYTES, tune

_HELLO_BYTES = len(MAGIC) + TOKEN_BYTES
_STRANGERS = 64  # connections that have not sent a token
_BACKLOG = 4096

_refusals = Refusals()


class StreamListener:
    """Where the workers of a server open their streams.

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
            self._socket = socket.create_server((host, 0), family=family)
            self.address = addresses.tcp(roles.host, self._socket.getsockname()[1])
        self._socket.listen(_BACKLOG)
        self._socket.setblocking(False)
        self._peers: dict[bytes, Hashable] = {}  # by token
        self._tokens: dict[Hashable, bytes] = {}
        self._strangers: dict[socket.socket, tuple[float, bytes]] = {}

    def fileno(self) -> int:
        """Return the descriptor, which is readable when somebody wants to connect."""
        return self._socket.fileno()

    def offer(self, peer: Hashable) -> str:
        """Return what a peer has to know to open its stream; it is to be told over ZeroMQ."""
        token = self._tokens.get(peer)
        if token is None:
            token = self._tokens[peer] = secrets.token_bytes(TOKEN_BYTES)
            self._peers[token] = peer
        return f"{self.address}/{token.hex()}"

    def withdraw(self, peer: Hashable) -> None:
        """Let a peer open no stream any more."""
        token = self._tokens.pop(peer, None)
        if token is not None:
            del self._peers[token]

    def accept(self) -> list[socket.socket]:
        """Return new connections, of which nobody knows yet whose they are: give them to `greet`."""
        accepted: list[socket.socket] = []
        while True:
            try:
                connection, _ = self._socket.accept()
            except BlockingIOError:
                return accepted
            except OSError as error:
                if error.errno not in (errno.ECONNABORTED, errno.EPROTO):
                    _refusals.note("a connection", f"it could not be accepted: {error.strerror}")
                    return accepted
                continue
            if len(self._strangers) >= _STRANGERS or not _is_own_user(connection):
                _refusals.note("a connection", "too many have not said who they are, or another user's")
                connection.close()
                continue
            try:
                tune(connection)
            except OSError:  # it is broken by now
                connection.close()
                continue
            self._strangers[connection] = time.monotonic(), b""
            accepted.append(connection)

    def greet(self, connection: socket.socket) -> tuple[bool, Hashable]:
        """Read a new connection's token: whether that is done, and whose the connection is; None: nobody's.

        When it is done, the connection is the caller's.
        """
        since, read = self._strangers[connection]
        try:
            got = connection.recv(_HELLO_BYTES - len(read))
        except BlockingIOError:
            return False, None
        except OSError:
            got = b""
        read += got
        if got and len(read) < _HELLO_BYTES:
            self._strangers[connection] = since, read
            return False, None
        del self._strangers[connection]
        peer = self._peers.get(read[len(MAGIC) :]) if read.startswith(MAGIC) else None
        if peer is None:
            _refusals.note("a connection", "its first bytes are not those of a worker of this job")
        return True, peer

    def late(self) -> list[socket.socket]:
        """Return connections that have not said who they are for too long; they are the caller's."""
        if not self._strangers:
            return []
        now = time.monotonic()
        late = [one for one, (since, _) in self._strangers.items() if now - since > HANDSHAKE]
        for one in late:
            del self._strangers[one]
        return late

    def close(self) -> None:
        """Listen no more. A second call does nothing."""
        for connection in self._strangers:
            connection.close()
        self._strangers.clear()
        self._socket.close()


def _is_own_user(connection: socket.socket) -> bool:
    """Whether a connection may come at all: a unix socket without a file has no permissions."""
    if connection.family != socket.AF_UNIX:
        return True
    told = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
    return bool(struct.unpack("3i", told)[1] == os.getuid())
