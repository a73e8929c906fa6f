"""Arrays on GPUs in a store on servers: summed on the GPU, copied to the host to be sent, and back.

Work is queued on the caller's streams. The host waits for a sum that is copied to it, because it sends it;
received values are copied on the stream that was the caller's at the call.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np

from ....devices import arrays, driver
from ....settings.options import StoreConfig
from ...device.arguments import CallerStreams, OutTarget, fetch_value, out_target, put_result
from ...device.backend import DeviceBackend
from ...entry import Array, check_dtype, check_shape
from .key_directory import DistKey


class GpuTransfer:
    """The arrays on GPUs of one worker's calls."""

    def __init__(self, config: StoreConfig) -> None:
        self._driver = driver.get_driver()
        self._config = config
        #: A store of this process alone: it sums the values of one push.
        self._sums: DeviceBackend | None = None

    # ------------------------------------------------------------------------------------ device to host

    def fetch_array(self, value: Any, what: str) -> Array:
        """Copy one array to the host, and wait until it is there."""
        return fetch_value(self._driver, value, what)

    def fetch_sum(self, key: DistKey, values: list[Any]) -> Array:
        """Sum values on their device, and copy the sum to the host."""
        what = f"value of key {key.key!r}"
        arrays.check_all_on_devices(values, key.key)
        if len(values) == 1:
            found = self.fetch_array(values[0], what)
            check_dtype(key, found.dtype)
            check_shape(key, found, "value")
            return found
        if self._sums is None:
            self._sums = DeviceBackend(self._config)
        if key.key not in self._sums.key_templates():
            self._sums.init([(key.key, [np.zeros(key.shape, key.dtype)])])
        self._sums.push([(key.key, values)])
        return np.array(self._sums.fetch(key.key))

    # ------------------------------------------------------------------------------------ host to device

    def make_target(self, key: DistKey, out: Any) -> Callable[[Array], None]:
        """Check an out; return a function that copies a host array to it, on the caller's present stream."""
        return partial(self._send_value, out_target(key, out, CallerStreams([out])))

    def _send_value(self, out: OutTarget, value: Array) -> None:
        view, stream, _ = out
        content = value if value.dtype == view.dtype else value.astype(view.dtype)
        # `put_result` must wait, because the host's memory is used again.
        wait = partial(self._driver.synchronize, stream.handle, view.device)
        put_result(self._driver, content.ctypes.data, out, wait)

    # ---------------------------------------------------------------------------------------------- both

    def close(self) -> None:
        """Release the memory of the GPUs."""
        sums, self._sums = self._sums, None
        if sums is not None:
            sums.close()
