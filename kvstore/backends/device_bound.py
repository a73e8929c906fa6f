"""A `pushpull` of keys of one GPU with fixed arrays: nothing is looked at but the caller's stream."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ..devices import arrays
from ..devices.streams import Stream
from .device_calls import order_behind
from .device_launches import Launches, Work

if TYPE_CHECKING:
    from .device_gpus import Gpus


class GpuCall:
    """See `kvstore.backends.bound.Bound`.

    Parameters
    ----------
    gpus : Gpus
    works : list of Work
        Keys of one GPU, whose arrays lie there too and do not overlap.
    objects : list
        The arrays, in the order of the addresses in `works`.
    """

    def __init__(self, gpus: Gpus, works: list[Work], objects: list[Any]) -> None:
        self._gpus, self._works, self._objects = gpus, works, objects
        self._version = gpus.version, gpus.apply.tag
        self._entries = [work.entry for work in works]
        self._place = self._entries[0].place
        self._addresses = _addresses(objects)
        gpus.bound.add(self)
        self._launches: Launches | None = None

    def fits(self) -> bool:
        """Whether updates and keys are the same."""
        return (self._gpus.version, self._gpus.apply.tag) == self._version

    def is_current(self) -> bool:
        """Whether all arrays lie where they lay."""
        return self.fits() and _addresses(self._objects) == self._addresses

    def drop(self) -> None:
        """Let the keys' memory go: the store is closed."""
        self._works, self._entries, self._launches = [], [], None

    def run(self) -> None:
        """Launch on the caller's stream."""
        place = self._place
        stream = arrays.stream_for(self._objects, place.device)
        tail = place.tail(stream)
        order_behind(self._entries, place, stream)
        self._gpus.apply.run(self._works, stream, lambda: self._launched(stream))
        for entry in self._entries:
            entry.tail = tail
        tail.moved()

    def _launched(self, stream: Stream) -> Launches:
        if self._launches is None:
            self._launches = self._gpus.pushing(self._works, stream)
        return self._launches


def _addresses(objects: list[Any]) -> list[int]:
    return [arrays.address_of(one) for one in objects]
