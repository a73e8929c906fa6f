"""The interface of every peer, and how it is timed."""

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
    """The peer has nothing that does this case."""


class Peer:
    """One way to do a case.

    `prepare` makes the arrays, makes one call, and returns what that call produced. Afterwards `variants`
    names the ways to make the call again; the best one counts. Each process of a group has one such peer, and
    all have the same variants. `cpu` is what the last run took of the processor, in seconds.
    """

    #: What the cases of its claim are.
    case_type: ClassVar[type[Case]] = LocalCase

    case: Any
    variants: dict[str, Call]
    cpu = 0.0

    def __init__(self, place: Any = None) -> None:
        """Create the peer; `place` is that of its worker in the group."""

    def prepare(self, case: Any) -> list[Array]:
        """Get ready, call once, and return the result: the outs, or after a push alone what is stored."""
        raise NotImplementedError

    def run(self, variant: str, repeats: int) -> list[float]:
        """Seconds that each of `repeats` calls took."""
        with no_collections():
            return timed(self.variants[variant], repeats)

    def release(self) -> None:
        """Free the arrays of the last case."""
        self.variants = {}

    def close(self) -> None:
        """Leave in good order."""


@contextmanager
def no_collections() -> Iterator[None]:
    """Inside, the garbage collector is off."""
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def timed(call: Call, repeats: int) -> list[float]:
    """Time `repeats` calls one by one."""
    times = [0.0] * repeats
    for i in range(repeats):
        start = perf_counter()
        call()
        times[i] = perf_counter() - start
    return times


def fields(*groups: tuple[str, Any]) -> tuple[tuple[str, Any], ...]:
    """List the fields of a structure of C: each group has names, and their type."""
    return tuple((name, kind) for names, kind in groups for name in names.split())


def all_of(calls: Sequence[Call]) -> Call:
    """Make one call of several."""

    def call() -> None:
        for one in calls:
            one()

    return call


def digest(results: list[Array]) -> list[float]:
    """Squeeze arrays into a few numbers that peers can be compared by."""
    few = results if len(results) <= 8 else [results[0], results[len(results) // 2], results[-1]]
    numbers = []
    for array in few:
        flat = np.asarray(array).reshape(-1)
        numbers += [float(flat[0]), float(flat[-1]), float(np.abs(flat, dtype=np.float64).mean())]
    return numbers
