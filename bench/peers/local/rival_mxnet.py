"""MXNet 1.9.1: the `local` store, in its fastest way of calling."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

# MXNet 1.9.1 uses names that NumPy 1.24 removed.
for _name, _kind in {"bool": bool, "int": int, "float": float, "object": object}.items():
    if _name not in np.__dict__:
        setattr(np, _name, _kind)

import mxnet as mx  # noqa: E402 - needs the names above

from bench.cases import local as cases  # noqa: E402
from bench.cases.local import LocalCase  # noqa: E402
from bench.peers.base import Array, Call, Peer, Unsupported  # noqa: E402


def optimizer(name: str, rate: float = cases.LEARNING_RATE) -> Any:
    """Make the optimizer of a case."""
    if name == "sgd":
        return mx.optimizer.SGD(learning_rate=rate, lazy_update=True)
    rates = {"learning_rate": rate, "wd": cases.WEIGHT_DECAY}
    if name == "sgd_momentum":
        return mx.optimizer.SGD(momentum=cases.MOMENTUM, **rates)
    return mx.optimizer.Adam(beta1=cases.BETA1, beta2=cases.BETA2, epsilon=cases.EPSILON, **rates)


class MXNet(Peer):
    """Waits for the results of each call, as a training loop does before it reads them."""

    def prepare(self, case: LocalCase) -> list[Array]:
        if case.verb in cases.STREAMS:
            raise Unsupported("measured in C")
        self.store = mx.kv.create("local")
        if case.update:
            self.store.set_optimizer(optimizer(case.update))
        results = self._prepare_sparse(case) if case.rows else self._prepare_dense(case)
        mx.nd.waitall()
        return results

    def release(self) -> None:
        super().release()
        self.store = None
        mx.nd.waitall()

    def _prepare_dense(self, case: LocalCase) -> list[Array]:
        data = cases.inputs(case)
        weights = [mx.nd.array(weight) for weight in data.weights]
        values = [[mx.nd.array(value) for value in own] for own in data.values]
        outs = values if case.in_place else [[mx.nd.array(out) for out in own] for own in data.outs]
        self.store.init(case.keys, weights)
        self.variants = self._ways(case, case.keys, values, outs)
        next(iter(self.variants.values()))()
        if case.verb == "push":
            self.store.pull(case.keys, out=weights)
            results = [weight.asnumpy() for weight in weights]
        else:
            results = [out.asnumpy() for own in outs for out in own]
        if case.verb == "push" and case.k == 1 and case.update:
            self.variants["one operator for each tensor"] = _operators(case.update, weights, values)
        return results

    def _ways(self, case: LocalCase, keys: Any, values: Any, outs: Any) -> dict[str, Call]:
        flat = [out for own in outs for out in own]
        if len(keys) == 1:
            keys, values, outs = keys[0], values[0], outs[0]
        push, pull = partial(self.store.push, keys, values), partial(self.store.pull, keys, out=outs)
        single = partial(self.store.pushpull, keys, values, out=outs)
        calls: dict[str, list[Callable[[], Any]]] = {
            "push": [push],
            "pull": [pull],
            "pair": [push, pull],
            "pushpull": [single],
        }
        ways = {case.verb: calls[case.verb]}
        if case.verb == "pushpull":
            ways["push, then pull"] = calls["pair"]
        return {
            f"{name}, {wait}": partial(_all, [*steps, waiting])
            for name, steps in ways.items()
            for wait, waiting in {"waitall": mx.nd.waitall, "wait_to_read": partial(_wait, flat)}.items()
            if wait == "waitall" or case.verb != "push"
        }

    def _prepare_sparse(self, case: LocalCase) -> list[Array]:
        data = cases.sparse_inputs(case)
        (shape,) = case.shapes
        values = [
            mx.nd.sparse.row_sparse_array((rows, ids), shape=shape)
            for rows, ids in zip(data.rows, data.ids, strict=True)
        ]
        outs = [mx.nd.sparse.zeros("row_sparse", shape) for _ in values]
        ids = [mx.nd.array(own, dtype="int64") for own in data.ids]
        if case.update or case.verb == "pull":
            self.store.init(0, mx.nd.array(data.table).tostype("row_sparse"))
        else:
            self.store.init(0, mx.nd.sparse.zeros("row_sparse", shape))
        pull = partial(self.store.row_sparse_pull, 0, out=outs, row_ids=ids)
        call = pull if case.verb == "pull" else partial(self.store.push, 0, values)
        self.variants = {case.verb: partial(_all, [call, mx.nd.waitall])}
        self.variants[case.verb]()
        pull()
        return [out.data.asnumpy() for out in outs]


def _all(steps: list[Callable[[], Any]]) -> None:
    for step in steps:
        step()


def _wait(arrays: list[Any]) -> None:
    for array in arrays:
        array.wait_to_read()


def _operators(update: str, weights: list[Any], values: list[list[Any]]) -> Call:
    """Update without a store, by the fused operator of each tensor."""
    grads = [own[0] for own in values]
    m, v = ([mx.nd.zeros(weight.shape) for weight in weights] for _ in range(2))
    rates = {"lr": cases.LEARNING_RATE, "wd": cases.WEIGHT_DECAY}

    def momentum() -> None:
        for weight, grad, state in zip(weights, grads, m, strict=True):
            mx.nd.sgd_mom_update(weight, grad, state, out=weight, momentum=cases.MOMENTUM, **rates)
        mx.nd.waitall()

    def adam() -> None:
        more = {"beta1": cases.BETA1, "beta2": cases.BETA2, "epsilon": cases.EPSILON, **rates}
        for weight, grad, mean, var in zip(weights, grads, m, v, strict=True):
            mx.nd.adam_update(weight, grad, mean, var, out=weight, **more)
        mx.nd.waitall()

    return momentum if update == "sgd_momentum" else adam
