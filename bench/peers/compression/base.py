"""Code of all peers that compress gradients."""

from __future__ import annotations

from functools import partial
from typing import Protocol

import numpy as np

from bench.cases import compression as compression_cases
from bench.cases.compression import CHECKED, VALUES, CompressionCase, Inputs
from bench.peers.base import Array, Peer
from bench.peers.local.limit import on_huge_pages


class Way(Protocol):
    """One way to compress. All arrays are allocated beforehand; a packed gradient is uint8."""

    def encode(self, gradient: Array, residual: Array, packed: Array) -> None: ...

    def add(self, packed: Array, target: Array) -> None:
        """Add the values of a packed gradient."""

    def push(self, gradients: list[Array], residuals: list[Array], stored: Array) -> None:
        """Write the sum of the values after packing and unpacking."""

    def pull(self, stored: Array, outs: list[Array]) -> None:
        """Copy to all outs."""


class Compressor(Peer):
    """A peer for `CompressionCase`.

    In each case, `prepare` returns for each of the first calls the sum of its values after packing and
    unpacking. The first of its ways computes that; all are timed.
    """

    case_type = CompressionCase

    def ways(self, case: CompressionCase) -> dict[str, Way]:
        """Return the ways of this peer, by name."""
        raise NotImplementedError

    def prepare(self, case: CompressionCase) -> list[Array]:
        verbs = {"quantise": self._quantise, "dequantise": self._dequantise, "pair": self._pair}
        return verbs[case.verb](case, compression_cases.inputs(case), self.ways(case))

    def _quantise(self, case: CompressionCase, data: Inputs, ways: dict[str, Way]) -> list[Array]:
        way, residuals, turns = _first(ways), _zeros(case, VALUES), Turns(data)
        results = [_sum(way, case, own) for own in _packed(way, case, data, residuals)]
        target = _words(case)

        def call(way: Way) -> None:
            way.encode(turns.gradients()[0], residuals[0], target)

        self.variants = {name: partial(call, way) for name, way in ways.items()}
        return results

    def _dequantise(self, case: CompressionCase, data: Inputs, ways: dict[str, Way]) -> list[Array]:
        way = _first(ways)
        calls = _packed(way, case, data, _zeros(case, VALUES))
        packed = [words for own in calls for words in own]
        target = on_huge_pages(data.first[0])  # no zeros: some machines add to them faster

        def call(way: Way) -> None:
            packed.append(packed.pop(0))
            way.add(packed[0], target)

        self.variants = {name: partial(call, way) for name, way in ways.items()}
        return [_sum(way, case, own) for own in calls]

    def _pair(self, case: CompressionCase, data: Inputs, ways: dict[str, Way]) -> list[Array]:
        way, residuals, turns = _first(ways), _zeros(case, VALUES), Turns(data)
        (stored,) = _zeros(case, 1)
        outs = [np.full(case.size, -1, np.float32) for _ in range(VALUES)]
        way.push(data.first, residuals, stored)
        results = []
        for number in range(CHECKED):
            way.push(data.gradients(number), residuals, stored)
            way.pull(stored, outs)
            results.append(outs[-1].copy())

        def call(way: Way) -> None:
            way.push(turns.gradients(), residuals, stored)
            way.pull(stored, outs)

        self.variants = {name: partial(call, way) for name, way in ways.items()}
        return results


class Turns:
    """Counts calls, so that each call has different gradients."""

    def __init__(self, data: Inputs) -> None:
        self._data = data
        self._number = CHECKED

    def gradients(self) -> list[Array]:
        """Return the gradients of the next call."""
        self._number += 1
        return self._data.gradients(self._number)


def _first(ways: dict[str, Way]) -> Way:
    return next(iter(ways.values()))


def _packed(way: Way, case: CompressionCase, data: Inputs, residuals: list[Array]) -> list[list[Array]]:
    """Pack the first calls; return the words of each value, by call."""
    for gradient, residual in zip(data.first, residuals, strict=True):
        way.encode(gradient, residual, _words(case))
    calls = []
    for number in range(CHECKED):
        calls.append([_words(case) for _ in residuals])
        for gradient, residual, words in zip(data.gradients(number), residuals, calls[-1], strict=True):
            way.encode(gradient, residual, words)
    return calls


def _sum(way: Way, case: CompressionCase, packed: list[Array]) -> Array:
    (total,) = _zeros(case, 1)
    for words in packed:
        way.add(words, total)
    return total


def _words(case: CompressionCase) -> Array:
    return on_huge_pages(np.zeros(case.packed_bytes, np.uint8))


def _zeros(case: CompressionCase, count: int) -> list[Array]:
    return [on_huge_pages(np.zeros(case.size, np.float32)) for _ in range(count)]


def copy_to_all(stored: Array, outs: list[Array]) -> None:
    """Pull by NumPy's copies."""
    for out in outs:
        np.copyto(out, stored)
