"""Arrays on GPUs in a store on servers: summed where they lie, brought to the host to be sent, and back.

Work goes to the caller's streams. The host waits for a sum that goes down, since it is sent from there; what
comes up is copied on the stream that was the caller's at the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ....devices import arrays, driver
from ....devices.arrays import DeviceView
from ....devices.memory import host_copy
from ....devices.streams import Stream, order
from ....errors import ArrayError
from ....settings.options import StoreConfig
from ...device.arguments import Streams
from ...device.backend import DeviceBackend
from ...entry import Array, check_dtype, check_shape
from .key_directory import DistKey


class GpuTransfer:
    """The arrays on GPUs of one worker's calls."""

    def __init__(self, config: StoreConfig) -> None:
        self._driver = driver.get()
        self._config = config
        #: A store of this process alone: it sums the values of one push.
        self._sums: DeviceBackend | None = None

    # ---------------------------------------------------------------------------------------------- down

    def fetched(self, value: Any, what: str) -> Array:
        """Copy one array to the host, and wait until it is there."""
        streams = Streams([value])
        stream = streams.of(_device(value, what))
        seen = arrays.view(value, what, stream)
        order(self._driver, seen.producer, stream)
        if not seen.contiguous:
            seen = arrays.gathered(seen, what, stream)
        array = np.empty(seen.shape, seen.dtype)
        host_copy(self._driver, seen.address, array, stream.handle, seen.device)
        return array

    def total(self, key: DistKey, values: list[Any]) -> Array:
        """Sum values where they lie, and bring the sum to the host."""
        what = f"value of key {key.key!r}"
        arrays.check_all_on_devices(values, key.key)
        if len(values) == 1:
            found = self.fetched(values[0], what)
            check_dtype(key, found.dtype)
            check_shape(key, found, "value")
            return found
        if self._sums is None:
            self._sums = DeviceBackend(self._config)
        if key.key not in self._sums.key_templates():
            self._sums.init([(key.key, [np.zeros(key.shape, key.dtype)])])
        self._sums.push([(key.key, values)])
        return np.array(self._sums.fetch(key.key))

    # ------------------------------------------------------------------------------------------------ up

    def target(self, key: DistKey, out: Any) -> Callable[[Array], None]:
        """Check an out; return what copies a host array to it, on the stream that is the caller's now."""
        what = f"out of key {key.key!r}"
        stream = Streams([out]).of(_device(out, what))
        seen = arrays.view(out, what, stream, write=True)
        check_shape(key, seen, "out")  # type: ignore[arg-type]
        if seen.contiguous:
            return partial(self._send, seen, stream, None)
        room, bring = arrays.room_for(seen, what, stream)
        return partial(self._send, room, stream, bring)

    def _send(self, view: DeviceView, stream: Stream, bring: Callable[[], None] | None, value: Array) -> None:
        if not view.nbytes:
            return
        content = value if value.dtype == view.dtype else value.astype(view.dtype)
        order(self._driver, view.producer, stream)
        self._driver.copy(view.address, content.ctypes.data, view.nbytes, stream.handle, view.device)
        self._driver.synchronize(stream.handle, view.device)  # the host's memory is used again
        if bring is not None:
            bring()
        if view.producer is not None:
            order(self._driver, stream, view.producer)

    # ---------------------------------------------------------------------------------------------- both

    def close(self) -> None:
        """Give the GPUs' memory back."""
        sums, self._sums = self._sums, None
        if sums is not None:
            sums.close()


def _device(obj: Any, what: str) -> int:
    device = arrays.device_of(obj)
    if device is None:
        raise ArrayError(f"{what} lies on the host")
    return device
