"""Echoes of heartbeats: a process returns each request without running any Python.

The scheduler requests an echo of every process (`HeartbeatMonitor`, `HeartbeatResponder`), and each process
that waits requests one of the scheduler (`SchedulerEcho`). Their periods are set where they are requested:
`scheduler/loop.py` and `protocol/silence.py`. A loop in C without the interpreter's lock answers,
so a process that computes for minutes in one call is alive; a process that is stopped (SIGSTOP), swapped out
or dead is silent.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import signal
import threading

import zmq

from ....settings.keys import JobKeys
from .channel import NotSentError, RouterChannel
from .context import ZmqContext
from .frames import MessageLimits
from .options import set_options
from .process_limits import check_threads
from .zmq_auth import use_keys, use_password

_LIMITS = MessageLimits(frame=64, control=64, records=0)
_THREADS = 3  # ZeroMQ's two, and the echo's


class HeartbeatResponder:
    """The echo of one process, until `close`, the end of the process, or in the child of a fork.

    It connects to the scheduler's `HeartbeatMonitor`, and again whenever the connection breaks. The scheduler
    knows this process by its unique name, of at most 255 bytes.
    """

    def __init__(self, address: str, process: str, keys: JobKeys | None = None, job: str = "") -> None:
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
            # A message on each new connection, without a request: a restarted scheduler knows no process.
            self._socket.setsockopt(zmq.PROBE_ROUTER, 1)
            self._socket.setsockopt(zmq.IMMEDIATE, 1)
            self._socket.connect(address)
        except BaseException:
            self._context.destroy(0)
            raise
        self._thread = _start_echo(self._socket, "kvstore-pulse")
        atexit.register(self.close)

    def close(self) -> None:
        """Stop the echo. Needs some milliseconds; a second call does nothing, nor does a call in a fork."""
        atexit.unregister(self.close)
        if os.getpid() == self._pid and not self._context.closed:
            self._context.term()
            self._thread.join()


class SchedulerEcho:
    """The scheduler's echo: returns every message that arrives at `address`, until its context is closed."""

    def __init__(self, context: ZmqContext, address: str) -> None:
        router = RouterChannel(context, address, _LIMITS)
        self.address = router.address
        router.socket.setsockopt(zmq.ROUTER_MANDATORY, 0)  # a peer that has ended must not end the loop
        context.leave_to_thread(router.socket)
        _start_echo(router.socket, "kvstore-echo")


def _start_echo(socket: zmq.Socket[bytes], name: str) -> threading.Thread:
    """Start an echo thread; return once it runs in C, where it does not need the interpreter's lock."""
    thread = threading.Thread(target=_run_echo, args=(socket,), name=name, daemon=True)
    with socket.context.socket(zmq.DEALER) as asks:
        socket.bind(f"inproc://{name}")
        asks.connect(f"inproc://{name}")
        for _ in range(4):  # the DEALER may send some of the answers to its other peer
            asks.send(b"?")
        thread.start()
        while thread.is_alive() and not (asks.poll(100) and asks.recv()):  # empty: a probe
            pass
    return thread


def _run_echo(socket: zmq.Socket[bytes]) -> None:
    """Return every message to its sender, until the socket's context is closed; runs in its own thread."""
    # A signal in this thread would make it acquire the interpreter's lock.
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    try:
        while True:
            with contextlib.suppress(zmq.Again):  # a connection broke between its poll and its read
                zmq.proxy(socket, socket)
    except zmq.ContextTerminated:
        socket.close()


class HeartbeatMonitor:
    """The scheduler's end: each `HeartbeatResponder` connects to `address`; a `Poller` waits for `router`."""

    def __init__(self, context: ZmqContext, address: str) -> None:
        self.router = RouterChannel(context, address, _LIMITS)
        self.address = self.router.address
        self._known: set[bytes] = set()

    def ping_all(self) -> None:
        """Request an echo of every process that has ever sent one and is still connected."""
        for identity in list(self._known):
            self._ping_process(identity)

    def _ping_process(self, identity: bytes) -> None:
        try:
            self.router.send(identity, [b"?"])
        except NotSentError:
            self._known.discard(identity)

    def read_echoes(self) -> list[str]:
        """Return the names of the processes that have echoed since the last call, each once."""
        found: dict[bytes, None] = {}
        while (message := self.router.receive()) is not None:
            found[message[0]] = None
        self._known.update(found)
        return [identity.decode(errors="replace") for identity in found]
