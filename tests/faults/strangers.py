"""A stranger that sends garbage until its stdin ends: ``strangers.py KIND PORT ...``.

When its connection is closed it connects again; at the end it prints how often. ``strangers.py COUNT PORT
...`` is a crowd: so many connections that say something once, or nothing, read nothing, and stay.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import resource
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

OF_PYZMQ = 7  # of a context and a thread that come with the first large message over ZeroMQ


def greeting(mechanism: bytes) -> bytes:
    """What ZMTP 3.1 begins with: signature, version, mechanism, not a server, filler."""
    return b"\xff" + bytes(8) + b"\x7f\x03\x01" + mechanism.ljust(20, b"\0") + b"\0" + bytes(31)


def command(body: bytes) -> bytes:
    """Frame a command of a handshake."""
    return b"\x04" + bytes([len(body)]) + body


_TYPE = b"\x0bSocket-Type\x00\x00\x00\x06DEALER"
READY = command(b"\x05READY" + _TYPE)
_WRONG = command(b"\x05HELLO\x07kvstore\x40" + b"0" * 64)
_INITIATE = command(b"\x08INITIATE" + _TYPE)
_LARGE = (200 << 20).to_bytes(8, "big")

#: The first data of each kind, and its repeated data. A kind that begins with a command waits for replies.
KINDS = {
    "parts": (greeting(b"NULL") + READY, b"\x01\x00" * (1 << 19)),
    "parts with a password": (greeting(b"PLAIN") + _WRONG + _INITIATE, b"\x01\x00" * (1 << 19)),
    "large parts": (greeting(b"NULL") + READY, b"\x03" + _LARGE + bytes(1 << 20)),
    "a large command": (greeting(b"PLAIN") + b"\x06" + _LARGE, bytes(1 << 20)),
    "a large command for keys": (greeting(b"CURVE") + b"\x06" + _LARGE, bytes(1 << 20)),
    "a large command after a refusal": (_WRONG, b"\x06" + _LARGE + bytes(1 << 20)),
    "a large message too early": (greeting(b"PLAIN") + b"\x02" + _LARGE, bytes(1 << 20)),
    "small pieces": (greeting(b"PLAIN") + b"\x06" + _LARGE, bytes(64)),
    "half a greeting": (greeting(b"PLAIN")[:40], b""),
    "version 2": (greeting(b"NULL")[:10] + b"\x01\x05\x00\x00", b"\x01\x00" * (1 << 19)),
    "version 1": (b"\x08" + bytes(8) + b"\0\x03old", b"\x02\x01" * (1 << 19)),
}


@contextlib.contextmanager
def flood(ports: list[int], kinds: list[str]) -> Iterator[Callable[[], list[int]]]:
    """Start one sender for each kind; yield a function that ends them and returns their connection counts."""
    arguments = [sys.executable, "-SE", __file__]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    told = [*map(str, ports)]
    started = [subprocess.Popen([*arguments, kind, *told], text=True, **pipes) for kind in kinds]  # type: ignore[call-overload]
    began = [one.stdout.readline() for one in started]
    counted: list[int] = []

    def end() -> list[int]:
        counted.extend(int(one.communicate(timeout=600)[0] or 0) for one in started[len(counted) :])
        return counted

    try:
        assert began == ["there\n"] * len(kinds)
        yield end
    finally:
        for one in started:
            one.kill()
            one.communicate()


#: What every fourth connection of a crowd says, one after the other; most say nothing.
_WORDS = [
    bytes(range(200)),
    greeting(b"PLAIN")[:40],
    greeting(b"PLAIN"),
    greeting(b"PLAIN") + _WRONG,
    greeting(b"CURVE"),
    b"KVSTREAM",
    b"KVCIPHER" + bytes(40),
    b"GET / HTTP/1.1\r\nHost: parameters\r\n\r\n",
]


@contextlib.contextmanager
def crowd(ports: list[int], count: int, processes: int = 1) -> Iterator[None]:
    """Keep so many connections open, from processes of their own."""
    arguments = [sys.executable, "-SE", __file__, str(count // processes), *map(str, ports)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    started = [subprocess.Popen(arguments, text=True, **pipes) for _ in range(processes)]  # type: ignore[call-overload]
    try:
        assert [one.stdout.readline() for one in started] == ["there\n"] * processes
        yield
    finally:
        for one in started:
            one.kill()
            one.communicate()


def _crowd(count: int, ports: list[int]) -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    kept = []
    for number in range(count):
        kept.append(socket.create_connection(("127.0.0.1", ports[number % len(ports)]), timeout=60))
        with contextlib.suppress(OSError):  # it was cut off already
            kept[-1].sendall(b"" if number % 4 else _WORDS[number // 4 % len(_WORDS)])
    _say_there()
    sys.stdin.read()


class Descriptors(NamedTuple):
    """How many files and sockets a process has open, and of what its own threads wait on."""

    files: int
    events: int


def descriptors(pid: int) -> Descriptors:
    """Count the descriptors of a process."""
    names = list(_links(pid))
    events = sum(name.startswith("anon_inode:") for name in names)
    return Descriptors(len(names) - events, events)


def open_files(pid: int) -> int:
    """Count the descriptors of a process, all together."""
    return sum(descriptors(pid))


def have_closed(pids: Sequence[int], before: Sequence[Descriptors]) -> bool:
    """Whether processes have no more descriptors than before, but for those of pyzmq's own thread."""
    pairs = [(descriptors(pid), was) for pid, was in zip(pids, before, strict=True)]
    return all(now.files <= was.files and now.events <= was.events + OF_PYZMQ for now, was in pairs)


