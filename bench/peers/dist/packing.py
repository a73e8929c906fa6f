"""The limit of a compressed push and pull: each worker packs, sends nothing, and pulls."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

import kvstore as kv
from bench.cases import dist as dist_cases
from bench.cases.dist import DistCase
from bench.peers.base import Array, all_of
from bench.peers.dist.base import PAIR
from bench.peers.dist.ours import Ours
from kvstore import compression
from kvstore.kernels import cpu


class PackAndPull(Ours):
    """Pulls are not compressed, as in MXNet: a codec saves at most the time of a push beyond packing."""

    def _prepare_dense(self, case: DistCase, store: kv.KVStore, keys: list[int]) -> list[Array]:
        data = self.dense(case)
        store.init(keys, data.weights())
        codec = compression.create({"type": self.entry.codec, "threshold": dist_cases.THRESHOLD})
        assert codec.compiled is not None
        code, _ = codec.compiled
        residuals = [np.zeros(value.size, np.float32) for value in data.values]
        words = [np.empty(cpu.encoded_bytes(code, value.size), np.uint8) for value in data.values]
        many: Any = keys if len(keys) > 1 else keys[0]
        pull = partial(store.pull, many, out=data.outs if len(keys) > 1 else data.outs[0])

        def pack() -> None:
            for value, residual, packed in zip(data.values, residuals, words, strict=True):
                codec.encode(value.reshape(-1), residual, packed)

        self.variants = {PAIR: all_of([pack, pull])}
        data.write(data.seeds())
        store.push(many, data.values if len(keys) > 1 else data.values[0])  # values as a push leaves them
        pack()
        self.first()
        return []
