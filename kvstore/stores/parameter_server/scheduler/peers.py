"""The processes that the scheduler knows, their connections, and the messages that one step sends to them."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from ..protocol.events import Action, Send
from ..protocol.messages import Failure, Fenced, Hello, Refused
from ..protocol.reliable_link import ReliableLink
from .store_membership import StoreMembership


class State(enum.Enum):
    """The state of a process; `machine.TRANSITIONS` lists the events that change it."""

    HERE = "here"
    ENDED = "ended"
    LOST = "lost"


@dataclass(eq=False)
class Process:
    """A process of the job; `peers` has one connection of a worker for each store, and -1 for a server."""

    name: str
    role: str
    rank: int
    incarnation: int
    heard: float
    state: State = State.HERE
    peers: dict[int, Peer] = field(default_factory=dict, repr=False)

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


@dataclass(eq=False)
class Peer:
    """One connection: that of one store of a worker, or of a server."""

    name: Hashable
    link: ReliableLink
    since: float
    hello: Hello | None = None
    process: Process | None = None
    store: StoreMembership | None = None

    @property
    def rank(self) -> int:
        """Return the rank of its process; -1 before the process has one."""
        return self.process.rank if self.process is not None else -1


class Outgoing:
    """The actions of one step of the scheduler, and the time `now` of the step."""

    __slots__ = ("actions", "changed", "now")

    def __init__(self, now: float) -> None:
        self.now = now
        #: Whether the step has changed state that a restarted scheduler needs.
        self.changed = False
        self.actions: list[Action] = []

    def write(self, peer: Peer, body: Any) -> None:
        """Send a message; the link repeats it until it is acknowledged."""
        self.changed = True
        self.actions.append(Send(peer.name, peer.link.write(body, self.now)))

    def send_unreliable(self, peer: Peer, body: Any) -> None:
        """Send a message that is not repeated if it is lost."""
        self.actions.append(Send(peer.name, peer.link.send_unreliable(body)))

    def fence(self, peer: Peer, text: str) -> None:
        """Tell a peer that its process is not, or no longer, part of the job."""
        self.send_unreliable(peer, Fenced(0, text))

    def refuse(self, peer: Peer, failure: Failure) -> None:
        """Tell a peer why its store or its server cannot take part in the job."""
        self.write(peer, Refused(failure.error, failure.text, failure.role, failure.rank, failure.silent))

    def acknowledge(self, peer: Peer) -> None:
        """Acknowledge the received messages, unless another message of this step does."""
        acknowledgement = peer.link.pending_ack()
        if acknowledgement is not None:
            self.actions.append(Send(peer.name, acknowledgement))

    def repeat(self, peer: Peer) -> None:
        """Send the messages again that have been unacknowledged for too long."""
        self.actions.extend(Send(peer.name, message) for message in peer.link.again(self.now))
