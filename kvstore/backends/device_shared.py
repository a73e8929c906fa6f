"""The store between processes, with arrays on GPUs.

Each worker sums its own arrays on its GPU; the sum comes down to host memory, to that which the workers share
where the result comes back to it, and results go up. Rounds, waits and updates are those of `SharedBackend`.
Nothing of CUDA is imported before an array of a GPU has been met.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import numpy as np

from ..config import StoreConfig
from ..devices import arrays
from ..devices.arrays import DeviceView
from ..errors import ArrayError, ShapeError
from ..grouping import Group, Key
from ..kernels import cuda
from .device_calls import Streams
from .entry import Array
from .shared import Finish, SharedBackend

log = logging.getLogger("kvstore.device")

Target = tuple[DeviceView, Array]


class Way(NamedTuple):
    """A call by way of host memory: groups as the store takes them, and arrays to be filled from them."""

    groups: list[Group]
    targets: list[Target]


class DeviceSharedBackend(SharedBackend):
    """See `kvstore.backends.protocol.Backend`."""

    def __init__(self, config: StoreConfig) -> None:
        super().__init__(config)
        self._places: dict[int, Any] = {}
        # By key: memory that the workers share, for what is pushed and comes back; and this process's own.
        self._common: dict[Key, Array] = {}
        self._own: dict[Key, Array] = {}

    # ------------------------------------------------------------------------------------------ verbs

    def init(self, groups: list[Group]) -> None:
        """Take the value of the lowest rank, and wait until it is there."""
        if _any_on_gpu(groups):
            streams = _streams(groups)
            groups = [
                (key, [self._copied(key, value, streams) for value in values]) for key, values in groups
            ]
        super().init(groups)

    def start_push(self, groups: list[Group]) -> Finish:
        """Sum on the GPU, copy down, arrive."""
        if _any_on_gpu(groups):
            groups = self._brought_down(groups, self._own, _streams(groups)).groups
        return super().start_push(groups)

    def start_pull(self, groups: list[Group], ignore_sparse: bool) -> Finish:
        """Note which rounds are meant; what is left to do is to wait, and to copy up."""
        if not _any_on_gpu(groups):
            return super().start_pull(groups, ignore_sparse)
        streams = _streams(groups)
        way = self._replaced(groups, streams)
        return self._then_up(super().start_pull(way.groups, ignore_sparse), way.targets, streams)

    def start_pushpull(self, groups: list[Group], outs: list[Group] | None) -> Finish:
        """Sum on the GPU and arrive; what is left to do is to work, to wait, and to copy up."""
        if not _any_on_gpu(groups) and not _any_on_gpu(outs or []):
            return super().start_pushpull(groups, outs)
        streams = _streams([*groups, *(outs or [])])
        down = self._brought_down(groups, self._common, streams, back=outs is None)
        if outs is None:
            return self._then_up(super().start_pushpull(down.groups, None), down.targets, streams)
        up = self._replaced(outs, streams)
        return self._then_up(super().start_pushpull(down.groups, up.groups), up.targets, streams)

    def close(self) -> None:
        """Leave the job."""
        for place in self._places.values():
            place.close()
        self._places.clear()
        self._common.clear()
        self._own.clear()
        super().close()

    # ------------------------------------------------------------------------------------------- down

    def _brought_down(
        self, groups: list[Group], homes: dict[Key, Array], streams: Streams, back: bool = False
    ) -> Way:
        """Put the sum of a key's values on a GPU in place of these."""
        found: list[Group] = []
        targets: list[Target] = []
        for key, values in groups:
            on_gpu = [arrays.device_of(value) is not None for value in values]
            if not any(on_gpu):
                found.append((key, values))
                continue
            if not all(on_gpu):
                raise ArrayError(
                    f"the values of key {key!r} lie on the host and on a GPU; give arrays of one kind"
                )
            seen = [self._seen(key, value, streams, write=back) for value in values]
            home = self._home(key, seen[0], homes)
            self._sum_to(home, seen, streams)
            found.append((key, [home]))
            targets += [(view, home) for view in seen] if back else []
        return Way(found, targets)

    def _seen(self, key: Key, value: Any, streams: Streams, write: bool = False) -> DeviceView:
        device = arrays.device_of(value)
        if device is None:
            raise ArrayError(f"value of key {key!r} lies on the host")
        view = arrays.view(value, f"value of key {key!r}", streams.of(device), write)
        if not view.contiguous and not write:
            view = arrays.gathered(view, f"value of key {key!r}", streams.of(device))
        if not view.contiguous:
            raise ArrayError(f"value of key {key!r} is not contiguous, and is to be written; pass an out")
        return view

    def _home(self, key: Key, like: DeviceView, homes: dict[Key, Array]) -> Array:
        """Host memory for a key's sum, used again from call to call."""
        home = homes.get(key)
        if home is None or home.shape != like.shape or home.dtype != like.dtype:
            handle = self._keys.find(key) if homes is self._common else None
            fits = handle is not None and (handle.shape, handle.dtype) == (like.shape, like.dtype)
            home = homes[key] = self.empty(key) if fits else np.empty(like.shape, like.dtype)
        return home

    def _sum_to(self, home: Array, values: list[DeviceView], streams: Streams) -> None:
        """Add on the first value's GPU, and copy to the host, which waits."""
        from .device_calls import Call

        if any((v.shape, v.dtype) != (home.shape, home.dtype) for v in values):
            raise ShapeError("the values of a key on a GPU differ in shape or type")
        place, nbytes = self._place(values[0].device), home.nbytes
        stream = streams.of(place.device)
        call = Call(place, stream, streams)
        sources = tuple(call.reach(value) for value in values)
        call.begin([])
        at = sources[0]
        if len(sources) > 1:
            at = call.lend(nbytes)
            _launch_sum(place, stream, home.dtype.name, cuda.Row(home.size, srcs=sources, dst=at))
        if nbytes:
            place.driver.copy(home.ctypes.data, at, nbytes, stream.handle, place.device)
        call.end([])
        place.driver.synchronize(stream.handle, place.device)

    def _copied(self, key: Key, value: Any, streams: Streams) -> Any:
        if arrays.device_of(value) is None:
            return value
        seen = self._seen(key, value, streams)
        home = np.empty(seen.shape, seen.dtype)
        self._sum_to(home, [seen], streams)
        return home

    def _place(self, device: int) -> Any:
        from ..devices import driver
        from ..devices.place import Place

        place = self._places.get(device)
        if place is None:
            if not self._places:
                log.info("worker %d: GPU arrays go to other workers by way of host memory", self.rank)
            place = self._places[device] = Place(driver.get(), device)
        return place

    # --------------------------------------------------------------------------------------------- up

    def _replaced(self, outs: list[Group], streams: Streams) -> Way:
        """Put host memory in place of outs on GPUs; one for each key."""
        found: list[Group] = []
        targets: list[Target] = []
        for key, own in outs:
            there = [out for out in own if arrays.device_of(out) is not None]
            here = [out for out in own if arrays.device_of(out) is None]
            seen = [self._out(key, out, streams) for out in there]
            for dtype in dict.fromkeys(view.dtype for view in seen):
                alike = [view for view in seen if view.dtype == dtype]
                home = np.empty(alike[0].shape, dtype)
                if any(view.shape != home.shape for view in alike):
                    raise ShapeError(f"outs of key {key!r} differ in shape")
                here.append(home)
                targets += [(view, home) for view in alike]
            found.append((key, here))
        return Way(found, targets)

    def _out(self, key: Key, out: Any, streams: Streams) -> DeviceView:
        device = arrays.device_of(out)
        view = arrays.view(out, f"out of key {key!r}", streams.of(device or 0), write=True)
        if not view.contiguous:
            raise ArrayError(f"out of key {key!r} is not contiguous; between processes outs on GPUs must be")
        return view

    def _then_up(self, finish: Finish, targets: list[Target], streams: Streams) -> Finish:
        """Finish, then copy to the GPUs; the host memory is free again when that is done."""
        used = {view.device: (self._place(view.device), streams.of(view.device)) for view, _ in targets}

        def finished() -> None:
            finish()
            for view, home in targets:
                place, stream = used[view.device]
                if home.nbytes:
                    place.driver.copy(view.address, home.ctypes.data, home.nbytes, stream.handle, view.device)
            for device, (place, stream) in used.items():
                place.driver.synchronize(stream.handle, device)

        return finished


def _launch_sum(place: Any, stream: Any, dtype: str, row: cuda.Row) -> None:
    from .device_launches import Launches

    launches = Launches(place)
    launches.add(cuda.choose("sum", dtype, len(row.srcs)), [row])
    launches.run(stream)


def _any_on_gpu(groups: list[Group]) -> bool:
    return any(arrays.any_on_device(values) for _, values in groups)


def _streams(groups: list[Group]) -> Streams:
    return Streams(value for _, values in groups for value in values)
