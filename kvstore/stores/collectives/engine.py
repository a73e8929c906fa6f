"""The interface of an engine of collective operations; `collectives.backend` makes a store of an engine.

An engine connects processes that call the same operations together. It works with names and arrays, not with
keys or stores. Each engine has its own file or folder: `mpi`, `horovod`, `nccl`, `byteps`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy.typing as npt

#: Blocks until an operation is complete, or raises its error. Any thread can call it, once.
Finish = Callable[[], None]
#: A name that is the same in all processes, and a contiguous, writable array.
Item = tuple[str, npt.NDArray[Any]]


def do_nothing() -> None:
    """Do nothing: a `Finish` of a complete operation."""


def ascii_name(name: str) -> str:
    """Return a unique ASCII form of a name: engines can reject lone surrogates, or stop at a NUL."""
    return name.encode("unicode_escape").decode("ascii")


class Collective(Protocol):
    """Interface of an engine in one process.

    All processes must call `broadcast`, `allreduce` and `barrier` in the same order, with items of the same
    names, sizes and element types. If an engine detects a difference, it raises a `ConfigError` in each
    process. No call waits longer than the timeout of the engine. The death of a peer raises `PeerLostError`,
    unless the engine then ends the whole job. The memory of an item belongs to the engine until the operation
    is complete; its content is undefined after an error.

    Engines match operations by their order or by their names. An engine that uses the order compares each
    operation in all processes before it sends data (`kvstore.stores.collectives.call_matching`).

    Attributes
    ----------
    name : str
        Name of the store for `create`.
    rank, size, local_rank : int
        Rank of this process, number of processes, and rank among the processes on this machine.
    dtypes : frozenset of str
        Names of the element types that the engine can sum. The store converts 16-bit floats to float32, and
        8-bit integers to int32 if they are not in this set.
    compares : bool
        Whether the engine compares the calls of the processes, with `meaning`. If not, the store compares
        them before a broadcast.
    """

    name: str
    rank: int
    size: int
    local_rank: int
    dtypes: frozenset[str]
    compares: bool

    def broadcast(self, items: Sequence[Item], meaning: str = "") -> None:
        """Overwrite the items with those of rank 0. The items can have any element type.

        `meaning` is a text that must be the same in all processes, in addition to the items.
        """

    def allreduce(self, items: Sequence[Item], priority: int = 0) -> Finish:
        """Begin to replace each item by its sum over all processes, and return a `Finish`."""

    def barrier(self) -> None:
        """Wait until all processes have called `barrier`."""

    def versions(self) -> dict[str, str]:
        """Return names and versions of the libraries in use, for reports."""

    def abandon(self) -> None:
        """Stop waiting for other processes, and let them notice quickly that this process has failed."""

    def close(self) -> None:
        """Free the resources of the store. Other users in this process can continue to use the engine."""
