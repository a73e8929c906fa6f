"""Sums over the GPUs of several processes: each reads the pushed values of the others, by CUDA IPC.

A round of such a key is counted in the region as any other, but the pushed values stay in GPU memory: in
slots that the other workers have opened. A worker arrives when its slot is written. When all have arrived,
each worker sums all slots, in the order of the ranks, into its own value and outs.
docs/decisions/0011-cuda-ipc.md says when this method is used, and why no worker reads a slot that is being
overwritten.
"""

from __future__ import annotations

import contextlib
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np

from ....arrays.grouping import Key
from ....devices.arrays import DeviceView
from ....devices.driver import CudaDriver
from ....devices.gpu_context import GpuContext
from ....devices.memory import host_copy, may_free
from ....devices.streams import DeviceStream, order_streams
from ....errors import KVStoreError
from ....kernels import cpu
from ...device.arguments import OutTarget
from ..native import _shared as shm
from .keys import IpcKey
from .launches import GpuSums, TypedRow
from .memory import MemoryExports, MemoryImports
from .table import OFFERED, READY, REFUSED, IpcTable

log = logging.getLogger("kvstore.shared")

#: Seconds that `close` waits for the other workers to close this worker's memory.
_PATIENCE = 5.0
_PAUSE = 0.0005

Handle = shm.Handle


class PushedOnGpu(list[tuple[DeviceView, DeviceStream]]):
    """Values on a GPU that other workers read from a slot."""


class DeviceOutputs(NamedTuple):
    """Outs on the key's GPU and of its type."""

    handle: Handle
    targets: list[OutTarget]


class _GpuMemory(NamedTuple):
    place: GpuContext
    exports: MemoryExports
    sums: GpuSums


