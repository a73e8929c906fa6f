"""MXNet 1.9.1: a `device` store on CPU contexts, and its profiler's times of the operators inside."""

from __future__ import annotations

import itertools
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from bench.cases import compression as compression_cases
from bench.cases.common import beginning
from bench.cases.compression import CHECKED, VALUES, CompressionCase, Inputs
from bench.peers.base import Array, Unsupported
from bench.peers.compression import spans
from bench.peers.compression.base import Compressor
from bench.peers.local.rival_mxnet import mx

OPERATORS = {"quantise": "QuantizeCPU", "dequantise": "DequantizeCPU"}


class MXNet(Compressor):
    """Each value of a push has its own context, so that the operators run concurrently.

    The time of a gradient is the time in which at least one operator of the push ran, divided by the number
    of values: the time of all cores for one value, without the engine. A dequantising operator does not add;
    other operators do, which are not counted.
    """

    def __init__(self, place: Any = None) -> None:
        super().__init__(place)
        self.profiler = Profiler()

    def prepare(self, case: CompressionCase) -> list[Array]:
        if case.codec != "2bit":
            raise Unsupported("MXNet 1.9.1 has no other codec")
        self.operator = OPERATORS.get(case.verb, "")
        data = compression_cases.inputs(case)
        self.store = mx.kv.create("device")
        self.store.set_gradient_compression({"type": case.codec, "threshold": case.threshold})
        self.store.init(0, mx.nd.zeros((case.size,)))
        outs = [mx.nd.full((case.size,), -1, ctx=context) for context in _contexts()]
        push = self._pushing(data)
        results = []
        for _ in range(CHECKED):
            push()
            self.store.pull(0, out=outs)
            results.append(outs[-1].asnumpy())

        def pair() -> None:
            push()
            self.store.pull(0, out=outs)
            mx.nd.waitall()

        def alone() -> None:
            push()
            mx.nd.waitall()

        self.variants = {"its operator": alone} if self.operator else {"store": pair}
        return results

    def _pushing(self, data: Inputs) -> Callable[[], None]:
        """Push the first values; return a function that pushes the next ones."""
        self.store.push(0, _on_contexts(data.first))
        pools, size, calls = _on_contexts(data.pools), data.size, itertools.count()

        def push() -> None:
            start = beginning(next(calls), size, pools[0].size)
            self.store.push(0, [pool[start : start + size] for pool in pools])

        return push

    def run(self, variant: str, repeats: int) -> list[float]:
        if not self.operator:
            return super().run(variant, repeats)
        found = sorted(self.profiler.spans(self.variants[variant], self.operator, repeats))
        if len(found) != repeats * VALUES:
            raise RuntimeError(f"{len(found)} runs of {self.operator} in {repeats} pushes of {VALUES} values")
        pushes = (found[at : at + VALUES] for at in range(0, len(found), VALUES))
        return [spans.covered(push) / VALUES for push in pushes]

    def release(self) -> None:
        super().release()
        self.store = None
        mx.nd.waitall()


def _contexts() -> list[Any]:
    return [mx.cpu(number) for number in range(VALUES)]


def _on_contexts(arrays: list[Array]) -> list[Any]:
    return [mx.nd.array(array, ctx=context) for array, context in zip(arrays, _contexts(), strict=True)]


class Profiler:
    """MXNet's profiler. It appends to one file during the life of the process."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self._path = Path(self._folder.name) / "trace.json"
        self._read = 0
        mx.profiler.set_config(profile_imperative=True, aggregate_stats=False, filename=str(self._path))

    def spans(self, call: Callable[[], Any], operator: str, repeats: int) -> list[spans.Span]:
        """Make calls, and return when the operator began and ended."""
        mx.profiler.set_state("run")
        for _ in range(repeats):
            call()
        mx.profiler.set_state("stop")
        mx.profiler.dump(False)
        with self._path.open() as trace:
            trace.seek(self._read)
            text = trace.read()
            self._read = trace.tell()
        return spans.read(text, operator)
