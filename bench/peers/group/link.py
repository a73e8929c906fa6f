"""A worker's connection to the bench, and the barrier of its group."""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import socket
from dataclasses import dataclass
from multiprocessing.connection import Client
from typing import Any

PAGE = 4096
HOST = "KVSTORE_BENCH_HOST"


class Gate:
    """A barrier of all workers, in C, so that it costs every peer the same."""

    def __init__(self, code: str, descriptor: int, workers: int) -> None:
        self.memory = mmap.mmap(descriptor, PAGE)
        self.address = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.code = ctypes.CDLL(code)
        self._workers = workers

    def wait(self) -> None:
        if self.code.gate_wait(ctypes.c_void_p(self.address), ctypes.c_uint(self._workers)):
            raise TimeoutError("other workers did not reach the barrier")


class Link:
    """The connection to the bench; the first byte carries the descriptor of the shared page."""

    def __init__(self, address: str, rank: int) -> None:
        self._connection = Client(address, "AF_UNIX")
        self.send({"rank": rank})
        with socket.socket(fileno=os.dup(self._connection.fileno())) as connection:
            first, descriptors, _, _ = socket.recv_fds(connection, 1, 1)
        self.descriptor = descriptors[0] if first else -1

    def send(self, message: Any) -> None:
        self._connection.send_bytes(json.dumps(message).encode())

    def receive(self) -> Any:
        """Return the next message; None if the bench has ended."""
        try:
            return json.loads(self._connection.recv_bytes())
        except (EOFError, ConnectionError):
            return None

    def gather(self, value: Any) -> list[Any]:
        """Send a value to all workers, and return the values of all, in rank order."""
        self.send({"gather": value})
        answer = self.receive()
        if answer is None:
            raise ConnectionError("the bench has ended")
        return list(answer["gathered"])


def own_address() -> str:
    """Return the address of this worker for the other workers: loopback, unless there are several hosts."""
    return os.environ.get(HOST, "127.0.0.1")


def free_port() -> int:
    """Find a free port of loopback."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])


@dataclass
class Place:
    """The rank of a worker in its group, and the name of the group."""

    rank: int
    workers: int
    processes: int
    link: Link
    gate: Gate
    limits: str
    name: str
