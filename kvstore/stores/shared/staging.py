"""Arrays on GPUs in the shared store: copied to the region before a round, and from it afterwards.

That is the way that is always there. Where the workers' GPUs reach each other's memory, sums without an
optimizer leave it out: see `ipc/exchange.py`.

To a round, the copies are arrays of the region like those of `KVStore.empty`: sums, updates, compression and
the death of a worker are what they are without a GPU. Copies run on the caller's streams. A worker arrives in
a round when its gradient is down; what goes up is waited for by nobody on the host.
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
from ...devices.streams import Stream
from ..device.arguments import Streams, Target, fetched, put, seen_there, target, target_in, writable_there
from ..entry import Array, Deliver, check_dtype, check_shape
from ..outs import convert
from .ipc.exchange import DeviceOutputs, IpcExchange, PushedOnGpu
from .native import _shared as shm
from .staging_buffers import BufferLease, StagingBuffers

if TYPE_CHECKING:
    from .gpu_access import Dense

log = logging.getLogger("kvstore.shared")

Handle = shm.Handle


class GpuStaging:
    """The arrays on GPUs of one process's calls; see `gpu_access.NoStaging` for a process without."""

    in_use = True

    def __init__(self, job: shm.Job, rank: int, ipc: bool) -> None:
        self._rank = rank
        self._driver = driver.get()
        self._buffers = StagingBuffers(job, self._driver)
        #: Copies to the region that are under way for the push that is being made.
        self._staged: dict[Key, list[BufferLease]] = {}
        #: The way from GPU to GPU.
        self.ipc = IpcExchange(job, self._driver, rank, ipc)
        #: Whether this worker packs what it pushes, which is done on the host.
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
            log.info("worker %d sums arrays on GPUs by CUDA IPC, where no optimizer is set", self._rank)
        else:
            self._say_how()

    # ---------------------------------------------------------------------------------------------- down

    def copied(self, value: Any, what: str) -> Array:
        """Copy a value to the host, and wait until it is there."""
        return fetched(self._driver, value, what)

    def sources(self, handle: Handle, values: list[Any]) -> list[Any]:
        """Check what is pushed to a key, and begin to copy it to the region, if it must be."""
        arrays.check_all_on_devices(values, handle.key)
        what, streams = f"value of key {handle.key!r}", Streams(values)
        seen = [seen_there(self._driver, value, what, streams) for value in values]
        for view, _ in seen:
            check_dtype(handle, view.dtype)
            check_shape(handle, view, "value")  # type: ignore[arg-type]
        if not self.packs and self.ipc.takes(handle, [view for view, _ in seen]):
            return PushedOnGpu(seen)
        self._staged[handle.key] = [self._brought_down(handle, view, stream) for view, stream in seen]
        return [lease.array for lease in self._staged[handle.key]]

    def _brought_down(self, handle: Handle, view: DeviceView, stream: Stream) -> BufferLease:
        lease = self._buffers.for_copy(handle, stream)
        if view.nbytes:
            to = lease.array.ctypes.data
            self._driver.copy(to, view.address, view.nbytes, stream.handle, view.device)
            lease.buffer.mark(stream, held=view)
        return lease

    def wait_staged(self, handle: Handle) -> None:
        """Wait until the values of a key are in the region; it is about to arrive in its next round."""
        for lease in self._staged.pop(handle.key, ()):
            lease.buffer.settle()
            lease.buffer.held = None
            lease.buffer.round = handle.arrived + 1
        self.ipc.wait_until_read(handle)

    def discard_staged(self) -> None:
        """Forget what a push has left that did not come to its arrivals."""
        self._staged.clear()

    # ------------------------------------------------------------------------------------------------ up

    def check_out(self, handle: Handle, out: Any) -> None:
        """Make sure that a key can be pulled into an array."""
        writable_there(handle, out, Streams([out]))

    def outs(
        self,
        handle: Handle,
        outs: list[Any],
        values: Sequence[Array],
        direct: Sequence[Array],
        value: Callable[[], Array],
        later: list[Deliver],
    ) -> list[Array]:
        """Check outs; return what a round is to fill for them, and add to `later` how that gets there.

        The buffer of a value that is pushed in the same call is used, so that a sum may be made in place.
        `direct` are arrays of the host that the round fills; `value` gives what it has left in the store.
        """
        streams = Streams(outs)
        targets = [target(handle, out, streams) for out in outs]
        return self._filled(handle, targets, values, direct, value, later)

    def device_outputs(self, handle: Handle, outs: list[Any]) -> tuple[DeviceOutputs, list[Any]]:
        """Check outs that the key's own GPU may write, and leave the others."""
        streams, targets, others = Streams(outs), [], []
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
        """Return what the host is to fill for outs that no GPU could, as `outs` does."""
        return self._filled(left.handle, left.targets, (), (), left.handle.value, later)

    def _filled(
        self,
        handle: Handle,
        targets: list[Target],
        values: Sequence[Array],
        direct: Sequence[Array],
        value: Callable[[], Array],
        later: list[Deliver],
    ) -> list[Array]:
        filled: list[Array] = []
        same = [one for one in targets if one.view.dtype == handle.dtype]
        if same:
            lease = self._pushed(handle, values) or self._buffers.for_host(handle, handle.dtype)
            filled = [lease.array]
            later += [partial(self._send, lease, one) for one in same]
        for one in targets:
            if one.view.dtype != handle.dtype:
                lease = self._buffers.for_host(handle, one.view.dtype)
                later.append(partial(convert, value, [*direct, *filled], lease.array))
                later.append(partial(self._send, lease, one))
        return filled

    def _pushed(self, handle: Handle, values: Sequence[Array]) -> BufferLease | None:
        staged = self._staged.get(handle.key)
        return staged[0] if staged and values and staged[0].array is values[0] else None

    def _send(self, lease: BufferLease, out: Target) -> None:
        """Put the copy of a result to an out on the caller's stream."""
        held = out.view if out.view.kind in ("any", "own") else None
        put(self._driver, lease.array.ctypes.data, out, partial(lease.buffer.mark, out.stream, held=held))

    # ---------------------------------------------------------------------------------- from GPU to GPU

    def split(self, dense: Dense) -> tuple[Dense, Dense]:
        """Part what goes from GPU to GPU from the rest."""
        on_gpu = [pair for pair in dense if _stays_on_gpu(pair[1])]
        return on_gpu, [pair for pair in dense if not _stays_on_gpu(pair[1])] if on_gpu else dense

    def is_on_gpu(self, handle: Handle) -> bool:
        """Whether the value of a key may lie on GPUs."""
        return self.ipc.is_agreed(handle)

    def may_be_pushed_on_gpu(self, handle: Handle) -> bool:
        """Whether others may push to a key what lies on their GPUs."""
        return self.ipc.is_open(handle)

    def copy_to_region(self, handle: Handle) -> None:
        """See the value of a key in the region."""
        self.ipc.copy_to_region(handle)

    def overwritten(self, handle: Handle) -> None:
        """Note that the region gets another value of a key; this worker holds it."""
        self.ipc.overwritten(handle)

    # ---------------------------------------------------------------------------------------------- both

    def close(self) -> None:
        """Wait for all copies and give everything back. A second call does nothing."""
        self._staged.clear()
        try:
            self.ipc.close()
        finally:
            self._buffers.close()

    def __del__(self) -> None:
        with contextlib.suppress(Exception):  # nobody is left to tell; `close` was the place
            self.close()


def _stays_on_gpu(values: object) -> bool:
    return isinstance(values, PushedOnGpu)
