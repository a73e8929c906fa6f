"""Memory that one process fills and others of the same machine read: payloads and values without a wire.

The memory is a memfd without a name, which grows by segments, is reserved before it is touched and sealed
against shrinking, so that a full machine is an answer and never a signal. Its owner says in an offer where it
is; who reads opens it by /proc, which lets in the same user on the same machine and nobody else.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

Bytes = npt.NDArray[np.uint8]


class Block(NamedTuple):
    """A piece of memory that others can read."""

    array: Bytes
    segment: int
    offset: int


class Outbox:
    """A process's memory for what it sends.

    Parameters
    ----------
    limit : int, optional
        Most bytes that it grows to. None: what the machine has left.
    """

    def __init__(self, limit: int | None = None) -> None:
        raise NotImplementedError

    def take(self, nbytes: int) -> Block | None:
        """Return `nbytes` of memory, aligned to a cache line; None where there is none, or after a fork."""
        raise NotImplementedError

    def give(self, block: Block) -> None:
        """Take memory back; nobody reads it any more."""
        raise NotImplementedError

    def offer(self) -> str:
        """Say where the memory is, for `Inbox.open` in another process; "" where there is none.

        Stays true as long as the process lives, however much it grows.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let the memory go, as soon as no block is in use."""
        raise NotImplementedError


class Values(Outbox):
    """A server's memory for values: beside each stands a stamp, odd while the value is written."""

    def stamp(self, segment: int, offset: int) -> int:
        """Return the stamp of what begins at `offset`."""
        raise NotImplementedError

    def writing(self, places: Iterable[tuple[int, int]]) -> AbstractContextManager[None]:
        """Mark what begins at these (segment, offset) as being written."""
        raise NotImplementedError


class Inbox:
    """Another process's memory, read-only."""

    @classmethod
    def open(cls, offer: str) -> Inbox | None:
        """Open what a process offers; None where it cannot be reached: another machine, user, container ..."""
        raise NotImplementedError

    def view(self, segment: int, offset: int, nbytes: int) -> Bytes:
        """Look at a block of an `Outbox`.

        Raises
        ------
        ProtocolError
            There is no such place.
        """
        raise NotImplementedError

    def copy(self, segment: int, offset: int, nbytes: int, stamp: int, out: npt.NDArray[Any]) -> bool:
        """Copy a block of `Values` to a contiguous array of as many bytes.

        Returns
        -------
        bool
            False if the value was written since it had this stamp: what is in `out` means nothing then.

        Raises
        ------
        ProtocolError
            There is no such place.
        """
        raise NotImplementedError

    def close(self) -> None:
        """Let the memory go."""
        raise NotImplementedError
