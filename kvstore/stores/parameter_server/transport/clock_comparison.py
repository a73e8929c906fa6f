"""Comparisons of the clock of a worker or a server with the scheduler's, for a timeline.

A question is a `Ping` with the time of this process, and the scheduler puts its own into the `Pong`. The
loops do this: state machines see a ping and a pong as usual.
"""

from __future__ import annotations

from typing import Any

from ....observe.native._observe import now
from ....observe.timeline.recording import clock
from ..protocol.messages import Ping, Pong, ReliableMessage


class ClockComparison:
    """Of one process, or of one store of it; does nothing where no timeline is recorded."""

    def __init__(self) -> None:
        self._clock = clock()
        #: Number of answers.
        self.answers = 0

    @property
    def wanted(self) -> bool:
        """Whether clocks are compared."""
        return self._clock is not None

    def question(self) -> ReliableMessage:
        """Make what is to be sent to the scheduler now."""
        return ReliableMessage(0, 0, Ping(now()))

    def hear(self, message: Any) -> None:
        """Look whether a message that has just come is an answer."""
        if self._clock is None or type(message) is not ReliableMessage or type(message.body) is not Pong:
            return
        if message.body.number and message.body.time:
            self._clock.add(message.body.number, message.body.time, now())
            self.answers += 1
