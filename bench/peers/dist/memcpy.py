"""The limit of payloads in shared memory: each worker copies its array to a place to share, and back."""

from __future__ import annotations

import mmap
from functools import partial

import numpy as np

from bench.cases.common import KB, MB
from bench.cases.dist import DistCase
from bench.peers.base import Array
from bench.peers.dist.base import PAIR, DistPeer

BLOCKS = {"whole": 0, "by 256 KB": 256 * KB, "by 1 MB": MB}


class Memcpy(DistPeer):
    """Two copies, and no sum; by blocks the second one finds its block in a cache."""

    def prepare(self, case: DistCase) -> list[Array]:
        data = self.dense(case)
        middle = np.frombuffer(mmap.mmap(-1, data.flat.nbytes), np.float32)
        middle[:] = 1  # touched
        for label, block in BLOCKS.items():
            if block < data.flat.nbytes:
                cut = (block or data.flat.nbytes) // 4
                triples = [
                    tuple(flat[at : at + cut] for flat in (data.flat, middle, data.flat_outs))
                    for at in range(0, data.flat.size, cut)
                ]
                self.variants[label] = partial(_copy, triples)
        self.variants[PAIR] = self.variants["whole"]
        return []


def _copy(triples: list[tuple[Array, ...]]) -> None:
    for source, middle, target in triples:
        np.copyto(middle, source)
        np.copyto(target, middle)
