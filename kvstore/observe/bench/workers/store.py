"""A store of kvstore, and what the memory of the same processes can do."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import numpy as np

import kvstore as kv
from kvstore.errors import CapabilityError
from kvstore.settings import launchers
from kvstore.store_kinds import is_synchronous

from ..key_lists import BenchKey
from .arrays import Array, WorkerArrays
from .peer import BenchPeer, Call

#: Names of the ways: one call of the store with all keys, and copies of the same bytes out and back in.
OURS, MEMCPY = "kvstore", "memcpy"


class StorePeer(BenchPeer):
    """One worker of the store.

    Parameters
    ----------
    options : dict
        Store, method, compression and optimizer, as in `BenchSettings`.
    """

    store: kv.KVStore

    def __init__(self, options: dict[str, Any]) -> None:
        place = launchers.detect()
        super().__init__(place.rank, place.size)
        self._options = options

    def join(self, address: str) -> None:
        """Create the store, which finds the other workers by itself."""
        self.store = kv.create(self._options["store"])
        if self.store.num_workers != self.size:
            raise CapabilityError(f"store {self.store.type!r} does not connect {self.size} processes")

    def prepare(self, keys: Sequence[BenchKey]) -> str | None:
        """Create the keys, and check what comes back from a first call, without an optimizer."""
        self.gradients = mine = WorkerArrays(keys)
        if packing := self._options["compression"]:
            self.store.set_gradient_compression(packing)
        self.store.init(mine.names, [np.zeros(value.shape, value.dtype) for value in mine.values])
        mine.write_patterns(self.rank)
        self._sum(mine.values)
        wrong = mine.wrong(self.size, packing, is_synchronous(self.store))
        self.store.barrier()  # where nobody waits for the others, they read before anybody pushes again
        if update := self._options["optimizer"]:
            self.store.set_optimizer(kv.optimizer.create(update))
        self.ways = self._ways(WorkerArrays(keys))
        return f"what the store made of key {wrong!r}" if wrong else None

    def barrier(self) -> None:
        """Wait for all, by the store."""
        self.store.barrier()

    def close(self) -> None:
        """Close the store."""
        self.store.close()

    def _ways(self, other: WorkerArrays) -> dict[str, Call]:
        """Make the calls; `other` is for weights, where there are any, and the other side of the copies."""
        mine = self.gradients
        outs = other.values if self._options["optimizer"] else mine.values
        pairs = list(zip(mine.flat, other.flat, strict=True))
        return {OURS: partial(self._sum, outs), MEMCPY: partial(_copy_out_and_in, pairs)}

    def _sum(self, outs: list[Array]) -> None:
        names, values = self.gradients.names, self.gradients.values
        if self._options["method"] == "pushpull":
            self.store.pushpull(names, values, out=None if outs is values else outs)
        else:
            self.store.push(names, values)
            self.store.pull(names, out=outs)


def _copy_out_and_in(pairs: Sequence[tuple[Array, Array]]) -> None:
    for here, there in pairs:
        np.copyto(there, here)
        np.copyto(here, there)
