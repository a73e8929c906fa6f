"""The compiled limit: the same memory traffic in bare C, the write of the store's own value included."""

from __future__ import annotations

import ctypes
import mmap
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.cases import local as cases
from bench.cases.local import Inputs, LocalCase
from bench.peers.base import Array, Peer, Unsupported, fields
from bench.runner import compiled, machine

MAX_VALUES = 16
UPDATES = ("", "sgd_momentum", "adam")
HOW = {"ordinary stores": 0, "streaming stores": 1, "streaming, by blocks": 2}
SMALL = 256 * 1024


class Item(ctypes.Structure):
    _fields_ = fields(
        ("n", ctypes.c_ssize_t),
        ("k m streamed", ctypes.c_int),
        ("src", ctypes.c_void_p * MAX_VALUES),
        ("out", ctypes.c_void_p * (MAX_VALUES + 1)),
        ("w s1 s2", ctypes.c_void_p),
    )


class Params(ctypes.Structure):
    _fields_ = fields(("lr mu wd beta1 beta2 eps", ctypes.c_float))


PARAMS = Params(
    cases.LEARNING_RATE, cases.MOMENTUM, cases.WEIGHT_DECAY, cases.BETA1, cases.BETA2, cases.EPSILON
)

Timer = Callable[[int], list[float]]


class Limit(Peer):
    """All ways of the C code to write; the fastest way counts."""

    def __init__(self, place: Any = None) -> None:
        super().__init__(place)
        source = Path(__file__).with_name("limit.c")
        self.code = compiled.load(source, "-fopenmp", "-lm")
        self.code.limit_stream.restype = ctypes.c_float
        self.threads = len(machine.cpus())

    def prepare(self, case: LocalCase) -> list[Array]:
        if case.rows:
            raise Unsupported("no compiled limit for row-sparse cases")
        self.steps = 0
        self.timers: dict[str, Timer] = {}
        if case.verb in cases.STREAMS:
            return self._prepare_stream(case)
        self.data = cases.inputs(case)
        self.stored = [on_huge_pages(weight) for weight in self.data.weights]
        self.states = [[on_huge_pages(np.zeros_like(w)) for w in self.stored] for _ in _states(case)]
        self._plan(case)
        self.variants = dict.fromkeys(self.timers, _nothing)
        next(iter(self.timers.values()))(1)
        return self.stored if case.verb == "push" else [out for outs in self.data.outs for out in outs]

    def run(self, variant: str, repeats: int) -> list[float]:
        return self.timers[variant](repeats)

    def release(self) -> None:
        super().release()
        self.timers = {}
        self.data, self.stored, self.states = Inputs([], [], []), [], []

    def _plan(self, case: LocalCase) -> None:
        jobs = [self._job(verb, case) for verb in (("push", "pull") if case.verb == "pair" else (case.verb,))]
        touched = case.nbytes * (2 * case.k + 1)
        for threads in {1, self.threads} if touched < 16 * SMALL else {self.threads}:
            for fixed in (1, 0) if threads > 1 else (1,):
                for how, number in HOW.items():
                    if number and touched < SMALL:
                        continue
                    label = f"{how}, {threads} thread{'s' if threads > 1 else ''}{', fixed' if fixed else ''}"
                    update = UPDATES.index(case.update)
                    self.timers[label] = partial(self._run, jobs, update, (number, threads, fixed))

    def _job(self, verb: str, case: LocalCase) -> ctypes.Array[Item]:
        items = (Item * len(case.shapes))()
        for i, item in enumerate(items):
            weight, values, outs = self.stored[i], self.data.values[i], self.data.outs[i]
            fresh = [] if case.update or verb == "pull" else [weight]
            given = outs if verb in ("pushpull", "pull") else []
            in_place = verb == "pushpull" and case.in_place
            fill(item, [weight] if verb == "pull" else values, fresh + given)
            item.streamed = len(fresh) if in_place else len(fresh) + len(given)
            if case.update:
                item.w = weight.ctypes.data
                item.s1, item.s2 = [*(s[i].ctypes.data for s in self.states), None][:2]
        return items

    def _run(
        self, jobs: list[ctypes.Array[Item]], update: int, how: tuple[int, ...], repeats: int
    ) -> list[float]:
        """Time a case; push and pull of a pair alternate, as in a training loop."""
        if len(jobs) == 1:
            return self._run_one(jobs[0], update, how, repeats)
        push, pull = jobs
        turns = range(repeats)
        return [self._run_one(push, update, how, 1)[0] + self._run_one(pull, 0, how, 1)[0] for _ in turns]

    def _run_one(
        self, items: ctypes.Array[Item], update: int, how: tuple[int, ...], repeats: int
    ) -> list[float]:
        seconds, rates = (ctypes.c_double * repeats)(), ctypes.byref(PARAMS)
        self.code.limit_run(items, len(items), update, *how, rates, self.steps + 1, repeats, seconds)
        self.steps += repeats if update else 0
        return list(seconds)

    def _prepare_stream(self, case: LocalCase) -> list[Array]:
        ((n,),) = case.shapes
        self.stored = [on_huge_pages(np.ones(n, np.float32)) for _ in range(2)]
        ways = {"ordinary stores": 0, "streaming stores": 1} if case.verb in ("write", "copy") else {"": 0}
        kind = cases.STREAMS.index(case.verb)
        self.timers = {name: partial(self._stream, kind, n, past) for name, past in ways.items()}
        self.variants = dict.fromkeys(self.timers, _nothing)
        return []

    def _stream(self, kind: int, n: int, past: int, repeats: int) -> list[float]:
        seconds = (ctypes.c_double * repeats)()
        a, b = (ctypes.c_void_p(array.ctypes.data) for array in self.stored)
        self.code.limit_stream(kind, a, b, ctypes.c_ssize_t(n), past, self.threads, repeats, seconds)
        return list(seconds)


def _nothing() -> None:
    """Stand in for a call that C times."""


def _states(case: LocalCase) -> range:
    return range({"": 0, "sgd_momentum": 1, "adam": 2}[case.update])


def fill(item: Item, sources: list[Array], outs: list[Array]) -> None:
    item.n, item.k, item.m = sources[0].size, len(sources), len(outs)
    item.src[: len(sources)] = [array.ctypes.data for array in sources]
    item.out[: len(outs)] = [array.ctypes.data for array in outs]


def on_huge_pages(array: Array) -> Array:
    """Copy to separate memory at the start of a page, a huge page where the system has some."""
    memory = mmap.mmap(-1, max(array.nbytes, 1))
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    copy = np.ndarray(array.shape, array.dtype, buffer=memory)
    np.copyto(copy, array)
    return copy
