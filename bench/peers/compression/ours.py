"""kvstore itself: its codecs, and the public verbs of a `device` store."""

from __future__ import annotations

import numpy as np

import kvstore as kv
from bench.cases.compression import CHECKED, VALUES, CompressionCase, Inputs
from bench.peers.base import Array
from bench.peers.compression.base import Compressor, Turns, Way, copy_to_all
from kvstore import compression
from kvstore.kernels import cpu


class Ours(Compressor):
    """The codec for arrays, and a store for pairs of verbs."""

    def ways(self, case: CompressionCase) -> dict[str, Way]:
        return {"codec": ByCodec(case)}

    def release(self) -> None:
        super().release()
        if hasattr(self, "store"):
            self.store.close()

    def _pair(self, case: CompressionCase, data: Inputs, ways: dict[str, Way]) -> list[Array]:
        self.store = store = kv.create("device")
        store.init(0, np.zeros(case.size, np.float32))
        store.set_gradient_compression({"type": case.codec, "threshold": case.threshold})
        outs = [np.full(case.size, -1, np.float32) for _ in range(VALUES)]
        turns, results = Turns(data), []
        store.push(0, data.first)
        for number in range(CHECKED):
            store.push(0, data.gradients(number))
            store.pull(0, outs)
            results.append(outs[-1].copy())

        def call() -> None:
            store.push(0, turns.gradients())
            store.pull(0, outs)

        self.variants = {"store": call}
        return results


class ByCodec:
    """The codec; packed gradients are added by the kernel of the stores and servers."""

    def __init__(self, case: CompressionCase) -> None:
        self._codec = compression.create({"type": case.codec, "threshold": case.threshold})
        compiled = self._codec.compiled
        if compiled is None:
            raise ValueError(f"codec {case.codec!r} is not compiled")
        self._code, self._threshold = compiled

    def encode(self, gradient: Array, residual: Array, packed: Array) -> None:
        self._codec.encode(gradient, residual, packed)

    def add(self, packed: Array, target: Array) -> None:
        cpu.decode(self._code, self._threshold, [packed], target, accumulate=True)

    def push(self, gradients: list[Array], residuals: list[Array], stored: Array) -> None:
        sources = cpu.Coded(self._code, self._threshold, stored.size, gradients, residuals)
        cpu.reduce([(sources, stored, [])])

    def pull(self, stored: Array, outs: list[Array]) -> None:
        copy_to_all(stored, outs)
