"""Messages between the scheduler and one other: each is handled once, in order, however often it is sent."""

from __future__ import annotations

from collections import deque
from typing import Any

from .messages import ReliableMessage

_AHEAD = 1024  # messages that came before their turn and are kept
_BURST = 64  # messages that are sent again at once
_SLOWEST = 8  # times the first pause: who is only slow must not be buried under repetitions


class ReliableLink:
    """One side of the exchange."""

    __slots__ = ("_ack_pending", "_early", "_last", "_number", "_out", "_pause", "resend", "seen", "term")

    def __init__(self, resend: float, term: int = 0) -> None:
        self.resend = resend
        #: Of the scheduler; the other side learns it from what it reads.
        self.term = term
        self.seen = 0
        self._early: dict[int, Any] = {}
        self._number = 0
        self._out: deque[tuple[int, Any]] = deque()
        self._last = 0.0
        self._pause = resend
        self._ack_pending = False

    @property
    def number(self) -> int:
        """Of the last message written."""
        return self._number

    @property
    def acknowledged(self) -> int:
        """All messages up to this one have come."""
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
        """Take a message; return what is to be handled now, in order."""
        if self._out and message.seen >= self._out[0][0]:
            self._last, self._pause = now, self.resend
            while self._out and message.seen >= self._out[0][0]:
                self._out.popleft()
        if not message.number:
            return [] if message.body is None else [message.body]
        self._ack_pending = True
        if self.seen < message.number <= self.seen + _AHEAD:
            self._early[message.number] = message.body
        return self._in_turn()

    def follows(self, message: ReliableMessage) -> bool:
        """Whether a message is of the last scheduler that was started, as far as this side has heard."""
        stale = message.term < self.term
        self.term = max(self.term, message.term)
        return not stale

    def is_new(self, message: ReliableMessage) -> bool:
        """Whether a message says something that is to be handled, now or in its turn."""
        return message.number > self.seen and message.number not in self._early

    def resume(self, term: int, now: float) -> None:
        """Go on after an absence: send again soon, for the other side has to connect again first."""
        self.term = term
        self._last, self._pause = now, self.resend / 4

    def pending_ack(self) -> ReliableMessage | None:
        """Say what has come, if no other message has said it meanwhile."""
        return self.send_unreliable(None) if self._ack_pending else None

    def again(self, now: float) -> list[ReliableMessage]:
        """Make again the messages that have had no acknowledgement for too long; each time later."""
        if not self._out or now - self._last < self._pause:
            return []
        self._last, self._pause = now, min(2 * self._pause, _SLOWEST * self.resend)
        return [
            ReliableMessage(number, self.seen, body, self.term) for number, body in list(self._out)[:_BURST]
        ]

    def _in_turn(self) -> list[Any]:
        bodies = []
        while self.seen + 1 in self._early:
            self.seen += 1
            bodies.append(self._early.pop(self.seen))
        return bodies
