"""Cases of gradient compression, their inputs, and the goal of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from bench.cases.common import LINE, MB, Array, Case, beginning, triangle

VALUES = 2  # of a push: one for each core of a small machine
CHECKED = 2  # further calls after the first, of which peers are compared, too

_SIZES = {"4 MB": 4 * MB, "64 MB": 64 * MB}
_BITS = {"2bit": 2, "1bit": 1}


@dataclass(frozen=True)
class CompressionCase(Case):
    """One line of the tables."""

    name: str  # unique; `--only` matches it
    #: `quantise` (one gradient and its residual to words), `dequantise` (words added to an array), or `pair`
    #: (push of `VALUES` values, each compressed, then pull into as many outs)
    verb: str
    codec: str  # `2bit` or `1bit`
    size: int  # elements of a gradient
    #: `normal`: N(0, 0.01), of which a few in ten thousand are sent at a time; `uniform`: U(-1, 1), of which
    #: the sent elements have no pattern
    data: str
    threshold: float = 0.5
    #: Peer to the ratio `time of peer / time of ours` that must hold
    goals: dict[str, float] = field(default_factory=dict)

    @property
    def bits(self) -> int:
        """Return the bits of a packed element."""
        return _BITS[self.codec]

    @property
    def packed_bytes(self) -> int:
        """Return the bytes of a packed gradient: whole words of 32 bits."""
        return 4 * -(-self.size * self.bits // 32)


# ------------------------------------------------------------------------------------------------ inputs


@dataclass
class Inputs:
    """The numbers of a case, equal for all peers."""

    size: int
    #: The first push of each value. All elements are below the threshold, so 2bit keeps them as residuals:
    #: these are then as after a long training.
    first: list[Array]
    pools: list[Array]  # the pool of the later gradients of each value

    def gradients(self, call: int) -> list[Array]:
        """Return the gradient of each value, a view of the pool."""
        start = beginning(call, self.size, len(self.pools[0]))
        return [pool[start : start + self.size] for pool in self.pools]


def inputs(case: CompressionCase) -> Inputs:
    """Make the numbers of a case, and touch each page."""
    room = case.size + max(case.size // 2, 64 * LINE)
    first, pools = [], []
    for value in range(VALUES):
        rng = np.random.default_rng([11, value])
        first.append(triangle(rng, case.size, case.threshold))
        pools.append(_drawn(rng, case.data, room))
    return Inputs(case.size, first, pools)


def _drawn(rng: np.random.Generator, data: str, count: int) -> Array:
    if data == "normal":
        drawn: Array = rng.standard_normal(count, np.float32)
        drawn *= np.float32(0.01)
        return drawn
    drawn = rng.random(count, np.float32)
    drawn *= np.float32(2)
    drawn -= np.float32(1)
    return drawn


# ------------------------------------------------------------------------------------------------- cases

Goals = dict[str, float]
_NAMES = {"normal": "N(0, 0.01)", "uniform": "U(-1, 1)"}
_QUANTISE: dict[str, Goals] = {
    "normal": {"mxnet": 2.8, "limit": 0.85},
    "uniform": {"mxnet": 15.0, "limit": 0.85},
}
_DEQUANTISE: dict[str, Goals] = {"normal": {"mxnet": 7.0}, "uniform": {"mxnet": 25.0}}


def all_cases() -> list[CompressionCase]:
    """Return all cases, in the order of the tables."""
    return [
        *_kernels("quantise", "quantise", _QUANTISE),
        *_kernels("dequantise + add", "dequantise", _DEQUANTISE),
        *_stores(),
    ]


def _kernels(name: str, verb: str, goals: dict[str, Goals]) -> Iterator[CompressionCase]:
    """Return the goals: only the 2bit codec at 64 MB has some."""
    for codec in _BITS:
        for size in _SIZES:
            for data in _NAMES:
                has_goal = codec == "2bit" and size == "64 MB"
                yield _case(name, verb, codec, size, data, goals[data] if has_goal else {})


def _stores() -> Iterator[CompressionCase]:
    for size in _SIZES:
        for data in _NAMES:
            yield _case(f"push, then pull k={VALUES}", "pair", "2bit", size, data, {})


def _case(name: str, verb: str, codec: str, size: str, data: str, goals: Goals) -> CompressionCase:
    label = f"{codec} {name} {size} {_NAMES[data]}"
    return CompressionCase(label, verb, codec, _SIZES[size] // 4, data, goals=goals)
