"""All options of kvstore's ZeroMQ sockets, each with its reason, in one function."""

from __future__ import annotations

import contextlib
import ctypes
import os

import zmq

from .frames import MessageLimits

#: Frames from this size on are sent without a copy; smaller ones pyzmq always copies.
BORROWED = 64 * 1024

_WAITING = 10_000  # messages in a queue: credit limits bytes, this limit is for a peer without credit
_HEARTBEAT = 2_000  # ms
_SILENT = 15_000  # ms: a slice on a link of 1 MB/s needs a second or more, and replies wait behind it
_SOON, _SILENT_SOON = 500, 2_000  # ms: the same for heartbeat connections, in time before a loss is declared
_HANDSHAKE = 10_000  # ms for the handshake of a connection; then its descriptor is closed
_CONNECT = 5_000  # ms, for the kernel's own limit is two minutes
_AGAIN, _AGAIN_MOST = 50, 1_000  # ms between two attempts to connect
_BACKLOG = 4_096  # as the kernel's; thousands of workers connect at once


def set_options(socket: zmq.Socket[bytes], limits: MessageLimits, address: str) -> None:
    """Set the options of all sockets. The kernel sizes its buffers itself."""
    for option, value in {
        zmq.LINGER: 0,  # unsent messages never delay the end; `close(linger)` asks for it
        zmq.SNDHWM: _WAITING,
        zmq.RCVHWM: _WAITING,
        zmq.MAXMSGSIZE: _largest_frame(limits),  # before libzmq allocates anything for a frame
        zmq.HEARTBEAT_IVL: _HEARTBEAT,  # detects links that are dead in one direction, and connects again
        zmq.HEARTBEAT_TIMEOUT: _SILENT,
        zmq.HEARTBEAT_TTL: _SILENT,
        zmq.HANDSHAKE_IVL: _HANDSHAKE,
        zmq.CONNECT_TIMEOUT: _CONNECT,
        zmq.RECONNECT_IVL: _AGAIN,
        zmq.RECONNECT_IVL_MAX: _AGAIN_MOST,
        zmq.BACKLOG: _BACKLOG,
        zmq.IMMEDIATE: 0,  # messages that are sent before the connection is made are queued
        zmq.IPV6: "[" in address,
    }.items():
        socket.setsockopt(option, value)
    if socket.type == zmq.ROUTER:
        _set_router_options(socket, address)


def watch_closely(socket: zmq.Socket[bytes]) -> None:
    """Detect a dead or replaced connection for heartbeats soon, and connect again."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, _SOON)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_SOON)


def _set_router_options(socket: zmq.Socket[bytes], address: str) -> None:
    # A message to an unknown peer is an error, not silence.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # No two processes have the same identity. A connection with a known identity is the same process on a new
    # connection; the old one is dead, which is not detected yet. Without this the new one would be ignored.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if address.startswith("ipc://"):
        with contextlib.suppress(zmq.ZMQError):  # a libzmq without this option
            # A unix socket without a file has no permissions: this option refuses other users.
            socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())


def _largest_frame(limits: MessageLimits) -> int:
    head = 4096
    return max(limits.frame, limits.control + head, limits.records * 128 + head)


def tune_malloc() -> bool:
    """Have glibc keep the memory of large messages instead of mapping it for each message.

    Measured with messages of 1 MB: 6 page faults each instead of 40 to 80, and half the time in the kernel.
    It affects the whole process: only processes that belong to kvstore alone should call it. False where
    there is no glibc, or it refuses.
    """
    trim_threshold, mmap_threshold, most = -1, -3, 1 << 30
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # glibc accepts mmap thresholds only up to half a heap (32 MB); slices are smaller than that.
    return bool(mallopt(mmap_threshold, 32 << 20) and mallopt(trim_threshold, most))
