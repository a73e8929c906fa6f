"""Keys on GPUs that NCCL sums: each GPU of a key's last push has a copy of its value.

A push first sums the values on each GPU, if there are several, and then over the GPUs and workers into the
copies. Results are copied from these to the outs. All work is enqueued on the streams of the caller.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

from ....arrays.grouping import Key
from ....devices import arrays
from ....devices.arrays import DeviceView
from ....devices.gpu_context import StreamBuffer
from ....devices.streams import DeviceStream
from ....errors import DTypeError
from ...device.arguments import (
    CallerStreams,
    GpuCallArrays,
    HostOut,
    KeyItem,
    moved_key,
    new_key,
    order_behind,
    view_out,
    view_value,
)
from ...device.keys import Array, DeviceKey
from ...device.launches import CallLaunches, KeyWork, are_apart
from ...device.updates import PlainSum
from ..backend import names_text
from .engine import NcclEngine
from .library import TYPES, CollectiveArray

#: GPU -> value there.
Copies = dict[int, DeviceKey]


class KeyOnGpu(NamedTuple):
    """One key of a call on one GPU: its copy, the addresses to sum, and pairs (GPU, address) to fill."""

    copy: DeviceKey
    srcs: tuple[int, ...]
    outs: tuple[tuple[int, int], ...]


class NcclKey:
    """A key, with a copy of its value on each GPU that has the current value.

    Attributes
    ----------
    copies : dict of int to DeviceKey
        By GPU; never empty.
    """

    __slots__ = ("copies", "key", "number")

    def __init__(self, first: DeviceKey) -> None:
        self.key, self.number = first.key, first.number
        self.copies: Copies = {first.device: first}

    @property
    def first(self) -> DeviceKey:
        """Return the copy on the first GPU."""
        return next(iter(self.copies.values()))


class NcclGpus:
    """The keys of a store on GPUs.

    Attributes
    ----------
    entries : dict
        Key -> `NcclKey`.
    """

    def __init__(self, engine: NcclEngine) -> None:
        self._engine, self.gpu_context = engine, engine.gpu_context
        self._driver = engine.driver
        self.entries: dict[Key, NcclKey] = {}

    # ------------------------------------------------------------------------------------- new values

    def checked_value(self, key: Key, value: Any, streams: CallerStreams) -> DeviceView:
        """Check the first value of a key."""
        what = f"value of key {key!r}"
        device = arrays.device_of(value)
        assert device is not None
        self._engine.register_gpu(device)
        seen = arrays.view_array(value, what, streams.stream_of(device))
        if seen.dtype.name not in TYPES:
            raise DTypeError(f"nccl does not sum {seen.dtype} (key {key!r}); it sums {', '.join(TYPES)}")
        return seen if seen.contiguous else arrays.gather_copy(seen, what, streams.stream_of(device))

    def add(self, new: Sequence[tuple[Key, int, DeviceView]], streams: CallerStreams) -> None:
        """Add keys, with copies of their values, or of rank 0's."""
        ordered = sorted(new, key=lambda one: str(one[0]))
        made = [new_key(self.gpu_context(one[2].device), *one, streams) for one in ordered]
        self._spread_copies(made, {copy.device: streams.stream_of(copy.device) for copy in made})
        self.entries.update({copy.key: NcclKey(copy) for copy in made})

    def pass_through(self, key: Key, number: int, value: Any) -> None:
        """Allocate memory for the sum of a key without a value, on the GPU of the first array of the sum."""
        streams = CallerStreams([value])
        seen = self.checked_value(key, value, streams)
        place = self.gpu_context(seen.device)
        tail = place.stream_cursor(streams.stream_of(seen.device))
        self.entries[key] = NcclKey(DeviceKey(place, key, number, seen.shape, seen.dtype, tail))

    def hold_until_complete(self) -> None:
        """Keep the memory of all keys until the running work on it is complete."""
        for entry in self.entries.values():
            for copy in entry.copies.values():
                copy.place.hold_references([copy], copy.tail.stream)

    def _spread_copies(self, copies: Sequence[DeviceKey], streams: dict[int, DeviceStream]) -> None:
        if self._engine.size > 1:
            jobs = [_copy_job(copy, copy.memory.address) for copy in copies]
            self._engine.spread_root(
                jobs, streams, f"the init of {names_text([repr(copy.key) for copy in copies])}"
            )

    def add_moved(self, key: Key, number: int, value: Array, device: int, stream: DeviceStream) -> NcclKey:
        """Add a key that moves from the host."""
        entry = self.entries[key] = NcclKey(moved_key(self.gpu_context(device), key, number, value, stream))
        return entry

    def assign(self, entry: NcclKey, value: Array) -> None:
        """Overwrite a value from the host; the value is the same on all workers."""
        copy = entry.first
        order_behind([copy], copy.place, copy.tail.stream)
        copy.upload_array(copy.memory, value, copy.tail.stream)
        copy.tail.note_work()
        entry.copies = {copy.device: copy}

    # -------------------------------------------------------------------------------------------- verbs

    def item(
        self, like: DeviceKey, values: Iterable[Any], outs: Iterable[Any], streams: CallerStreams
    ) -> KeyItem:
        """Check the arrays of a key."""
        seen = [view_value(like, value, streams) for value in values]
        for value in seen:
            if isinstance(value, DeviceView):
                self._engine.register_gpu(value.device)
        return KeyItem(like, seen, [view_out(like, out, streams) for out in outs])

    def push(self, items: Sequence[KeyItem], streams: CallerStreams) -> None:
        """Sum, store the sums, and fill the outs; keys without values are only pulled."""
        copies = {item.entry.key: self._copies_after(item) for item in items}
        calls = self._gpu_calls(items, copies, streams)
        try:
            parts = {device: self._gpu_parts(items, copies, device, call) for device, call in calls.items()}
            for device, call in calls.items():
                call.order_before([part.copy for part in parts[device]])
            self._sum_parts(parts, calls)
            for item in items:
                self.entries[item.entry.key].copies = copies[item.entry.key]
            self._wait_for_sums(items, calls)
            for device, call in calls.items():
                self._fill_outs(parts[device], call)
                call.order_after([part.copy for part in parts[device]])
        except BaseException:
            for call in calls.values():
                call.abandon()
            raise

    def pull(self, items: Sequence[KeyItem], streams: CallerStreams) -> None:
        """Fill the outs."""
        self.push([item._replace(values=[]) for item in items], streams)

    def _copies_after(self, item: KeyItem) -> Copies:
        """Return the copies of a key after the call, on each GPU that has a value of the call."""
        entry = self.entries[item.entry.key]
        if not item.values:
            return entry.copies
        devices = {value.device for value in item.values if isinstance(value, DeviceView)}
        return {
            device: entry.copies.get(device) or self._new_copy(entry, device)
            for device in sorted(devices or {entry.first.device})
        }

    def _new_copy(self, entry: NcclKey, device: int) -> DeviceKey:
        """Allocate a copy on another GPU."""
        first, place = entry.first, self.gpu_context(device)
        copy = DeviceKey(
            place, first.key, first.number, first.shape, first.dtype, place.stream_cursor(place.own)
        )
        copy.form = first.form
        return copy

    def _gpu_calls(
        self, items: Sequence[KeyItem], copies: dict[Key, Copies], streams: CallerStreams
    ) -> dict[int, GpuCallArrays]:
        """Return each GPU's part of a call, on the stream of the caller's arrays or of earlier work."""
        seen = [one for item in items for one in (*item.values, *item.outs)]
        here = {one.device for one in seen if isinstance(one, DeviceView)}
        found = {device: copy for own in copies.values() for device, copy in own.items()}
        return {
            device: GpuCallArrays(
                found[device].place,
                streams.stream_of(device) if device in here else found[device].tail.stream,
                streams,
            )
            for device in sorted(found)
        }

    @staticmethod
    def _gpu_parts(
        items: Sequence[KeyItem], copies: dict[Key, Copies], device: int, call: GpuCallArrays
    ) -> list[KeyOnGpu]:
        """Return the parts of one GPU.

        The first copy's GPU has the arrays that are on none of the copies' GPUs.
        """
        parts = []
        for item in items:
            own = copies[item.entry.key]
            if device not in own:
                continue
            copy, first = own[device], next(iter(own))
            srcs = tuple(
                call.source_address(copy, value)
                for value in item.values
                if _nearest_copy(value, own, first) == device
            )
            outs = []
            for out in item.outs:
                if _nearest_copy(out, own, first) != device:
                    continue
                address = call.out_address(copy, out)
                if address is not None and isinstance(out, DeviceView):
                    outs.append((out.device, address))
            parts.append(KeyOnGpu(copy, srcs, tuple(outs)))
        return parts

    # --------------------------------------------------------------------------------------------- sums

    def _sum_parts(self, parts: dict[int, list[KeyOnGpu]], calls: dict[int, GpuCallArrays]) -> None:
        """Sum on each GPU first, then over all of them; keys are in the same order on all workers."""
        jobs: dict[Key, list[CollectiveArray]] = {}
        loans: list[StreamBuffer] = []
        for device, call in calls.items():
            for part in _summed_on_gpu([part for part in parts[device] if part.srcs], call, loans):
                jobs.setdefault(part.copy.key, []).append(_copy_job(part.copy, part.srcs[0]))
        together: dict[tuple[int, ...], list[CollectiveArray]] = {}
        for key in sorted(jobs, key=str):
            together.setdefault(tuple(job.device for job in jobs[key]), []).extend(jobs[key])
        streams = {device: call.stream for device, call in calls.items()}
        what = f"the sum of {names_text([repr(key) for key in jobs])}"
        for devices, group in together.items():
            if self._engine.size > 1 or len(devices) > 1:
                self._engine.sum_on_gpus(group, streams, what)
            else:
                self._copy_single_parts(group, streams[devices[0]])
        for call in calls.values() if loans else ():
            call.place.stream_cursor(call.stream).note_work()
        for loan in loans:
            loan.end()

    def _copy_single_parts(self, jobs: Iterable[CollectiveArray], stream: DeviceStream) -> None:
        """Copy the value of a key with a single part."""
        for job in jobs:
            if job.numel and job.send != job.recv:
                self._driver.copy(job.recv, job.send, job.nbytes, stream.handle, job.device)

    # --------------------------------------------------------------------------------------------- outs

    def _wait_for_sums(self, items: Sequence[KeyItem], calls: dict[int, GpuCallArrays]) -> None:
        """Wait for the sums if a later step waits for the GPU: the driver's waits have no deadline."""
        slow = [
            item
            for item in items
            if any(isinstance(out, HostOut) or out.dtype != item.entry.dtype for out in item.outs)
        ]
        if slow:
            for call in calls.values():
                self._engine.wait_for_stream(
                    call.place.stream_cursor(call.stream), names_text([repr(i.entry.key) for i in slow])
                )

    def _fill_outs(self, parts: Sequence[KeyOnGpu], call: GpuCallArrays) -> None:
        device, handle = call.place.device, call.stream.handle
        for copy, _, outs in parts:
            for there, address in outs if copy.nbytes else ():
                if there == device:
                    self._driver.copy(address, copy.memory.address, copy.nbytes, handle, device)
                else:
                    pair = (there, address), (device, copy.memory.address)
                    self._driver.copy_between(*pair, copy.nbytes, handle, device)


