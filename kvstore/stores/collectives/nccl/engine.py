"""The engine NCCL: communicators of this process's GPUs, and sums on their streams.

A process that is alone in its job has communicators over several GPUs, one for each set of GPUs that is used
together. In a job of several processes each process has one GPU. Arrays of the host are copied to that GPU,
and the results are copied back.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ....devices.gpu_context import GpuContext, StreamBuffer
from ....devices.memory import host_copy
from ....devices.streams import DeviceStream, StreamCursor
from ....errors import ArrayError, ConfigError, KVStoreError, TimeoutError
from ....settings.options import StoreConfig
from ..backend import check_process, operation_name
from ..call_matching import call_digest, calls_match, mismatch_error
from ..engine import Finish, Item, do_nothing
from .library import MAX, SUM, CollectiveArray, NcclLibrary
from .rendezvous import NcclRendezvous, RendezvousAnswer, find_rendezvous
from .watchdog import NcclWatchdog

Array = npt.NDArray[Any]

_DTYPES = frozenset(("float32", "float64", "int8", "uint8", "int32", "int64"))


class NcclEngine:
    """See `collectives.engine.Collective`, for arrays of the host; and the operations for stores of GPUs.

    Raises
    ------
    MissingBackendError
        nccl4py, NCCL or a GPU is missing.
    ConfigError
        The processes of the job have no address to meet at.
    TimeoutError
        Not all processes arrived in time.
    KVStoreError
        This process is a fork of a process that uses NCCL.
    """

    name = "nccl"
    dtypes = _DTYPES
    compares = True
    #: Lock of all stores of this process: operations of several communicators must be on all GPUs in one
    #: order.
    _lock = threading.RLock()
    #: GPU -> end of the last operation there, of any store.
    _last: dict[int, StreamCursor] = {}  # noqa: RUF012 - shared on purpose

    def __init__(self, config: StoreConfig) -> None:
        check_process(self.name)
        self._library = NcclLibrary()
        self.driver = self._library.driver
        self._timeout = config.timeout
        self._places: dict[int, GpuContext] = {}
        self._teams: dict[tuple[int, ...], dict[int, Any]] = {}  # GPUs -> communicator of each
        self._closed: str | None = None
        self._watch: NcclWatchdog | None = None
        place = find_rendezvous()
        self.rank, self.size, self.local_rank = place.rank, place.size, place.local_rank
        self._device: int | None = None
        self._answer: RendezvousAnswer | None = None
        if self.size > 1:
            self._answer = NcclRendezvous(place, config).share_name(self._library.unique_id)
            self._watch = self._make_watchdog(self._answer)

    def _make_watchdog(self, answer: RendezvousAnswer) -> NcclWatchdog:
        others = [hello for hello in answer.everybody if hello.rank != self.rank]
        machine = answer.everybody[self.rank].machine
        return NcclWatchdog(
            self.driver, self.rank, self._timeout, others, machine, self._error_text, self._abort_running
        )

    # ------------------------------------------------------------------------------------------- places

    def gpu_context(self, device: int) -> GpuContext:
        """Return the place of a GPU."""
        place = self._places.get(device)
        if place is None:
            place = self._places[device] = GpuContext(self.driver, device)
        return place

    @property
    def device(self) -> int:
        """Return the process's GPU if the job has several processes, else its first GPU."""
        if self._device is None:
            self._device = self.local_rank % self.driver.count
        return self._device

    def register_gpu(self, device: int) -> None:
        """Register a GPU; in a job of several processes the first registered one is the process's.

        Raises
        ------
        ArrayError
            The process has another GPU already.
        """
        if self.size == 1:
            return
        if self._device is None:
            self._device = device
        if device != self._device:
            raise ArrayError(
                f"worker {self.rank} works on cuda:{self._device}, and this array lies on cuda:{device}: "
                "start one process for each GPU, or all GPUs in one process without a launcher"
            )

    # --------------------------------------------------------------------------------- arrays on GPUs

    def sum_on_gpus(
        self, jobs: Sequence[CollectiveArray], streams: dict[int, DeviceStream], what: str, op: int = SUM
    ) -> None:
        """Enqueue sums of all workers' arrays, or of this process's GPUs, on the streams of the GPUs.

        Jobs of one array follow each other, one for each GPU that has the array.
        """
        self._run_jobs(
            jobs, streams, what, lambda comm, job, stream: self._library.allreduce(comm, job, stream, op)
        )

    def spread_root(
        self, jobs: Sequence[CollectiveArray], streams: dict[int, DeviceStream], what: str
    ) -> None:
        """Copy the array of rank 0 to every worker."""
        self._run_jobs(jobs, streams, what, self._library.broadcast)

    def _run_jobs(
        self,
        jobs: Sequence[CollectiveArray],
        streams: dict[int, DeviceStream],
        what: str,
        call: Callable[[Any, CollectiveArray, int], None],
    ) -> None:
        self._check_broken()
        jobs = [job for job in jobs if job.numel]
        if not jobs:
            return
        devices = tuple(sorted({job.device for job in jobs}))
        with self._lock:
            team = self._make_communicators(devices)
            ours = {device: streams[device] for device in devices}
            self._order_streams(ours)
            pending = self._watch.begin(what) if self._watch is not None else None
            try:
                with self._library.group(devices[0], what):
                    for job in jobs:
                        call(team[job.device], job, ours[job.device].handle)
                if pending is not None and self._watch is not None:
                    self._watch.note_stream(pending, ours[devices[0]].handle, devices[0])
            except KVStoreError as error:
                if pending is None or self._watch is None:
                    self._mark_broken(error)
                    raise
                raise self._watch.note_failure(pending, error) from error
            self._note_streams(ours)

    def _order_streams(self, streams: dict[int, DeviceStream]) -> None:
        """Let the streams wait for earlier operations on their GPUs."""
        for device, stream in streams.items():
            last = self._last.get(device)
            if last is not None and last is not self.gpu_context(device).stream_cursor(stream):
                last.hold_stream(stream)

    def _note_streams(self, streams: dict[int, DeviceStream]) -> None:
        for device, stream in streams.items():
            tail = self.gpu_context(device).stream_cursor(stream)
            tail.note_work()
            self._last[device] = tail

    def wait_for_stream(self, tail: StreamCursor, what: str) -> None:
        """Wait until a stream is complete; called before a wait in the driver, which has no deadline."""
        if self._watch is None:
            return
        device = tail.stream.device
        event = self.driver.event(device)
        try:
            self.driver.record(event, tail.stream.handle, device)
            self._watch.wait_until(lambda: self.driver.is_done(event, device), what)
        finally:
            self.driver.drop_event(event, device)

    # ------------------------------------------------------------------------------- communicators

    def _make_communicators(self, devices: tuple[int, ...]) -> dict[int, Any]:
        team = self._teams.get(devices)
        if team is None:
            made = (
                [self._join_communicator(devices[0])]
                if self._answer is not None
                else self._library.join_all(devices)
            )
            team = self._teams[devices] = dict(zip(devices, made, strict=True))
        return team

    def _join_communicator(self, device: int) -> Any:
        """Make this process's communicator, in a thread: NCCL waits for the others without a deadline."""
        assert self._answer is not None
        name, found, failed = self._answer.name, [], []

        def join() -> None:
            try:
                found.append(self._library.join(name, self.rank, self.size, device))
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=join, name="kvstore-nccl-join", daemon=True)
        thread.start()
        thread.join(self._timeout)
        if failed:
            raise failed[0]
        if not found:
            error = TimeoutError(
                f"worker {self.rank} has waited {self._timeout:g} s for all workers in the start of NCCL: "
                "did one of them end? Start the job again"
            )
            self._mark_broken(error)
            raise error
        return found[0]

    def _error_text(self) -> KVStoreError | None:
        for team in list(self._teams.values()):
            for comm in team.values():
                if (error := self._library.error_of(comm)) is not None:
                    return error
        return None

    def _abort_running(self) -> None:
        """Abort the running operations."""
        teams, self._teams = dict(self._teams), {}
        for team in teams.values():
            for comm in team.values():
                self._library.abort(comm)

    def _mark_broken(self, error: KVStoreError) -> None:
        """Mark the store as broken: after an error the state of the communicators is undefined."""
        self._closed = f"an earlier operation failed ({error})"
        self._abort_running()

    def _check_broken(self) -> None:
        if self._closed is not None:
            raise KVStoreError(f"worker {self.rank}: {self._closed}; start the job again")
        if self._watch is not None:
            self._watch.check()

    # -------------------------------------------------------------------------------- arrays of the host

    def broadcast(self, items: Sequence[Item], meaning: str = "") -> None:
        """Overwrite the items with those of rank 0."""
        if self.size > 1:
            what = operation_name("init, broadcast or load", items)
            arrays = [array.reshape(-1).view(np.uint8) for _, array in items]
            with self._broken_by_interrupt(what):
                self.compare_calls("init", what, meaning, items)
                self._stage_arrays(arrays, what, partial(self.spread_root, what=what))()

    def allreduce(self, items: Sequence[Item], priority: int = 0) -> Finish:
        """Start a sum. All workers first compare their calls, and wait for each other for that."""
        self._check_broken()
        if self.size == 1:
            return do_nothing
        what = operation_name("the sum", items)
        try:
            with self._broken_by_interrupt(what):
                self.compare_calls("sum", what, items=items)
                return self._stage_arrays(
                    [array for _, array in items], what, partial(self.sum_on_gpus, what=what)
                )
        except ConfigError as error:
            return partial(_raise_error, error)

    def compare_calls(self, kind: str, what: str, meaning: str = "", items: Sequence[Item] = ()) -> None:
        """Wait until all workers have called an operation, and compare their calls.

        Raises
        ------
        ConfigError
            The calls differ. All workers raise this, and nothing has changed.
        """
        self._check_broken()
        marks = call_digest(kind, items, meaning)
        with self._broken_by_interrupt(what):
            self._stage_arrays([marks], what, partial(self.sum_on_gpus, what=what, op=MAX))()
        if not calls_match(marks):
            raise mismatch_error(self.name, self.rank, what)

    @contextlib.contextmanager
    def _broken_by_interrupt(self, what: str) -> Iterator[None]:
        """Break the store if Ctrl-C ends the block: the other processes continue with partial data."""
        try:
            yield
        except KVStoreError:
            raise
        except BaseException:
            self._mark_broken(KVStoreError(f"interrupted in {what}"))
            raise

    def _stage_arrays(
        self,
        arrays: Sequence[Array],
        what: str,
        run: Callable[[list[CollectiveArray], dict[int, DeviceStream]], None],
    ) -> Finish:
        """Copy arrays to the GPU and start; return a callable that waits, and copies the results back."""
        place = self.gpu_context(self.device)
        stream, device = place.own, place.device
        flat = [array.reshape(-1) for array in arrays if array.size]
        loans = [StreamBuffer(place, array.nbytes, stream) for array in flat]
        jobs = []
        for array, loan in zip(flat, loans, strict=True):
            self.driver.copy(loan.address, array.ctypes.data, array.nbytes, stream.handle, device)
            jobs.append(CollectiveArray(device, loan.address, loan.address, array.size, array.dtype.name))
        run(jobs, {device: stream})

        def finish() -> None:
            self.wait_for_stream(place.stream_cursor(stream), what)
            for array, loan in zip(flat, loans, strict=True):
                host_copy(self.driver, loan.address, array, stream.handle, device)
                loan.end()

        return finish

    def barrier(self) -> None:
        """Wait until all processes have called `barrier`."""
        self._check_broken()
        if self.size > 1:
            self.compare_calls("barrier", "a barrier")

    def versions(self) -> dict[str, str]:
        """Return the versions of nccl4py, and of its NCCL."""
        return self._library.versions()

    # ------------------------------------------------------------------------------------------- end

    def abandon(self) -> None:
        """Stop waiting; the other processes notice at their deadline, or when this process ends."""
        self._closed = "the store was left by an error"
        self._abort_running()

    def close(self) -> None:
        """Wait for the running operations, and free all communicators."""
        if self._watch is not None:
            if self._closed is not None:
                self._watch.error = self._watch.error or KVStoreError(self._closed)
            self._watch.close()
        with self._lock:
            for device, place in self._places.items():
                if (last := self._last.get(device)) is not None and last is place.stream_cursor(last.stream):
                    del self._last[device]
            for place in self._places.values():
                place.close()
            self._places.clear()
            for team in self._teams.values():
                for comm in team.values():
                    self._library.destroy(comm)
            self._teams.clear()
        self._closed = self._closed or "the store is closed"


def _raise_error(error: KVStoreError) -> None:
    raise error
