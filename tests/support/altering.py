"""Somebody between two processes who alters what goes over each connection."""

from __future__ import annotations

import contextlib
import socket
import threading

_AT = 300  # the byte that is altered in each direction: behind the handshake


class Altering:
    """Listens on a port of its own for an address, for one connection."""

    def __init__(self, target: str) -> None:
        host, _, port = target.removeprefix("tcp://").rpartition(":")
        self._listening = socket.create_server(("127.0.0.1", 0))
        self.address = f"tcp://127.0.0.1:{self._listening.getsockname()[1]}"
        threading.Thread(target=self._run, args=((host, int(port)),), daemon=True).start()

    def _run(self, target: tuple[str, int]) -> None:
        with self._listening:
            near, _ = self._listening.accept()
        with near, socket.create_connection(target) as far:
            back = threading.Thread(target=_pass, args=(far, near), daemon=True)
            back.start()
            _pass(near, far)
            back.join()


def _pass(one: socket.socket, other: socket.socket) -> None:
    passed = 0
    with contextlib.suppress(OSError):
        while data := one.recv(1 << 16):
            altered = bytearray(data)
            if passed <= _AT < passed + len(data):
                altered[_AT - passed] ^= 1
            other.sendall(altered)
            passed += len(data)
    for connection in (one, other):
        with contextlib.suppress(OSError):
            connection.shutdown(socket.SHUT_RDWR)
