"""The interface of a peer, and how it is timed."""

from __future__ import annotations

import gc
from collections.abc import Callable
from time import perf_counter
from typing import Any, ClassVar

import numpy as np
import numpy.typing as npt

from bench.cases.local import Case

Array = npt.NDArray[Any]
Call = Callable[[], Any]


class Unsupported(Exception):
    """The peer has nothing that does this case."""


class Peer:
    """One way to do a case.

    `prepare` makes the arrays, makes one call, and returns what that call produced. Afterwards `variants`
    names the ways to make the call again; the best one counts.
    """

    #: What the cases of its bench are.
    case_type: ClassVar[type[Any]] = Case

    variants: dict[str, Call]

    def prepare(self, case: Case) -> list[Array]:
        """Get ready, call once, and return the result: the outs, or after a push alone what is stored."""
        raise NotImplementedError

    def run(self, variant: str, repeats: int) -> list[float]:
        """Seconds that each of `repeats` calls took."""
        return timed(self.variants[variant], repeats)

    def release(self) -> None:
        """Let go of the arrays of the last case."""
        self.variants = {}


def timed(call: Call, repeats: int) -> list[float]:
    """Time `repeats` calls one by one, without the garbage collector."""
    times = [0.0] * repeats
    gc.collect()
    gc.disable()
    try:
        for i in range(repeats):
            start = perf_counter()
            call()
            times[i] = perf_counter() - start
    finally:
        gc.enable()
    return times


def digest(results: list[Array]) -> list[float]:
    """Squeeze arrays into a few numbers that peers can be compared by."""
    few = results if len(results) <= 8 else [results[0], results[len(results) // 2], results[-1]]
    numbers = []
    for array in few:
        flat = np.asarray(array).reshape(-1)
        numbers += [float(flat[0]), float(flat[-1]), float(np.abs(flat, dtype=np.float64).mean())]
    return numbers