def unaccepted(pid: int) -> int:
    """Count the connections that wait until a process accepts them."""
    with open(f"/proc/{pid}/net/tcp") as file:
        table = [line.split() for line in file.readlines()[1:]]
    own = _sockets(pid)
    return sum(int(row[4].partition(":")[2], 16) for row in table if row[3] == "0A" and row[9] in own)


def listening(pid: int) -> list[int]:
    """Ports at which a process listens."""
    with open(f"/proc/{pid}/net/tcp") as file:
        table = [line.split() for line in file.readlines()[1:]]
    listed = {fields[9]: int(fields[1].rpartition(":")[2], 16) for fields in table if fields[3] == "0A"}
    return sorted(port for inode, port in listed.items() if inode in _sockets(pid))


def _sockets(pid: int) -> set[str]:
    return {name.removeprefix("socket:[").rstrip("]") for name in _links(pid)}


def _links(pid: int) -> Iterator[str]:
    for name in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            yield os.readlink(f"/proc/{pid}/fd/{name}")


def memory(pid: int, name: str = "VmRSS") -> float:
    """MiB that a process has."""
    with open(f"/proc/{pid}/status") as file:
        return next(int(line.split()[1]) for line in file if line.startswith(name)) / 1024


class Memory:
    """The most memory that a process has had since, by asking until it ends; a context."""

    def __init__(self, pid: int) -> None:
        self._pid = pid
        with open(f"/proc/{pid}/clear_refs", "w") as file:
            file.write("5")  # its peak begins again
        self._before = self._read("VmRSS")
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._ask)
        #: MiB more than it had at first.
        self.grown = 0.0

    def __enter__(self) -> Memory:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._stop.set()
        self._thread.join()

    def _ask(self) -> None:
        with contextlib.suppress(OSError, StopIteration):  # it has ended
            while not self._stop.wait(0.05):
                self.grown = self._read("VmHWM") - self._before

    def _read(self, name: str) -> float:
        return memory(self._pid, name)


def begin(one: socket.socket, first: bytes) -> None:
    """Return the first data of a kind."""
    if first == _WRONG:
        for piece in (greeting(b"PLAIN"), first):
            one.sendall(piece)
            time.sleep(0.1)
    else:
        one.sendall(first)


def _say_there() -> None:
    sys.stdout.write("there\n")
    sys.stdout.flush()


def _over() -> bool:
    return bool(select.select([sys.stdin], [], [], 0)[0])


def _send(kind: str, port: int) -> None:
    """Connect, and send until the other side has had enough."""
    first, body = KINDS[kind]
    with socket.create_connection(("127.0.0.1", port), timeout=2) as one:
        one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        begin(one, first)
        while body and not _over():
            one.sendall(body)
        select.select([one, sys.stdin], [], [], 2)


def _main() -> None:
    if sys.argv[1].isdigit():
        _crowd(int(sys.argv[1]), [*map(int, sys.argv[2:])])
        return
    connected = 0
    _say_there()
    for port in itertools.cycle(map(int, sys.argv[2:])):
        if _over():
            break
        connected += 1
        with contextlib.suppress(OSError):
            _send(sys.argv[1], port)
    sys.stdout.write(str(connected))


if __name__ == "__main__":
    _main()
