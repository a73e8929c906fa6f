"""The arrays of a call, checked, and made accessible to the kernels of one GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NamedTuple

import numpy as np

from ...arrays.element_types import HALVES
from ...arrays.grouping import Key
from ...arrays.host import readable_array
from ...arrays.sparse import RowSparseArray
from ...devices import arrays
from ...devices.arrays import DeviceView
from ...devices.driver import CudaDriver
from ...devices.gpu_context import GpuContext
from ...devices.memory import host_copy
from ...devices.streams import DeviceStream, StreamCursor, order_streams
from ...errors import CapabilityError
from ...kernels import cuda
from ..entry import Deliver, KeyDescription, StoredKey, check_dtype, check_shape, dense_out
from .keys import Array, DeviceKey
from .launches import CallLaunches

#: Element types between which there are kernels.
_CASTS = {frozenset(("float32", half)) for half in HALVES}


class CallerStreams:
    """The stream on which the caller works, for each GPU of a call."""

    def __init__(self, objects: Iterable[Any]) -> None:
        self._objects = list(objects)
        self._known: dict[int, DeviceStream] = {}

    def stream_of(self, device: int) -> DeviceStream:
        """Return the caller's stream on a GPU, which is looked up once."""
        stream = self._known.get(device)
        if stream is None:
            stream = self._known[device] = arrays.stream_for(self._objects, device)
        return stream


class HostOut(NamedTuple):
    """An out on the host, and a function that copies its contents back if it is a buffer."""

    array: Array
    deliver: Deliver | None


class KeyItem(NamedTuple):
    """One key of a call, with its arrays checked and none of them touched."""

    entry: DeviceKey
    values: list[DeviceView | Array]
    outs: list[DeviceView | HostOut]


def view_value(entry: DeviceKey | StoredKey, value: Any, streams: CallerStreams) -> DeviceView | Array:
    """Check a value that is pushed to a key on a GPU, or to a key that will move there."""
    what = f"value of key {entry.key!r}"
    if isinstance(value, RowSparseArray):
        place = f"cuda:{entry.device}" if isinstance(entry, DeviceKey) else "the host"
        raise CapabilityError(
            f"{what} is row-sparse, and the key is on {place}; row-sparse keys and values stay on the host"
        )
    device = arrays.device_of(value)
    found = (
        readable_array(value, what)
        if device is None
        else arrays.view_array(value, what, streams.stream_of(device))
    )
    check_dtype(entry, found.dtype)
    if found.shape != entry.shape:
        check_shape(entry, found, "value")  # type: ignore[arg-type]
    if isinstance(entry, DeviceKey) and entry.form is None and arrays.is_tensor(value):
        entry.form = value.dtype, value.shape
    return found


def view_out(entry: DeviceKey, out: Any, streams: CallerStreams) -> DeviceView | HostOut:
    """Check an out of a key on a GPU."""
    what = f"out of key {entry.key!r}"
    device = arrays.device_of(out)
    if device is None:
        return HostOut(*dense_out(entry, out))
    found = arrays.view_array(out, what, streams.stream_of(device), write=True)
    if found.shape != entry.shape:
        check_shape(entry, found, "out")  # type: ignore[arg-type]
    return found


