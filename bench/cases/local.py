"""Cases of the store in one process, their inputs, and the goal of each."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from bench.cases.common import KB, MB, Array, KeyedCase, Shape, resnet50

LEARNING_RATE, MOMENTUM, WEIGHT_DECAY = 1e-4, 0.9, 1e-4
BETA1, BETA2, EPSILON = 0.9, 0.999, 1e-8


#: Verbs of the compiled limit alone: bare passes over memory.
STREAMS = ("read", "write", "copy", "scale")


@dataclass(frozen=True)
class LocalCase(KeyedCase):
    """One line of the tables."""

    name: str  # unique; `--only` matches it
    verb: str  # `pushpull` (one call), `pair` (push, then pull), `push`, `pull`, or one of `STREAMS`
    shapes: tuple[Shape, ...]  # one for each key
    k: int = 2  # values pushed to, and outs pulled from, each key
    update: str = ""  # `""`, `sgd`, `sgd_momentum` or `adam` on the store
    in_place: bool = False  # the values themselves receive the result
    rows: int = 0  # row-sparse if positive: stored rows of each value
    #: Peer to the ratio `time of peer / time of ours` that must hold
    goals: dict[str, float] = field(default_factory=dict)
    most_us: float = 0.0  # the most microseconds that kvstore may need; 0 for no such goal


# ------------------------------------------------------------------------------------------------ inputs


@dataclass
class Inputs:
    """Arrays of a case: by key, then by value. Outs are the values themselves where the case is in place."""

    weights: list[Array]
    values: list[list[Array]]
    outs: list[list[Array]]


def inputs(case: LocalCase) -> Inputs:
    """Make the arrays of a dense case: equal numbers for all peers, each page touched."""
    rng = np.random.default_rng(7)
    base = rng.random(case.nbytes // 4, np.float32) - np.float32(0.5)
    factors = [_factor(case, j) for j in range(case.k)]
    weights, values, outs = [], [], []
    for shape, part in zip(case.shapes, _pieces(base, case.shapes), strict=True):
        weights.append(_scaled(part, shape, 0.75))
        own = [_scaled(part, shape, factor) for factor in factors]
        values.append(own)
        outs.append(own if case.in_place else [np.full(shape, -1, np.float32) for _ in own])
    return Inputs(weights, values, outs)


def _factor(case: LocalCase, j: int) -> float:
    """Return a factor for values that are summed in place: they grow to infinity, which costs no time.

    They must not cancel: some machines write zeros three times as fast as other numbers.
    """
    return (1 + j) * (1e-30 if case.in_place and not case.update else 0.01)


def _scaled(part: Array, shape: Shape, factor: float) -> Array:
    array = np.empty(shape, np.float32)
    np.multiply(part.reshape(shape), np.float32(factor), out=array)
    return array


def _pieces(base: Array, shapes: tuple[Shape, ...]) -> Iterator[Array]:
    at = 0
    for shape in shapes:
        n = math.prod(shape)
        yield base[at : at + n]
        at += n


@dataclass
class SparseInputs:
    """A table, and for each value its row ids (sorted, unique) and rows."""

    table: Array
    ids: list[npt.NDArray[np.int64]]
    rows: list[Array]


def sparse_inputs(case: LocalCase) -> SparseInputs:
    """Make the arrays of a row-sparse case; the values' rows overlap as random batches do."""
    rng = np.random.default_rng(7)
    (shape,) = case.shapes
    table = rng.random(shape, np.float32)
    ids = [np.sort(rng.choice(shape[0], case.rows, replace=False)).astype(np.int64) for _ in range(case.k)]
    return SparseInputs(table, ids, [rng.random((case.rows, *shape[1:]), np.float32) for _ in ids])


# ------------------------------------------------------------------------------------------------- cases

