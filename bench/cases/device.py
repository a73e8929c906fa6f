"""Cases of the `device` store on a GPU, the bytes that each must move, and its goals."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from bench.cases.common import Case, resnet50

#: Elements of the large cases: 256 MiB of float32.
LARGE = 64 << 20
RESNET = tuple(math.prod(shape) for shape in resnet50())


@dataclass(frozen=True)
class DeviceCase(Case):
    """One line of the tables."""

    name: str  # unique; `--only` matches it
    #: `sum`; `update` (sum, then SGD with momentum); `compress` (2-bit quantise, decode and sum in one call);
    #: `quantise` and `dequantise` (the kernels by themselves)
    op: str
    sizes: tuple[int, ...]  # elements of each key
    k: int  # values of each key
    dtype: str = "float32"
    bytes_each: float = 0.0  # bytes that the operation must read and write for an element
    share: float = 0.0  # goal: at least this share of the rate at which the GPU copies memory; 0 for none
    #: Peer to the ratio `time of peer / time of ours` that must hold
    goals: dict[str, float] = field(default_factory=dict)
    most_us: float = 0.0  # goal: the most microseconds of the host for a call; 0 for none

    @property
    def elements(self) -> int:
        """Return the number of elements of all keys."""
        return sum(self.sizes)

    @property
    def nbytes(self) -> float:
        """Return the number of bytes that the case must move."""
        return self.bytes_each * self.elements


def all_cases(large: int = LARGE, resnet: tuple[int, ...] = RESNET) -> Iterator[DeviceCase]:
    """Return the cases, with other sizes for a trial."""
    one = (large,)
    for k in (2, 4, 8):
        yield DeviceCase(f"sum k={k} 256 MiB", "sum", one, k, bytes_each=4 * (k + 1), share=0.9)
    yield DeviceCase("sum k=4 bfloat16 128 MiB", "sum", one, 4, "bfloat16", bytes_each=10, share=0.88)
    yield DeviceCase("2-bit quantise 256 MiB", "quantise", one, 1, bytes_each=12.25, share=0.85)
    for k, share in ((4, 0.8), (8, 0.6)):
        name = f"2-bit decode and sum k={k} 256 MiB"
        yield DeviceCase(name, "dequantise", one, k, bytes_each=4 + 0.25 * k, share=share)
    yield DeviceCase("2-bit compressed push k=4 256 MiB", "compress", one, 4, bytes_each=52, share=0.85)
    yield DeviceCase("sum k=4 + SGD-momentum 256 MiB", "update", one, 4, bytes_each=32, share=0.85)
    for k in (2, 4, 8):
        goals = {"torch foreach": 1.9} if k == 4 else {}
        floor = 4 * (k + 1)
        most = 10.0 if k == 4 else 0.0
        yield DeviceCase(f"ResNet-50 sum k={k}", "sum", resnet, k, "float32", floor, 1 / 1.15, goals, most)
    yield DeviceCase("ResNet-50 sum k=4 + SGD-momentum", "update", resnet, 4, bytes_each=32)
    yield DeviceCase("one key of 4 KB, k=2", "sum", (1024,), 2, bytes_each=12, most_us=8.0)
