"""kvstore's `dist` stores, by the public methods only."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import kvstore as kv
from bench.cases import dist as dist_cases
from bench.cases.dist import EACH, INIT, DistCase, Inputs
from bench.peers.base import Array, Call, all_of
from bench.peers.dist.base import PAIR, PUSHPULL, DistPeer, changes
from bench.peers.local.ours import optimizer


class Ours(DistPeer):
    """One store for all cases of a job; each case has keys of its own."""

    store: kv.KVStore | None = None

    def prepare(self, case: DistCase) -> list[Array]:
        store = self.store = self.store or self._open(case)
        keys = self.new_keys(case)
        return (self._prepare_sparse if case.rows else self._prepare_dense)(case, store, keys)

    def _open(self, case: DistCase) -> kv.KVStore:
        options: dict[str, Any] = {"same_host_shm": self.entry.shm}
        if self.entry.hierarchy != "flat":  # an older kvstore does not have it
            options["hierarchy"] = self.entry.hierarchy
        store = kv.create(f"dist_{case.mode}", **options)
        if self.entry.codec:
            store.set_gradient_compression({"type": self.entry.codec, "threshold": dist_cases.THRESHOLD})
        if case.update:
            store.set_optimizer(optimizer(case.update, dist_cases.LEARNING_RATE))
        return store

    def _prepare_dense(self, case: DistCase, store: kv.KVStore, keys: list[int]) -> list[Array]:
        data = self.dense(case)
        weights = data.weights()
        store.init(keys, weights)
        if self.entry.homes:
            data.values = data.outs = [store.empty(key) for key in keys]
            self.variants = {PUSHPULL: partial(store.pushpull, keys, data.values)}
        else:
            self.variants = _ways(store, keys, data)
        if INIT in case.also:
            self.variants[INIT] = lambda: store.init(self.new_keys(case), weights)
        if EACH in case.also:
            self.variants[EACH] = partial(_each, store, keys, data)
        if self.entry.codec:
            data.write(data.seeds())
            self.call()
        self.first()
        if case.mode == "async":
            self.place.gate.wait()  # every worker's push has been applied
            store.pull(keys, out=data.outs)
        if case.compressed != bool(self.entry.codec):
            return []  # other keys than the rest of the case
        return changes(data.outs, weights) if case.update else data.outs

    def _prepare_sparse(self, case: DistCase, store: kv.KVStore, keys: list[int]) -> list[Array]:
        data = dist_cases.sparse_inputs(case, self.place.rank)
        (shape,), (key,) = case.shapes, keys
        store.init(key, kv.RowSparseArray(data.table, np.arange(shape[0]), shape))
        value, out = kv.RowSparseArray(data.rows, data.ids, shape), kv.RowSparseArray.zeros(shape)
        push = partial(store.push, key, value)
        self.variants = {PAIR: all_of([push, partial(store.row_sparse_pull, key, out=out, row_ids=data.ids)])}
        self.first()
        store.row_sparse_pull(key, out=out, row_ids=data.compared)
        return changes([out.data], [data.table[data.compared]])

    def close(self) -> None:
        if self.store is not None:
            self.store.close()
            self.store = None


def _ways(store: kv.KVStore, keys: list[int], data: Inputs) -> dict[str, Call]:
    many: Any = keys if len(keys) > 1 else keys[0]
    values, outs = (data.values, data.outs) if len(keys) > 1 else (data.values[0], data.outs[0])
    push, pull = partial(store.push, many, values), partial(store.pull, many, out=outs)
    return {PUSHPULL: partial(store.pushpull, many, values, out=outs), PAIR: all_of([push, pull])}


def _each(store: kv.KVStore, keys: list[int], data: Inputs) -> None:
    for key, value, out in zip(keys, data.values, data.outs, strict=True):
        store.pushpull(key, value, out=out)
