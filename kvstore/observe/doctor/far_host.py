"""``python -m kvstore.observe.doctor.far_host``: what `kvstore doctor --hosts` has another host do.

It answers questions, a JSON object a line, until its stdin ends. Who connects to what it listens at has to
say a token first, which came over ssh.
"""

from __future__ import annotations

import contextlib
import hmac
import json
import os
import platform
import secrets
import socket
import statistics
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

#: The first line; what comes before it was written by the login shell.
GREETING = "kvstore doctor far host 1"
#: Seconds in which two hosts must have connected, or moved the bytes of a measurement.
DEADLINE = 20.0

_TOKEN = 32
_TURNS = 200
_BYTES = 64 << 20
_PIECE = 1 << 20


def main() -> None:
    """Answer the questions on stdin."""
    print(f"\n{GREETING}", flush=True)  # noqa: T201
    for line in sys.stdin:
        question = json.loads(line)
        try:
            answer = _ANSWERS[question.pop("do")](**question)
        except Exception as error:  # the other side has to hear of it
            answer = {"error": str(error) or type(error).__name__}
        print(json.dumps(answer), flush=True)  # noqa: T201


def facts() -> dict[str, Any]:
    """Say which versions are installed here."""
    import numpy

    import kvstore

    found = {"kvstore": kvstore.__version__, "Python": platform.python_version(), "NumPy": numpy.__version__}
    return {"versions": found, "processors": len(os.sched_getaffinity(0))}


def clock() -> dict[str, Any]:
    """Return the time of day in ns."""
    return {"ns": time.time_ns()}


def doctor() -> dict[str, Any]:
    """Run the checks of this machine, without self-tests."""
    from . import report

    return {"findings": report.as_objects(list(report.findings(tests=False)))}


def listen() -> dict[str, Any]:
    """Listen at a free port for one connection, which is served by a thread."""
    token = secrets.token_bytes(_TOKEN)
    listener = socket.create_server(("", 0))
    listener.settimeout(DEADLINE)
    threading.Thread(target=_serve, args=(listener, token), daemon=True).start()
    return {"port": listener.getsockname()[1], "token": token.hex()}


def connect(address: str, port: int, token: str) -> dict[str, Any]:
    """Connect to what listens; measure a byte there and back, and bytes one way."""
    with socket.create_connection((address, port), DEADLINE) as link:
        link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        link.sendall(bytes.fromhex(token))
        turns = [_timed(lambda: _turn(link)) for _ in range(_TURNS)]
        piece = bytes(_PIECE)
        link.sendall(_BYTES.to_bytes(8, "little"))

        def move() -> None:
            for _ in range(_BYTES // _PIECE):
                link.sendall(piece)
            _read(link, 1)

        return {"round_trip": statistics.median(turns), "bytes_per_second": _BYTES / _timed(move)}


def _serve(listener: socket.socket, token: bytes) -> None:
    with contextlib.suppress(OSError), listener:
        link, _ = listener.accept()
        with link:
            link.settimeout(DEADLINE)
            link.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if not hmac.compare_digest(_read(link, len(token)), token):
                return
            for _ in range(_TURNS):
                link.sendall(_read(link, 1))
            left = int.from_bytes(_read(link, 8), "little")
            buffer = bytearray(_PIECE)
            while left > 0 and (got := link.recv_into(buffer)):
                left -= got
            link.sendall(b"x")


def _turn(link: socket.socket) -> None:
    link.sendall(b"x")
    _read(link, 1)


def _read(link: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = link.recv(size - len(data))
        if not more:
            raise ConnectionError("the other host closed the connection")
        data += more
    return data


def _timed(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


_ANSWERS: dict[str, Callable[..., dict[str, Any]]] = {
    "facts": facts,
    "clock": clock,
    "doctor": doctor,
    "listen": listen,
    "connect": connect,
}

if __name__ == "__main__":
    main()