class GpuCallArrays:
    """Addresses for the kernels of one GPU, and the work before and after them."""

    def __init__(self, place: GpuContext, stream: DeviceStream, streams: CallerStreams) -> None:
        self.place, self.stream = place, stream
        self._streams = streams
        self._others: dict[tuple[int, int], DeviceStream] = {}
        self._scratch: list[int] = []
        self._held: list[Any] = []
        self._later: list[Deliver] = []
        #: Whether the same arrays give the same addresses, without work before and after.
        self.plain = True

    @property
    def is_on_stream(self) -> bool:
        """Return whether all arrays belong to the stream."""
        return not self._others

    # ---------------------------------------------------------------------------------- before the work

    def source_address(self, entry: DeviceKey, value: DeviceView | Array) -> int:
        """Return the address of a value, or of a copy of it."""
        if isinstance(value, np.ndarray):
            return self._brought_up(value)
        self.order_with(value)
        if not value.contiguous:
            self.plain = False
            value = arrays.gather_copy(
                value, f"value of key {entry.key!r}", self._streams.stream_of(value.device)
            )
            self._held.append(value)
        if self.place.driver.reaches(self.place.device, value.device):
            return value.address
        return self._fetch_address(value)

    def _brought_up(self, array: Array) -> int:
        self.plain = False
        address = self._temporary_memory(array.nbytes)
        if array.nbytes:
            self.place.driver.copy(
                address, array.ctypes.data, array.nbytes, self.stream.handle, self.place.device
            )
        return address

    def _fetch_address(self, value: DeviceView) -> int:
        self.plain = False
        here, device = self._temporary_memory(value.nbytes), self.place.device
        if value.nbytes:
            order_streams(self.place.driver, self._streams.stream_of(value.device), self.stream)
            pair = (device, here), (value.device, value.address)
            self.place.driver.copy_between(*pair, value.nbytes, self.stream.handle, device)
        return here

    def _temporary_memory(self, nbytes: int) -> int:
        address = self.place.allocate_temporary(nbytes, self.stream)
        self._scratch.append(address)
        return address

    def order_with(self, view: DeviceView) -> None:
        """Record the stream of the array's owner, if it is another one."""
        if view.device != self.place.device:
            self._note_stream(self._streams.stream_of(view.device))
        if view.producer is not None:
            self._note_stream(view.producer)
        if view.kind in ("any", "jax"):
            self._held.append(view)
            self.plain = self.plain and view.kind != "jax"

    def _note_stream(self, other: DeviceStream) -> None:
        if (other.device, other.handle) != (self.stream.device, self.stream.handle):
            self._others[other.device, other.handle] = other

    def order_before(self, entries: Iterable[DeviceKey]) -> None:
        """Let the stream wait for the arrays' owners, and for earlier work on these keys."""
        for other in self._others.values():
            order_streams(self.place.driver, other, self.stream)
        order_behind(entries, self.place, self.stream)

    # -------------------------------------------------------------------------------------- outs, after

    def out_address(self, entry: DeviceKey, out: DeviceView | HostOut) -> int | None:
        """Return the address that the kernels write the result to; None if it is copied there afterwards."""
        if isinstance(out, HostOut):
            self._later.append(partial(self._download_out, entry, out))
            self.plain = False
            return None
        self.order_with(out)
        if not out.contiguous:
            self.plain = False
            name = f"out of key {entry.key!r}"
            out, bring = arrays.contiguous_out(out, name, self._streams.stream_of(out.device))
            self._held.append(out)
            inner = self.out_address(entry, out)
            self._later.append(bring)
            return inner
        if out.dtype != entry.dtype:
            self.plain = False
            self._later.append(lambda: self._convert_out(entry, out))
            return None
        if self.place.driver.reaches(self.place.device, out.device):
            return out.address
        self.plain = False
        self._later.append(lambda: self._send_out(entry.memory.address, out))
        return None

    def _download_out(self, entry: DeviceKey, out: HostOut) -> None:
        target = out.array
        same = target.dtype == entry.dtype
        buffer = target if same else np.empty(entry.shape, entry.dtype)
        host_copy(self.place.driver, entry.memory.address, buffer, self.stream.handle, self.place.device)
        if not same:
            _converted_copy(buffer, target)
        if out.deliver is not None:
            out.deliver()

    def _convert_out(self, entry: DeviceKey, out: DeviceView) -> None:
        """Write the value in another element type: by a kernel, or, if there is none, on the host."""
        if frozenset((entry.dtype.name, out.dtype.name)) not in _CASTS:
            buffer = np.empty(entry.shape, entry.dtype)
            self._download_out(entry, HostOut(buffer, None))
            array = np.empty(entry.shape, out.dtype)
            _converted_copy(buffer, array)
            self._send_out(self._brought_up(array), out)
            return
        here = self.place.driver.reaches(self.place.device, out.device)
        target = out.address if here else self._temporary_memory(out.nbytes)
        launches = CallLaunches(self.place, [entry])
        spec = cuda.choose_spec("cast", entry.dtype.name, target=out.dtype.name)
        launches.add(spec, [cuda.KernelRow(entry.numel, srcs=(entry.memory.address,), dst=target)])
        launches.run(self.stream)
        if not here:
            self._send_out(target, out)

    def _send_out(self, source: int, out: DeviceView) -> None:
        if not out.nbytes:
            return
        driver, device, handle = self.place.driver, self.place.device, self.stream.handle
        if out.device == device:
            driver.copy(out.address, source, out.nbytes, handle, device)
        else:
            pair = (out.device, out.address), (device, source)
            driver.copy_between(*pair, out.nbytes, handle, device)

    def staged_source(self, entry: DeviceKey, address: int) -> int:
        """Copy a source that overlaps an out, so that it is read before the out is written."""
        copy = self._temporary_memory(entry.nbytes)
        self.place.driver.copy(copy, address, entry.nbytes, self.stream.handle, self.place.device)
        return copy

    def order_after(self, entries: Iterable[DeviceKey]) -> None:
        """Copy the results that no kernel writes, and let the arrays' owners wait for all work."""
        tail = self.place.stream_cursor(self.stream)
        leave_at(entries, tail)
        tail.note_work()
        if self._later:  # a library's own work
            for other in self._others.values():
                tail.hold_stream(other)
        for deliver in self._later:
            deliver()
        for address in self._scratch:
            self.place.free_temporary(address, self.stream)
        self._scratch.clear()
        tail.note_work()
        for other in self._others.values():
            tail.hold_stream(other)
        if self._held:
            self.place.hold_references(self._held, self.stream)

    def abandon(self) -> None:
        """Free the scratch memory after an error."""
        for address in self._scratch:
            self.place.free_temporary(address, self.stream)
        self._scratch.clear()


