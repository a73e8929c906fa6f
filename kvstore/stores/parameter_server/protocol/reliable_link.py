"""Messages between the scheduler and one other process, each handled once and in order."""

from __future__ import annotations

from collections import deque
from typing import Any

from .messages import ReliableMessage

_AHEAD = 1024  # messages that arrived early and are stored
_BURST = 64  # messages that are repeated at once
_SLOWEST = 8  # longest pause, in first pauses: repetitions must not flood a process that is only slow


class ReliableLink:
    """One end of a reliable link."""

    __slots__ = ("_ack_pending", "_early", "_last", "_number", "_out", "_pause", "resend", "seen", "term")

    def __init__(self, resend: float, term: int = 0) -> None:
        self.resend = resend
        #: The scheduler's term; the other end learns it from the messages that it reads.
        self.term = term
        self.seen = 0
        self._early: dict[int, Any] = {}
        self._number = 0
        self._out: deque[tuple[int, Any]] = deque()
        self._last = 0.0
        self._pause = resend
        self._ack_pending = False

    @property
    def last_number(self) -> int:
        """The number of the last message written."""
        return self._number

    @property
    def last_acknowledged(self) -> int:
        """The number up to which the other end has received all messages."""
        return self._out[0][0] - 1 if self._out else self._number

    def write(self, body: Any, now: float) -> ReliableMessage:
        """Make the next message."""
        if not self._out:
            self._last, self._pause = now, self.resend
        self._number += 1
        self._out.append((self._number, body))
        self._ack_pending = False
        return ReliableMessage(self._number, self.seen, body, self.term)

    def send_unreliable(self, body: Any) -> ReliableMessage:
        """Make a message that may be lost."""
        self._ack_pending = False
        return ReliableMessage(0, self.seen, body, self.term)

    def read(self, message: ReliableMessage, now: float) -> list[Any]:
        """Store an arrived message; return the bodies that are to be handled now, in order."""
        if self._out and message.seen >= self._out[0][0]:
            self._last, self._pause = now, self.resend
            while self._out and message.seen >= self._out[0][0]:
                self._out.popleft()
        if not message.number:
            return [] if message.body is None else [message.body]
        self._ack_pending = True
        if self.seen < message.number <= self.seen + _AHEAD:
            self._early[message.number] = message.body
        return self._next_bodies()

    def is_current_term(self, message: ReliableMessage) -> bool:
        """Return whether a message is of the newest term of the scheduler that this end knows."""
        stale = message.term < self.term
        self.term = max(self.term, message.term)
        return not stale

    def is_new(self, message: ReliableMessage) -> bool:
        """Return whether a message has a body that is not yet handled or stored."""
        return message.number > self.seen and message.number not in self._early

    def restart_repeats(self, term: int, now: float) -> None:
        """Continue after an absence: repeat soon, because the other end has to connect again first."""
        self.term = term
        self._last, self._pause = now, self.resend / 4

    def pending_ack(self) -> ReliableMessage | None:
        """Return an acknowledgement, if no other message has carried it."""
        return self.send_unreliable(None) if self._ack_pending else None

    def overdue_messages(self, now: float) -> list[ReliableMessage]:
        """Return the messages to repeat, if an acknowledgement is overdue; the pause grows each time."""
        if not self._out or now - self._last < self._pause:
            return []
        self._last, self._pause = now, min(2 * self._pause, _SLOWEST * self.resend)
        return [
            ReliableMessage(number, self.seen, body, self.term) for number, body in list(self._out)[:_BURST]
        ]

    def _next_bodies(self) -> list[Any]:
        bodies = []
        while self.seen + 1 in self._early:
            self.seen += 1
            bodies.append(self._early.pop(self.seen))
        return bodies
