"""Launches for the keys of a call: one for each kernel, made once for the same arrays.

The image of a launch, that is its arguments, is copied to the GPU when it is made; the parameters of an
update only if they have changed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ...devices.driver import Kernel
from ...devices.gpu_context import GpuContext, StreamBuffer
from ...devices.streams import DeviceStream, StreamCursor
from ...kernels import cuda
from .keys import DeviceKey

#: Values of an update's parameters, a tuple for each key.
Values = Sequence[tuple[float, ...]]


class KeyWork(NamedTuple):
    """One key of a call: addresses of the arrays to sum, and of those that receive the result."""

    entry: DeviceKey
    srcs: tuple[int, ...]
    outs: tuple[int, ...]


class _LaunchStep:
    """One launch."""

    __slots__ = ("_loan", "chunks", "kernel", "scalars", "words")

    def __init__(self, kernel: Kernel, words: Any, chunks: int, scalars: tuple[Any, ...]) -> None:
        self.kernel, self.chunks, self.scalars = kernel, chunks, scalars
        self.words: Any = words
        self._loan: StreamBuffer | None = None

    def put(self, place: GpuContext, stream: DeviceStream, tail: StreamCursor) -> None:
        """Launch; the first time after a copy of the image to the GPU."""
        loan = self._loan
        if loan is None:
            loan = self._loan = StreamBuffer(place, self.words.nbytes, stream)
            place.upload(loan.address, self.words, stream)
            self.words = None
        self.kernel(stream.handle, loan.address, self.chunks, *self.scalars)
        loan.tail = tail


class UpdateParameters:
    """Constants of an update's rows on the device."""

    def __init__(self, place: GpuContext, spec: cuda.KernelSpec, rows: int, stream: DeviceStream) -> None:
        self._place, self._spec = place, spec
        self._line = cuda.WIDTH * np.dtype(spec.real_type).itemsize
        self._loan = StreamBuffer(place, rows * self._line, stream)
        self._last: Values | None = None

    def row_addresses(self, rows: int) -> range:
        """Return the address of each row's line."""
        start = self._loan.address
        return range(start, start + rows * self._line, self._line)

    def set_values(self, values: Values, stream: DeviceStream) -> None:
        """Copy the lines to the GPU if they have changed."""
        if values != self._last:
            self._place.upload(self._loan.address, cuda.row_constants(self._spec, values), stream)
            self._last = values
        self._loan.tail = self._place.stream_cursor(stream)


class CallLaunches:
    """The launches of a call on a stream of one GPU."""

    def __init__(self, place: GpuContext, entries: Iterable[DeviceKey] = ()) -> None:
        self._place = place
        self.entries = list(entries)
        self._steps: list[_LaunchStep] = []
        #: For updates: constants, and the numbers of their works.
        self.parameters: list[tuple[UpdateParameters, list[int]]] = []

    def add(
        self, spec: cuda.KernelSpec, rows: Sequence[cuda.KernelRow], scalars: tuple[Any, ...] = ()
    ) -> None:
        """Append one launch for all these rows."""
        words, chunks = cuda.launch_image(spec, [row for row in rows if row.numel])
        if chunks:
            kernel = self._place.driver.kernel(spec, self._place.device)
            self._steps.append(_LaunchStep(kernel, words, chunks, scalars))

    def run(self, stream: DeviceStream, values: Values = ()) -> None:
        """Put all launches on a stream that is ordered behind earlier work on these keys."""
        place, tail = self._place, self._place.stream_cursor(stream)
        entered = place.driver.enter(place.device)
        try:
            for parameters, chosen in self.parameters:
                parameters.set_values([values[i] for i in chosen], stream)
            for step in self._steps:
                step.put(place, stream, tail)
        finally:
            if entered:
                place.driver.leave()
        tail.note_work()


def count_of(rows: Iterable[tuple[int, ...]]) -> int | None:
    """Return the number of arrays of each row; None if they differ."""
    counts = {len(row) for row in rows}
    return counts.pop() if len(counts) == 1 else None


def are_apart(works: Sequence[KeyWork]) -> bool:
    """Return whether all works can run at once: no work writes an array that another reads or writes.

    An array may be a source and an out of one key, but not overlap another one in part.
    """
    spans: dict[tuple[int, int, int], bool] = {}
    for number, work in enumerate(works):
        nbytes = work.entry.nbytes
        if nbytes:
            for start in work.srcs:
                spans.setdefault((start, start + nbytes, number), False)
            for start in (*work.outs, work.entry.memory.address):
                spans[start, start + nbytes, number] = True
    reach = written = 0  # ends of the earlier spans, and of the written ones
    for (start, end, _), writes in sorted(spans.items()):
        if start < (reach if writes else written):
            return False
        reach = max(reach, end)
        written = max(written, end) if writes else written
    return True
