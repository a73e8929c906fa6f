"""Arrays on GPUs in the shared store: copied to the region before a round, and from it afterwards.

This general path always works. If the workers' GPUs can read each other's memory, sums without an optimizer
do not use it: see `ipc/exchange.py`.

In a round, the copies are arrays of the region like those of `KVStore.empty`: sums, updates, compression and
the death of a worker work as without a GPU. Copies run on the caller's streams. A worker arrives in a round
when its gradient is in the region; no host thread waits for a copy to a GPU.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ...arrays.grouping import Key
from ...devices import arrays, driver
from ...devices.arrays import DeviceView
from ...devices.streams import DeviceStream
from ..device.arguments import (
    CallerStreams,
    OutTarget,
    fetch_value,
    out_target,
    put_result,
    target_in,
    view_contiguous,
    writable_there,
)
from ..entry import Array, Deliver, check_dtype, check_shape
from ..outs import convert_out
from .ipc.exchange import DeviceOutputs, IpcExchange, PushedOnGpu
from .native import _shared as shm
from .staging_buffers import BufferLease, StagingBuffers

if TYPE_CHECKING:
    from .gpu_access import Dense

log = logging.getLogger("kvstore.shared")

Handle = shm.Handle


class GpuStaging:
    """The arrays on GPUs of one process's calls; see `gpu_access.NoStaging` for a process without any."""

    in_use = True

    def __init__(self, job: shm.Job, rank: int, ipc: bool) -> None:
        self._rank = rank
        self._driver = driver.get_driver()
        self._buffers = StagingBuffers(job, self._driver)
        #: Copies to the region in progress, for the current push.
        self._staged: dict[Key, list[BufferLease]] = {}
        #: Sums from GPU to GPU.
        self.ipc = IpcExchange(job, self._driver, rank, ipc)
        #: Whether this worker packs pushed values, which happens on the host.
        self.packs = False
        self.ipc.on_decision = self._say_what_came_of_it
        self._say_how()

    def _say_how(self) -> None:
        refusal = self._buffers.arena.refusal
        log.info(
            "worker %d copies arrays on GPUs through %s memory of the shared region: %s%s",
            self._rank,
            "page-locked" if refusal is None else "pageable",
            self.ipc.refusal or "CUDA IPC is tried with each key that all workers push from a GPU",
            "" if refusal is None else f"; pages cannot be locked ({refusal})",
        )

    def _say_what_came_of_it(self) -> None:
        if self.ipc.refusal is None:
            log.info("worker %d sums arrays on GPUs by CUDA IPC if no optimizer is set", self._rank)
        else:
            self._say_how()

    # ---------------------------------------------------------------------------------------------- down

    def copy_to_host(self, value: Any, what: str) -> Array:
        """Copy a value to the host, and wait until it is there."""
        return fetch_value(self._driver, value, what)

    def sources(self, handle: Handle, values: list[Any]) -> list[Any]:
        """Check the values of a key, and begin to copy them to the region, if needed."""
        arrays.check_all_on_devices(values, handle.key)
        what, streams = f"value of key {handle.key!r}", CallerStreams(values)
        seen = [view_contiguous(self._driver, value, what, streams) for value in values]
        for view, _ in seen:
            check_dtype(handle, view.dtype)
            check_shape(handle, view, "value")  # type: ignore[arg-type]
        if not self.packs and self.ipc.accepts_values(handle, [view for view, _ in seen]):
            return PushedOnGpu(seen)
        self._staged[handle.key] = [self._brought_down(handle, view, stream) for view, stream in seen]
        return [lease.array for lease in self._staged[handle.key]]

    def _brought_down(self, handle: Handle, view: DeviceView, stream: DeviceStream) -> BufferLease:
        lease = self._buffers.for_copy(handle, stream)
        if view.nbytes:
            to = lease.array.ctypes.data
            self._driver.copy(to, view.address, view.nbytes, stream.handle, view.device)
            lease.buffer.note_copy(stream, held=view)
        return lease

    def wait_staged(self, handle: Handle) -> None:
        """Wait until the values of a key are in the region; then the worker arrives in its next round."""
        for lease in self._staged.pop(handle.key, ()):
            lease.buffer.wait_until_idle()
            lease.buffer.held = None
            lease.buffer.round = handle.arrived + 1
        self.ipc.wait_until_read(handle)

    def discard_staged(self) -> None:
        """Forget the copies of a push that did not arrive."""
        self._staged.clear()

    # ------------------------------------------------------------------------------------------------ up

    def check_out(self, handle: Handle, out: Any) -> None:
        """Check that a key can be pulled into an array."""
        writable_there(handle, out, CallerStreams([out]))

    def outs(
        self,
        handle: Handle,
        outs: list[Any],
        values: Sequence[Array],
        direct: Sequence[Array],
        value: Callable[[], Array],
        later: list[Deliver],
    ) -> list[Array]:
        """Check outs; return the host arrays that a round fills for them, and add later copies to `later`.

        The buffer of a value that the same call pushes is used, so that a sum can be made in place. `direct`
        are arrays of the host that the round fills; `value` returns the result in the store.
        """
        streams = CallerStreams(outs)
        targets = [out_target(handle, out, streams) for out in outs]
        return self._host_outs(handle, targets, values, direct, value, later)

    def device_outputs(self, handle: Handle, outs: list[Any]) -> tuple[DeviceOutputs, list[Any]]:
        """Check the outs that the key's own GPU can write, and return the others."""
        streams, targets, others = CallerStreams(outs), [], []
        for out in outs:
            if arrays.device_of(out) is None:
                others.append(out)
                continue
            view, stream = writable_there(handle, out, streams)
            if self.ipc.is_near(handle, view):
                targets.append(target_in(handle, view, stream))
            else:
                others.append(out)
        return DeviceOutputs(handle, targets), others

    def host_outs(self, left: DeviceOutputs, later: list[Deliver]) -> list[Array]:
        """Return the host arrays for outs that no GPU could write, as `outs` does."""
        return self._host_outs(left.handle, left.targets, (), (), left.handle.value, later)

    def _host_outs(
        self,
        handle: Handle,
        targets: list[OutTarget],
        values: Sequence[Array],
        direct: Sequence[Array],
        value: Callable[[], Array],
        later: list[Deliver],
    ) -> list[Array]:
        filled: list[Array] = []
        same = [one for one in targets if one.view.dtype == handle.dtype]
        if same:
            lease = self._is_pushed(handle, values) or self._buffers.for_host(handle, handle.dtype)
            filled = [lease.array]
            later += [partial(self._send_result, lease, one) for one in same]
        for one in targets:
            if one.view.dtype != handle.dtype:
                lease = self._buffers.for_host(handle, one.view.dtype)
                later.append(partial(convert_out, value, [*direct, *filled], lease.array))
                later.append(partial(self._send_result, lease, one))
        return filled

    def _is_pushed(self, handle: Handle, values: Sequence[Array]) -> BufferLease | None:
        staged = self._staged.get(handle.key)
        return staged[0] if staged and values and staged[0].array is values[0] else None

    def _send_result(self, lease: BufferLease, out: OutTarget) -> None:
        """Copy a result to an out on the caller's stream."""
        held = out.view if out.view.kind in ("any", "own") else None
        put_result(
            self._driver, lease.array.ctypes.data, out, partial(lease.buffer.note_copy, out.stream, held=held)
        )

    # ---------------------------------------------------------------------------------- from GPU to GPU

    def split_gpu(self, dense: Dense) -> tuple[Dense, Dense]:
        """Separate the pairs that are pushed from GPU to GPU from the others."""
        on_gpu = [pair for pair in dense if _stays_on_gpu(pair[1])]
        return on_gpu, [pair for pair in dense if not _stays_on_gpu(pair[1])] if on_gpu else dense

    def is_on_gpu(self, handle: Handle) -> bool:
        """Return whether the value of a key may be on GPUs."""
        return self.ipc.is_agreed(handle)

    def may_be_pushed_on_gpu(self, handle: Handle) -> bool:
        """Return whether other workers may push to a key from GPU to GPU."""
        return self.ipc.is_open(handle)

    def copy_to_region(self, handle: Handle) -> None:
        """Copy the value of a key to the region, if it is on GPUs."""
        self.ipc.copy_to_region(handle)

    def note_overwritten(self, handle: Handle) -> None:
        """Record that the region holds a new value of a key; this worker holds the key."""
        self.ipc.note_overwritten(handle)

    # ---------------------------------------------------------------------------------------------- both

    def close(self) -> None:
        """Wait for all copies, and free the memory. A second call does nothing."""
        self._staged.clear()
        try:
            self.ipc.close()
        finally:
            self._buffers.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # no caller is left to report to; `close` reports errors
            self.close()


def _stays_on_gpu(values: object) -> bool:
    return isinstance(values, PushedOnGpu)