class IpcExchange:
    """The keys of one process that are summed on GPUs."""

    def __init__(self, job: shm.Job, driver: CudaDriver, rank: int, wanted: bool) -> None:
        self._job, self._driver, self._rank, self._size = job, driver, rank, job.size
        self._keys: dict[Key, IpcKey] = {}
        self._gpus: dict[int, _GpuMemory] = {}
        self._imports = MemoryImports(driver)
        self._lock = threading.RLock()  # operations in the background end in other threads
        #: Why CUDA IPC is not used; None if it may be.
        self.refusal: str | None = self._not_wanted(wanted)
        self._said = False
        #: Called when it is decided whether CUDA IPC is used, and if that ends for new keys.
        self.on_decision: Callable[[], None] = lambda: None
        _sweep_freed()

    def _not_wanted(self, wanted: bool) -> str | None:
        if not wanted:
            return "CUDA IPC is switched off (cuda_ipc=0)"
        if self._size == 1:
            return "there are no other workers"
        if self._job.continues_after_loss:
            return "CUDA IPC is not used with on_peer_loss='continue'"
        return None

    # ----------------------------------------------------------------------------------- agreement

    def accepts_values(self, handle: Handle, views: Sequence[DeviceView]) -> bool:
        """Return whether values of a key are pushed from GPU to GPU; offer the slots that this needs."""
        devices = {view.device for view in views}
        if len(devices) > 1 or not handle.nbytes or shm.mode(self._job) & 1:
            return False
        if len(self._job.members()) < self._size:
            return False
        with self._lock:
            key = self._keys.get(handle.key)
            if key is None:
                if self.refusal is not None:
                    return False
                key = self._offer_slots(handle, devices.pop())
            elif key.place.device not in devices:
                return False
            return key.agreed or (not key.hopeless and self._open_slots(key))

    def is_open(self, handle: Handle) -> bool:
        """Return whether other workers may push to a key from GPU to GPU, now or soon."""
        key = self._keys.get(handle.key)
        return key is not None and not key.hopeless

    def _offer_slots(self, handle: Handle, device: int) -> IpcKey:
        table = IpcTable(self._job, handle, self._size, self._rank)
        gpu = self._gpu_of(device)
        key = self._keys[handle.key] = IpcKey(handle, gpu.place, table, self._rank)
        try:
            key.offer_slots(gpu.exports)
        except (KVStoreError, MemoryError) as error:
            self._refuse_key(key, error)
        else:
            table.set_standing(OFFERED)
        return key

    def _gpu_of(self, device: int) -> _GpuMemory:
        gpu = self._gpus.get(device)
        if gpu is None:
            place = GpuContext(self._driver, device)
            exports = MemoryExports(self._driver, device, place.own)
            gpu = self._gpus[device] = _GpuMemory(place, exports, GpuSums(place))
        return gpu

    def _open_slots(self, key: IpcKey) -> bool:
        """Open the slots that the other workers offer, once all do; return True when all have."""
        standings = key.table.read_standings()
        if self.refusal is not None and standings[self._rank] == OFFERED:
            key.table.set_standing(REFUSED, self.refusal)
            key.hopeless = True
            return False
        if standings[self._rank] == OFFERED and key.table.begin_to_hold():
            try:
                key.open_all(self._size, self._imports)
            except (KVStoreError, MemoryError) as error:
                self._refuse_key(key, error)
            else:
                key.table.set_standing(READY)
            standings = key.table.read_standings()
        if REFUSED in standings:
            self._note_refusal(key, standings.index(REFUSED))
        elif all(standing == READY for standing in standings):
            key.agreed = True
            self._log_standing()
        return key.agreed

    def _refuse_key(self, key: IpcKey, error: Exception) -> None:
        key.table.set_standing(REFUSED, str(error))
        key.hopeless = True
        self.refusal = f"CUDA IPC is refused here: {error}"
        self._log_standing(again=True)

    def _note_refusal(self, key: IpcKey, worker: int) -> None:
        key.hopeless = True
        if self.refusal is None:
            why = key.table.refusal_reason(worker) or "it has left"
            self.refusal = f"CUDA IPC is refused to worker {worker}: {why}"
            self._log_standing(again=True)

    def _log_standing(self, again: bool = False) -> None:
        if again or not self._said:
            self._said = True
            self.on_decision()

    # ---------------------------------------------------------------------------------------------- push

    def push(self, pairs: Sequence[tuple[Handle, PushedOnGpu]]) -> None:
        """Write values to free slots, wait until they are written, and arrive."""
        with self._lock:
            slots = self._write_slots(pairs)
            keys = [self._keys[handle.key] for handle, _ in pairs]
            _finish_keys(keys)
            for key, (handle, _), slot in zip(keys, pairs, slots, strict=True):
                key.be_through()
                key.note_slot(slot)
                shm.arrive_on_gpu(handle)

    def wait_until_read(self, handle: Handle) -> None:
        """Before a push from the host, wait until this worker has read the slots of earlier rounds."""
        key = self._keys.get(handle.key)
        if key is not None and key.agreed:
            with self._lock:
                self._apply_last_round(key)
                _finish_keys([key])
                key.be_through()

    def _write_slots(self, pairs: Sequence[tuple[Handle, PushedOnGpu]]) -> list[int]:
        works: dict[tuple[int, int], tuple[DeviceStream, list[TypedRow]]] = {}
        slots = []
        for handle, values in pairs:
            key, stream = self._keys[handle.key], values[0][1]
            self._apply_last_round(key)
            slots.append(key.free_slot(self._gpu_of(stream.device).exports))
            row = key.put_row([view.address for view, _ in values], slots[-1])
            _, rows = works.setdefault((stream.device, stream.handle), (stream, []))
            rows.append((handle.dtype, row))
        self._run_sums(works)
        for stream, _ in works.values():
            self._gpu_of(stream.device).place.stream_cursor(stream).finish()
        return slots

    def _run_sums(self, works: dict[tuple[int, int], tuple[DeviceStream, list[TypedRow]]]) -> None:
        for stream, rows in works.values():
            self._gpu_of(stream.device).sums.run(rows, stream)

    # ------------------------------------------------------------------------------------------- results

    def is_agreed(self, handle: Handle) -> bool:
        """Return whether the value of a key may be on GPUs."""
        key = self._keys.get(handle.key)
        return key is not None and key.agreed

    def is_near(self, handle: Handle, view: DeviceView) -> bool:
        """Return whether the GPU of a key can write a result to an out."""
        return view.device == self._keys[handle.key].place.device and view.dtype == handle.dtype

    def deliver(self, outputs: Sequence[DeviceOutputs]) -> list[DeviceOutputs]:
        """Write outs of keys with complete rounds; return those that must be read from the region."""
        works: dict[tuple[int, int], tuple[DeviceStream, list[TypedRow]]] = {}
        done: list[tuple[IpcKey, int, DeviceOutputs]] = []
        with self._lock:
            for handle, targets in outputs:
                key, complete = self._keys[handle.key], handle.complete
                if not targets or not key.table.lies_on_gpus(complete):
                    continue
                stream = targets[0].stream
                key.hold_stream(stream)
                for target in targets:
                    order_streams(self._driver, target.view.producer, stream)
                row = self._result_address(key, complete, [target.view.address for target in targets])
                _, rows = works.setdefault((stream.device, stream.handle), (stream, []))
                rows.append((handle.dtype, row))
                done.append((key, complete, DeviceOutputs(handle, targets)))
            self._run_sums(works)
            for key, complete, one in done:
                key.applied = complete
                self._write_owners(key, one.targets)
            for stream, _ in works.values():
                self._gpu_of(stream.device).place.stream_cursor(stream).note_work()
        served = {one.handle.key for _, _, one in done}
        return [one for one in outputs if one.targets and one.handle.key not in served]

    def _result_address(self, key: IpcKey, complete: int, outs: list[int]) -> Any:
        return (
            key.copy_row(outs)
            if key.applied == complete
            else key.sum_row(self._round_sources(key, complete), outs)
        )

    def _round_sources(self, key: IpcKey, round: int) -> list[int]:
        return [key.source_address(worker, round, self._imports) for worker in range(self._size)]

    def _write_owners(self, key: IpcKey, targets: Sequence[OutTarget]) -> None:
        stream = targets[0].stream
        key.tail = key.place.stream_cursor(stream)
        held = [view for view, _, _ in targets if view.kind in ("any", "own")]
        for view, _, bring in targets:
            if bring is not None:
                bring()
            if view.producer is not None:
                order_streams(self._driver, stream, view.producer)
        if held:
            key.place.hold_references(held, stream)

    def _apply_last_round(self, key: IpcKey) -> None:
        """Sum the last complete round into the value, if that is not done: its slots will be overwritten."""
        key.through = complete = key.handle.complete
        if key.applied < complete and key.table.lies_on_gpus(complete):
            own = key.place.own
            key.hold_stream(own)
            row = key.sum_row(self._round_sources(key, complete), [])
            self._gpu_of(own.device).sums.run([(key.handle.dtype, row)], own)
            key.tail = key.place.stream_cursor(own)
            key.applied = complete

    # ------------------------------------------------------------------------------------ on the host

    def copy_to_region(self, handle: Handle) -> None:
        """Copy a value on GPUs to the region, too; every worker that does so writes the same bits."""
        key = self._keys.get(handle.key)
        if key is None:
            return
        with self._lock:
            complete = handle.complete
            if key.in_region == complete or not key.table.lies_on_gpus(complete):
                return
            self._apply_last_round(key)
            own = key.place.own
            key.hold_stream(own)
            host_copy(self._driver, key.value_address, handle.value(), own.handle, own.device)
            key.in_region = complete

    def note_overwritten(self, handle: Handle) -> None:
        """Record that the region holds a new value; the caller holds the key."""
        key = self._keys.get(handle.key)
        if key is not None:
            key.table.put_on_gpus(handle.complete, False)

    def carry_out(self, handle: Handle, on_gpu: list[int], ranks: list[int]) -> None:
        """Complete a round that this worker has opened and that has parts on GPUs."""
        if shm.mode(self._job) & 1:
            raise KVStoreError(
                "some workers had pushed to this round before the updater or optimizer was set; set it on "
                "all workers between the same two rounds"
            )
        with self._lock:
            key, round = self._keys[handle.key], handle.complete + 1
            together = len(on_gpu) == self._size
            if not together:
                self.copy_to_region(handle)  # if this round fails, the last value remains
                parts = shm.opened_sources(handle)
                arrays = [
                    self._fetch_address(key, worker, round) if part is None else part
                    for worker, part in zip(ranks, parts, strict=True)
                ]
                cpu.reduce([(arrays, handle.value(other=True), [])])
            key.table.put_on_gpus(round, together)
            shm.close_opened(handle, not together)

    def _fetch_address(self, key: IpcKey, worker: int, round: int) -> Any:
        array = np.empty(key.handle.shape, key.handle.dtype)
        own = key.place.own
        host_copy(
            self._driver, key.source_address(worker, round, self._imports), array, own.handle, own.device
        )
        return array

    # -------------------------------------------------------------------------------------------- the end

    def close(self) -> None:
        """Wait for this worker's work, and close and free all memory. A second call does nothing."""
        if not may_free(self._driver):
            return
        with self._lock:
            keys, self._keys = list(self._keys.values()), {}
            gpus, self._gpus = list(self._gpus.values()), {}
            for key in keys:
                with contextlib.suppress(InterruptedError):  # this worker is fenced
                    key.table.set_standing(REFUSED)
            _finish_keys(keys)
            for key in keys:
                key.close()
            for gpu in gpus:
                gpu.sums.close()
                gpu.place.close()
            self._imports.close()
            for key in keys:
                key.table.note_closed()
        _give_up([gpu.exports for gpu in gpus], _OtherWorkers(self._job, [key.table for key in keys]))


