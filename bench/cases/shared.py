"""Cases of the store between processes: their inputs, their peers, and the goal of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np

from bench.cases.common import KB, MB, Array, KeyedCase, Shape, bert_base, memory, padded, pieces, resnet50

LIMITS = ("limit", "bare", "memcpy")
RIVALS = ("openmpi", "mpich", "deepspeed", "gloo", "mxnet")
USERS = ("queue", "manager", "redis", "ray")

Goals = dict[str, float]


@dataclass(frozen=True)
class SharedCase(KeyedCase):
    """One line of the tables."""

    name: str  # unique; `--only` matches it
    verb: str  # `allreduce` (every array receives the sum) or `update` (push, optimizer, view of the weights)
    shapes: tuple[Shape, ...]  # one for each key
    processes: int = 2  # workers; each pushes one value to each key
    #: Where our arrays live: `store` (from `store.empty`) or `private` (ordinary memory). Rivals have
    #: ordinary memory always.
    home: str = "store"
    pages: str = "huge"  # ordinary memory is on `huge` pages where the system has them, or on `small` ones
    update: str = ""  # `""`, `sgd_momentum` or `adam`
    #: `spin` or `block`: a chain of calls without barriers, and how our store waits. Else `""`.
    wait: str = ""
    peers: tuple[str, ...] = ()  # peers without kvstore
    #: Peer, or several with `|` of which the fastest counts, to the ratio `time of peer / time of ours`
    goals: Goals = field(default_factory=dict)
    tail: float = 0.0  # the greatest ratio of kvstore's 99th percentile to its median; 0 for no such goal

    @property
    def links(self) -> int:
        """Return the calls of a chain between two rescalings; each multiplies the values by `processes`."""
        return int(100 / math.log2(self.processes)) if self.wait else 1


# ------------------------------------------------------------------------------------------------ inputs


@dataclass
class Inputs:
    """One worker's arrays by key: views of flat memory, each aligned to a cache line."""

    weights: list[Array]
    values: list[Array]
    flat: Array
    flat_weights: Array


def inputs(case: SharedCase, rank: int) -> Inputs:
    """Make a worker's arrays and touch each page; the workers' values differ by a factor.

    Weights are equal on all workers; where sums replace them, they are zeros.
    """
    flat = memory(padded(case.shapes), case.pages)
    np.random.default_rng(7).random(dtype=np.float32, out=flat)
    flat -= np.float32(0.5)
    weights = memory(flat.size, case.pages)
    if case.verb == "update":
        np.multiply(flat, np.float32(0.75), out=weights)
    flat *= np.float32(0.01 * (1 + rank))
    return Inputs(pieces(weights, case.shapes), pieces(flat, case.shapes), flat, weights)


# ------------------------------------------------------------------------------------------------- cases

SIZES = {"4 KB": 4 * KB, "256 KB": 256 * KB, "4 MB": 4 * MB, "64 MB": 64 * MB, "256 MB": 256 * MB}
MPI = "openmpi|mpich"
CLASS = f"{MPI}|deepspeed"

_STORE: dict[tuple[int, str], Goals] = {
    (2, "4 MB"): {"openmpi": 4, "gloo": 40},
    (2, "64 MB"): {CLASS: 4, "gloo": 8, "mxnet": 40, "limit": 0.85},
    (2, "ResNet-50"): {MPI: 3.5, "gloo": 9, "mxnet": 30},
    (4, "64 MB"): {"|".join(RIVALS): 4},
}
_PRIVATE: dict[tuple[int, str], Goals] = {
    (2, "4 MB"): dict.fromkeys(USERS, 10.0),
    (2, "64 MB"): {MPI: 3, "deepspeed": 2.2, "gloo": 5, "cma": 0.5, **dict.fromkeys(USERS, 10.0)},
    (2, "ResNet-50"): {MPI: 1.7, "cma": 0.5},
}


def all_cases(workers: tuple[int, ...] = (2, 4)) -> list[SharedCase]:
    """Yield all cases, in the order of the tables."""
    return [case for n in workers for part in (_latency, _sums, _updates) for case in part(n)]


def _latency(n: int) -> Iterator[SharedCase]:
    shapes = ((KB,),)
    for wait, more in (("spin", ("limit", "line")), ("block", ("futex",))):
        goals: Goals = {"futex": 1 / 1.3} if (n, wait) == (2, "block") else {}
        if wait == "spin":
            goals = {"openmpi": 1, "gloo": 150} if n == 2 else {"openmpi": 2}
        tail = 20.0 if (n, wait) == (4, "spin") else 0.0
        name = f"{n} processes, round trip 4 KB, {wait}"
        peers = (*more, *RIVALS)
        yield SharedCase(name, "allreduce", shapes, n, wait=wait, peers=peers, goals=goals, tail=tail)


def _sums(n: int) -> Iterator[SharedCase]:
    for home, pages, label in (
        ("store", "huge", "all-reduce in the store"),
        ("private", "huge", "all-reduce of private arrays"),
        ("private", "small", "all-reduce of private arrays on 4 KB pages"),
    ):
        goals = _STORE if home == "store" else _PRIVATE if pages == "huge" else {}
        for size, shapes in _payloads(n):
            peers = (*(LIMITS if home == "store" else ("cma",)), *RIVALS)
            if (n, home, pages) == (2, "private", "huge") and size in ("4 MB", "64 MB"):
                peers += USERS
            if len(shapes) > 1:
                peers = tuple(peer for peer in peers if peer != "memcpy")
            name = f"{n} processes, {label}, {size}"
            here = goals.get((n, size), {})
            yield SharedCase(name, "allreduce", shapes, n, home, pages, peers=peers, goals=here)


def _payloads(n: int) -> Iterator[tuple[str, tuple[Shape, ...]]]:
    """Return the sizes; BERT in four processes of each peer needs more memory than many machines have."""
    for size, nbytes in SIZES.items():
        yield size, ((nbytes // 4,),)
    yield "ResNet-50", resnet50()
    if n == 2:
        yield "BERT-base", bert_base()


def _updates(n: int) -> Iterator[SharedCase]:
    peers = ("limit", "openmpi", "mpich", "gloo", "mxnet")
    for update, label in (("sgd_momentum", "SGD-momentum"), ("adam", "Adam")):
        for size, shapes in (("4 MB", ((MB,),)), ("64 MB", ((16 * MB,),)), ("ResNet-50", resnet50())):
            goals: Goals = {"openmpi": 3} if (n, update, size) == (2, "sgd_momentum", "ResNet-50") else {}
            name = f"{n} processes, push + {label} + pull as view, {size}"
            yield SharedCase(name, "update", shapes, n, update=update, peers=peers, goals=goals)
