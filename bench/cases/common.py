"""What cases of several claims are made of: sizes, shapes of networks, memory that is cut into arrays."""

from __future__ import annotations

import math
import mmap
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.cases.base import Shape

Array = npt.NDArray[Any]

KB, MB = 1024, 1024 * 1024
LINE = 16  # float32 in a cache line


def memory(n: int, pages: str) -> Array:
    """Private memory for `n` float32, on huge or on small pages."""
    raw = mmap.mmap(-1, max(4 * n, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    name = "MADV_HUGEPAGE" if pages == "huge" else "MADV_NOHUGEPAGE"
    if hasattr(mmap, name):
        raw.madvise(getattr(mmap, name))
    return np.frombuffer(raw, np.float32, n)


def padded(shapes: tuple[Shape, ...]) -> int:
    """Count the numbers of flat memory."""
    return sum(_lines(shape) for shape in shapes)


def pieces(flat: Array, shapes: tuple[Shape, ...]) -> list[Array]:
    """Cut flat memory into arrays."""
    found, at = [], 0
    for shape in shapes:
        found.append(flat[at : at + math.prod(shape)].reshape(shape))
        at += _lines(shape)
    return found


def _lines(shape: Shape) -> int:
    return -(-math.prod(shape) // LINE) * LINE


def resnet50() -> tuple[Shape, ...]:
    """Shapes of ResNet-50's 161 parameters, 25.6 million numbers."""
    shapes: list[Shape] = [(64, 3, 7, 7), (64,), (64,)]
    width = 64
    for blocks, inner in ((3, 64), (4, 128), (6, 256), (3, 512)):
        for block in range(blocks):
            convolutions = [(inner, width, 1, 1), (inner, inner, 3, 3), (4 * inner, inner, 1, 1)]
            if block == 0:
                convolutions.append((4 * inner, width, 1, 1))
            for convolution in convolutions:
                shapes += [convolution, convolution[:1], convolution[:1]]
            width = 4 * inner
    return (*shapes, (1000, 2048), (1000,))


def bert_base() -> tuple[Shape, ...]:
    """Shapes of BERT-base's 199 parameters, 109.5 million numbers."""
    h, inner = 768, 3072
    norm: list[Shape] = [(h,), (h,)]
    shapes: list[Shape] = [(30522, h), (512, h), (2, h), *norm]
    for _ in range(12):
        shapes += [(h, h), (h,)] * 4 + norm
        shapes += [(inner, h), (inner,), (h, inner), (h,), *norm]
    return (*shapes, (h, h), (h,))
