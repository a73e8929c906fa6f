"""Hosts and their links: bandwidth, latency, and queues.

Switches are not modelled: a message passes the uplink of its sender and the downlink of its receiver. The
uplink sends the messages to different hosts in rotation, as connections share a link; the downlink is first
in, first out. Queues are unbounded and lose nothing. A dead host sends and receives nothing.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


class Clock:
    """Events in the order of their times; events of one time in the order of their creation."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    @property
    def count(self) -> int:
        """Return the number of events so far."""
        return self._count

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Schedule a call at a time; at once, if that has passed."""
        self._count += 1
        heapq.heappush(self._events, (max(when, self.now), self._count, call, arguments))

    def run(self, over: Callable[[], bool], limit: float) -> bool:
        """Run events until `over`; False: not before the time `limit`, or no event is left."""
        events, pop = self._events, heapq.heappop
        while not over():
            if not events or events[0][0] > limit:
                return False
            self.now, _, call, arguments = pop(events)
            call(*arguments)
        return True


#: The share of a link's bytes that carry messages: of 1,538 on an Ethernet, TCP has 1,448.
SHARE = 1448 / 1538


@dataclass(frozen=True)
class LinkKind:
    """A host's link."""

    rate: float  # bytes a second, each way
    latency: float  # seconds to any other host
    local: float = 0.0  # seconds from one process of a host to another; no bytes are counted


def ethernet(gbits: float, latency: float = 50e-6) -> LinkKind:
    """Return a link of this number of Gbit/s."""
    return LinkKind(gbits * 1e9 / 8 * SHARE, latency)


#: The bytes of a message, the function that receives it, and its arguments.
Delivery = tuple[int, Callable[..., None], tuple[Any, ...]]


class Downlink:
    """The incoming side of a host's link."""

    __slots__ = ("free", "nbytes", "rate")

    def __init__(self, rate: float) -> None:
        self.rate = rate
        self.free = 0.0  # from when on
        self.nbytes = 0

    def take(self, nbytes: int, now: float) -> float:
        """Queue a message; return the time at which its last byte arrives."""
        self.nbytes += nbytes
        self.free = max(now, self.free) + nbytes / self.rate
        return self.free


class Uplink:
    """The outgoing side of a host's link: a queue for each other host, served in rotation."""

    __slots__ = ("_busy", "_clock", "_latency", "_queues", "_turns", "nbytes", "rate")

    def __init__(self, clock: Clock, rate: float, latency: float) -> None:
        self._clock, self.rate, self._latency = clock, rate, latency
        self.nbytes = 0
        self._queues: dict[Host, deque[Delivery]] = {}
        self._turns: deque[Host] = deque()
        self._busy = False

    def put(self, target: Host, message: Delivery) -> None:
        """Queue a message."""
        queue = self._queues.setdefault(target, deque())
        if not queue:
            self._turns.append(target)
        queue.append(message)
        if not self._busy:
            self._busy = True
            self._send()

    def _send(self) -> None:
        if not self._turns:
            self._busy = False
            return
        target = self._turns.popleft()
        queue, clock = self._queues[target], self._clock
        nbytes, deliver, arguments = queue.popleft()
        if queue:
            self._turns.append(target)
        self.nbytes += nbytes
        clock.at(clock.now + self._latency, _arrive, target, nbytes, deliver, arguments)
        clock.at(clock.now + nbytes / self.rate, self._send)


class Host:
    """A machine: its link, and the number of cores for its processes; 0: one for each."""

    def __init__(self, clock: Clock, kind: LinkKind, cores: int = 0) -> None:
        self.clock, self.kind, self.cores = clock, kind, cores
        self.out, self.into = Uplink(clock, kind.rate, kind.latency), Downlink(kind.rate)
        self.alive = True
        self.busy = 0.0  # seconds of its cores
        self._running = 0
        self._ready: deque[Callable[[], None]] = deque()

    def when_free(self, work: Callable[[], None]) -> None:
        """Start some work as soon as a core is free; the work ends by `release`."""
        if self.cores and self._running >= self.cores:
            self._ready.append(work)
        else:
            self._running += 1
            work()

    def release(self, end: float) -> None:
        """Free a core at a time."""
        if self.cores:
            self.clock.at(end, self._released)
        else:
            self._running -= 1

    def _released(self) -> None:
        if self._ready:
            self._ready.popleft()()
        else:
            self._running -= 1

    def die(self) -> None:
        """End without a message."""
        self.alive = False


def send(source: Host, target: Host, nbytes: int, deliver: Callable[..., None], *arguments: Any) -> None:
    """Transfer a message from one host to another, and deliver it there."""
    clock, kind = source.clock, source.kind
    if source is target:
        clock.at(clock.now + kind.local, deliver, *arguments)
    elif source.alive:
        source.out.put(target, (nbytes, deliver, arguments))


def _arrive(target: Host, nbytes: int, deliver: Callable[..., None], arguments: tuple[Any, ...]) -> None:
    if target.alive:
        clock = target.clock
        clock.at(target.into.take(nbytes, clock.now), deliver, *arguments)