def _finish_keys(keys: Sequence[IpcKey]) -> None:
    """Wait until the work on the values of some keys is complete."""
    for tail in {key.tail for key in keys if key.tail is not None}:
        tail.finish()


class _OtherWorkers:
    """The workers that may have opened this worker's memory."""

    def __init__(self, job: shm.Job, tables: list[IpcTable]) -> None:
        self._job, self._tables = job, tables

    def are_through(self) -> bool:
        """Return whether no process has any of it open."""
        holders = {worker for table in self._tables for worker in table.memory_holders()}
        return all(_has_ended(self._job.pid(worker)) for worker in holders)


def _has_ended(pid: int) -> bool:
    """Return whether a process has ended; a stopped or fenced process may still exist."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([descriptor], [], [], 0)[0])
    finally:
        os.close(descriptor)


_kept: list[tuple[list[MemoryExports], _OtherWorkers]] = []


def _give_up(exports: list[MemoryExports], others: _OtherWorkers) -> None:
    """Free memory when the other workers have closed it; memory that stays open for long is freed later."""
    end = time.monotonic() + _PATIENCE
    while not others.are_through():
        if time.monotonic() > end:
            log.info("memory of GPUs that other workers have open is freed when they have closed it")
            _kept.append((exports, others))
            return
        time.sleep(_PAUSE)
    for one in exports:
        one.close()
    _sweep_freed()


def _sweep_freed() -> None:
    """Free memory that other workers had open when its store was closed, and have closed since."""
    for kept in [one for one in _kept if one[1].are_through()]:
        _kept.remove(kept)
        for exports in kept[0]:
            exports.close()
