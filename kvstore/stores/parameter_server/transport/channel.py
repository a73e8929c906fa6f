"""The two kinds of ZeroMQ sockets, and a poller for several of them.

No call blocks unless it has a timeout. A channel belongs to one thread at a time; to pass it on, a thread
needs a lock. Only `ChannelPoller.wake` may be called by other threads concurrently.
"""

from __future__ import annotations

import contextlib
import errno
import math
import os
import re
import secrets
import select
import time
from array import array
from collections.abc import Sequence
from typing import Any, cast

import zmq

from kvstore.errors import AuthError, ConfigError, KVStoreError
from kvstore.settings import addresses
from kvstore.settings.ports import bound_in_range

from .context import ZmqContext
from .frames import Buffer, MessageLimits
from .options import BORROWED, set_options, watch_closely
from .zmq_auth import HandshakeMonitor, use_keys, use_password

_MORE = zmq.SNDMORE | zmq.DONTWAIT
_LOOK = 0.05  # seconds between two checks of a handshake that is not done
_SOON = 1.0  # seconds to wait for another thread
_PORTS, _TRIES = range(10_000, 20_000), 20  # below the ports that Linux assigns to connections


class NotSentError(KVStoreError):
    """The peer is not connected, or its queue is full. No part of the message was sent; try again."""


class ZmqChannel:
    """A ZeroMQ socket with the options of kvstore."""

    def __init__(
        self, context: ZmqContext, kind: int, address: str, limits: MessageLimits | None = None
    ) -> None:
        self._context = context
        self.address = address
        self.socket = context.make_socket(kind)
        self._poller = zmq.Poller()
        self._poller.register(self.socket, zmq.POLLIN)
        try:
            set_options(self.socket, limits or context.limits, address)
        except zmq.ZMQError:
            self.close()
            raise

    def close(self, linger: float = 0.0) -> None:
        """Close it; ZeroMQ sends what is queued for `linger` more seconds, without blocking the caller.

        It must be removed from its `ChannelPoller` first.
        """
        self._context.close_socket(self.socket, linger)

    def _send_frames(self, frames: Sequence[Buffer]) -> None:
        send, last = self.socket.send, len(frames) - 1
        for index, frame in enumerate(frames):
            flags = zmq.DONTWAIT if index == last else _MORE
            send(frame, flags, copy=len(frame) < BORROWED)

    def _receive_frames(self, timeout: float) -> list[zmq.Frame] | None:
        self._context.check_usable()
        receive = self.socket.recv
        try:
            frame = receive(zmq.DONTWAIT, copy=False)
        except zmq.Again:
            if timeout <= 0 or not self._poller.poll(_to_milliseconds(timeout)):
                return None
            try:
                frame = receive(zmq.DONTWAIT, copy=False)
            except zmq.Again:
                return None
        frames = [frame]
        while frame.more:
            frame = receive(copy=False)
            frames.append(frame)
        return frames


