"""The compiled limit: C with OpenMP that computes a case, or only moves its bytes."""

from __future__ import annotations

import ctypes
from itertools import product
from pathlib import Path
from typing import Any

from bench.cases.compression import CompressionCase
from bench.peers.base import Array, fields
from bench.peers.compression.base import Compressor, Way
from bench.peers.compression.plain import table
from bench.peers.local.limit import MAX_VALUES
from bench.runner import compiled, machine

QUANTISE, DEQUANTISE, PUSH, PULL = range(4)
KINDS = {"the work": 1, "bytes alone": 0}
HOW = {"ordinary stores": 0, "streaming stores": 1, "prefetched": 2}
DEALT = {"fixed": 1, "as it comes": 0}


class Task(ctypes.Structure):
    _fields_ = fields(
        ("n", ctypes.c_ssize_t),
        ("bits k", ctypes.c_int),
        ("threshold", ctypes.c_float),
        ("g r", ctypes.c_void_p * MAX_VALUES),
        ("packed table sum", ctypes.c_void_p),
        ("out", ctypes.c_void_p * MAX_VALUES),
    )


class Limit(Compressor):
    """All ways of the C code; the fastest way counts."""

    def __init__(self, place: Any = None) -> None:
        super().__init__(place)
        self._code = compiled.load(Path(__file__).with_name("limit.c"), "-fopenmp", "-lm")

    def ways(self, case: CompressionCase) -> dict[str, Way]:
        found: dict[str, Way] = {}
        for kind, how, dealt in product(KINDS, HOW, DEALT):
            if _written(kind, how, pair=case.verb == "pair"):
                setting = KINDS[kind], HOW[how], len(machine.cpus()), DEALT[dealt]
                found[f"{kind}, {how}, {dealt}"] = InC(self._code, case, setting)
        return found


def _written(kind: str, how: str, pair: bool) -> bool:
    """Return whether the C code has this way: it has streaming for a pair, and prefetching otherwise."""
    if how == "prefetched":
        return kind == "bytes alone" and not pair
    return how == "ordinary stores" or pair


class InC:
    """One way of calling the C code."""

    def __init__(self, code: ctypes.CDLL, case: CompressionCase, setting: tuple[int, int, int, int]) -> None:
        self._code, self._setting = code, setting
        self._table = table(case.bits, case.threshold)
        self._task = Task(bits=case.bits, threshold=case.threshold, table=self._table.ctypes.data)

    def encode(self, gradient: Array, residual: Array, packed: Array) -> None:
        self._task.packed = packed.ctypes.data
        self._fill("g", [gradient])
        self._fill("r", [residual])
        self._run(QUANTISE, gradient.size)

    def add(self, packed: Array, target: Array) -> None:
        self._task.packed, self._task.sum = packed.ctypes.data, target.ctypes.data
        self._run(DEQUANTISE, target.size)

    def push(self, gradients: list[Array], residuals: list[Array], stored: Array) -> None:
        self._fill("g", gradients)
        self._fill("r", residuals)
        self._task.sum = stored.ctypes.data
        self._run(PUSH, stored.size)

    def pull(self, stored: Array, outs: list[Array]) -> None:
        self._task.sum = stored.ctypes.data
        self._fill("out", outs)
        self._run(PULL, stored.size)

    def _fill(self, name: str, arrays: list[Array]) -> None:
        self._task.k = len(arrays)
        getattr(self._task, name)[: len(arrays)] = [array.ctypes.data for array in arrays]

    def _run(self, verb: int, size: int) -> None:
        self._task.n = size
        self._code.compression_run(ctypes.byref(self._task), verb, *self._setting)
