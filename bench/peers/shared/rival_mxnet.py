"""MXNet 1.9.1: `dist_sync` with one server over loopback. The mechanism differs, the use is the same."""

from __future__ import annotations

from functools import partial
from typing import Any

from bench.cases import shared as shared_cases
from bench.cases.shared import SharedCase
from bench.peers.base import Array, Call
from bench.peers.group.base import GroupPeer
from bench.peers.local.rival_mxnet import mx, optimizer


class DistSync(GroupPeer):
    """Push, then pull, of all keys; and key by key. Its arrays are MXNet's."""

    store: Any = None

    def prepare(self, case: SharedCase) -> list[Array]:
        data = shared_cases.inputs(case, self.place.rank)
        self.store = mx.kv.create("dist_sync")
        values = [mx.nd.array(value) for value in data.values]
        outs = [mx.nd.array(weight) for weight in data.weights] if case.update else values
        self.store.init(case.keys, [mx.nd.array(weight) for weight in data.weights])
        if case.update:
            self.store.set_optimizer(optimizer(case.update))
        self.buffers, self.grows = values, not case.update
        self.variants = self._ways(case.keys, values, outs)
        next(iter(self.variants.values()))()
        self.calls = 1
        return [out.asnumpy() for out in outs]

    def _ways(self, keys: list[int], values: list[Any], outs: list[Any]) -> dict[str, Call]:
        ways: dict[str, Call] = {"one call": partial(self._step, keys, values, outs)}
        if len(keys) > 1:
            ways["a call for each key"] = partial(self._each, keys, values, outs)
        return ways

    def _step(self, keys: list[int], values: list[Any], outs: list[Any]) -> None:
        self.store.push(keys, values)
        self.store.pull(keys, out=outs)
        mx.nd.waitall()

    def _each(self, keys: list[int], values: list[Any], outs: list[Any]) -> None:
        for key, value, out in zip(keys, values, outs, strict=True):
            self.store.push(key, value, priority=-key)
            self.store.pull(key, out=out, priority=-key)
        mx.nd.waitall()

    def scale(self, factor: float) -> None:
        for buffer in self.buffers:
            buffer *= factor
        mx.nd.waitall()