class DealerChannel(ZmqChannel):
    """A connection to one router, which is made anew whenever it breaks.

    Messages in flight are lost silently when it breaks. The router knows this end by its identity, which no
    other process may have: 1 to 255 bytes, the first not 0. `role` and `rank` are the router's: they select
    its key, where the context has keys, and stand in messages. `insists`: the router is known to belong to
    this job, so a refusal before the first handshake is another process's at that address; the connection is
    tried again, and the router's silence shows a loss. `watched`: a dead connection is detected soon. Raises
    ConfigError for an invalid address, AuthError where there are keys, but none of this peer.
    """

    def __init__(
        self,
        context: ZmqContext,
        address: str,
        identity: bytes,
        role: str = "scheduler",
        rank: int = 0,
        insists: bool = False,
        watched: bool = False,
    ) -> None:
        addresses.check_address(f"the address of {role} {rank}", address)
        super().__init__(context, zmq.DEALER, address)
        self.role, self.rank, self._insists = role, rank, insists
        self._watch: HandshakeMonitor | None = None
        try:
            self.socket.setsockopt(zmq.IDENTITY, identity)
            if watched:
                watch_closely(self.socket)
            self._open_connection()
        except BaseException:
            self.close()
            raise

    def send(self, frames: Sequence[Buffer]) -> None:
        """Send a message, without blocking. Before the connection is made it is queued.

        ZeroMQ reads large frames until it has sent them: they must not change until the peer answers. Raises
        NotSentError if the queue is full, because the router has not read for long, and AuthError if it has
        refused this process.
        """
        self._context.check_usable()
        if self._watch is not None:
            self._check_handshake()
        try:
            self._send_frames(frames)
        except zmq.Again:
            if self.role == "scheduler":  # a restarted scheduler has the same address
                self._connect_again()
            raise NotSentError(f"{self.peer_name} has not read for long: its queue is full") from None

    def receive(self, timeout: float = 0.0) -> list[zmq.Frame] | None:
        """Return the frames of the next message, None if there is none within `timeout` seconds.

        Raises AuthError if the router has refused this process.
        """
        if self._watch is None:
            return self._receive_frames(timeout)
        self._context.check_usable()
        end = time.monotonic() + timeout
        while self._check_handshake():
            left = end - time.monotonic()
            found = self._receive_frames(max(0.0, min(left, _LOOK)))
            if found is not None or left <= 0:
                return found
        return self._receive_frames(max(0.0, end - time.monotonic()))

    @property
    def peer_name(self) -> str:
        """The router's role, rank and address, for messages."""
        return f"{self.role}{f' {self.rank}' if self.role == 'server' else ''} at {self.address}"

    @property
    def handshake_monitor(self) -> HandshakeMonitor | None:
        """The monitor of the first handshake; None when that is done."""
        return self._watch

    def close(self, linger: float = 0.0) -> None:
        """Close it; ZeroMQ sends what is queued for `linger` more seconds, without blocking the caller."""
        self._stop_watching()
        super().close(linger)

    def _open_connection(self) -> None:
        keys = self._context.keys
        if keys is not None:
            known = (keys.scheduler,) if self.role == "scheduler" else keys.servers
            if not 0 <= self.rank < len(known):
                raise AuthError(
                    f"this process has no key of {self.peer_name}: it was started for a smaller job"
                )
            use_keys(self.socket, keys, known[self.rank])
        else:
            use_password(self.socket, self._context.job)
        pair = self._context.make_socket(zmq.PAIR)
        self._watch = HandshakeMonitor(
            self.socket, pair, self._context.close_socket, self.peer_name, keys is not None, self._insists
        )
        self._connect_socket()

    def _connect_socket(self) -> None:
        try:
            self.socket.connect(self.address)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"cannot connect to {self.address!r}: {error.strerror}; check the address"
            ) from None

    def _check_handshake(self) -> bool:
        """Check the first handshake; return whether it is still in progress."""
        if self._watch is None:
            return False
        self._watch.read_events()
        if self._watch.error is not None and not (self._insists or self._watch.met_itself):
            raise AuthError(str(self._watch.error))
        if self._watch.error is not None:
            self._watch.error = None
            self._connect_again()
        if self._watch.socket is None:
            self._watch = None
        return self._watch is not None

    def _connect_again(self) -> None:
        """Connect again: ZeroMQ does not return to an address at which another process answered once."""
        with contextlib.suppress(zmq.ZMQError):  # ZeroMQ may have forgotten the address, too
            self.socket.disconnect(self.address)
        self._connect_socket()

    def _stop_watching(self) -> None:
        if self._watch is not None and os.getpid() == self._context.pid:
            self._watch.close()
        self._watch = None


