"""The line between the command and a worker: messages in JSON, over a unix socket without a file."""

from __future__ import annotations

import json
import os
import socket
import struct
from typing import Any

Message = dict[str, Any]

_PIECE = 1 << 20  # bytes
_SEND = 60.0  # seconds in which the other side must take a message
_CREDENTIALS = struct.Struct("3i")


class CommandGone(Exception):
    """The command has ended, or wants nothing more of this worker."""


class WorkerLink:
    """The worker's end.

    Raises
    ------
    CommandGone
        The command is not there any more. All methods may raise it.
    """

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        try:
            self._socket.connect("\0" + address)
        except OSError as error:
            raise CommandGone from error
        self._lines = self._socket.makefile("rb")

    def send(self, message: Message) -> None:
        """Send a message."""
        try:
            self._socket.sendall(_written(message))
        except OSError as error:
            raise CommandGone from error

    def receive(self) -> Message:
        """Wait for the next message."""
        try:
            line = self._lines.readline()
        except OSError as error:
            raise CommandGone from error
        if not line:
            raise CommandGone
        message: Message = json.loads(line)
        return message


class CommandLink:
    """The command's end; it is read when there is something to read, and never waits for that."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        connection.settimeout(_SEND)
        self._rest = b""
        #: Messages that have come and were not taken.
        self.inbox: list[Message] = []
        #: The worker has hung up, or sent what is no message.
        self.closed = False

    def fileno(self) -> int:
        """Give the descriptor, for a selector."""
        return self._socket.fileno()

    def is_ours(self) -> bool:
        """Whether a process of this user is at the other end: a name without a file has no permissions."""
        found = self._socket.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
        return bool(_CREDENTIALS.unpack(found)[1] == os.getuid())

    def send(self, message: Message) -> None:
        """Send a message; a worker that is gone is noticed by the next `read`."""
        try:
            self._socket.sendall(_written(message))
        except OSError:
            self.closed = True

    def read(self) -> None:
        """Take what there is."""
        try:
            data = self._socket.recv(_PIECE)
            *lines, self._rest = (self._rest + data).split(b"\n")
            self.inbox += map(json.loads, lines)
        except (OSError, ValueError):
            data = b""
        self.closed = self.closed or not data

    def close(self) -> None:
        """Hang up."""
        self.closed = True
        self._socket.close()


def _written(message: Message) -> bytes:
    return json.dumps(message).encode() + b"\n"
