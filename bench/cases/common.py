"""Code of the cases of several claims: keys, bytes, JSON for a worker, sizes, shapes of networks, memory."""

from __future__ import annotations

import math
import mmap
from dataclasses import asdict
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

Shape = tuple[int, ...]
Own = TypeVar("Own", bound="Case")


class Case:
    """One line of the tables; `name` is unique, and ``--only`` matches it."""

    name: str

    #: Goals of the cases of some claims.
    goals: Any = ()
    most_us: float = 0.0
    tail: float = 0.0
    share: float = 0.0

    def to_json(self) -> dict[str, Any]:
        return asdict(self)  # type: ignore[call-overload, no-any-return]

    @classmethod
    def from_json(cls: type[Own], fields: dict[str, Any]) -> Own:
        return cls(**{name: _tuples(value) for name, value in fields.items()})


class KeyedCase(Case):
    """A case of float32 arrays, one for each key."""

    shapes: tuple[Shape, ...]

    @property
    def nbytes(self) -> int:
        """Payload of one value over all keys."""
        return 4 * sum(math.prod(shape) for shape in self.shapes)

    @property
    def keys(self) -> list[int]:
        return list(range(len(self.shapes)))


def _tuples(value: Any) -> Any:
    return tuple(map(_tuples, value)) if isinstance(value, list) else value


Array = npt.NDArray[Any]

KB, MB = 1024, 1024 * 1024
LINE = 16  # float32 in a cache line


def memory(n: int, pages: str) -> Array:
    """Allocate private memory for `n` float32, on huge or on small pages."""
    raw = mmap.mmap(-1, max(4 * n, 1), mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    name = "MADV_HUGEPAGE" if pages == "huge" else "MADV_NOHUGEPAGE"
    if hasattr(mmap, name):
        raw.madvise(getattr(mmap, name))
    return np.frombuffer(raw, np.float32, n)


def padded(shapes: tuple[Shape, ...]) -> int:
    """Return the length of the flat memory, in numbers."""
    return sum(_lines(shape) for shape in shapes)


def pieces(flat: Array, shapes: tuple[Shape, ...]) -> list[Array]:
    """Divide flat memory into arrays."""
    found, at = [], 0
    for shape in shapes:
        found.append(flat[at : at + math.prod(shape)].reshape(shape))
        at += _lines(shape)
    return found


def _lines(shape: Shape) -> int:
    return -(-math.prod(shape) // LINE) * LINE


def beginning(call: int, size: int, room: int) -> int:
    """Return the offset of a call's gradients in a pool of `room` elements, aligned to a cache line.

    Each call has another offset, so the gradients of an element are nearly independent, and residuals vary
    as in training. A few gradients in rotation would move each residual in one direction without end.
    """
    places = (room - size) // LINE + 1
    return call * 40_503 % places * LINE


def triangle(rng: np.random.Generator, size: int, threshold: float) -> Array:
    """Draw numbers below a threshold, distributed like residuals after a long training.

    A random walk of small steps that restarts at zero at either threshold has a triangular distribution.
    """
    drawn = rng.random(size, np.float32)
    drawn += rng.random(size, np.float32)
    drawn -= np.float32(1)
    drawn *= np.float32(0.999 * threshold)
    return drawn


def resnet50() -> tuple[Shape, ...]:
    """Return the shapes of ResNet-50's 161 parameters, 25.6 million numbers."""
    # Not at the top: workers of rivals also import this file, and their environments have no kvstore.
    from kvstore.observe.bench.key_lists import resnet50 as named

    return tuple(named().values())


def bert_base() -> tuple[Shape, ...]:
    """Return the shapes of BERT-base's 199 parameters, 109.5 million numbers."""
    h, inner = 768, 3072
    norm: list[Shape] = [(h,), (h,)]
    shapes: list[Shape] = [(30522, h), (512, h), (2, h), *norm]
    for _ in range(12):
        shapes += [(h, h), (h,)] * 4 + norm
        shapes += [(inner, h), (inner,), (h, inner), (h,), *norm]
    return (*shapes, (h, h), (h,))
