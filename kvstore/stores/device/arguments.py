"""The arrays of a call, checked, and made accessible to the kernels of one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...arrays.element_types import HALVES
from ...arrays.grouping import Key
from ...arrays.host import readable
from ...arrays.sparse import RowSparseArray
from ...devices import arrays
from ...devices.arrays import DeviceView
from ...devices.driver import Driver
from ...devices.gpu_context import GpuContext
from ...devices.memory import host_copy
from ...devices.streams import Stream, StreamCursor, order
from ...errors import CapabilityError
from ...kernels import cuda
from ..entry import Deliver, Entry, Keyed, check_dtype, check_shape, dense_out
from .keys import Array, DeviceKey
from .launches import Launches

#: Element types between which there are kernels.
_CASTS = {frozenset(("float32", half)) for half in HALVES}


class Streams:
    """The stream on which the caller works, for each GPU of a call."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._objects = list(objects)
        self._known: dict[int, Stream] = {}

    def of(self, device: int) -> Stream:
        """Return the caller's stream on a GPU, which is looked up once."""
        stream = self._known.get(device)
        if stream is None:
            stream = self._known[device] = arrays.stream_for(self._objects, device)
        return stream


class HostOut(NamedTuple):
    """An out on the host, and a function that copies its contents back if it is a buffer."""

    array: Array
    deliver: Deliver | None


class Item(NamedTuple):
    """One key of a call, with its arrays checked and none of them touched."""

    entry: DeviceKey
    values: list[DeviceView | Array]
    outs: list[DeviceView | HostOut]


def seen_value(entry: DeviceKey | Entry, value: Any, streams: Streams) -> DeviceView | Array:
    """Check a value that is pushed to a key on a GPU, or to a key that will move there."""
    what = f"value of key {entry.key!r}"
    if isinstance(value, RowSparseArray):
        place = f"cuda:{entry.device}" if isinstance(entry, DeviceKey) else "the host"
        raise CapabilityError(
            f"{what} is row-sparse, and the key is on {place}; row-sparse keys and values stay on the host"
        )
    device = arrays.device_of(value)
    found = readable(value, what) if device is None else arrays.view(value, what, streams.of(device))
    check_dtype(entry, found.dtype)
    if found.shape != entry.shape:
        check_shape(entry, found, "value")  # type: ignore[arg-type]
    if isinstance(entry, DeviceKey) and entry.form is None and arrays.is_tensor(value):
        entry.form = value.dtype, value.shape
    return found


def seen_out(entry: DeviceKey, out: Any, streams: Streams) -> DeviceView | HostOut:
    """Check an out of a key on a GPU."""
    what = f"out of key {entry.key!r}"
    device = arrays.device_of(out)
    if device is None:
        return HostOut(*dense_out(entry, out))
    found = arrays.view(out, what, streams.of(device), write=True)
    if found.shape != entry.shape:
        check_shape(entry, found, "out")  # type: ignore[arg-type]
    return found


