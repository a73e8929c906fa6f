"""The keys of a store on GPUs, and the work on them."""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from ...arrays.grouping import Group, Key
from ...devices import arrays, driver
from ...devices.arrays import DeviceView
from ...devices.gpu_context import GpuContext
from ...devices.streams import DeviceStream
from ...errors import ArrayError
from ...observe.counters import MEMORY, MOVING
from ...observe.native._observe import Counters
from . import states
from .arguments import (
    CallerStreams,
    GpuCallArrays,
    KeyItem,
    moved_key,
    new_key,
    order_behind,
    view_out,
    view_value,
)
from .bound import GpuCall
from .keys import Array, DeviceKey
from .launches import CallLaunches, KeyWork, are_apart
from .updates import GpuUpdate, emit_outs

#: Calls with launches that are kept, to be reused for the same arrays.
_MOST_CALLS = 64


class GpuExecutor:
    """Keys on the GPUs of this process.

    Attributes
    ----------
    entries : dict
        Key -> `DeviceKey`.
    apply : GpuUpdate
        The update that a push applies.
    counters : Counters
        The store's counters. Times are those of this process, which does not wait for the GPU.
    """

    def __init__(self, apply: GpuUpdate, counters: Counters) -> None:
        self.driver = driver.get_driver()
        self.entries: dict[Key, DeviceKey] = {}
        self.apply, self.counters = apply, counters
        self._places: dict[int, GpuContext] = {}
        self._launches: OrderedDict[Any, CallLaunches] = OrderedDict()
        #: A number that changes when earlier launches become invalid.
        self.version = 0
        self.bound: weakref.WeakSet[GpuCall] = weakref.WeakSet()

    def gpu_context(self, device: int) -> GpuContext:
        """Return a GPU."""
        place = self._places.get(device)
        if place is None:
            place = self._places[device] = GpuContext(self.driver, device)
        return place

    def set_update(self, apply: GpuUpdate) -> None:
        """Use another update from now on."""
        self.apply = apply
        self.forget_launches()

    def forget_launches(self) -> None:
        """Forget launches for earlier states, parameters or keys."""
        self._launches.clear()
        self.version += 1

    # ------------------------------------------------------------------------------------- new values

    def checked_value(self, key: Key, value: Any, streams: CallerStreams) -> DeviceView:
        """Check the first value of a key."""
        what = f"value of key {key!r}"
        device = arrays.device_of(value)
        if device is None:
            raise ArrayError(f"{what} is on the host")
        seen = arrays.view_array(value, what, streams.stream_of(device))
        return seen if seen.contiguous else arrays.gather_copy(seen, what, streams.stream_of(device))

    def add(self, key: Key, number: int, value: DeviceView, streams: CallerStreams) -> None:
        """Add a key, with a copy of its value."""
        self.entries[key] = new_key(self.gpu_context(value.device), key, number, value, streams)

    def add_moved(self, key: Key, number: int, value: Array, device: int, stream: DeviceStream) -> DeviceKey:
        """Move a key from the host to a GPU."""
        entry = self.entries[key] = moved_key(self.gpu_context(device), key, number, value, stream)
        return entry

    def assign(self, entry: DeviceKey, value: Array) -> None:
        """Overwrite a value from the host."""
        stream = entry.tail.stream
        order_behind([entry], entry.place, stream)
        entry.upload_array(entry.memory, value, stream)
        updater = entry.owner
        if updater is not None and entry.dtype.itemsize == 2:
            states.update_master(updater, entry, value, stream)
        entry.tail.note_work()

    # ------------------------------------------------------------------------------------------- verbs

    def checked_items(
        self,
        groups: Iterable[Group],
        outs: dict[Key, list[Any]],
        streams: CallerStreams,
        entry_of: Callable[[Key], Any],
    ) -> list[KeyItem]:
        """Check all arrays of a call, without access to their contents."""
        items = []
        for key, values in groups:
            entry = entry_of(key)
            if values:
                self.apply.check(entry)
            items.append(
                KeyItem(
                    entry,
                    [view_value(entry, value, streams) for value in values],
                    [view_out(entry, out, streams) for out in outs.get(key, ())],
                )
            )
        return sorted(items, key=lambda item: item.entry.number)

    def push(self, items: list[KeyItem], streams: CallerStreams) -> None:
        """Sum, apply, and write the outs; keys without values are only pulled."""
        pushed = [item for item in items if item.values]
        batches = [[item] for item in pushed] if self.apply.by_key else _by_device(pushed)
        for batch in batches:
            self._run_works("push", batch, streams, self._apply_update)
        self.pull([item for item in items if not item.values], streams)

    def pull(self, items: list[KeyItem], streams: CallerStreams) -> None:
        """Fill the outs."""
        for batch in _by_device([item for item in items if item.outs]):
            self._run_works("pull", batch, streams, self._emit_outs)

    def _run_works(
        self,
        verb: str,
        items: list[KeyItem],
        streams: CallerStreams,
        run: Callable[[str, list[KeyWork], DeviceStream], None],
    ) -> None:
        place = items[0].entry.place
        on_gpu = [a for item in items for a in (*item.values, *item.outs) if isinstance(a, DeviceView)]
        stream = streams.stream_of(place.device) if on_gpu else items[0].entry.tail.stream
        call = GpuCallArrays(place, stream, streams)
        entries = [item.entry for item in items]
        begin = self.counters.begin()
        try:
            works = [_key_work(call, item) for item in items]
            call.order_before(entries)
            if are_apart(works):
                run(verb, works, stream)
            else:
                self._one_by_one(verb, call, works, run)
            call.order_after(entries)
        except BaseException:
            call.abandon()
            raise
        if verb == "push":
            self.counters.end_works(self.apply.phase, begin, MEMORY, items)
        else:
            self.counters.end_works(MOVING, begin, MEMORY, items, 0)

    def _one_by_one(
        self,
        verb: str,
        call: GpuCallArrays,
        works: list[KeyWork],
        run: Callable[[str, list[KeyWork], DeviceStream], None],
    ) -> None:
        """Process keys with overlapping arrays one by one; sources that an out overlaps are copied first."""
        for work in works:
            if not are_apart([work]):
                work = work._replace(
                    srcs=tuple(call.staged_source(work.entry, source) for source in work.srcs)
                )
            run(verb, [work], call.stream)

    def _apply_update(self, verb: str, works: list[KeyWork], stream: DeviceStream) -> None:
        self.apply.run(works, stream, lambda: self.push_launches(works, stream))

    def push_launches(self, works: Sequence[KeyWork], stream: DeviceStream) -> CallLaunches:
        """Return the launches that push these works."""
        verb = f"push {self.apply.tag}"
        return self._find_launches(verb, works, lambda launches: self.apply.build(launches, works, stream))

    def _emit_outs(self, verb: str, works: list[KeyWork], stream: DeviceStream) -> None:
        if any(work.outs for work in works):
            self._find_launches(verb, works, lambda launches: emit_outs(launches, works)).run(stream)

    def is_known(self, works: Sequence[KeyWork]) -> bool:
        """Return whether there are launches that push these works."""
        return _call_signature(f"push {self.apply.tag}", works) in self._launches

    def _find_launches(
        self, verb: str, works: Sequence[KeyWork], build: Callable[[CallLaunches], None]
    ) -> CallLaunches:
        """Return the launches of a call with these arrays, new or from before."""
        signature = _call_signature(verb, works)
        known = self._launches.get(signature)
        if known is not None:
            self._launches.move_to_end(signature)
            return known
        launches = CallLaunches(works[0].entry.place, [work.entry for work in works])
        build(launches)
        if len(self._launches) >= _MOST_CALLS:
            self._launches.popitem(last=False)
        self._launches[signature] = launches
        return launches

    def bind(self, items: list[KeyItem], streams: CallerStreams, objects: list[Any]) -> GpuCall | None:
        """Return the short path to push these items; None if there is none."""
        if self.apply.by_key or not items or not all(_is_short(item, items[0].entry) for item in items):
            return None
        place = items[0].entry.place
        call = GpuCallArrays(place, streams.stream_of(place.device), streams)
        works = [_key_work(call, item) for item in items]
        return (
            GpuCall(self, works, objects) if call.plain and call.is_on_stream and are_apart(works) else None
        )

    # -------------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Wait for the work in progress, and free all memory."""
        for call in list(self.bound):
            call.release_keys()
        self.forget_launches()
        self.entries.clear()
        for place in self._places.values():
            place.close()
        self._places.clear()


def _call_signature(verb: str, works: Sequence[KeyWork]) -> tuple[Any, ...]:
    return (verb, *((id(work.entry), work.srcs, work.outs) for work in works))


def _key_work(call: GpuCallArrays, item: KeyItem) -> KeyWork:
    entry = item.entry
    srcs = tuple(call.source_address(entry, value) for value in item.values)
    outs = (call.out_address(entry, out) for out in item.outs)
    return KeyWork(entry, srcs, tuple(out for out in outs if out is not None))


def _is_short(item: KeyItem, first: Any) -> bool:
    """Return whether an item needs only a kernel of the same GPU as the first."""
    if item.entry.device != first.device or not item.values:
        return False
    arrays_of = (*item.values, *item.outs)
    return all(isinstance(a, DeviceView) and a.contiguous and a.device == first.device for a in arrays_of)


def _by_device(items: list[KeyItem]) -> list[list[KeyItem]]:
    batches: dict[int, list[KeyItem]] = {}
    for item in items:
        batches.setdefault(item.entry.device, []).append(item)
    return list(batches.values())
