"""Short paths for repeated calls: plans, and PyTorch tensors that were seen before."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from ...arrays.grouping import Group, Key
from ...arrays.tensors import whole_address
from ...devices import arrays, streams
from ...devices.streams import DeviceStream, StreamCursor
from ...observe.counters import MEMORY
from ..local.bound import BoundCall
from .arguments import leave_at, order_behind
from .keys import DeviceKey
from .launches import CallLaunches, KeyWork, are_apart

if TYPE_CHECKING:
    from .executor import GpuExecutor


class GpuCall(BoundCall):
    """A plan for keys of one GPU: each run only looks up the caller's stream.

    The arrays of `works` are on the GPU too and do not overlap; `objects` are these arrays, in the order of
    their addresses in `works`.
    """

    def __init__(self, gpus: GpuExecutor, works: list[KeyWork], objects: list[Any]) -> None:
        self._gpus, self._works, self._objects = gpus, works, objects
        self._version = gpus.version, gpus.apply.tag
        self._entries = [work.entry for work in works]
        self._place = self._entries[0].place
        self._speaker = arrays.stream_owner(objects)
        self._addresses = arrays.addresses_of(objects)
        gpus.bound.add(self)
        self._launches: CallLaunches | None = None
        #: End of the stream with the last work on all keys, and `GpuContext.moves` then.
        self._behind: tuple[StreamCursor | None, int] = None, 0
        self._account = _counter_arguments(works)

    def is_unchanged(self) -> bool:
        """Return whether updates and keys are the same."""
        return (self._gpus.version, self._gpus.apply.tag) == self._version

    def is_current(self) -> bool:
        """Return whether all arrays have the same addresses."""
        return self.is_unchanged() and arrays.addresses_of(self._objects) == self._addresses

    def release_keys(self) -> None:
        """Release the keys' memory: the store is closed."""
        self._works, self._entries, self._launches, self._behind = [], [], None, (None, 0)

    def run(self) -> None:
        """Launch on the caller's stream."""
        place, counters = self._place, self._gpus.counters
        begin = counters.begin()
        stream = arrays.stream_for(self._speaker, place.device)
        self._order_behind(stream)
        self._gpus.apply.run(self._works, stream, lambda: self._launch_works(stream))
        counters.passed(self._gpus.apply.phase, begin, MEMORY, *self._account)

    def _order_behind(self, stream: DeviceStream) -> None:
        """Order the stream behind earlier work on these keys; at once if all of it is on this stream."""
        place = self._place
        tail = place.stream_cursor(stream)
        if self._behind != (tail, place.moves):
            order_behind(self._entries, place, stream)
            leave_at(self._entries, tail)
            self._behind = tail, place.moves

    def _launch_works(self, stream: DeviceStream) -> CallLaunches:
        if self._launches is None:
            self._launches = self._gpus.push_launches(self._works, stream)
        return self._launches


def _counter_arguments(works: list[KeyWork]) -> tuple[int, ...]:
    """Return arguments of `Counters.passed`: bytes sent and received, rounds, and a single key's number."""
    sent = sum(work.entry.nbytes * len(work.srcs) for work in works)
    received = sum(work.entry.nbytes * len(work.outs) for work in works)
    about = (works[0].entry.slice.number,) if len(works) == 1 else ()
    return sent, received, len(works), *about


def push_tensors(gpus: GpuExecutor, groups: list[Group], outs: dict[Key, list[Any]]) -> bool:
    """Push PyTorch tensors to keys of one GPU that had such before, and write the outs, in few steps.

    False: nothing has happened, and the general path decides.
    """
    works = None if gpus.apply.by_key else _call_works(gpus, groups, outs)
    if not works or not (gpus.is_known(works) or _may_run(gpus, works)):
        return False
    place, begin = works[0].entry.place, gpus.counters.begin()
    stream = streams.of_torch(place.device)
    tail = place.stream_cursor(stream)
    order_behind([work.entry for work in works], place, stream)
    gpus.apply.run(works, stream, lambda: gpus.push_launches(works, stream))
    leave_at((work.entry for work in works), tail)
    gpus.counters.end_works(gpus.apply.phase, begin, MEMORY, works)
    return True


def _may_run(gpus: GpuExecutor, works: list[KeyWork]) -> bool:
    for work in works:
        gpus.apply.check(work.entry)
    return are_apart(works)


def _call_works(gpus: GpuExecutor, groups: list[Group], outs: dict[Key, list[Any]]) -> list[KeyWork] | None:
    """Return the works with the addresses of all arrays; None if an array does not fit."""
    if outs and outs.keys() != {key for key, _ in groups}:
        return None
    works: list[KeyWork] = []
    for key, values in groups:
        entry = gpus.entries.get(key)
        if entry is None or entry.form is None or not values:
            return None
        if works and works[0].entry.device != entry.device:
            return None
        srcs = _addresses_if(entry, values)
        filled = _addresses_if(entry, outs[key]) if outs else ()
        if srcs is None or filled is None:
            return None
        works.append(KeyWork(entry, srcs, filled))
    works.sort(key=lambda work: work.entry.number)
    return works


def _addresses_if(entry: DeviceKey, tensors: list[Any]) -> tuple[int, ...] | None:
    """Return the addresses of tensors, if all are contiguous and of the key's GPU, type and shape."""
    dtype, shape = entry.form  # type: ignore[misc]
    device = entry.device
    found = []
    for tensor in tensors:
        if not arrays.is_tensor(tensor) or tensor.dtype != dtype or tensor.shape != shape:
            return None
        if tensor.get_device() != device:
            return None
        address = whole_address(tensor, entry.nbytes, entry.dtype.itemsize)
        if address is None:
            return None
        found.append(address)
    return tuple(found)