class RouterChannel(ZmqChannel):
    """An address at which any number of dealers connect; each message has its sender's identity.

    ``"tcp://127.0.0.1:0"`` uses a free port, which `address` then shows; ``"ipc://@name"`` is a unix socket
    without a file, for processes of this machine and user. With keys, only their owners are admitted. Raises
    ConfigError where the port is in use, or the address is not this machine's.
    """

    def __init__(self, context: ZmqContext, address: str, limits: MessageLimits | None = None) -> None:
        addresses.check_address("the address to listen at", address)
        super().__init__(context, zmq.ROUTER, address, limits)
        try:
            if context.keys is not None:
                use_keys(self.socket, context.keys)
            limited = context.watch_clients(self.socket, address)
            self._bind_address(address)
            limited.wait(_SOON)
        except zmq.ZMQError as error:
            self.close()
            raise ConfigError(_bind_error(address, error)) from None
        self.address = cast(bytes, self.socket.getsockopt(zmq.LAST_ENDPOINT)).rstrip(b"\0").decode()

    def _bind_address(self, address: str) -> None:
        """Bind; where any port is allowed, to a port that the system does not assign to connections.

        A scheduler may restart at its port. Until then the system must not assign the port to another
        process, nor to a socket that tries to connect to it, which would be connected to itself.
        """
        host, port = addresses.split_address(address)
        if host and not port:
            bound = bound_in_range(lambda port: self.socket.bind(f"tcp://{host}:{port}"), zmq.ZMQError, host)
            if bound is not None:
                return
            for chosen in secrets.SystemRandom().sample(_PORTS, _TRIES):
                with contextlib.suppress(zmq.ZMQError):
                    self.socket.bind(f"tcp://{host}:{chosen}")
                    return
        self.socket.bind(re.sub(r"^(tcp://.*):0$", r"\1:*", address))

    def send(self, peer: bytes, frames: Sequence[Buffer]) -> None:
        """Send a message to a dealer, without blocking; otherwise as `DealerChannel.send`.

        Raises NotSentError where no such dealer is connected, or it has not read for long.
        """
        self._context.check_usable()
        try:
            self.socket.send(peer, _MORE)
            self._send_frames(frames)
        except zmq.ZMQError as error:
            if error.errno not in (errno.EAGAIN, errno.EHOSTUNREACH):
                raise
            why = "has not read for long" if error.errno == errno.EAGAIN else "is not connected"
            raise NotSentError(f"peer {peer!r} of {self.address} {why}") from None

    def receive(self, timeout: float = 0.0) -> tuple[bytes, list[zmq.Frame]] | None:
        """Return the next message as (identity of its sender, frames), None if there is none in time."""
        frames = self._receive_frames(timeout)
        return None if frames is None else (frames[0].bytes, frames[1:])


