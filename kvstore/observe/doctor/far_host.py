"""``python -m kvstore.observe.doctor.far_host``: the program of `kvstore doctor --hosts` on another host.

It answers requests, a JSON object in a line each, until its stdin ends. The port of a measurement accepts one
connection: it returns some bytes, and reads others.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

#: The first line of the program; lines before it are those of the login shell.
GREETING = "kvstore doctor far host 3"
#: Seconds within which two hosts must connect, or send the bytes of a measurement.
DEADLINE = 20.0

_TURNS = 200
_PIECE, _PIECES = bytes(1 << 20), 64


def main() -> None:
    """Answer the requests on stdin."""
    print(f"\n{GREETING}", flush=True)  # noqa: T201
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = _ANSWERS[request.pop("do")](**request)
        except Exception as error:  # the doctor reports it
            answer = {"error": str(error) or type(error).__name__}
        print(json.dumps(answer), flush=True)  # noqa: T201


def facts() -> dict[str, Any]:
    """Return the installed versions and the number of processors."""
    import numpy

    import kvstore

    found = {"kvstore": kvstore.__version__, "Python": platform.python_version(), "NumPy": numpy.__version__}
    return {"versions": found, "processors": len(os.sched_getaffinity(0))}


def clock() -> dict[str, Any]:
    """Return the time of day in ns."""
    return {"ns": time.time_ns()}


def doctor() -> dict[str, Any]:
    """Run the checks of this host, without self-tests."""
    from . import report

    return {"findings": [one._asdict() for one in report.run_checks(with_tests=False)]}


def listen() -> dict[str, Any]:
    """Listen at a free port for one connection, which a thread serves."""
    listener = socket.create_server(("", 0))
    listener.settimeout(DEADLINE)
    threading.Thread(target=_serve_link, args=(listener,), daemon=True).start()
    return {"port": listener.getsockname()[1]}


def connect(address: str, port: int) -> dict[str, Any]:
    """Connect to a host that listens; measure round trips of a byte, and the bandwidth of one connection."""
    with socket.create_connection((address, port), DEADLINE) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        turns = [_round_trip(link, b"x") for _ in range(_TURNS)]
        seconds = _round_trip(link, *[_PIECE] * _PIECES)
    return {"round_trip": statistics.median(turns), "bytes_per_second": _PIECES * len(_PIECE) / seconds}


def _round_trip(link: socket.socket, *pieces: bytes) -> float:
    """Send pieces, and wait for the byte that answers them; return the seconds."""
    began = time.perf_counter()
    for piece in pieces:
        link.sendall(piece)
    if not link.recv(1):
        raise ConnectionError("the other host closed the connection")
    return time.perf_counter() - began


def _serve_link(listener: socket.socket) -> None:
    """Answer each byte of the round trips, and then all pieces together."""
    with contextlib.suppress(OSError), listener:
        link, _ = listener.accept()
        with link, link.makefile("rb") as stream:
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            link.settimeout(DEADLINE)
            for size in [1] * _TURNS + [_PIECES * len(_PIECE)]:
                while size:
                    size -= len(stream.read(min(size, len(_PIECE)))) or size
                link.sendall(b"x")


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    one.__name__: one for one in (facts, clock, doctor, listen, connect)
}

if __name__ == "__main__":
    main()
