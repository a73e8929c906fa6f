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
    # Not at the top: this file is also read by the workers of rivals, whose environments have no kvstore.
    from kvstore.observe.bench.key_lists import resnet50 as named

    return tuple(named().values())


def bert_base() -> tuple[Shape, ...]:
    """Shapes of BERT-base's 199 parameters, 109.5 million numbers."""
    h, inner = 768, 3072
    norm: list[Shape] = [(h,), (h,)]
    shapes: list[Shape] = [(30522, h), (512, h), (2, h), *norm]
    for _ in range(12):
        shapes += [(h, h), (h,)] * 4 + norm
        shapes += [(inner, h), (inner,), (h, inner), (h,), *norm]
    return (*shapes, (h, h), (h,))