def order_behind(entries: Iterable[DeviceKey], place: GpuContext, stream: DeviceStream) -> None:
    """Let a stream wait for the work of other streams on these keys."""
    mine = place.stream_cursor(stream)
    for tail in {entry.tail for entry in entries if entry.tail is not mine}:
        tail.hold_stream(stream)


def leave_at(entries: Iterable[DeviceKey], tail: StreamCursor) -> None:
    """Record the place of the last work on these keys."""
    for entry in entries:
        if entry.tail is not tail:
            entry.tail = tail
            entry.place.moves += 1


def _converted_copy(source: Array, target: Array) -> None:
    with np.errstate(all="ignore"):
        np.copyto(target, source, casting="unsafe")


# ------------------------------------------------------------------------------------------ whole values


def new_key(place: GpuContext, key: Key, number: int, value: DeviceView, streams: CallerStreams) -> DeviceKey:
    """Make a key with a copy of its first value, which is on the GPU."""
    stream = streams.stream_of(value.device)
    call = GpuCallArrays(place, stream, streams)
    entry = DeviceKey(place, key, number, value.shape, value.dtype, place.stream_cursor(stream))
    source = call.source_address(entry, value)
    call.order_before([])
    if value.nbytes:
        place.driver.copy(entry.memory.address, source, value.nbytes, stream.handle, value.device)
    call.order_after([entry])
    return entry


def moved_key(place: GpuContext, key: Key, number: int, value: Array, stream: DeviceStream) -> DeviceKey:
    """Make a key from a key of the host."""
    entry = DeviceKey(place, key, number, value.shape, value.dtype, place.stream_cursor(stream))
    if value.nbytes:
        address = value.ctypes.data
        place.driver.copy(entry.memory.address, address, value.nbytes, stream.handle, place.device)
    entry.tail.note_work()
    return entry


