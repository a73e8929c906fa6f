"""The processes that the scheduler knows, their sockets, and what one step writes to them."""

from __future__ import annotations

import enum
from collections.abc import Hashable
from dataclasses import dataclass, field
from typing import Any

from ..protocol.events import Action, Send
from ..protocol.messages import Failure, Fenced, Hello, Refused
from ..protocol.reliable_link import ReliableLink
from .membership import Membership


class State(enum.Enum):
    """What has become of a process."""

    HERE = "here"
    ENDED = "ended"
    LOST = "lost"


@dataclass(eq=False)
class Process:
    """A process of the job; a worker's has a peer for each store, a server's one for -1."""

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
    """One socket: a worker's store, or a server."""

    name: Hashable
    link: ReliableLink
    since: float
    hello: Hello | None = None
    process: Process | None = None
    store: Membership | None = None

    @property
    def rank(self) -> int:
        """Rank of its process; -1 while it has none."""
        return self.process.rank if self.process is not None else -1


class Outgoing:
    """What one step of the scheduler comes to, and when it is taken."""

    __slots__ = ("actions", "changed", "now")

    def __init__(self, now: float) -> None:
        self.now = now
        #: Whether the step has changed what must outlast the scheduler's process.
        self.changed = False
        self.actions: list[Action] = []

    def write(self, peer: Peer, body: Any) -> None:
        """Send a message; it is sent again until it is acknowledged."""
        self.changed = True
        self.actions.append(Send(peer.name, peer.link.write(body, self.now)))

    def send_unreliable(self, peer: Peer, body: Any) -> None:
        """Send a message that may be lost."""
        self.actions.append(Send(peer.name, peer.link.send_unreliable(body)))

    def fence(self, peer: Peer, text: str) -> None:
        """Tell a peer that it is no part of the job any more, or never was."""
        self.send_unreliable(peer, Fenced(0, text))

    def refuse(self, peer: Peer, why: Failure) -> None:
        """Tell a peer that its store or its server cannot be in the job."""
        self.write(peer, Refused(why.error, why.text, why.role, why.rank, why.silent))

    def acknowledge(self, peer: Peer) -> None:
        """Say which messages have come, if none of this step has said it."""
        acknowledgement = peer.link.pending_ack()
        if acknowledgement is not None:
            self.actions.append(Send(peer.name, acknowledgement))

    def repeat(self, peer: Peer) -> None:
        """Send again what has not been acknowledged for too long."""
        self.actions.extend(Send(peer.name, message) for message in peer.link.again(self.now))
