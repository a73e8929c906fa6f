"""NumPy: the code of a careful user, with all buffers allocated in advance."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from bench.cases import local as cases
from bench.cases.local import LocalCase
from bench.peers.base import Array, Peer, Unsupported


class Numpy(Peer):
    """Whole-array operations with ``out=``."""

    def prepare(self, case: LocalCase) -> list[Array]:
        if case.verb in cases.STREAMS:
            raise Unsupported("measured in C")
        return self._prepare_sparse(case) if case.rows else self._prepare_dense(case)

    def _prepare_dense(self, case: LocalCase) -> list[Array]:
        data = cases.inputs(case)
        stored = [weight.copy() for weight in data.weights]
        push = _push(case, stored, data.values)

        def pull() -> None:
            for weight, outs in zip(stored, data.outs, strict=True):
                for out in outs:
                    np.copyto(out, weight)

        def both() -> None:
            push()
            pull()

        call = {"push": push, "pull": pull}.get(case.verb, both)
        self.variants = {"whole arrays": call}
        call()
        return stored if case.verb == "push" else [out for outs in data.outs for out in outs]

    def _prepare_sparse(self, case: LocalCase) -> list[Array]:
        data = cases.sparse_inputs(case)
        state: dict[str, Any] = {}
        outs = [np.empty_like(rows) for rows in data.rows]

        def merge() -> None:
            ids = np.unique(np.concatenate(data.ids))
            merged = np.zeros((len(ids), *data.table.shape[1:]), np.float32)
            for own, rows in zip(data.ids, data.rows, strict=True):
                merged[np.searchsorted(ids, own)] += rows
            state.update(ids=ids, merged=merged)

        def update() -> None:
            merge()
            state["merged"] *= np.float32(cases.LEARNING_RATE)
            data.table[state["ids"]] -= state["merged"]

        def pull() -> None:
            for ids, out in zip(data.ids, outs, strict=True):
                np.take(data.table, np.unique(ids), axis=0, out=out, mode="clip")

        call = pull if case.verb == "pull" else update if case.update else merge
        self.variants = {"whole arrays": call}
        call()
        if call is merge:
            return [state["merged"][np.searchsorted(state["ids"], ids)] for ids in data.ids]
        return [data.table[ids] for ids in data.ids] if call is update else outs


def _push(case: LocalCase, stored: list[Array], values: list[list[Array]]) -> Callable[[], None]:
    if not case.update:

        def push() -> None:
            for weight, own in zip(stored, values, strict=True):
                _sum(own, weight)

        return push
    rule = _momentum if case.update == "sgd_momentum" else _Adam()
    buffers = [[np.zeros_like(weight) for _ in range(4)] for weight in stored]

    def push_and_update() -> None:
        if isinstance(rule, _Adam):
            rule.t += 1
        for weight, own, (grad, spare, m, v) in zip(stored, values, buffers, strict=True):
            _sum(own, grad)
            rule(weight, grad, spare, m, v)

    return push_and_update


def _sum(values: list[Array], into: Array) -> None:
    if len(values) == 1:
        np.copyto(into, values[0])
        return
    np.add(values[0], values[1], out=into)
    for value in values[2:]:
        np.add(into, value, out=into)


def _decayed(weight: Array, grad: Array, spare: Array) -> None:
    np.multiply(weight, np.float32(cases.WEIGHT_DECAY), out=spare)
    np.add(grad, spare, out=grad)


def _momentum(weight: Array, grad: Array, spare: Array, m: Array, _: Array) -> None:
    _decayed(weight, grad, spare)
    grad *= np.float32(cases.LEARNING_RATE)
    m *= np.float32(cases.MOMENTUM)
    m -= grad
    weight += m


class _Adam:
    t = 0

    def __call__(self, weight: Array, grad: Array, spare: Array, m: Array, v: Array) -> None:
        _decayed(weight, grad, spare)
        np.multiply(grad, np.float32(1 - cases.BETA1), out=spare)
        m *= np.float32(cases.BETA1)
        m += spare
        np.multiply(grad, grad, out=grad)
        grad *= np.float32(1 - cases.BETA2)
        v *= np.float32(cases.BETA2)
        v += grad
        np.sqrt(v, out=spare)
        spare += np.float32(cases.EPSILON)
        np.divide(m, spare, out=spare)
        spare *= np.float32(corrected_rate(self.t))
        weight -= spare


def corrected_rate(t: int) -> float:
    """Return Adam's learning rate with the bias corrections of step `t`."""
    return cases.LEARNING_RATE * math.sqrt(1 - cases.BETA2**t) / (1 - cases.BETA1**t)
