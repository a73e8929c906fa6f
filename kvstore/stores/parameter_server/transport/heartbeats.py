"""Signs of life: whoever is asked sends the question back, without running any Python.

The scheduler asks every process (`HeartbeatMonitor`, `HeartbeatResponder`), and each that waits asks the
scheduler (`Echo`). What answers is a loop in C that never takes the interpreter's lock, so a process that
computes for minutes in one call is alive; one that is stopped (SIGSTOP), swapped out or dead is silent.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading

import zmq

from ....settings.keys import Keys
from .auth import use_keys, use_password
from .channel import NotSentError, Router
from .context import Context
from .frames import Limits
from .options import set_options
from .process_limits import check_threads

_LIMITS = Limits(frame=64, control=64, records=0)
_THREADS = 3  # ZeroMQ's two, and the one that answers


class HeartbeatResponder:
    """The echo of one process, from now until `close`, its end, or a fork (only for the child).

    It connects by itself to the scheduler's `HeartbeatMonitor`, and again whenever the connection breaks. The
    scheduler hears of this process by a name that no other may have, of at most 255 bytes.
    """

    def __init__(self, address: str, process: str, keys: Keys | None = None, job: str = "") -> None:
        self._pid = os.getpid()
        check_threads(_THREADS)
        self._context = zmq.Context(1)
        self._socket = self._context.socket(zmq.DEALER)
        try:
            set_options(self._socket, _LIMITS, address)
            self._socket.setsockopt(zmq.IDENTITY, process.encode())
            if keys is not None:
                use_keys(self._socket, keys, keys.scheduler)
            else:
                use_password(self._socket, job)
            # A first sign on each new connection, unasked: a scheduler that has started again knows nobody.
            self._socket.setsockopt(zmq.PROBE_ROUTER, 1)
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._socket.connect(address)
        except BaseException:
            self._context.destroy(0)
            raise
        self._thread = _start_echo(self._socket, "kvstore-pulse")
        atexit.register(self.close)

    def close(self) -> None:
        """Fall silent. Takes some milliseconds; a second call does nothing, nor does one in a fork."""
        atexit.unregister(self.close)
        if os.getpid() == self._pid and not self._context.closed:
            self._context.term()
            self._thread.join()


class Echo:
    """The scheduler's: sends back whatever comes to `address`, until its context is closed."""

    def __init__(self, context: Context, address: str) -> None:
        router = Router(context, address, _LIMITS)
        self.address = router.address
        router.socket.setsockopt(zmq.ROUTER_MANDATORY, 0)  # who has gone must not end the loop
        context.give(router.socket)
        _start_echo(router.socket, "kvstore-echo")


def _start_echo(socket: zmq.Socket[bytes], name: str) -> threading.Thread:
    """Have a thread send back what comes. It does by the return: it needs the interpreter's lock no more."""
    thread = threading.Thread(target=_echo, args=(socket,), name=name, daemon=True)
    with socket.context.socket(zmq.DEALER) as asks:
        socket.bind(f"inproc://{name}")
        asks.connect(f"inproc://{name}")
        for _ in range(4):  # some of the answers of a DEALER may go to its other peer
            asks.send(b"?")
        thread.start()
        while thread.is_alive() and not (asks.poll(100) and asks.recv()):  # empty: a probe
            pass
    return thread


def _echo(socket: zmq.Socket[bytes]) -> None:
    """Send back what comes, until the socket's context is closed; in a thread of its own."""
    # A signal that came to this thread would make it take the interpreter's lock.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        while True:
            with contextlib.suppress(zmq.Again):  # a connection broke between its poll and its read
                zmq.proxy(socket, socket)
    except zmq.ContextTerminated:
        socket.close()


class HeartbeatMonitor:
    """The scheduler's side: `HeartbeatResponder` connects to `address`; a `Poller` waits for `router`."""

    def __init__(self, context: Context, address: str) -> None:
        self.router = Router(context, address, _LIMITS)
        self.address = self.router.address
        self._known: set[bytes] = set()

    def ping(self) -> None:
        """Ask everybody who has ever said a word, but for those who are not connected any more."""
        for identity in list(self._known):
            self._ping(identity)

    def _ping(self, identity: bytes) -> None:
        try:
            self.router.send(identity, [b"?"])
        except NotSentError:
            self._known.discard(identity)

    def heard(self) -> list[str]:
        """Return the names of the processes that have given a sign since the last call, each once."""
        found: dict[bytes, None] = {}
        while (message := self.router.receive()) is not None:
            found[message[0]] = None
        self._known.update(found)
        return [identity.decode(errors="replace") for identity in found]
