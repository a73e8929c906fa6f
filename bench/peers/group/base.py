"""The interface of a peer between processes, and its timing."""

from __future__ import annotations

import math
from time import process_time
from typing import Any, ClassVar

import numpy as np

from bench.cases.common import Case
from bench.cases.shared import SharedCase
from bench.peers.base import Call, Peer, no_collections, timed
from bench.peers.group.link import Place


class GroupPeer(Peer):
    """One worker of a peer.

    `buffers` are written before each repetition, as a training loop writes its gradients; where a call writes
    the sum into them (`grows`), this also undoes the growth, so that values stay in their range.
    """

    case_type: ClassVar[type[Case]] = SharedCase

    grows = True

    def __init__(self, place: Place) -> None:
        self.place = place
        self.variants: dict[str, Call] = {}
        self.buffers: list[Any] = []
        self.calls = 0

    def run(self, variant: str, repeats: int) -> list[float]:
        """Return the seconds of each of `repeats` calls; a chain of links has one more call, the first."""
        call, links = self.variants[variant], self.case.links
        times: list[float] = []
        first = int(links > 1)
        with no_collections():
            start = process_time()
            while len(times) < repeats:
                self._rescale()
                count = first + min(links, repeats - len(times))
                self.place.gate.wait()
                times += timed(call, count)[first:]
                self.calls += count
            self.cpu = process_time() - start
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
