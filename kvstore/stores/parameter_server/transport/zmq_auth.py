"""Admission of processes to ZeroMQ sockets, by CURVE keys or the job's name, and the reports of refusals.

Streams are not admitted here but in `stream_listener`. A server asks its ZAP handler (RFC 27)
about every client. With keys, only clients whose key is on the list are admitted; without keys, clients that
know the name of the job (ZeroMQ's PLAIN, RFC 24). A client that is refused can send no message, of which
ZeroMQ would store all parts until it is complete. A client knows the server's key in advance. ZeroMQ does not
tell a client that it was refused, so `HandshakeMonitor` reads the socket's monitor until the first handshake
is done.
"""

from __future__ import annotations

import contextlib
import errno
import hashlib
import hmac
import itertools
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import zmq
from zmq.utils import z85
from zmq.utils.monitor import parse_monitor_message

from kvstore.errors import AuthError

from ....settings.keys import JobKeys
from .new_connections import NewConnections
from .refusals import RefusalLog

_ZAP = "inproc://zeromq.zap.01"
_VERSION = b"1.0"
_FAILED = (
    zmq.EVENT_HANDSHAKE_FAILED_AUTH
    | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
    | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL
)
_STOPPED = zmq.EVENT_MONITOR_STOPPED  # the last event of a monitor
_COME = zmq.EVENT_LISTENING | zmq.EVENT_ACCEPTED | zmq.EVENT_HANDSHAKE_SUCCEEDED
_LOOK = 20  # ms between two checks of handshakes that are not done
_SOON, _EAGER = 1, 0.05  # ms between them for `_EAGER` seconds after a handshake
_HUNG_UP = (errno.EPIPE, errno.ECONNRESET)
_NAMES = itertools.count()
#: Only another client sends this. Linux may choose the very port of this machine that a socket connects to,
#: where no process listens at it, as the port of the connection: the socket is then connected to itself.
_MET_ITSELF = (zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL, zmq.PROTOCOL_ERROR_ZMTP_UNEXPECTED_COMMAND)
#: Successive connections that end without data before this is an error: a single one may be the peer's death.
_PATIENCE = 3


def send_events(socket: zmq.Socket[bytes], pair: zmq.Socket[bytes], events: int) -> zmq.Socket[bytes]:
    """Send a socket's events to a PAIR socket of its context.

    ZeroMQ's I/O threads block until an event is queued. So the queue has no limit, and `stop_events` must be
    called before the pair is closed: otherwise all connections of the process would stop.
    """
    address = f"inproc://kvstore.monitor.{next(_NAMES)}"
    pair.setsockopt(zmq.LINGER, 0)
    pair.setsockopt(zmq.RCVHWM, 0)
    socket.monitor(address, events)
    pair.connect(address)
    return pair


def stop_events(socket: zmq.Socket[bytes]) -> None:
    """Stop sending a socket's events, if they were sent."""
    if not socket.closed:
        socket.monitor(None, 0)


def use_keys(socket: zmq.Socket[bytes], keys: JobKeys, server_key: bytes | None = None) -> None:
    """Encrypt a socket, as a client of the server with that public key or as a server."""
    socket.curve_publickey, socket.curve_secretkey = keys.public, keys.secret
    if server_key is None:
        socket.curve_server = True
    else:
        socket.curve_serverkey = server_key


def job_password(job: str) -> bytes:
    """Return the password that proves that a process belongs to a job without keys; it hides the name."""
    name = job.encode(errors="surrogatepass")
    return hashlib.blake2b(name, digest_size=32, person=b"kvstore door").hexdigest().encode()


def use_password(socket: zmq.Socket[bytes], job: str) -> None:
    """Have a client send the password of its job."""
    socket.plain_username, socket.plain_password = b"kvstore", job_password(job)


class _ListenAddress:
    """An address at which clients connect."""

    def __init__(self, address: str) -> None:
        self.address = address
        self.limited = threading.Event()
        if not address.startswith("tcp://"):
            self.limited.set()


_Listeners = dict[zmq.Socket[bytes], _ListenAddress]


