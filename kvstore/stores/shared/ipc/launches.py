"""Sums on a GPU for several keys at once: one launch for each type, reused for the same addresses."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import numpy as np

from ....devices.gpu_context import GpuContext
from ....devices.streams import DeviceStream
from ....kernels import cuda
from ...device.launches import CallLaunches, count_of

#: Calls with launches that are kept.
_MOST_CALLS = 64

#: Element type and kernel arguments of a sum.
TypedRow = tuple[np.dtype[Any], cuda.KernelRow]


class GpuSums:
    """Launches sums on the streams of one GPU."""

    def __init__(self, place: GpuContext) -> None:
        self._place = place
        self._known: OrderedDict[Any, CallLaunches] = OrderedDict()

    def run(self, rows: list[TypedRow], stream: DeviceStream) -> None:
        """Launch sums; rows that overlap run one after the other."""
        if _are_apart(rows):
            self._sum_launches(rows, stream).run(stream)
            return
        for row in rows:
            self._sum_launches([row], stream).run(stream)

    def _sum_launches(self, rows: list[TypedRow], stream: DeviceStream) -> CallLaunches:
        signature = (
            stream.handle,
            *((dtype, row.numel, row.srcs, row.dst, row.outs) for dtype, row in rows),
        )
        known = self._known.get(signature)
        if known is not None:
            self._known.move_to_end(signature)
            return known
        launches = CallLaunches(self._place)
        for name, group in _by_type(rows):
            launches.add(cuda.choose_spec("sum", name, count_of(row.srcs for row in group)), group)
        if len(self._known) >= _MOST_CALLS:
            self._known.popitem(last=False)
        self._known[signature] = launches
        return launches

    def close(self) -> None:
        """Forget all launches."""
        self._known.clear()


def _by_type(rows: list[TypedRow]) -> list[tuple[str, list[cuda.KernelRow]]]:
    groups: dict[str, list[cuda.KernelRow]] = {}
    for dtype, row in rows:
        groups.setdefault(dtype.name, []).append(row)
    return list(groups.items())


def _are_apart(rows: list[TypedRow]) -> bool:
    """Return whether no two rows write to the same memory.

    Sources never overlap memory that a call writes.
    """
    if len(rows) == 1:
        return True
    spans = sorted(
        (start, start + row.numel * dtype.itemsize, number)
        for number, (dtype, row) in enumerate(rows)
        for start in (row.dst, *row.outs)
    )
    reach, last = 0, -1
    for start, end, number in spans:
        if start < reach and number != last:
            return False
        if end > reach:
            reach, last = end, number
    return True