class ChannelPoller:
    """Waits for messages of several channels.

    Closing it closes none of them.
    """

    def __init__(self) -> None:
        self._poller = zmq.Poller()
        self._channels: dict[Any, Any] = {}  # by ZeroMQ socket, or descriptor
        self._watched: dict[zmq.Socket[bytes], DealerChannel] = {}
        self._all = select.epoll()
        self._descriptors: dict[Any, int] = {}
        self._packed: bytes | None = None  # the values of `_descriptors`
        self._wake = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._register(self._wake)

    @property
    def descriptors(self) -> bytes:
        """The descriptors, as C ints, that are readable after an event of a channel or item, or a wake.

        The descriptor of a ZeroMQ socket shows an event once, and only if `wait` has found nothing before.
        Empty while a handshake is watched.
        """
        if self._watched:
            return b""
        if self._packed is None:
            self._packed = array("i", self._descriptors.values()).tobytes()
        return self._packed

    def fileno(self) -> int:
        """Return a descriptor that is readable after an event since a `wait` that found nothing."""
        return self._all.fileno()

    def _register(self, item: zmq.Socket[bytes] | int) -> None:
        self._poller.register(item, zmq.POLLIN)
        descriptor = item if isinstance(item, int) else cast(int, item.getsockopt(zmq.FD))
        self._descriptors[item] = descriptor
        self._packed = None
        self._all.register(descriptor, select.EPOLLIN)

    def _unregister(self, item: zmq.Socket[bytes] | int) -> None:
        self._poller.unregister(item)
        self._packed = None
        with contextlib.suppress(OSError):  # already closed
            self._all.unregister(self._descriptors.pop(item))

    def add_channel(self, channel: ZmqChannel) -> None:
        """Wait for messages of a channel, too."""
        self._channels[channel.socket] = channel
        self._register(channel.socket)
        if (
            isinstance(channel, DealerChannel)
            and channel.handshake_monitor is not None
            and channel.handshake_monitor.socket is not None
        ):
            self._watched[channel.handshake_monitor.socket] = channel
            self._register(channel.handshake_monitor.socket)

    def remove_channel(self, channel: ZmqChannel) -> None:
        """Stop waiting for a channel; must be called before it is closed."""
        if self._channels.pop(channel.socket, None) is not None:
            self._unregister(channel.socket)
        for socket in [socket for socket, dealer in self._watched.items() if dealer is channel]:
            self._drop_watched(socket)

    def watch_descriptor(self, descriptor: int, item: object) -> None:
        """Return `item` from `wait` when a descriptor is readable."""
        self._channels[descriptor] = item
        self._register(descriptor)

    def unwatch_descriptor(self, descriptor: int) -> None:
        """Stop waiting for a descriptor; must be called before it is closed."""
        if self._channels.pop(descriptor, None) is not None:
            self._unregister(descriptor)

    def wake(self) -> None:
        """End the `wait` of another thread, or the next `wait`."""
        os.eventfd_write(self._wake, 1)

    def forget_wake(self) -> None:
        """Discard earlier wakes: they do not end the next `wait`."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self._wake)

    def wait(self, timeout: float) -> list[Any]:
        """Wait until there are messages, at most `timeout` seconds (infinity: without limit).

        Returns channels with messages, items of `watch_descriptor` that are readable, and dealers that were
        refused: their `receive` raises. Empty after `timeout` and after `wake`.
        """
        if not self._watched:
            return self._poll_ready(timeout)[0]
        end = time.monotonic() + timeout
        while True:
            for socket in [socket for socket in self._watched if socket.closed]:
                self._drop_watched(socket)
            ready, woken = self._poll_ready(max(0.0, end - time.monotonic()))
            if ready or woken or time.monotonic() >= end:
                return ready

    def close(self) -> None:
        """Close the descriptors of the poller."""
        if self._wake >= 0:
            os.close(self._wake)
            self._wake = -1
            self._all.close()

    def _poll_ready(self, timeout: float) -> tuple[list[Any], bool]:
        ready: list[Any] = []
        woken = False
        for socket, _ in self._poller.poll(_to_milliseconds(timeout)):
            if socket == self._wake:
                os.eventfd_read(self._wake)
                woken = True
            elif socket in self._watched:
                ready += self._check_watched(socket)
            else:
                ready.append(self._channels[socket])
        return ready, woken

    def _check_watched(self, socket: zmq.Socket[bytes]) -> list[ZmqChannel]:
        dealer = self._watched[socket]
        watch = dealer.handshake_monitor
        if watch is None:
            self._drop_watched(socket)
            return []
        watch.read_events()
        if watch.socket is None:
            self._drop_watched(socket)
        return [dealer] if watch.error is not None else []

    def _drop_watched(self, socket: zmq.Socket[bytes]) -> None:
        del self._watched[socket]
        self._unregister(socket)


def _to_milliseconds(timeout: float) -> int:
    """Convert for ZeroMQ, where -1 is no limit; rounded up, because ZeroMQ truncates a fraction to 0."""
    return -1 if timeout == math.inf else max(0, math.ceil(timeout * 1000))


def _bind_error(address: str, error: zmq.ZMQError) -> str:
    """Return why an address cannot be bound, and the cure."""
    if error.errno == errno.EADDRINUSE:
        return (
            f"{address} is taken by another process: end that process, or choose another port, with --port "
            "or a variable (KVSTORE_PORT for a server, KVSTORE_SCHEDULER or DMLC_PS_ROOT_PORT for a "
            "scheduler); 0 selects a free port"
        )
    if error.errno in (errno.EADDRNOTAVAIL, errno.ENODEV):
        return (
            f"{address} is not an address of this machine "
            f"({addresses.addresses_text(addresses.interface_addresses())}): "
            "set KVSTORE_HOST or DMLC_INTERFACE"
        )
    if error.errno == errno.EACCES:
        return f"{address}: this user may not take that port: choose one from 1024 on"
    return f"cannot listen at {address!r}: {error.strerror}; check host and port"
