"""The slices of a server for counters and timelines: their names and sizes."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable

from ....arrays.element_types import dtype_named
from ..protocol.messages import KeyEntry


class HeldSlices:
    """The slices of one server, by the number that events use: the store in the upper 32 bits."""

    def __init__(self) -> None:
        self._names: dict[int, str] = {}  # also of dropped slices, because their events remain
        self._slices: dict[int, tuple[int, int]] = {}  # number of the key, bytes
        self._keys: Counter[tuple[int, int]] = Counter()  # how many slices of a key, by store and number
        #: Bytes of the values; a table counts with all its rows.
        self.nbytes = 0

    @property
    def key_count(self) -> int:
        """Number of keys with slices here."""
        return len(self._keys)

    def add_slices(self, server: int, store: int, keys: Iterable[KeyEntry]) -> None:
        """Add the slices of keys that this server holds."""
        for key in keys:
            row = math.prod(key.spec.shape[1:]) if key.spec.sparse else 1
            element = dtype_named(key.spec.dtype).itemsize * row
            for (slice_, name), part in zip(key.slice_names(), key.slices, strict=True):
                if part.server == server:
                    self._names[store << 32 | slice_] = name
                    self._drop_slice(store << 32 | slice_)
                    self._add_slice(store << 32 | slice_, key.number, (part.stop - part.start) * element)

    def forget_slices(self, store: int, slices: Iterable[int] | None) -> None:
        """Drop slices; None: all of a store."""
        if slices is None:
            slices = [number & 0xFFFFFFFF for number in self._slices if number >> 32 == store]
        for slice_ in slices:
            self._drop_slice(store << 32 | slice_)

    def _add_slice(self, number: int, key: int, nbytes: int) -> None:
        self._slices[number] = key, nbytes
        self._keys[number >> 32, key] += 1
        self.nbytes += nbytes

    def _drop_slice(self, number: int) -> None:
        key, nbytes = self._slices.pop(number, (-1, 0))
        self.nbytes -= nbytes
        self._keys[number >> 32, key] -= 1
        if self._keys[number >> 32, key] <= 0:
            del self._keys[number >> 32, key]

    def slice_names(self) -> dict[int, str]:
        """Return a name for each slice, also for dropped ones."""
        return dict(self._names)
