"""kvstore itself, by its public methods only."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

import kvstore as kv
from bench.cases import local as cases
from bench.cases.local import LocalCase
from bench.peers.base import Array, Peer, Unsupported


def optimizer(name: str, rate: float = cases.LEARNING_RATE) -> kv.optimizer.Optimizer:
    """Make the optimizer of a case; as in all peers the row-sparse kind updates the pushed rows only."""
    rates: dict[str, Any] = {"learning_rate": rate, "lazy_update": True}
    if name == "sgd":
        return kv.optimizer.create("sgd", **rates)
    rates["wd"] = cases.WEIGHT_DECAY
    if name == "sgd_momentum":
        return kv.optimizer.create("sgd", momentum=cases.MOMENTUM, **rates)
    return kv.optimizer.create("adam", beta1=cases.BETA1, beta2=cases.BETA2, epsilon=cases.EPSILON, **rates)


class Ours(Peer):
    """A `local` store."""

    def prepare(self, case: LocalCase) -> list[Array]:
        if case.verb in cases.STREAMS:
            raise Unsupported("the store has no bare memory passes")
        self.store = kv.create("local")
        return self._prepare_sparse(case) if case.rows else self._prepare_dense(case)

    def release(self) -> None:
        super().release()
        if hasattr(self, "store"):
            self.store.close()

    def _prepare_dense(self, case: LocalCase) -> list[Array]:
        data = cases.inputs(case)
        self.store.init(case.keys, data.weights)
        if case.update:
            self.store.set_optimizer(optimizer(case.update))
        many = len(case.shapes) > 1
        key: Any = case.keys if many else 0
        value = data.values if many else data.values[0]
        out = None if case.in_place else data.outs if many else data.outs[0]
        call = self._calls(key, value, out)[case.verb]
        self.variants = {case.verb: call}
        call()
        if case.verb == "push":
            return [np.array(self.store.view(key)) for key in case.keys]
        return [out for outs in data.outs for out in outs]

    def _calls(self, key: Any, value: Any, out: Any) -> dict[str, Callable[[], Any]]:
        push, pull = partial(self.store.push, key, value), partial(self.store.pull, key, out)

        def pair() -> None:
            push()
            pull()

        return {
            "pushpull": partial(self.store.pushpull, key, value, out=out),
            "pair": pair,
            "push": push,
            "pull": pull,
        }

    def _prepare_sparse(self, case: LocalCase) -> list[Array]:
        data = cases.sparse_inputs(case)
        (shape,) = case.shapes
        values = [kv.RowSparseArray(rows, ids, shape) for rows, ids in zip(data.rows, data.ids, strict=True)]
        full = kv.RowSparseArray(data.table, np.arange(shape[0]), shape)
        self.store.init(0, full if case.update or case.verb == "pull" else kv.RowSparseArray.zeros(shape))
        if case.update:
            self.store.set_optimizer(optimizer(case.update))
        outs = [kv.RowSparseArray.zeros(shape) for _ in values]
        if case.verb == "pull":
            call = partial(self.store.row_sparse_pull, 0, out=outs, row_ids=data.ids)
        else:
            call = partial(self.store.push, 0, values)
        self.variants = {case.verb: call}
        call()
        if case.verb == "push":
            self.store.row_sparse_pull(0, out=outs, row_ids=data.ids)
        return [out.data for out in outs]
