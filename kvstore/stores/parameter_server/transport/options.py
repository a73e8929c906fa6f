"""Every option that our sockets have, each with its reason, in one function."""

from __future__ import annotations

import contextlib
import ctypes
import os

import zmq

from .frames import Limits

#: Frames from this size on are sent without a copy; below, pyzmq copies whatever it is told.
BORROWED = 64 * 1024

_WAITING = 10_000  # messages in a queue: credit limits bytes, this only a peer that knows no credit
_HEARTBEAT = 2_000  # ms
_SILENT = 15_000  # ms: a slice on a link of 1 MB/s takes a second or more, and answers stand behind it
_SOON, _SILENT_SOON = 500, 2_000  # ms: the same for signs of life, before somebody is taken for lost
_HANDSHAKE = 10_000  # ms for a connection to become one of ours; else its descriptor is taken back
_CONNECT = 5_000  # ms, for the kernel's own limit is two minutes
_AGAIN, _AGAIN_MOST = 50, 1_000  # ms between two attempts to connect
_BACKLOG = 4_096  # as the kernel's; thousands of workers come at once


def set_options(socket: zmq.Socket[bytes], limits: Limits, address: str) -> None:
    """Set what holds for all sockets of ours. The kernel sizes its buffers itself."""
    for option, value in {
        zmq.LINGER: 0,  # what is unsent never holds up the end; `close(linger)` asks for it
        zmq.SNDHWM: _WAITING,
        zmq.RCVHWM: _WAITING,
        zmq.MAXMSGSIZE: _largest(limits),  # before libzmq allocates anything for a frame
        zmq.HEARTBEAT_IVL: _HEARTBEAT,  # finds links that are dead on one side only, and connects again
        zmq.HEARTBEAT_TIMEOUT: _SILENT,
        zmq.HEARTBEAT_TTL: _SILENT,
        zmq.HANDSHAKE_IVL: _HANDSHAKE,
        zmq.CONNECT_TIMEOUT: _CONNECT,
        zmq.RECONNECT_IVL: _AGAIN,
        zmq.RECONNECT_IVL_MAX: _AGAIN_MOST,
        zmq.BACKLOG: _BACKLOG,
        zmq.IMMEDIATE: 0,  # what is sent before the connection stands waits for it
        zmq.IPV6: "[" in address,
    }.items():
        socket.setsockopt(option, value)
    if socket.type == zmq.ROUTER:
        _set_router_options(socket, address)


def watch_closely(socket: zmq.Socket[bytes]) -> None:
    """Have a connection for signs of life made anew soon, if it is dead or another has taken its place."""
    socket.setsockopt(zmq.HEARTBEAT_IVL, _SOON)
    socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _SILENT_SOON)


def _set_router_options(socket: zmq.Socket[bytes], address: str) -> None:
    # A message to nobody is an error, not silence.
    socket.setsockopt(zmq.ROUTER_MANDATORY, 1)
    # No two processes have one identity. Who comes with one that is there is the same process on a new
    # connection; its old one is dead and does not look so yet. Without this it would be ignored for ever.
    socket.setsockopt(zmq.ROUTER_HANDOVER, 1)
    if address.startswith("ipc://"):
        with contextlib.suppress(zmq.ZMQError):  # a libzmq without it
            # A unix socket without a file has no permissions: other users are kept out here.
            socket.setsockopt(zmq.IPC_FILTER_UID, os.getuid())


def _largest(limits: Limits) -> int:
    head = 4096
    return max(limits.frame, limits.control + head, limits.records * 128 + head)


def tune_malloc() -> bool:
    """Let glibc keep the memory of large messages instead of mapping it anew for each.

    Measured with messages of 1 MB: 6 page faults each instead of 40 to 80, and half the time in the kernel.
    It holds for the whole process: only processes that are ours alone should do it. False where there is no
    glibc, or it refuses.
    """
    trim_threshold, mmap_threshold, most = -1, -3, 1 << 30
    try:
        mallopt = ctypes.CDLL(None).mallopt
    except (AttributeError, OSError):
        return False
    # glibc takes mmap thresholds up to half a heap only (32 MB); slices are smaller than that.
    return bool(mallopt(mmap_threshold, 32 << 20) and mallopt(trim_threshold, most))
