"""New connections before the end of their handshake, and the bytes that the kernel accepts of each.

ZeroMQ limits a frame only to the size of a job's largest message; the first frame of a stranger may be as
large, on any number of connections. A handshake is small: so a socket filter (classic BPF), which any user
may set on their own sockets, lets only the first bytes of a new connection pass. The rest waits at the sender
until the handshake is done or ZeroMQ ends it after its timeout. To poll the number of received bytes instead
would be too late: a gigabyte arrives in half a second.

A connection inherits a filter from the listening socket, which passes any number of small segments; it gets
its own filter as soon as this module sees it.

ZeroMQ calls accept() again and again, without a pause, where no descriptor is left for a connection. So some
descriptors are always kept free: the oldest newcomers are cut off.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import math
import os
import socket
import struct
import time
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice, takewhile

from .process_limits import DescriptorReserve

log = logging.getLogger("kvstore.wire")

#: Bytes of a connection that pass before its handshake is done. The handshake has less than 2,000; the rest
#: is for first messages that arrive before this module sees that it is done.
MOST = 16 * 1024

# Bytes of a segment that pass before this module sees a connection: a greeting and the first command.
_SMALL = 1024

# Bytes that a server sends to every client: its greeting, with CURVE its WELCOME, and a refusal. An admitted
# client is sent more: a READY has 40 bytes at least.
_GREETING, _CURVE_WELCOME, _ERROR = 64, 170, 12

_TCP_SAVE_SYN, _TCP_SAVED_SYN = 27, 28  # linux/tcp.h; not in Python
_ATTACH_FILTER, _DETACH_FILTER = 26, 27  # asm-generic/socket.h
_ACKED = struct.Struct("120xQ")  # tcp_info.tcpi_bytes_acked
_SYN_BYTES = 512

_YOUNG = 1.0  # seconds; older newcomers are checked only once in this period
_FEW = 8  # newcomers that are never cut off: a handshake of this job needs only milliseconds


@dataclass(frozen=True)
class _NewConnection:
    inode: int
    most_told: int  # bytes that a stranger is sent at most
    since: float


class NewConnections:
    """The accepted connections that are not known to be admitted."""

    def __init__(self) -> None:
        self._found: dict[int, _NewConnection] = {}  # the oldest first
        self._reserve = DescriptorReserve()
        self._all_looked_at = -math.inf
        # Two descriptors from the start: later there may be none left.
        self._nothing = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
        self._copy = os.dup(self._nothing)

    def __bool__(self) -> bool:
        return bool(self._found)

    def close(self) -> None:
        """Close the descriptors of this object."""
        os.close(self._copy)
        os.close(self._nothing)

    def limit_listener(self, fd: int) -> None:
        """Save the SYN of each connection to a listening socket, and limit its first segments."""
        try:
            with self._duplicate_socket(fd) as one:
                one.setsockopt(socket.IPPROTO_TCP, _TCP_SAVE_SYN, 1)
                _attach_filter(one, _small_segments_filter(_SMALL))
        except OSError as error:
            log.debug("this kernel limits no new connections: %s", error)

    def limit_connection(self, fd: int, curve: bool) -> None:
        """Limit a connection, unless it has ended, or its number now belongs to another socket."""
        self._reserve.note_opened(1)
        with contextlib.suppress(OSError), self._duplicate_socket(fd) as one:
            inode = os.fstat(one.fileno()).st_ino
            # The SYN can be read once: a socket with this number that was limited already has none.
            syn = one.getsockopt(socket.IPPROTO_TCP, _TCP_SAVED_SYN, _SYN_BYTES)
            if not syn and fd in self._found and self._found[fd].inode == inode:
                return
            if syn:
                _attach_filter(one, _first_bytes_filter(_first_sequence(syn) + 1, MOST))
            else:  # accepted by a SYN cookie
                _detach_filter(one)
            self._found.pop(fd, None)
            told = _GREETING + _ERROR + (_CURVE_WELCOME if curve else 0)
            self._found[fd] = _NewConnection(inode, told, time.monotonic())

    def cut_off_oldest(self) -> int:
        """Cut off the oldest newcomers if they use descriptors that this process needs; return how many."""
        excess = len(self._found) - _FEW
        if excess <= 0:
            return 0
        gone = sum(
            self._cut_off(fd)
            for fd in list(islice(self._found, min(excess, self._reserve.missing_descriptors)))
        )
        self._reserve.note_opened(-gone)
        return gone

    def _cut_off(self, fd: int) -> bool:
        """Shut down a connection, unless it was admitted; ZeroMQ sees its end."""
        newcomer = self._found.pop(fd)
        with contextlib.suppress(OSError), self._duplicate_socket(fd) as one:
            if not _is_other(one, newcomer) and not _is_let_in(one, newcomer):
                one.shutdown(socket.SHUT_RDWR)
                return True
        return False

    def remove_admitted(self) -> None:
        """Remove newcomers that were admitted or have ended; older ones are checked only now and then."""
        now = time.monotonic()
        since = now - _YOUNG
        if self._all_looked_at <= since:
            self._all_looked_at, since = now, -math.inf
        for fd, newcomer in takewhile(lambda one: one[1].since >= since, reversed([*self._found.items()])):
            try:
                with self._duplicate_socket(fd) as one:
                    done = _is_other(one, newcomer) or _is_let_in(one, newcomer)
            except OSError:
                done = True
            if done:
                del self._found[fd]

    @contextlib.contextmanager
    def _duplicate_socket(self, fd: int) -> Iterator[socket.socket]:
        """Duplicate a descriptor: ZeroMQ may close it at any time, and the number may be assigned again."""
        os.dup2(fd, self._copy, inheritable=False)
        try:
            one = socket.socket(socket.AF_INET, socket.SOCK_STREAM, 0, self._copy)
            try:
                yield one
            finally:
                one.detach()
        finally:
            os.dup2(self._nothing, self._copy, inheritable=False)


def _is_other(one: socket.socket, newcomer: _NewConnection) -> bool:
    return os.fstat(one.fileno()).st_ino != newcomer.inode


def _is_let_in(one: socket.socket, newcomer: _NewConnection) -> bool:
    """Return whether a connection was admitted; if so, remove its filter."""
    info = one.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, _ACKED.size)
    # The kernel may count the SYN. On a kernel without this count, each connection counts as admitted.
    if len(info) == _ACKED.size and _ACKED.unpack(info)[0] <= newcomer.most_told + 1:
        return False
    _detach_filter(one)
    return True


def _first_sequence(syn: bytes) -> int:
    """Read the first sequence number of a connection: behind an IPv4 header with its options, or IPv6."""
    start = (syn[0] & 15) * 4 if syn[0] >> 4 == 4 else 40
    return int(struct.unpack_from("!I", syn, start + 4)[0])


def _attach_filter(one: socket.socket, program: list[tuple[int, int, int, int]]) -> None:
    """Set a filter; it replaces an earlier one."""
    code = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *line) for line in program))
    one.setsockopt(socket.SOL_SOCKET, _ATTACH_FILTER, struct.pack("HP", len(program), ctypes.addressof(code)))


def _detach_filter(one: socket.socket) -> None:
    one.setsockopt(socket.SOL_SOCKET, _DETACH_FILTER, 0)


# A filter sees a segment from its TCP header on, and returns how many bytes pass. Both filters begin so:
_HEADER = [
    (0x30, 0, 0, 12),  # A = length of the header, in words, and flags
    (0x74, 0, 0, 4),
    (0x64, 0, 0, 2),
    (0x02, 0, 0, 0),  # M[0] = A
    (0x07, 0, 0, 0),  # X = A
    (0x80, 0, 0, 0),  # A = length of the segment
    (0x1C, 0, 0, 0),  # A -= X: its payload
]
_KEEP = (0x06, 0, 0, 0xFFFFFFFF)
_DROP = (0x06, 0, 0, 0)


def _small_segments_filter(most: int) -> list[tuple[int, int, int, int]]:
    """Return a filter that passes segments of at most `most` bytes."""
    return [*_HEADER, (0x25, 1, 0, most), _KEEP, _DROP]


def _first_bytes_filter(first: int, most: int) -> list[tuple[int, int, int, int]]:
    """Return a filter that passes `most` bytes from a sequence number on, and segments without payload.

    The end of a segment that is cut is sent again later. A segment with a FIN is dropped instead, because the
    stream would otherwise end too early.
    """
    keep, drop = 23, 24
    return [
        *_HEADER,
        (0x15, keep - 8, 0, 0),  # no payload
        (0x02, 0, 0, 1),  # M[1] = A
        (0x20, 0, 0, 4),  # A = sequence number
        (0x14, 0, 0, first & 0xFFFFFFFF),
        (0x35, drop - 12, 0, most),  # begins beyond
        (0x07, 0, 0, 0),  # X = A: where it begins
        (0x60, 0, 0, 1),
        (0x0C, 0, 0, 0),  # A = M[1] + X: where it ends
        (0x25, 0, keep - 16, most),  # within
        (0x30, 0, 0, 13),  # A = flags
        (0x45, drop - 18, 0, 1),  # FIN
        (0x00, 0, 0, most),
        (0x1C, 0, 0, 0),  # A = most - X: the part of the payload that passes
        (0x61, 0, 0, 0),
        (0x0C, 0, 0, 0),  # A += M[0]
        (0x16, 0, 0, 0),
        _KEEP,
        _DROP,
    ]
