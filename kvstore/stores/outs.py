"""Outs of one call that are written once its values are there: converted, brought home, or kept apart."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays.grouping import Group, Key
from ..arrays.sparse import RowSparseArray
from ..devices.arrays import device_of
from ..kernels import cpu
from .entry import Array, Deliver, Keyed, check_shape, dense_out

if TYPE_CHECKING:
    from .protocol import Kind


class Later(dict[Key, list[Deliver]]):
    """What is to be done for the outs of each key once the values of the call are there."""

    def __init__(self) -> None:
        super().__init__()
        #: Arrays that are converted to.
        self._converted: list[Array] = []
        #: By key: outs, and the buffer that gets their value.
        self._copies: dict[Key, tuple[list[Array], Array]] = {}

    def add(self, key: Key, deliver: Deliver) -> None:
        """Do something for a key."""
        self.setdefault(key, []).append(deliver)

    def convert(self, key: Key, out: Array, deliver: Deliver) -> None:
        """Fill an array of another element type than the key's."""
        self._converted.append(out)
        self.add(key, deliver)

    def keep_apart(self, wanted: Iterable[tuple[Keyed, list[Array], list[Array]]]) -> None:
        """Where an out overlaps anything else of the call, let outs be written at its end, in their order.

        `wanted`: for each key what is pushed and what is filled. A key is given one buffer to fill then.
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
        """Whether anything is to be done."""
        return bool(self or self._copies)

    def deliver(self, keys: Sequence[Key] | None = None) -> None:
        """Do it for some keys, or for all."""
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
    key: Keyed, outs: list[Any], later: Later, value: Callable[[], Array] | None = None
) -> tuple[list[Array], list[Any]]:
    """Check the dense outs of a key that lie on the host; return those to be filled, and those on GPUs.

    What must be converted or copied home is added to `later`; `value` gives what is stored, where a store can
    be asked for it.
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
            later.convert(key.key, array, partial(convert, value, direct, array))
        if deliver is not None:
            later.add(key.key, deliver)
    return direct, on_gpu


def check_first_outs(groups: Sequence[Group], outs: Sequence[Group]) -> Iterator[tuple[Keyed, list[Any]]]:
    """Raise, before keys are made, for outs on the host that cannot take the values; yield others."""
    first = {key: values[0] for key, values in groups if len(values) == 1}
    for key, arrays in outs:
        shape = getattr(first.get(key), "shape", None)
        if isinstance(shape, tuple):
            new = _KeyForm(key, tuple(shape), first[key].dtype)
            _, on_gpu = host_outs(new, arrays, Later())
            if on_gpu:
                yield new, on_gpu


def check_outs(kind: Callable[[Key], Kind], outs: Iterable[Group]) -> None:
    """Raise what a pull into these arrays would raise; `kind` as that of a backend."""
    for key, arrays in outs:
        _, dtype, shape = kind(key)
        form = _KeyForm(key, shape, dtype)
        for out in arrays:
            if isinstance(out, RowSparseArray) or device_of(out) is not None:
                check_shape(form, out, "out")
            else:
                dense_out(form, out)


def convert(value: Callable[[], Array] | None, filled: list[Array], out: Array) -> None:
    """Write the result to an array of another element type.

    It is taken from an array that the round has filled, if there is one: of a small key, each worker has its
    own result sooner than the store has its.
    """
    with np.errstate(all="ignore"):
        np.copyto(out, filled[0] if filled or value is None else value(), casting="unsafe")
