"""What an engine of collective operations must do, for `collectives.backend` to make a store of it.

An engine is a job of processes that call the same operations together. It knows names and arrays, not keys
or stores; one file for each: `mpi`, `horovod`, `nccl`, `byteps`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy.typing as npt

#: Blocks until an operation is complete, or raises; may be called from any thread, once.
Finish = Callable[[], None]
#: A name that is the same in all processes, and memory that is contiguous and writable.
Item = tuple[str, npt.NDArray[Any]]


def nothing() -> None:
    """Finish what is complete."""


def plain(name: str) -> str:
    """Return a name in ASCII, another one for each: engines may refuse half surrogates, or stop at a NUL."""
    return name.encode("unicode_escape").decode("ascii")


class Collective(Protocol):
    """One process's end of a running engine.

    All processes call `broadcast`, `allreduce` and `barrier` in the same order, with items of the same names,
    sizes and element types. An engine that notices that they do not says so with a ConfigError in each of
    them; none waits longer than the timeout it was made with, and the death of a peer is a PeerLostError,
    unless the engine ends the whole job then. Memory of an item belongs to the engine until the operation is
    complete, and has undefined content after an error.

    Engines match operations by their order or by their names. One that goes by the order compares each of
    them in all processes before data moves (`kvstore.stores.collectives.agreement`).

    Attributes
    ----------
    name : str
        As in `create`.
    rank, size, local_rank : int
    dtypes : frozenset of str
        Names of the element types that can be summed. 16-bit floats never come, nor do 8-bit integers where
        they are not listed: they are widened before.
    compares : bool
        Whether it compares, with `meaning`; if not, the store asks all workers before a broadcast.
    """

    name: str
    rank: int
    size: int
    local_rank: int
    dtypes: frozenset[str]
    compares: bool

    def broadcast(self, items: Sequence[Item], meaning: str = "") -> None:
        """Overwrite the items with those of rank 0; of any element type, as bytes.

        `meaning` is what must be the same in all processes beside the items.
        """

    def allreduce(self, items: Sequence[Item], priority: int = 0) -> Finish:
        """Begin to replace each item by its sum over all processes."""

    def barrier(self) -> None:
        """Wait until all processes have called it."""

    def versions(self) -> dict[str, str]:
        """Name and version of what runs here, for reports."""

    def abandon(self) -> None:
        """Wait for nobody any more, and let nobody wait for this process longer than must be."""

    def close(self) -> None:
        """Give back what the store took; the engine may be of use to others in this process."""
