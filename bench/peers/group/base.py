"""The interface of a peer between processes, and how it is timed."""

from __future__ import annotations

import gc
import math
from time import perf_counter, process_time
from typing import Any, ClassVar

import numpy as np

from bench.cases.base import Case
from bench.cases.shared import SharedCase
from bench.peers.base import Call, Peer
from bench.peers.group.link import Place


class GroupPeer(Peer):
    """One worker of a peer.

    `buffers` are written before each repetition, as a training loop writes its gradients; where a call writes
    the sum into them (`grows`), that also undoes its growth, so that values stay what they were.
    """

    case_type: ClassVar[type[Case]] = SharedCase

    grows = True

    def __init__(self, place: Place) -> None:
        self.place = place
        self.variants: dict[str, Call] = {}
        self.buffers: list[Any] = []
        self.calls = 0

    def run(self, variant: str, repeats: int) -> list[float]:
        """Seconds of each of `repeats` calls; a chain of links has one more, which goes first."""
        call, links = self.variants[variant], self.case.links
        times: list[float] = []
        gc.collect()
        gc.disable()
        start = process_time()
        try:
            while len(times) < repeats:
                self._rescale()
                count = min(links, repeats - len(times))
                self.place.gate.wait()
                times += self._timed(call, count + 1)[1:] if links > 1 else self._timed(call, count)
        finally:
            self.cpu = process_time() - start
            gc.enable()
        return times

    def _timed(self, call: Call, count: int) -> list[float]:
        times = [0.0] * count
        for i in range(count):
            start = perf_counter()
            call()
            times[i] = perf_counter() - start
        self.calls += count
        return times

    def _rescale(self) -> None:
        factor = math.pow(self.place.processes, -self.calls) if self.grows else 1.0
        self.calls = 0
        self.scale(factor)

    def scale(self, factor: float) -> None:
        """Multiply the buffers."""
        for buffer in self.buffers:
            np.multiply(buffer, np.float32(factor), out=buffer)

    def release(self) -> None:
        super().release()
        self.buffers, self.calls = [], 0
