"""Arrays that a collective operation reads and overwrites, on the host or on a GPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ..arrays.host import readable_array, writable_array
from ..devices.arrays import any_on_device

Array = npt.NDArray[Any]


class ReductionOperand(NamedTuple):
    """An array of the caller: its value on the host, a function to write a new value, its name in errors."""

    value: Array
    put: Callable[[Array], None]
    what: str


class _KeyedArray(NamedTuple):
    key: str
    shape: tuple[int, ...]
    dtype: np.dtype[Any]


def operand_of(array: Any, number: int, count: int) -> ReductionOperand:
    """Make the operand of an array, one of several."""
    what = "the array of all_reduce" if count == 1 else f"array {number} of all_reduce"
    if type(array) is not np.ndarray and any_on_device([array]):
        return _on_gpu(array, what)
    out, deliver = writable_array(array, what)
    value = out if deliver is None else readable_array(array, what)

    def put(total: Array) -> None:
        out[...] = total
        if deliver is not None:
            deliver()

    return ReductionOperand(value, put, what)


def _on_gpu(array: Any, what: str) -> ReductionOperand:
    """Copy an array of a GPU to the host.

    `put` copies back on the caller's stream at the time of the call.
    """
    from ..devices import driver
    from ..stores.device.arguments import CallerStreams, fetch_value, out_target, put_result

    gpu = driver.get_driver()
    value = fetch_value(gpu, array, what)
    place = out_target(_KeyedArray(what, value.shape, value.dtype), array, CallerStreams([array]))

    def send(total: Array) -> None:
        content = np.ascontiguousarray(total)
        put_result(gpu, content.ctypes.data, place, lambda: gpu.synchronize(place[1].handle, place[0].device))

    return ReductionOperand(value, send, what)
