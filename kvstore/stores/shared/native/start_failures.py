"""The cause for which a worker cannot enter a region, sent to the workers that wait for it.

During the start, each worker has a datagram socket with a name that follows from the store and its rank.
"""

from __future__ import annotations

import contextlib
import os
import socket
import struct

from ....errors import KVStoreError

_MOST = 4000  # bytes of a text
_CREDENTIALS = struct.Struct("3i")


class StartFailures:
    """The socket of one worker, until all workers have entered the region of this name."""

    def __init__(self, name: str, rank: int, size: int) -> None:
        self._name, self._rank, self._size = name, rank, size
        self._told = False  # a failure was received, and the other workers have it too
        self._socket: socket.socket | None = None
        if size > 1:
            self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_PASSCRED, 1)
            with contextlib.suppress(OSError):  # another process has this rank: `listen` refuses it here
                self._socket.bind(self._rank_address(rank))

    def send_cause(self, error: Exception) -> None:
        """Send the cause for which this worker cannot take part to the workers that have begun to start."""
        if self._told:
            return
        text = f"{self._rank} {error}".encode(errors="replace")[:_MOST]
        for rank in range(self._size):
            if self._socket is not None and rank != self._rank:
                with contextlib.suppress(OSError):  # it has not started, or does not listen any more
                    self._socket.sendto(text, self._rank_address(rank))

    def check(self) -> None:
        """Raise KVStoreError if a worker has sent the cause of its failure."""
        if (text := self._receive_text()) is not None:
            self._told = True
            rank, _, why = text.partition(" ")
            raise KVStoreError(f"worker {rank} of {self._size} cannot take part in this store: {why}")

    def close(self) -> None:
        """Close the socket."""
        if self._socket is not None:
            self._socket.close()
            self._socket = None

    def _rank_address(self, rank: int) -> bytes:
        return f"\0kvstore/{self._name}/{rank}/start".encode()

    def _receive_text(self) -> str | None:
        """Return a text that a process of this user has sent."""
        while self._socket is not None:
            try:
                text, extra, _, _ = self._socket.recvmsg(_MOST, socket.CMSG_SPACE(_CREDENTIALS.size))
            except OSError:
                return None
            if _of_own_user(extra):
                return text.decode(errors="replace")
        return None


def _of_own_user(extra: list[tuple[int, int, bytes]]) -> bool:
    """Return whether the system reports this user as the sender of a message."""
    kinds = (socket.SOL_SOCKET, socket.SCM_CREDENTIALS)
    found = [data for level, kind, data in extra if (level, kind) == kinds and len(data) == _CREDENTIALS.size]
    return bool(found) and _CREDENTIALS.unpack(found[0])[1] == os.geteuid()
