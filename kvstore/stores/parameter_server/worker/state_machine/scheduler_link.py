"""One store's requests to the scheduler, the messages it receives, and the detection of its loss."""

from __future__ import annotations

from collections.abc import Hashable
from typing import Any

import msgspec

from ...protocol.events import ECHO, Action, OperationDone, SchedulerRequest, SendMessage
from ...protocol.losses import loss_failure, stopped_failure
from ...protocol.messages import Failure, Loss, MemberReply, PingRequest, ReliableMessage
from ...protocol.reliable_link import ReliableLink
from ...protocol.silence import SilenceDetector
from .options import WorkerOptions

SCHEDULER = "scheduler"


class SchedulerLink:
    """One store's link to the scheduler, with the requests that wait for it."""

    def __init__(self, options: WorkerOptions) -> None:
        self._dead_after, self._start = options.dead_after, options.start
        #: Seconds that the scheduler may be absent, as in its `HelloReply`.
        self.absence = options.absence
        self._link = ReliableLink(options.control_resend)
        #: To be stepped whenever the machine is.
        self.silence = SilenceDetector(options.dead_after)
        #: Whether a message of the scheduler has arrived.
        self.met = False
        #: Whether the address of `ECHO` is known.
        self.echoes = options.echoes
        self._requests: dict[int, Hashable] = {}  # by number: done when answered
        self._number = 0
        self._delivered: dict[int, Hashable] = {}  # by number of the message: done when acknowledged
        self._stood_still = (0.0, 0.0)  # seconds that this process did not run, and the time of its return

    @property
    def is_busy(self) -> bool:
        """Whether a request waits."""
        return bool(self._requests or self._delivered)

    # ----------------------------------------------------------------------------------------------- sending

    def write(self, body: Any, now: float, actions: list[Action]) -> None:
        """Send a message, and repeat it until it is acknowledged."""
        actions.append(SendMessage(SCHEDULER, self._link.write(body, now)))

    def unreliable_message(self, body: Any) -> SendMessage:
        """Return a message that may be lost."""
        return SendMessage(SCHEDULER, self._link.send_unreliable(body))

    def send_request(self, event: SchedulerRequest, store: int, now: float, actions: list[Action]) -> None:
        """Send a request; a message without a number is done when it is acknowledged."""
        message: Any = event.message
        fields = {"store": store} if hasattr(message, "store") else {}
        if not hasattr(message, "request"):
            self.write(msgspec.structs.replace(message, **fields), now, actions)
            self._delivered[self._link.last_number] = event.op
            return
        self._number += 1
        self._requests[self._number] = event.op
        self.write(msgspec.structs.replace(message, request=self._number, **fields), now, actions)

    def repeat_overdue(self, now: float, actions: list[Action]) -> None:
        """Repeat messages that are not acknowledged in time."""
        actions.extend(SendMessage(SCHEDULER, message) for message in self._link.overdue_messages(now))

    # --------------------------------------------------------------------------------------------- receiving

    def read(self, message: ReliableMessage, now: float) -> list[Any]:
        """Return the messages to handle now, in order; `acknowledge` must be called after that."""
        if not self._link.is_current_term(message):
            return []
        self.silence.note_heartbeat(now)
        self.met = True
        if now - self._stood_still[1] > self._dead_after:
            self._stood_still = (0.0, 0.0)  # its absence had no effect
        return self._link.read(message, now)

    def acknowledge(self, actions: list[Action]) -> None:
        """End requests that are acknowledged; acknowledge received messages, if no other message did."""
        delivered = [number for number in self._delivered if number <= self._link.last_acknowledged]
        actions.extend(OperationDone(self._delivered.pop(number)) for number in delivered)
        pending = self._link.pending_ack()
        if pending is not None:
            actions.append(SendMessage(SCHEDULER, pending))

    def end_answered(self, message: MemberReply, now: float, actions: list[Action]) -> None:
        """End the request that this message answers."""
        op = self._requests.pop(message.request, None)
        if op is not None:
            actions.append(OperationDone(op, message.error, message))

    def end_delivered(self, actions: list[Action]) -> None:
        """Stop waiting for acknowledgements: the scheduler has probably ended, and its last one was lost."""
        actions.extend(OperationDone(op) for op in self._delivered.values())
        self._delivered.clear()

    def fail_requests(self, failure: Failure, actions: list[Action]) -> None:
        """End all requests."""
        waiting = [*self._requests.values(), *self._delivered.values()]
        self._requests.clear()
        self._delivered.clear()
        actions.extend(OperationDone(op, failure) for op in waiting)

    # ---------------------------------------------------------------------------------------------- silence

    def stood_still(self, seconds: float, now: float) -> None:
        """Record that this process did not run for `seconds`."""
        self._stood_still = (seconds, now)

    def check_scheduler(self, now: float, actions: list[Action]) -> Failure | None:
        """Check that the scheduler is alive; return the failure if it is lost."""
        # Until the scheduler has sent its absence, the limit is that of its first message.
        told = self.met and self.echoes
        patience = max(self.absence, self._dead_after if told else self._start or self._dead_after)
        if self.silence.is_lost(now, patience):
            return loss_failure((Loss("scheduler", 0, self.silence.silent_seconds(now)),))
        if self.silence.should_ask(now):
            if self.echoes:
                actions.append(SendMessage(ECHO, PingRequest(0)))
            if not self.echoes or self.silence.is_long(now):  # another process may be at the echo's address
                actions.append(self.unreliable_message(PingRequest(0)))
        return None

    def removal_failure(self, why: Failure, who: str) -> Failure:
        """Return the error of this process's removal: that it was stopped is named first."""
        seconds = self._stood_still[0]
        return stopped_failure(who, seconds, self._dead_after, why) if seconds else why
