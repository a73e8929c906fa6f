"""Names and roles of the processes of a job, as counters, events and people have them."""

from __future__ import annotations

from .native._observe import NOBODY


def role_of(store: str) -> str:
    """Return the role of a process whose counters have this type of store."""
    return store if store in ("server", "scheduler") else "worker"


def process_name(role: str, rank: int) -> str:
    """Return the name of a process, such as ``worker 2``; the scheduler has no rank."""
    return role if role == "scheduler" else f"{role} {rank}"


def name_of(number: int) -> str:
    """Return the name of the process that an event or a wait is about; empty if it is unknown."""
    if number == NOBODY:
        return ""
    return f"worker {number}" if number >= 0 else f"server {-1 - number}"


def number_of(name: str) -> int:
    """Return the number of a process in events: the rank of a worker, -1 - the rank of a server."""
    role, _, rank = name.partition(" ")
    return -1 - int(rank) if role == "server" else int(rank)