def copy_to(target: DeviceView, entry: DeviceKey, array: Any, streams: CallerStreams) -> None:
    """Copy an array of the key's shape and type, from anywhere, to one on the key's GPU."""
    seen = view_value(entry, array, streams)
    stream = streams.stream_of(entry.device)
    call = GpuCallArrays(entry.place, stream, streams)
    source = call.source_address(entry, seen)
    call.order_with(target)
    call.order_before([])
    if entry.nbytes:
        entry.place.driver.copy(target.address, source, entry.nbytes, stream.handle, entry.device)
    call.order_after([])


def send_value(value: Array, out: DeviceView, place: GpuContext, streams: CallerStreams) -> None:
    """Copy a value of the host to an array on a GPU."""
    stream = streams.stream_of(out.device)
    call = GpuCallArrays(place, stream, streams)
    target, bring = (out, None) if out.contiguous else arrays.contiguous_out(out, "out", stream)
    call.order_with(target)
    call.order_before([])
    array = np.ascontiguousarray(value)
    if out.dtype != value.dtype:
        array = np.empty(value.shape, out.dtype)
        _converted_copy(value, array)
    if array.nbytes:
        place.driver.copy(target.address, array.ctypes.data, array.nbytes, stream.handle, out.device)
    call.order_after([])
    if bring is not None:
        bring()


# -------------------------------------------------------------------------- stores of several processes


class OutTarget(NamedTuple):
    """A checked out on a GPU; `bring` is its library's copy to a strided one afterwards."""

    view: DeviceView
    stream: DeviceStream
    bring: Deliver | None


def view_contiguous(
    driver: CudaDriver, value: Any, what: str, streams: CallerStreams
) -> tuple[DeviceView, DeviceStream]:
    """View a value on a GPU as contiguous memory that a stream may read."""
    stream = streams.stream_of(arrays.device_of(value))  # type: ignore[arg-type]
    seen = arrays.view_array(value, what, stream)
    order_streams(driver, seen.producer, stream)
    return (seen if seen.contiguous else arrays.gather_copy(seen, what, stream)), stream


def fetch_value(driver: CudaDriver, value: Any, what: str) -> Array:
    """Copy one array to the host, and wait until it is there."""
    seen, stream = view_contiguous(driver, value, what, CallerStreams([value]))
    array = np.empty(seen.shape, seen.dtype)
    host_copy(driver, seen.address, array, stream.handle, seen.device)
    return array


def writable_there(key: KeyDescription, out: Any, streams: CallerStreams) -> tuple[DeviceView, DeviceStream]:
    """View an out on a GPU that fits its key."""
    stream = streams.stream_of(arrays.device_of(out))  # type: ignore[arg-type]
    seen = arrays.view_array(out, f"out of key {key.key!r}", stream, write=True)
    check_shape(key, seen, "out")  # type: ignore[arg-type]
    return seen, stream


def check_there(key: KeyDescription, outs: list[Any]) -> None:
    """Raise an error for outs on GPUs that do not fit a key."""
    streams = CallerStreams(outs)
    for out in outs:
        writable_there(key, out, streams)


def out_target(key: KeyDescription, out: Any, streams: CallerStreams) -> OutTarget:
    """Check an out on a GPU, and return its target."""
    return target_in(key, *writable_there(key, out, streams))


def target_in(key: KeyDescription, seen: DeviceView, stream: DeviceStream) -> OutTarget:
    """Return the target of a checked out."""
    if seen.contiguous:
        return OutTarget(seen, stream, None)
    room, bring = arrays.contiguous_out(seen, f"out of key {key.key!r}", stream)
    return OutTarget(room, stream, bring)


def put_result(driver: CudaDriver, source: int, out: OutTarget, copied: Callable[[], None]) -> None:
    """Copy a result of the host to an out, on its stream; `copied` is called after the copy."""
    view, stream, bring = out
    if not view.nbytes:
        return
    order_streams(driver, view.producer, stream)
    driver.copy(view.address, source, view.nbytes, stream.handle, view.device)
    copied()
    if bring is not None:
        bring()
    if view.producer is not None:
        order_streams(driver, stream, view.producer)
