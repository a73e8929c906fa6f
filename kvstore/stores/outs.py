"""Outs of one call that are written after its values: converted, copied back, or kept apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays.grouping import Group, Key
from ..arrays.sparse import RowSparseArray
from ..devices.arrays import device_of
from ..kernels import cpu
from .entry import Array, Deliver, KeyDescription, check_shape, dense_out

if TYPE_CHECKING:
    from .protocol import Kind


class OutDeliveries(dict[Key, list[Deliver]]):
    """The work for the outs of each key that follows the arrival of the call's values."""

    def __init__(self) -> None:
        super().__init__()
        #: Arrays that receive converted values.
        self._converted: list[Array] = []
        #: By key: outs, and the buffer that receives their value.
        self._copies: dict[Key, tuple[list[Array], Array]] = {}

    def add(self, key: Key, deliver: Deliver) -> None:
        """Add a function to call for a key."""
        self.setdefault(key, []).append(deliver)

    def convert(self, key: Key, out: Array, deliver: Deliver) -> None:
        """Add the conversion to an array of another element type."""
        self._converted.append(out)
        self.add(key, deliver)

    def defer_overlaps(self, wanted: Iterable[tuple[KeyDescription, list[Array], list[Array]]]) -> None:
        """If an out overlaps another array of the call, write outs at its end, in their order.

        `wanted`: for each key the pushed arrays and the arrays to fill. Such a key fills one buffer instead.
        """
        wanted = list(wanted)
        if len(wanted) == 1 and not self._converted and len(wanted[0][2]) < 2 and not wanted[0][1]:
            return
        items = [(values, outs) for _, values, outs in wanted]
        if cpu.independent(items + [([], [array]) for array in self._converted]):
            return
        for key, _, outs in wanted:
            if outs:
                buffer = np.empty(key.shape, key.dtype)
                self._copies[key.key] = list(outs), buffer
                outs[:] = [buffer]

    @property
    def has_any(self) -> bool:
        """Whether there is any work."""
        return bool(self or self._copies)

    def deliver(self, keys: Sequence[Key] | None = None) -> None:
        """Do the work for some keys, or for all."""
        if not self.has_any:
            return
        for key in self._copies if keys is None else keys:
            if key in self._copies:
                outs, buffer = self._copies[key]
                for out in outs:
                    np.copyto(out, buffer)
        for key in self if keys is None else keys:
            for deliver in self.get(key, ()):
                deliver()


class _KeyForm(NamedTuple):
    key: Key
    shape: tuple[int, ...]
    dtype: Any


def host_outs(
    key: KeyDescription, outs: list[Any], later: OutDeliveries, value: Callable[[], Array] | None = None
) -> tuple[list[Array], list[Any]]:
    """Check the dense outs of a key that are on the host; return those to be filled, and those on GPUs.

    Conversions and copies that follow are added to `later`; `value` returns the stored value, if the store
    can be asked for it.
    """
    direct: list[Array] = []
    on_gpu: list[Any] = []
    for out in outs:
        if isinstance(out, RowSparseArray):
            continue
        if device_of(out) is not None:
            on_gpu.append(out)
            continue
        array, deliver = dense_out(key, out)
        if array.dtype == key.dtype:
            direct.append(array)
        else:
            later.convert(key.key, array, partial(convert_out, value, direct, array))
        if deliver is not None:
            later.add(key.key, deliver)
    return direct, on_gpu


def check_first_outs(
    groups: Sequence[Group], outs: Sequence[Group]
) -> Iterator[tuple[KeyDescription, list[Any]]]:
    """Raise an error, before keys are made, for outs on the host that cannot hold the values.

    Yield others.
    """
    first = {key: values[0] for key, values in groups if len(values) == 1}
    for key, arrays in outs:
        shape = getattr(first.get(key), "shape", None)
        if isinstance(shape, tuple):
            new = _KeyForm(key, tuple(shape), first[key].dtype)
            _, on_gpu = host_outs(new, arrays, OutDeliveries())
            if on_gpu:
                yield new, on_gpu


def check_outs(kind: Callable[[Key], Kind], outs: Iterable[Group]) -> None:
    """Raise the error of a pull into these arrays; `kind` is that of a backend."""
    for key, arrays in outs:
        _, dtype, shape = kind(key)
        form = _KeyForm(key, shape, dtype)
        for out in arrays:
            if isinstance(out, RowSparseArray) or device_of(out) is not None:
                check_shape(form, out, "out")
            else:
                dense_out(form, out)


def convert_out(value: Callable[[], Array] | None, filled: list[Array], out: Array) -> None:
    """Write the result to an array of another element type.

    The source is an array that the round has filled, if there is one: each worker has its own result of a
    small key sooner than the store has it.
    """
    with np.errstate(all="ignore"):
        np.copyto(out, filled[0] if filled or value is None else value(), casting="unsafe")
