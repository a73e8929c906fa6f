"""What one store asks the scheduler, what it hears of it, and when it takes it for lost."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec

from ...protocol.events import ECHO, Action, Done, SchedulerRequest, Send
from ...protocol.losses import lost, stopped
from ...protocol.messages import Answer, Failure, Loss, Ping, ReliableMessage
from ...protocol.reliable_link import ReliableLink
from ...protocol.silence import SilenceDetector
from .options import WorkerOptions

SCHEDULER = "scheduler"


class SchedulerLink:
    """One store's link to the scheduler, with the requests that wait there."""

    def __init__(self, options: WorkerOptions) -> None:
        self._dead_after, self._start = options.dead_after, options.start
        #: Seconds that the scheduler may be away, as it has said.
        self.absence = options.absence
        self._link = ReliableLink(options.control_resend)
        #: Whoever steps the machine steps this too.
        self.silence = SilenceDetector(options.dead_after)
        #: Whether the scheduler has ever said a word.
        self.met = False
        #: Whether `ECHO` can be reached.
        self.echoes = options.echoes
        self._requests: dict[int, Hashable] = {}  # by number: done when answered
        self._number = 0
        self._delivered: dict[int, Hashable] = {}  # by number of the message: done when it has come
        self._stood_still = (0.0, 0.0)  # seconds that this process was stopped last, and until when

    @property
    def busy(self) -> bool:
        """Whether a request waits."""
        return bool(self._requests or self._delivered)

    # ------------------------------------------------------------------------------------------------ to it

    def write(self, body: Any, now: float, actions: list[Action]) -> None:
        """Send a message, again until it is acknowledged."""
        actions.append(Send(SCHEDULER, self._link.write(body, now)))

    def unreliable(self, body: Any) -> Send:
        """Make a message that may be lost."""
        return Send(SCHEDULER, self._link.send_unreliable(body))

    def request(self, event: SchedulerRequest, store: int, now: float, actions: list[Action]) -> None:
        """Send a request; what has no number is done when it has come."""
        message: Any = event.message
        fields = {"store": store} if hasattr(message, "store") else {}
        if not hasattr(message, "request"):
            self.write(msgspec.structs.replace(message, **fields), now, actions)
            self._delivered[self._link.number] = event.op
            return
        self._number += 1
        self._requests[self._number] = event.op
        self.write(msgspec.structs.replace(message, request=self._number, **fields), now, actions)

    def resend(self, now: float, actions: list[Action]) -> None:
        """Send again what was not acknowledged for too long."""
        actions.extend(Send(SCHEDULER, message) for message in self._link.again(now))

    # ---------------------------------------------------------------------------------------------- from it

    def read(self, message: ReliableMessage, now: float) -> list[Any]:
        """Take a message; return what is to be handled now, in order. `acknowledge` comes after that."""
        if not self._link.follows(message):
            return []
        self.silence.hear(now)
        self.met = True
        if now - self._stood_still[1] > self._dead_after:
            self._stood_still = (0.0, 0.0)  # nobody has missed it
        return self._link.read(message, now)

    def acknowledge(self, actions: list[Action]) -> None:
        """End requests that have come; say what has come here, if nothing has said it meanwhile."""
        delivered = [number for number in self._delivered if number <= self._link.acknowledged]
        actions.extend(Done(self._delivered.pop(number)) for number in delivered)
        pending = self._link.pending_ack()
        if pending is not None:
            actions.append(Send(SCHEDULER, pending))

    def answered(self, message: Answer, now: float, actions: list[Action]) -> None:
        """End the request that this answers."""
        op = self._requests.pop(message.request, None)
        if op is not None:
            actions.append(Done(op, message.error, message))

    def end_delivered(self, actions: list[Action]) -> None:
        """Wait for no acknowledgement any more: it has ended, most likely, and its last word was lost."""
        actions.extend(Done(op) for op in self._delivered.values())
        self._delivered.clear()

    def fail(self, failure: Failure, actions: list[Action]) -> None:
        """End all requests."""
        waiting = [*self._requests.values(), *self._delivered.values()]
        self._requests.clear()
        self._delivered.clear()
        actions.extend(Done(op, failure) for op in waiting)

    # ---------------------------------------------------------------------------------------------- silence

    def stood_still(self, seconds: float, now: float) -> None:
        """Note that this process was stopped for so long."""
        self._stood_still = (seconds, now)

    def look(self, now: float, actions: list[Action]) -> Failure | None:
        """Make sure that the scheduler is there; return why not, if it is lost."""
        # Until it has said how long it may be away, it may be as long as until its first word.
        told = self.met and self.echoes
        patience = max(self.absence, self._dead_after if told else self._start or self._dead_after)
        if self.silence.lost(now, patience):
            return lost((Loss("scheduler", 0, self.silence.silent(now)),))
        if self.silence.asks(now):
            if self.echoes:
                actions.append(Send(ECHO, Ping(0)))
            if not self.echoes or self.silence.is_long(now):  # another may be at its address
                actions.append(self.unreliable(Ping(0)))
        return None

    def explained(self, why: Failure, who: str) -> Failure:
        """Word why this process is out: if it was stopped itself, that comes first."""
        seconds = self._stood_still[0]
        return stopped(who, seconds, self._dead_after, why) if seconds else why