class Call:
    """Addresses for the kernels of one GPU, and the work before and after them."""

    def __init__(self, place: GpuContext, stream: Stream, streams: Streams) -> None:
        self.place, self.stream = place, stream
        self._streams = streams
        self._others: dict[tuple[int, int], Stream] = {}
        self._scratch: list[int] = []
        self._held: list[Any] = []
        self._later: list[Deliver] = []
        #: Whether the same arrays give the same addresses, without work before and after.
        self.plain = True

    @property
    def alone(self) -> bool:
        """Return whether all arrays belong to the stream."""
        return not self._others

    # ---------------------------------------------------------------------------------- before the work

    def source(self, entry: DeviceKey, value: DeviceView | Array) -> int:
        """Return the address of a value, or of a copy of it."""
        if isinstance(value, np.ndarray):
            return self._brought_up(value)
        self.order_with(value)
        if not value.contiguous:
            self.plain = False
            value = arrays.gathered(value, f"value of key {entry.key!r}", self._streams.of(value.device))
            self._held.append(value)
        if self.place.driver.reaches(self.place.device, value.device):
            return value.address
        return self._fetched(value)

    def _brought_up(self, array: Array) -> int:
        self.plain = False
        address = self._lend(array.nbytes)
        if array.nbytes:
            self.place.driver.copy(
                address, array.ctypes.data, array.nbytes, self.stream.handle, self.place.device
            )
        return address

    def _fetched(self, value: DeviceView) -> int:
        self.plain = False
        here, device = self._lend(value.nbytes), self.place.device
        if value.nbytes:
            order(self.place.driver, self._streams.of(value.device), self.stream)
            pair = (device, here), (value.device, value.address)
            self.place.driver.copy_between(*pair, value.nbytes, self.stream.handle, device)
        return here

    def _lend(self, nbytes: int) -> int:
        address = self.place.lend(nbytes, self.stream)
        self._scratch.append(address)
        return address

    def order_with(self, view: DeviceView) -> None:
        """Record the stream of the array's owner, if it is another one."""
        if view.device != self.place.device:
            self._note(self._streams.of(view.device))
        if view.producer is not None:
            self._note(view.producer)
        if view.kind in ("any", "jax"):
            self._held.append(view)
            self.plain = self.plain and view.kind != "jax"

    def _note(self, other: Stream) -> None:
        if (other.device, other.handle) != (self.stream.device, self.stream.handle):
            self._others[other.device, other.handle] = other

    def begin(self, entries: Iterable[DeviceKey]) -> None:
        """Let the stream wait for the arrays' owners, and for earlier work on these keys."""
        for other in self._others.values():
            order(self.place.driver, other, self.stream)
        order_behind(entries, self.place, self.stream)

    # -------------------------------------------------------------------------------------- outs, after

    def out(self, entry: DeviceKey, out: DeviceView | HostOut) -> int | None:
        """Return the address that the kernels write the result to; None if it is copied there afterwards."""
        if isinstance(out, HostOut):
            self._later.append(partial(self._download, entry, out))
            self.plain = False
            return None
        self.order_with(out)
        if not out.contiguous:
            self.plain = False
            name = f"out of key {entry.key!r}"
            out, bring = arrays.room_for(out, name, self._streams.of(out.device))
            self._held.append(out)
            inner = self.out(entry, out)
            self._later.append(bring)
            return inner
        if out.dtype != entry.dtype:
            self.plain = False
            self._later.append(lambda: self._convert(entry, out))
            return None
        if self.place.driver.reaches(self.place.device, out.device):
            return out.address
        self.plain = False
        self._later.append(lambda: self._send(entry.memory.address, out))
        return None

    def _download(self, entry: DeviceKey, out: HostOut) -> None:
        target = out.array
        same = target.dtype == entry.dtype
        buffer = target if same else np.empty(entry.shape, entry.dtype)
        host_copy(self.place.driver, entry.memory.address, buffer, self.stream.handle, self.place.device)
        if not same:
            _converted(buffer, target)
        if out.deliver is not None:
            out.deliver()

    def _convert(self, entry: DeviceKey, out: DeviceView) -> None:
        """Write the value in another element type: by a kernel, or, if there is none, on the host."""
        if frozenset((entry.dtype.name, out.dtype.name)) not in _CASTS:
            buffer = np.empty(entry.shape, entry.dtype)
            self._download(entry, HostOut(buffer, None))
            array = np.empty(entry.shape, out.dtype)
            _converted(buffer, array)
            self._send(self._brought_up(array), out)
            return
        here = self.place.driver.reaches(self.place.device, out.device)
        target = out.address if here else self._lend(out.nbytes)
        launches = Launches(self.place, [entry])
        spec = cuda.choose("cast", entry.dtype.name, target=out.dtype.name)
        launches.add(spec, [cuda.Row(entry.numel, srcs=(entry.memory.address,), dst=target)])
        launches.run(self.stream)
        if not here:
            self._send(target, out)

    def _send(self, source: int, out: DeviceView) -> None:
        if not out.nbytes:
            return
        driver, device, handle = self.place.driver, self.place.device, self.stream.handle
        if out.device == device:
            driver.copy(out.address, source, out.nbytes, handle, device)
        else:
            pair = (out.device, out.address), (device, source)
            driver.copy_between(*pair, out.nbytes, handle, device)

    def staged(self, entry: DeviceKey, address: int) -> int:
        """Copy a source that overlaps an out, so that it is read before the out is written."""
        copy = self._lend(entry.nbytes)
        self.place.driver.copy(copy, address, entry.nbytes, self.stream.handle, self.place.device)
        return copy

    def end(self, entries: Iterable[DeviceKey]) -> None:
        """Copy the results that no kernel writes, and let the arrays' owners wait for all work."""
        tail = self.place.tail(self.stream)
        leave_at(entries, tail)
        tail.moved()
        if self._later:  # a library's own work
            for other in self._others.values():
                tail.hold(other)
        for deliver in self._later:
            deliver()
        for address in self._scratch:
            self.place.take_back(address, self.stream)
        self._scratch.clear()
        tail.moved()
        for other in self._others.values():
            tail.hold(other)
        if self._held:
            self.place.keep(self._held, self.stream)

    def abandon(self) -> None:
        """Free the scratch memory after an error."""
        for address in self._scratch:
            self.place.take_back(address, self.stream)
        self._scratch.clear()


def order_behind(entries: Iterable[DeviceKey], place: GpuContext, stream: Stream) -> None:
    """Let a stream wait for the work of other streams on these keys."""
    mine = place.tail(stream)
    for tail in {entry.tail for entry in entries if entry.tail is not mine}:
        tail.hold(stream)


def leave_at(entries: Iterable[DeviceKey], tail: StreamCursor) -> None:
    """Record the place of the last work on these keys."""
    for entry in entries:
        if entry.tail is not tail:
            entry.tail = tail
            entry.place.moves += 1


