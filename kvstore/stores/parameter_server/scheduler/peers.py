"""The processes that the scheduler knows, their connections, and the messages that one step sends to them."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from ..protocol.events import Action, SendMessage
from ..protocol.messages import Failure, FenceNotice, HelloRequest, RefusalNotice
from ..protocol.reliable_link import ReliableLink
from .store_membership import StoreMembership


class ProcessState(enum.Enum):
    """The state of a process; `machine.TRANSITIONS` lists the events that change it."""

    HERE = "here"
    ENDED = "ended"
    LOST = "lost"


@dataclass(eq=False)
class AdmittedProcess:
    """A process of the job; `peers` has one connection of a worker for each store, and -1 for a server."""

    name: str
    role: str
    rank: int
    incarnation: int
    heard: float
    state: ProcessState = ProcessState.HERE
    peers: dict[int, PeerConnection] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


@dataclass(eq=False)
class PeerConnection:
    """One connection: that of one store of a worker, or of a server."""

    name: Hashable
    link: ReliableLink
    since: float
    hello: HelloRequest | None = None
    process: AdmittedProcess | None = None
    store: StoreMembership | None = None

    @property
    def rank(self) -> int:
        """Return the rank of its process; -1 before the process has one."""
        return self.process.rank if self.process is not None else -1


class StepActions:
    """The actions of one step of the scheduler, and the time `now` of the step."""

    __slots__ = ("actions", "changed", "now")

    def __init__(self, now: float) -> None:
        self.now = now
        #: Whether the step has changed state that a restarted scheduler needs.
        self.changed = False
        self.actions: list[Action] = []

    def write(self, peer: PeerConnection, body: Any) -> None:
        """Send a message; the link repeats it until it is acknowledged."""
        self.changed = True
        self.actions.append(SendMessage(peer.name, peer.link.write(body, self.now)))

    def send_unreliable(self, peer: PeerConnection, body: Any) -> None:
        """Send a message that is not repeated if it is lost."""
        self.actions.append(SendMessage(peer.name, peer.link.send_unreliable(body)))

    def fence(self, peer: PeerConnection, text: str) -> None:
        """Tell a peer that its process is not, or no longer, part of the job."""
        self.send_unreliable(peer, FenceNotice(0, text))

    def refuse(self, peer: PeerConnection, failure: Failure) -> None:
        """Tell a peer why its store or its server cannot take part in the job."""
        self.write(
            peer, RefusalNotice(failure.error, failure.text, failure.role, failure.rank, failure.silent)
        )

    def acknowledge(self, peer: PeerConnection) -> None:
        """Acknowledge the received messages, unless another message of this step does."""
        acknowledgement = peer.link.pending_ack()
        if acknowledgement is not None:
            self.actions.append(SendMessage(peer.name, acknowledgement))

    def repeat(self, peer: PeerConnection) -> None:
        """Send the messages again that have been unacknowledged for too long."""
        self.actions.extend(
            SendMessage(peer.name, message) for message in peer.link.overdue_messages(self.now)
        )
