"""kvstore's `shared` store, by its public methods only."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import kvstore as kv
from bench.cases import shared as shared_cases
from bench.cases.shared import SharedCase
from bench.peers.base import Array, Call, all_of
from bench.peers.group.base import GroupPeer
from bench.peers.local.ours import optimizer

SPIN = {"spin": 60.0, "block": 0.0}  # seconds that a wait spins before it sleeps


class Ours(GroupPeer):
    """A new store for each case."""

    store: kv.KVStore | None = None

    def prepare(self, case: SharedCase) -> list[Array]:
        data = shared_cases.inputs(case, self.place.rank)
        options: dict[str, Any] = {"spin": SPIN[case.wait]} if case.wait else {}
        self.store = kv.create("shared", **options)
        self.store.init(case.keys, data.weights)
        if case.update:
            self.store.set_optimizer(optimizer(case.update))
        values = [self._moved(key, value) for key, value in enumerate(data.values)]
        if case.home == "private":
            values, self.buffers = data.values, [data.flat]
        else:
            self.buffers = values
        self.grows = not case.update
        self.variants = self._calls(case.keys, values, case.verb == "update")
        next(iter(self.variants.values()))()
        self.calls = 1
        return [np.array(self.store.view(key)) for key in case.keys] if case.update else values

    def _moved(self, key: int, value: Array) -> Array:
        """Return an array of the key's shape that lives in the store."""
        assert self.store is not None
        array = self.store.empty(key)
        np.copyto(array, value)
        return array

    def _calls(self, keys: list[int], values: list[Array], update: bool) -> dict[str, Call]:
        step = self._update if update else self._allreduce
        if len(keys) == 1:
            return {"": step(keys[0], values[0])}
        each = [step(key, value) for key, value in zip(keys, values, strict=True)]
        return {"one call": step(keys, values), "a call for each key": all_of(each)}

    def _allreduce(self, key: Any, value: Any) -> Call:
        assert self.store is not None
        return partial(self.store.pushpull, key, value)

    def _update(self, key: Any, value: Any) -> Call:
        assert self.store is not None
        push, view = self.store.push, self.store.view
        keys = key if isinstance(key, list) else [key]

        def call() -> None:
            push(key, value)
            for one in keys:
                view(one)

        return call

    def release(self) -> None:
        super().release()
        if self.store is not None:
            self.store.close()
            self.store = None