Goals = dict[str, float]
_SIZES = {"4 KB": 4 * KB, "256 KB": 256 * KB, "4 MB": 4 * MB, "64 MB": 64 * MB}
_BIG: Goals = {"mxnet": 3.2, "numpy": 1.5, "limit": 0.8}
_ONE_CALL: dict[str, Goals] = {"4 KB": {"mxnet": 12}, "4 MB": {"mxnet": 8}, "64 MB": _BIG}
_OPTIMIZERS = {"sgd_momentum": "SGD-momentum", "adam": "Adam"}


def all_cases() -> list[LocalCase]:
    """Yield all cases, in the order of the tables."""
    return [*_plain(), *_apart(), *_updates(), *_resnet(), *_sparse()]


def streams() -> list[LocalCase]:
    """Yield bare passes over 64 MB arrays: the bandwidth of the memory."""
    shape = ((64 * MB // 4,),)
    return [LocalCase(f"stream {verb} 64 MB", verb, shape, k=1) for verb in STREAMS]


def _dense(name: str, verb: str, size: str, k: int, **more: Any) -> LocalCase:
    return LocalCase(f"{name} k={k} {size}", verb, ((_SIZES[size] // 4,),), k, **more)


def _plain() -> Iterator[LocalCase]:
    for size in _SIZES:
        for k in (2, 4, 8):
            goals = _ONE_CALL.get(size, {}) if k < 8 else {}
            most = 8.0 if size == "4 KB" and k < 8 else 0.0
            yield _dense("pushpull", "pushpull", size, k, goals=goals, most_us=most)
    for size in ("4 KB", "4 MB", "64 MB"):
        most = 8.0 if size == "4 KB" else 0.0
        for k in (2, 4):
            goals = _ONE_CALL.get(size, {})
            yield _dense("pushpull in place", "pushpull", size, k, goals=goals, most_us=most, in_place=True)


def _apart() -> Iterator[LocalCase]:
    for size in ("4 KB", "4 MB", "64 MB"):
        for k in (2, 4):
            goals = {"mxnet": 2.2} if size == "64 MB" else {}
            yield _dense("push, then pull", "pair", size, k, goals=goals)
            yield _dense("push alone", "push", size, k)
            yield _dense("pull alone", "pull", size, k)


def _updates() -> Iterator[LocalCase]:
    for update, label in _OPTIMIZERS.items():
        for size in ("4 KB", "4 MB", "64 MB"):
            for k in (2, 4):
                yield _dense(f"pushpull {label}", "pushpull", size, k, update=update)
        yield _dense(f"pushpull {label}", "pushpull", "64 MB", 8, update=update)


def _resnet() -> Iterator[LocalCase]:
    shapes = resnet50()

    def case(name: str, verb: str, k: int, **more: Any) -> LocalCase:
        return LocalCase(f"ResNet-50 {name} k={k}", verb, shapes, k, **more)

    for k in (2, 4, 8):
        yield case("pushpull", "pushpull", k, goals=_BIG if k < 8 else {})
    yield case("push, then pull", "pair", 2)
    for k in (2, 4):
        yield case("pushpull in place", "pushpull", k, goals=_BIG, in_place=True)
    for k, least in ((2, 5.0), (4, 3.5)):
        yield case("pushpull SGD-momentum", "pushpull", k, update="sgd_momentum", goals={"mxnet": least})
    yield case("pushpull Adam", "pushpull", 2, update="adam")
    for update, label in _OPTIMIZERS.items():
        goals = {"torch": 0.95, "mxnet": 4.0}
        yield case(f"update alone {label}", "push", 1, update=update, goals=goals)


def _sparse() -> Iterator[LocalCase]:
    for shape, rows in (((100_000, 128), 10_000), ((1_000_000, 64), 20_000)):
        name = f"{shape[0]:,} x {shape[1]}, {rows:,} rows"
        for verb, update, least in (("push", "", 3.5), ("push", "sgd", 3.5), ("pull", "", 2.5)):
            label = f"{verb} + SGD" if update else verb
            yield LocalCase(
                f"row-sparse {label} k=2 {name}", verb, (shape,), 2, update, rows=rows, goals={"mxnet": least}
            )
