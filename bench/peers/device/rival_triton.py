"""Triton: one kernel that loads all values of a key and adds them."""

from __future__ import annotations

import importlib
from typing import Any

from bench.peers.base import Unsupported
from bench.peers.device.base import Data, Peer, Way

_BLOCKS = (1024, 4096)


class Triton(Peer):
    """Blocks of two sizes."""

    name = "triton"

    def ways(self, data: Data) -> dict[str, Way]:
        case = data.case
        if data.device != "cuda" or case.op != "sum" or len(case.sizes) > 1 or case.k not in (2, 4, 8):
            raise Unsupported("sums of one key of 2, 4 or 8 values on a GPU only")
        try:
            triton: Any = importlib.import_module("triton")
            kernels: Any = importlib.import_module(".triton_kernels", __package__)
        except ImportError as error:
            raise Unsupported(str(error)) from error
        (size,) = case.sizes
        kernel = getattr(kernels, f"sum{case.k}")

        def way(block: int) -> Way:
            grid = (triton.cdiv(size, block),)
            return lambda i: kernel[grid](data.outs[i][0], *data.values[i][0], size, BLOCK=block, num_warps=8)

        return {f"Triton, blocks of {block}": way(block) for block in _BLOCKS}
