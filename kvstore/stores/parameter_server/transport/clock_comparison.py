"""Comparison of the clock of a worker or a server with the scheduler's, for a timeline.

A question is a `PingRequest` with the time of this process, and the scheduler puts its own time into the
`PingReply`. The loops do this: for the state machines these are an ordinary ping and pong.
"""

from __future__ import annotations

from typing import Any

from ....observe.native._observe import now
from ....observe.timeline.recording import clock
from ..protocol.messages import PingReply, PingRequest, ReliableMessage


class ClockComparison:
    """The comparison of one process or store; it does nothing where no timeline is recorded."""

    def __init__(self) -> None:
        self._clock = clock()
        #: Number of answers.
        self.answers = 0

    @property
    def is_wanted(self) -> bool:
        """Whether clocks are compared."""
        return self._clock is not None

    def make_question(self) -> ReliableMessage:
        """Return the message that asks the scheduler for its time."""
        return ReliableMessage(0, 0, PingRequest(now()))

    def read_answer(self, message: Any) -> None:
        """Read a message that has just arrived, if it is an answer."""
        if self._clock is None or type(message) is not ReliableMessage or type(message.body) is not PingReply:
            return
        if message.body.number and message.body.time:
            self._clock.add(message.body.number, message.body.time, now())
            self.answers += 1
