"""The interface of each peer, and its timing."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bench.cases.common import Case
from bench.cases.local import LocalCase

Array = npt.NDArray[Any]
Call = Callable[[], Any]


class Unsupported(Exception):
    """The peer does not support this case."""


class Peer:
    """An implementation of cases.

    `prepare` makes the arrays, makes one call, and returns its result. Then `variants` has the ways to repeat
    the call; the fastest way counts. Each process of a group has one such peer, with the same variants. `cpu`
    is the processor seconds of the last run.
    """

    #: The class of the cases of its claim.
    case_type: ClassVar[type[Case]] = LocalCase

    case: Any
    variants: dict[str, Call]
    cpu = 0.0

    def __init__(self, place: Any = None) -> None:
        """Create the peer; `place` is the place of its worker in the group."""

    def prepare(self, case: Any) -> list[Array]:
        """Prepare, call once, and return the result: the outs, or after a push alone the stored values."""
        raise NotImplementedError

    def run(self, variant: str, repeats: int) -> list[float]:
        """Return the seconds of each of `repeats` calls."""
        with no_collections():
            return timed(self.variants[variant], repeats)

    def release(self) -> None:
        """Free the arrays of the last case."""
        self.variants = {}

    def close(self) -> None:
        """Close the connections of the peer."""


@contextmanager
def no_collections() -> Iterator[None]:
    """Disable the garbage collector inside."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(call: Call, repeats: int) -> list[float]:
    """Return the seconds of each of `repeats` calls."""
    times = [0.0] * repeats
    for i in range(repeats):
        start = perf_counter()
        call()
        times[i] = perf_counter() - start
    return times


def fields(*groups: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    """Return the fields of a structure of C: each group has names, and their type."""
    return tuple((name, kind) for names, kind in groups for name in names.split())


def all_of(calls: Sequence[Call]) -> Call:
    """Return one call that makes several calls."""

    def call() -> None:
        for one in calls:
            one()

    return call


def digest(results: list[Array]) -> list[float]:
    """Reduce arrays to a few numbers, by which results of peers are compared."""
    few = results if len(results) <= 8 else [results[0], results[len(results) // 2], results[-1]]
    numbers = []
    for array in few:
        flat = np.asarray(array).reshape(-1)
        numbers += [float(flat[0]), float(flat[-1]), float(np.abs(flat, dtype=np.float64).mean())]
    return numbers
