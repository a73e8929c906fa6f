"""MXNet 1.9.1: its `dist` stores, with the optimizer on its servers."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from bench.cases import dist as dist_cases
from bench.cases.dist import EACH, INIT, DistCase, Inputs
from bench.peers.base import Array, Call, all_of
from bench.peers.dist.base import PAIR, PUSHPULL, DistPeer, changes
from bench.peers.local.rival_mxnet import mx, optimizer


class MXNet(DistPeer):
    """One store for all cases of a job: a process cannot have two. Each case has its own keys."""

    store: Any = None

    def prepare(self, case: DistCase) -> list[Array]:
        if self.store is None:
            self._open(case)
        self.keys = self.new_keys(case)
        return self._prepare_sparse(case) if case.rows else self._prepare_dense(case)

    def _open(self, case: DistCase) -> None:
        self.store = mx.kv.create(f"dist_{case.mode}")
        if case.update and self.place.rank == 0:
            self.store.set_optimizer(optimizer(case.update, dist_cases.LEARNING_RATE))
        if self.entry.codec:
            settings = {"type": self.entry.codec, "threshold": dist_cases.THRESHOLD}
            self.store.set_gradient_compression(settings)
        self.store._barrier()  # only the first worker configures the servers

    def _prepare_dense(self, case: DistCase) -> list[Array]:
        data, keys = self.dense(case), self.keys
        weights = data.weights()
        initial = [mx.nd.array(weight) for weight in weights]
        self.store.init(keys, initial)
        values = [mx.nd.array(value) for value in data.values]
        outs = [mx.nd.array(out) for out in data.outs]
        mx.nd.waitall()
        self.write = partial(_write, data, values)
        self.variants = self._ways(keys, values, outs)
        if INIT in case.also:
            self.variants[INIT] = lambda: self.store.init(self.new_keys(case), initial)
        if self.entry.codec:
            _copy(data.seeds(), values)
            self.call()
        self.first()
        if case.mode == "async":
            self._pull_again(keys, outs)
        found = [out.asnumpy() for out in outs]
        return changes(found, weights) if case.update else found

    def _ways(self, keys: list[int], values: list[Any], outs: list[Any]) -> dict[str, Call]:
        push, pull = partial(self.store.push, keys, values), partial(self.store.pull, keys, out=outs)
        ways = {PAIR: all_of([push, pull, mx.nd.waitall])}
        each = list(zip(keys, values, outs, strict=True))
        if len(keys) > 1:
            ways[f"{PAIR}, a call for each key"] = partial(self._pairs, each)
        if self.entry.codec:
            return ways  # its pushpull ignores compression
        ways[PUSHPULL] = all_of([partial(self.store.pushpull, keys, values, out=outs), mx.nd.waitall])
        if len(keys) > 1:
            ways[EACH] = partial(self._pushpulls, each)
        return ways

    def _pairs(self, each: list[tuple[int, Any, Any]]) -> None:
        for key, value, out in each:
            self.store.push(key, value, priority=-key)
            self.store.pull(key, out=out, priority=-key)
        mx.nd.waitall()

    def _pushpulls(self, each: list[tuple[int, Any, Any]]) -> None:
        for key, value, out in each:
            self.store.pushpull(key, value, out=out, priority=-key)
        mx.nd.waitall()

    def _pull_again(self, keys: list[int], outs: list[Any]) -> None:
        """Pull once every worker's push has been applied."""
        self.place.gate.wait()
        self.store.pull(keys, out=outs)
        mx.nd.waitall()

    def _prepare_sparse(self, case: DistCase) -> list[Array]:
        data = dist_cases.sparse_inputs(case, self.place.rank)
        (shape,), (key,) = case.shapes, self.keys
        self.store.init(key, mx.nd.array(data.table).tostype("row_sparse"))
        value = mx.nd.sparse.row_sparse_array((data.rows, data.ids), shape=shape)
        out, ids = mx.nd.sparse.zeros("row_sparse", shape), mx.nd.array(data.ids, dtype="int64")
        push = partial(self.store.push, key, value)
        pull = partial(self.store.row_sparse_pull, key, out=out, row_ids=ids)
        self.variants = {PAIR: all_of([push, pull, mx.nd.waitall])}
        self.first()
        self.store.row_sparse_pull(key, out=out, row_ids=mx.nd.array(data.compared, dtype="int64"))
        return changes([out.data.asnumpy()], [data.table[data.compared]])

    def release(self) -> None:
        super().release()
        mx.nd.waitall()


def _write(data: Inputs, values: list[Any], call: int) -> None:
    _copy(data.gradients(call), values)


def _copy(arrays: list[Array], values: list[Any]) -> None:
    for array, value in zip(arrays, values, strict=True):
        value._sync_copyfrom(np.ascontiguousarray(array))