def _converted(source: Array, target: Array) -> None:
    with np.errstate(all="ignore"):
        np.copyto(target, source, casting="unsafe")


# ------------------------------------------------------------------------------------------ whole values


def new_key(place: GpuContext, key: Key, number: int, value: DeviceView, streams: Streams) -> DeviceKey:
    """Make a key with a copy of its first value, which is on the GPU."""
    stream = streams.of(value.device)
    call = Call(place, stream, streams)
    entry = DeviceKey(place, key, number, value.shape, value.dtype, place.tail(stream))
    source = call.source(entry, value)
    call.begin([])
    if value.nbytes:
        place.driver.copy(entry.memory.address, source, value.nbytes, stream.handle, value.device)
    call.end([entry])
    return entry


def adopted_key(place: GpuContext, key: Key, number: int, value: Array, stream: Stream) -> DeviceKey:
    """Make a key from a key of the host."""
    entry = DeviceKey(place, key, number, value.shape, value.dtype, place.tail(stream))
    if value.nbytes:
        address = value.ctypes.data
        place.driver.copy(entry.memory.address, address, value.nbytes, stream.handle, place.device)
    entry.tail.moved()
    return entry


def copy_to(target: DeviceView, entry: DeviceKey, array: Any, streams: Streams) -> None:
    """Copy an array of the key's shape and type, from anywhere, to one on the key's GPU."""
    seen = seen_value(entry, array, streams)
    stream = streams.of(entry.device)
    call = Call(entry.place, stream, streams)
    source = call.source(entry, seen)
    call.order_with(target)
    call.begin([])
    if entry.nbytes:
        entry.place.driver.copy(target.address, source, entry.nbytes, stream.handle, entry.device)
    call.end([])


def send(value: Array, out: DeviceView, place: GpuContext, streams: Streams) -> None:
    """Copy a value of the host to an array on a GPU."""
    stream = streams.of(out.device)
    call = Call(place, stream, streams)
    target, bring = (out, None) if out.contiguous else arrays.room_for(out, "out", stream)
    call.order_with(target)
    call.begin([])
    array = np.ascontiguousarray(value)
    if out.dtype != value.dtype:
        array = np.empty(value.shape, out.dtype)
        _converted(value, array)
    if array.nbytes:
        place.driver.copy(target.address, array.ctypes.data, array.nbytes, stream.handle, out.device)
    call.end([])
    if bring is not None:
        bring()


# -------------------------------------------------------------------------- stores of several processes


class Target(NamedTuple):
    """A checked out on a GPU; `bring` is its library's copy to a strided one afterwards."""

    view: DeviceView
    stream: Stream
    bring: Deliver | None


def seen_there(driver: Driver, value: Any, what: str, streams: Streams) -> tuple[DeviceView, Stream]:
    """View a value on a GPU as contiguous memory that a stream may read."""
    stream = streams.of(arrays.device_of(value))  # type: ignore[arg-type]
    seen = arrays.view(value, what, stream)
    order(driver, seen.producer, stream)
    return (seen if seen.contiguous else arrays.gathered(seen, what, stream)), stream


def fetched(driver: Driver, value: Any, what: str) -> Array:
    """Copy one array to the host, and wait until it is there."""
    seen, stream = seen_there(driver, value, what, Streams([value]))
    array = np.empty(seen.shape, seen.dtype)
    host_copy(driver, seen.address, array, stream.handle, seen.device)
    return array


def writable_there(key: Keyed, out: Any, streams: Streams) -> tuple[DeviceView, Stream]:
    """View an out on a GPU that fits its key."""
    stream = streams.of(arrays.device_of(out))  # type: ignore[arg-type]
    seen = arrays.view(out, f"out of key {key.key!r}", stream, write=True)
    check_shape(key, seen, "out")  # type: ignore[arg-type]
    return seen, stream


def check_there(key: Keyed, outs: list[Any]) -> None:
    """Raise an error for outs on GPUs that do not fit a key."""
    streams = Streams(outs)
    for out in outs:
        writable_there(key, out, streams)


def target(key: Keyed, out: Any, streams: Streams) -> Target:
    """Check an out on a GPU, and return its target."""
    return target_in(key, *writable_there(key, out, streams))


def target_in(key: Keyed, seen: DeviceView, stream: Stream) -> Target:
    """Return the target of a checked out."""
    if seen.contiguous:
        return Target(seen, stream, None)
    room, bring = arrays.room_for(seen, f"out of key {key.key!r}", stream)
    return Target(room, stream, bring)


def put(driver: Driver, source: int, out: Target, copied: Callable[[], None]) -> None:
    """Copy a result of the host to an out, on its stream; `copied` is called after the copy."""
    view, stream, bring = out
    if not view.nbytes:
        return
    order(driver, view.producer, stream)
    driver.copy(view.address, source, view.nbytes, stream.handle, view.device)
    copied()
    if bring is not None:
        bring()
    if view.producer is not None:
        order(driver, stream, view.producer)
