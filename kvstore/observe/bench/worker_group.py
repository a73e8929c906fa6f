"""The processes of one peer: started by a launcher, met, asked together, and ended together."""

from __future__ import annotations

import contextlib
import os
import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from kvstore.errors import KVStoreError

from .link import CommandLink, Message
from .supervisor import Supervisor

_MEET = 120.0  # seconds for all processes to come up, with a library that is slow to import
_LAST_WORDS = 10.0  # seconds in which a launcher says which of its processes failed
_LEAVE = 2.0  # seconds in which processes end by themselves, if the others have hung up,
_JOINING = 20.0  # or if they are about to start, which an MPI must not be interrupted in
_KEPT = 200  # lines
_CAUSE = re.compile(r"kvstore run: (.*?)(?:; its stderr ended with:|, with an empty stderr)?$")


class PeerFailure(KVStoreError):
    """The processes of a peer failed, or do not answer; `printed` is what they have printed."""

    def __init__(self, text: str, printed: Sequence[str] = ()) -> None:
        super().__init__(text)
        self.printed = tuple(printed)


@dataclass(frozen=True)
class GroupPlan:
    """How the processes of a peer are started.

    Attributes
    ----------
    name : str
        Peer.
    workers : int
        How many there are.
    command : tuple of str
        Launcher and worker, without the address of the command and the options of the store.
    variables : mapping
        Defaults of environment variables.
    """

    name: str
    workers: int
    command: tuple[str, ...]
    variables: Mapping[str, str]


class _Transcript:
    """The last lines that the processes have printed."""

    def __init__(self) -> None:
        self.lines: deque[str] = deque(maxlen=_KEPT)

    def write(self, data: bytes) -> None:
        """Keep a line."""
        self.lines.append(data.decode(errors="replace").rstrip())


class WorkerGroup:
    """The workers of one peer.

    Attributes
    ----------
    versions : dict of str to str
        Of the libraries in the workers, once they have been met.
    """

    def __init__(self, supervisor: Supervisor, plan: GroupPlan, options: str) -> None:
        self._supervisor, self._plan = supervisor, plan
        self._transcript = _Transcript()
        self._links: list[CommandLink] = []
        self._files: list[str] = []
        self._processes: list[int] = []
        self._over = False
        self.versions: dict[str, str] = {}
        command = [*plan.command, plan.name, supervisor.address, options]
        self._child = supervisor.start(plan.name, command, plan.variables, self._transcript)

    @property
    def name(self) -> str:
        """Name of the peer."""
        return self._plan.name

    @property
    def lines(self) -> Sequence[str]:
        """What its processes have printed."""
        return self._transcript.lines

    def meet(self, patience: float) -> None:
        """Wait until all workers have come, and have them meet each other.

        Raises
        ------
        PeerFailure
            They have not come, or are no job of this size.
        """
        if not self._supervisor.until(self._have_come, _MEET):
            missing = self._plan.workers - len(self._links)
            raise self._failure(f"{missing} of {self._plan.workers} have not started within {_MEET:g} s")
        if len(self._links) < self._plan.workers or self._errors():
            raise self._failure("some ended before all had started")
        hellos = [link.inbox.pop(0) for link in self._links]
        self._files = [name for hello in hellos for name in hello["files"]]
        place = {hello["rank"]: (hello, link) for hello, link in zip(hellos, self._links, strict=True)}
        if sorted(place) != list(range(self._plan.workers)):
            raise self._failure("each process is a job of its own: its launcher is that of another library")
        self._links = [place[rank][1] for rank in sorted(place)]
        self._processes = [place[rank][0]["pid"] for rank in sorted(place)]
        self.versions = place[0][0]["versions"]
        self.ask({"do": "join", "address": place[0][0]["address"]}, patience)

    def ask(self, message: Message, patience: float) -> list[Message]:
        """Send all workers the same message, and wait for their answers, in rank order.

        Raises
        ------
        PeerFailure
            One of them failed, ended, or does not answer within `patience` seconds.
        """
        for link in self._links:
            link.send(message)
        if not self._supervisor.until(self._have_answered, patience):
            silent = ", ".join(str(rank) for rank, link in enumerate(self._links) if not link.inbox)
            raise self._failure(f"no answer within {patience:.0f} s from rank {silent}")
        gone = [rank for rank, link in enumerate(self._links) if link.closed or not link.inbox]
        if gone or self._errors():
            raise self._failure(
                f"rank {gone[0]} (process {self._processes[gone[0]]}) has ended" if gone else ""
            )
        return [link.inbox.pop(0) for link in self._links]

    def end(self, leave: float = _LEAVE) -> None:
        """Hang up, and wait for the end of all; a second call does nothing.

        Those that are still there after `leave` seconds are asked to end, and later killed.
        """
        if self._over:
            return
        self._over = True
        self._supervisor.end(self._child, self._come, leave if self.versions else _JOINING)
        for name in self._files:  # of an MPI whose processes were killed
            with contextlib.suppress(OSError):
                os.unlink(name)

    def _come(self) -> list[CommandLink]:
        """Take in the workers that have said that they are of this peer."""
        self._links += self._supervisor.take(lambda link: _says_peer(link, self.name))
        return self._links

    def _have_come(self) -> bool:
        return len(self._come()) == self._plan.workers or bool(self._errors()) or self._child.ended()

    def _have_answered(self) -> bool:
        if self._errors() or self._child.ended() or any(link.closed for link in self._links):
            return True
        return all(link.inbox for link in self._links)

    def _errors(self) -> list[str]:
        """List what workers have said of their failure."""
        return [link.inbox[-1]["error"] for link in self._links if link.inbox and "error" in link.inbox[-1]]

    def _failure(self, why: str) -> PeerFailure:
        """Make the error. The launcher knows best who failed first; then the workers know."""
        if self._errors() or any(link.closed for link in self._links):
            self._supervisor.until(self._child.ended, _LAST_WORDS)
        told = [match[1] for line in self.lines if (match := _CAUSE.search(line))]
        words = [*told[-1:], *(self._errors()[:1] or ([] if told else [why]))]
        return PeerFailure(f"the workers of {self.name} failed: {': '.join(words)}", self.lines)


def _says_peer(link: CommandLink, name: str) -> bool:
    return bool(link.inbox) and link.inbox[0].get("peer") == name
