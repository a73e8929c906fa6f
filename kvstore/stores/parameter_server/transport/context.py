"""The common part of the sockets of one process: ZeroMQ's threads, keys, limits, and the ZAP handler."""

from __future__ import annotations

import atexit
import gc
import os
import threading
import weakref

import zmq

from kvstore.errors import ClosedError, KVStoreError

from ....settings.keys import JobKeys
from .frames import MessageLimits
from .zmq_auth import ZapHandler, stop_events

_OPEN: weakref.WeakSet[ZmqContext] = weakref.WeakSet()


class ZmqContext:
    """The ZeroMQ context of a process. Every socket belongs to one, and is closed with it.

    With keys every connection is encrypted, and only processes with a listed key are admitted. Without keys
    nothing is encrypted, and processes that know the job's name are admitted. ZeroMQ has `io_threads`
    threads: about one for each GB/s is enough.
    """

    def __init__(
        self,
        keys: JobKeys | None = None,
        limits: MessageLimits | None = None,
        io_threads: int = 1,
        job: str = "",
    ) -> None:
        self.keys = keys
        self._job = job
        self.limits = limits or MessageLimits()
        self.pid = os.getpid()
        self._context = zmq.Context(io_threads)
        self._context.set(zmq.MAX_SOCKETS, 8192)
        self._sockets: set[zmq.Socket[bytes]] = set()
        self._known: weakref.WeakSet[zmq.Socket[bytes]] = weakref.WeakSet()  # also sockets of other threads
        self._making = False
        self._zap_handler: ZapHandler | None = None
        self._lock = threading.Lock()
        self.closed = False
        _OPEN.add(self)

    @property
    def job(self) -> str:
        """Name of the job; a scheduler may learn it only after it has bound its port."""
        return self._job

    @job.setter
    def job(self, job: str) -> None:
        self._job = job
        if self._zap_handler is not None:
            self._zap_handler.job = job

    def check_usable(self) -> None:
        """Raise an error in a fork of the process, where no message would ever arrive, or after `close`."""
        if os.getpid() != self.pid:
            raise KVStoreError(
                f"this process is a fork of process {self.pid}, whose connections it cannot use: "
                "create the store in the process that uses it"
            )
        if self.closed:
            raise ClosedError("the connections of this process are closed")

    def make_socket(self, kind: int) -> zmq.Socket[bytes]:
        """Make a bare socket; for the rest of this package."""
        self.check_usable()
        self._making = True
        made: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.add(made)
        self._known.add(made)
        self._making = False
        return made

    def close_socket(self, socket: zmq.Socket[bytes], linger: float = 0.0) -> None:
        """Close a socket; ZeroMQ sends what is queued for `linger` more seconds, in the background."""
        self._sockets.discard(socket)
        if os.getpid() == self.pid:
            stop_events(socket)
            socket.close(int(linger * 1000))

    def leave_to_thread(self, socket: zmq.Socket[bytes]) -> None:
        """Leave a socket to its own thread, which closes it when `close` ends the thread's wait."""
        self._sockets.discard(socket)

    def watch_clients(self, socket: zmq.Socket[bytes], address: str) -> threading.Event:
        """Check a socket's clients before the binding, and log refusals, as `ZapHandler.watch_clients`."""
        with self._lock:
            if self._zap_handler is None:
                self._zap_handler = ZapHandler(self._context, self.keys, self._job)
        return self._zap_handler.watch_clients(socket, address)

    def close(self, linger: float = 0.0) -> None:
        """Close all sockets; blocks up to `linger` seconds to send messages. A second call does nothing."""
        if self.closed or os.getpid() != self.pid:
            return
        self.closed = True
        for socket in self._sockets:
            stop_events(socket)
        for socket in list(self._sockets):
            self.close_socket(socket, linger)
        if self._zap_handler is not None:
            self._zap_handler.close()
        if self._making:
            self._close_unknown()
        self._context.term()

    def _close_unknown(self) -> None:
        """Close a socket after an interrupt in its creation: an error may hold it, and `term` waits."""
        for one in gc.get_objects():
            if isinstance(one, zmq.Socket) and one.context is self._context and one not in self._known:
                one.close(0)


@atexit.register
def _close_all() -> None:
    """Close all open contexts while the ZAP handler can still close its sockets."""
    for context in list(_OPEN):
        context.close()
