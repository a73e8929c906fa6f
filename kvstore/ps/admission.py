"""Who is let into a job, and under which rank."""

from __future__ import annotations

import enum
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field

from .messages import PROTOCOL, Failure, Hello


class State(enum.Enum):
    """What has become of a process."""

    HERE = "here"
    ENDED = "ended"
    LOST = "lost"


@dataclass
class Process:
    """A process of the job; a worker's has a peer for each store, a server's one for -1."""

    name: str
    role: str
    rank: int
    incarnation: int
    heard: float
    state: State = State.HERE
    peers: dict[int, Hashable] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"{self.role} {self.rank}"


def unfit(hello: Hello, job: str, count: int) -> Failure | None:
    """Why a process cannot belong to the job."""
    if hello.protocol != PROTOCOL:
        text = f"protocol {hello.protocol}, but the scheduler speaks {PROTOCOL}: run one version of kvstore"
        return Failure("ProtocolError", text)
    if hello.job != job:
        return Failure("FencedError", f"this is the scheduler of job {job!r}, not of {hello.job!r}")
    if hello.role not in ("worker", "server"):
        return Failure("ProtocolError", f"a {hello.role!r} is neither worker nor server")
    if hello.rank >= count:
        text = f"{hello.role} {hello.rank} is out of range: the job has {count} {hello.role}s, from 0"
        return Failure("ConfigError", text)
    return None


def free_rank(taken: Mapping[int, Process], count: int) -> int:
    """Lowest rank that nobody has, or that a lost process had; -1 if there is none."""
    free = (rank for rank in range(count) if rank not in taken or taken[rank].state == State.LOST)
    return next(free, -1)