class ZapHandler:
    """A thread that admits clients, without keys those of `job`, and logs refusals.

    It must be closed before its context.
    """

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: JobKeys | None, job: str) -> None:
        self._context = context
        self.job = job
        self._allowed = frozenset(map(z85.decode, keys.allowed)) if keys else None  # None: by the job's name
        self._refusals = RefusalLog()
        self._connections = NewConnections()
        self._new: deque[tuple[zmq.Socket[bytes], _ListenAddress]] = deque()
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._closing = False
        self._eager = 0.0
        self._silent = 0  # clients that have closed the connection
        self._zap = context.socket(zmq.REP)
        self._zap.setsockopt(zmq.LINGER, 0)
        self._zap.bind(_ZAP)  # before any client connects: without a handler all would be admitted
        self._thread = threading.Thread(target=self._run_thread, name="kvstore-door", daemon=True)
        self._thread.start()

    def watch_clients(self, socket: zmq.Socket[bytes], address: str) -> threading.Event:
        """Check a socket's clients, and log failed handshakes; the socket is to be bound to `address`.

        Returns an event that is set soon after the binding, when the kernel knows how many bytes to accept.

        Clients of ZMTP 2 and older are refused, too: one that connects while the socket is being closed
        aborts the process (libzmq 4.3.5, `process_routing_id_msg`).
        """
        socket.zap_domain = b"kvstore"
        if self._allowed is None:
            socket.plain_server = True
        events = _FAILED | _STOPPED | (_COME if address.startswith("tcp://") else 0)
        listener = _ListenAddress(address)
        self._new.append((send_events(socket, self._context.socket(zmq.PAIR), events), listener))
        os.eventfd_write(self._wake, 1)
        return listener.limited

    def close(self) -> None:
        """Wait until the thread has closed its sockets; the sockets that it watches are closed already."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _run_thread(self) -> None:
        listeners: _Listeners = {}
        poller = zmq.Poller()
        poller.register(self._wake, zmq.POLLIN)
        poller.register(self._zap, zmq.POLLIN)
        try:
            while not self._closing:
                for ready, _ in poller.poll(self._poll_timeout()):
                    if ready == self._wake:
                        os.eventfd_read(self._wake)
                        self._add_listeners(listeners, poller)
                    elif ready is self._zap:
                        self._read_events(listeners, poller)  # the client that asks was accepted earlier
                        self._answer_request(self._zap)
                self._read_events(listeners, poller)
                self._connections.remove_admitted()
                self._free_descriptors()
        finally:
            self._add_listeners(listeners, poller)
            for socket in (*listeners, self._zap):
                socket.close()
            self._connections.close()

    def _add_listeners(self, listeners: _Listeners, poller: zmq.Poller) -> None:
        while self._new:
            socket, listener = self._new.popleft()
            listeners[socket] = listener
            poller.register(socket, zmq.POLLIN)

    def _read_events(self, listeners: _Listeners, poller: zmq.Poller) -> None:
        """Read the events of all listeners."""
        for socket, listener in list(listeners.items()):
            for event in _monitor_events(socket):
                if event["event"] == _STOPPED:
                    poller.unregister(socket)
                    del listeners[socket]
                    socket.close()
                    break
                self._handle_event(event, listener)

    def _handle_event(self, event: Mapping[str, Any], listener: _ListenAddress) -> None:
        match event["event"]:
            case zmq.EVENT_LISTENING:
                self._connections.limit_listener(event["value"])
                listener.limited.set()
            case zmq.EVENT_ACCEPTED:
                self._connections.limit_connection(event["value"], self._allowed is not None)
                self._free_descriptors()
            case zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self._eager = time.monotonic() + _EAGER
            case zmq.EVENT_HANDSHAKE_FAILED_AUTH:
                pass  # `_answer_request` has logged it
            case _ if not self._was_death(event):
                # The address of the event has the actual port, where any port was requested.
                taken = event["endpoint"].decode(errors="replace") or listener.address
                self._refusals.note_refusal(f"a connection to {taken}", self._handshake_advice())

    def _free_descriptors(self) -> None:
        gone = self._connections.cut_off_oldest()
        if gone:
            why = f"{gone} had not finished the handshake, and few descriptors are left"
            self._refusals.note_refusal(
                "connections", f"{why}; raise the limit (ulimit -n) if the job is so large"
            )

    def _poll_timeout(self) -> int | None:
        """Return milliseconds until the next check of newcomers: sent bytes show that they are admitted."""
        if not self._connections:
            return None
        return _SOON if time.monotonic() < self._eager else _LOOK

    def _handshake_advice(self) -> str:
        other = "keys, is of another release" if self._allowed is None else "no keys, or another job's"
        return f"the ZeroMQ handshake failed: it has {other}, or is not a process of kvstore"

    def _was_death(self, event: Mapping[str, Any]) -> bool:
        """Return whether a client may have died in the handshake; one that lacks keys connects repeatedly."""
        if event["event"] != zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL or event["value"] not in _HUNG_UP:
            return False
        self._silent += 1
        return self._silent % _PATIENCE != 0

    def _is_admitted(self, mechanism: bytes, credentials: list[bytes]) -> bool:
        if self._allowed is None:
            return mechanism == b"PLAIN" and hmac.compare_digest(credentials[-1], job_password(self.job))
        return mechanism == b"CURVE" and len(credentials) == 1 and credentials[0] in self._allowed

    def _answer_request(self, zap: zmq.Socket[bytes]) -> None:
        request = zap.recv_multipart()
        if len(request) < 6 or request[0] != _VERSION:
            zap.send_multipart([_VERSION, request[1] if len(request) > 1 else b"", b"500", b"", b"", b""])
            return
        _, number, _, address, _, mechanism, *credentials = request
        good = self._is_admitted(mechanism, credentials)
        if not good:
            self._refusals.note_refusal(
                f"a process at {address.decode(errors='replace') or 'this machine'}",
                f"its {_credential_text(mechanism, credentials)} is not of this job",
            )
        status = [b"200", b"OK"] if good else [b"400", b"not of this job"]
        zap.send_multipart([_VERSION, number, *status, b"", b""])


def _monitor_events(socket: zmq.Socket[bytes]) -> Iterator[Mapping[str, Any]]:
    """Yield the events of a monitor."""
    with contextlib.suppress(zmq.Again):
        while True:
            yield parse_monitor_message(socket.recv_multipart(zmq.DONTWAIT))


def _credential_text(mechanism: bytes, credentials: list[bytes]) -> str:
    """Return the credential of a client as far as the log may show it."""
    if mechanism == b"PLAIN":
        return "password"
    known = bool(credentials) and len(credentials[0]) == 32
    return f"key {z85.encode(credentials[0])[:8].decode() if known else '?'}..."


class HandshakeMonitor:
    """Reads the outcome of a client's handshake, until the first one is done.

    The client's socket is not connected yet. `pair` is a PAIR socket of the same context for the events;
    `release` takes it back. `peer` names the server and its address, for messages. With `patient` a
    connection that breaks before the handshake is done is never a failure.
    """

    def __init__(
        self,
        socket: zmq.Socket[bytes],
        pair: zmq.Socket[bytes],
        release: Callable[[zmq.Socket[bytes]], None],
        peer: str,
        keys: bool,
        patient: bool = False,
    ) -> None:
        self._release = release
        self._peer, self._keys, self._patient = peer, keys, patient
        self._failures = 0
        self._monitored = socket
        self.error: AuthError | None = None
        #: Whether the error is that the system has connected the client to itself.
        self.met_itself = False
        events = _FAILED | zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_CLOSED
        self.socket: zmq.Socket[bytes] | None = send_events(socket, pair, events)

    def read_events(self) -> None:
        """Read the events; `error` is set if this client is refused."""
        while self.socket is not None:
            try:
                told = parse_monitor_message(self.socket.recv_multipart(zmq.DONTWAIT))
            except zmq.Again:
                return
            if told["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED:
                self.close()
            elif told["event"] == zmq.EVENT_CLOSED:
                self._failures = 0  # no process listens any more: this has broken the connections
            elif told["event"] & _FAILED:
                self._note_failure(told["event"], told["value"])

    def close(self) -> None:
        """Stop reading events. A second call does nothing."""
        if self.socket is not None:
            stop_events(self._monitored)
            self._release(self.socket)
            self.socket = None

    def _note_failure(self, event: int, value: int) -> None:
        self._failures += 1
        self.met_itself = (event, value) == _MET_ITSELF
        if event == zmq.EVENT_HANDSHAKE_FAILED_AUTH:
            why = (
                "it does not know the key of this process"
                if self._keys
                else "it belongs to another job: KVSTORE_JOB, or the scheduler's address, must be the same, "
                "unless the scheduler of this job has ended, and that job has its port now"
            )
        elif event == zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL and (self._patient or self._failures < _PATIENCE):
            return  # ZeroMQ tries again
        elif self._keys:
            why = "it has no keys, or another key than this process expects"
        else:
            why = "it requires keys, and this process has none; or it is not of this release of kvstore"
        self.error = AuthError(
            f"{self._peer} refuses this process: {why}; start all processes of a job with one launcher, or "
            "give each process its own file of keys"
        )
