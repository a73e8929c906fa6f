"""The stores of a process, or its server, in a timeline."""

from __future__ import annotations

from typing import NamedTuple

from ..processes import role_of


class StoreRecord(NamedTuple):
    """The description of one store in a timeline."""

    number: int  # of its counters in the process: `Event.store`
    type: str  # of the store; "server" or "scheduler" for those processes
    job: str  # can be empty
    rank: int
    size: int
    slices: dict[int, str]  # the name of the key of each slice

    @property
    def role(self) -> str:
        """The role of the process that has the store."""
        return role_of(self.type)