def _copy_job(copy: DeviceKey, source: int) -> CollectiveArray:
    return CollectiveArray(copy.device, source, copy.memory.address, copy.numel, copy.type_name)


def _nearest_copy(array: Any, own: Copies, first: int) -> int:
    return array.device if isinstance(array, DeviceView) and array.device in own else first


def _summed_on_gpu(
    parts: Sequence[KeyOnGpu], call: GpuCallArrays, loans: list[StreamBuffer]
) -> list[KeyOnGpu]:
    """Sum several values of a GPU into memory of their own, so that the copy stays.

    Return one address for each part.
    """
    works = [KeyWork(part.copy, part.srcs, ()) for part in parts]
    if not are_apart(works):  # a value is the store's own memory, and this call writes to it
        works = [
            work._replace(srcs=tuple(call.staged_source(work.entry, source) for source in work.srcs))
            for work in works
        ]
    several = [work for work in works if len(work.srcs) > 1]
    sums = {work.entry.key: StreamBuffer(call.place, work.entry.nbytes, call.stream) for work in several}
    loans += sums.values()
    if several:
        launches = CallLaunches(call.place, [work.entry for work in several])
        PlainSum().add(launches, several, lambda work: sums[work.entry.key].address)
        launches.run(call.stream)
    return [
        KeyOnGpu(work.entry, (sums[work.entry.key].address,) if work.entry.key in sums else work.srcs, ())
        for work in works
    ]
