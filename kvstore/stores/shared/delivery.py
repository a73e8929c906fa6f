"""The end of a call: rounds are completed, results are written, and the first error is raised."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from ...arrays.grouping import Key
from ...arrays.sparse import RowSparseArray
from ...errors import FencedError, KVStoreError, PeerLostError, TimeoutError
from ...observe.counters import MOVING
from ..outs import OutDeliveries
from .arguments import SplitOuts
from .gpu_access import GpuAccess
from .native import _shared as shm
from .reading import ValueReader
from .rows import SparseKeys
from .waiting import RoundWaiter

Handle = shm.Handle
Finish = Callable[[], None]
Complete = Callable[[list[shm.Call]], None]


class ResultDelivery:
    """Ends the calls of one worker."""

    def __init__(
        self, job: shm.Job, waiter: RoundWaiter, reader: ValueReader, rows: SparseKeys, gpus: GpuAccess
    ) -> None:
        self._job, self._waiter, self._reader, self._rows, self._gpus = job, waiter, reader, rows, gpus

    def finish_pull(
        self,
        calls: list[shm.Call],
        rows: list[tuple[Handle, Any]],
        later: OutDeliveries,
        on_gpu: list[SplitOuts],
    ) -> None:
        """Wait for the rounds that this worker has pushed into, and copy the values."""
        if len(calls) + len(rows) + len(on_gpu) > 1:
            handles = [*(call.handle for call in calls), *(handle for handle, _ in rows)]
            self._waiter.even_out_calls([*handles, *(device.handle for device, _ in on_gpu)])
        self._finish_calls(self._waiter.read, calls, later)
        if on_gpu:
            self._finish_on_gpu(self._waiter.read, on_gpu, later)
        for handle, out in rows:
            self._waiter.complete_pushed(handle)
            self._reader.read(handle, partial(self._copy_rows, handle, out))
            self._job.receive(out.data.nbytes if isinstance(out, RowSparseArray) else handle.nbytes)

    def _copy_rows(self, handle: Handle, out: Any) -> None:
        with self._hold_moving([handle]):
            self._rows.copy_to(handle, out)

    def finish_pushpull(
        self, calls: list[shm.Call], private: set[Key], later: OutDeliveries, held: object, resumes: bool
    ) -> None:
        """Wait and write the results; `held` keeps the arrays alive that other workers read."""
        try:
            self._finish_calls(self._waiter.complete, calls, later)
        except BaseException as error:  # other workers may still be reading the arrays of later keys
            if not resumes or isinstance(error, Exception):
                self._waiter.give_up([call for call in calls if call.handle.key in private])
            raise

    def finish_both(self, finish: Finish, on_gpu: list[SplitOuts], later: OutDeliveries) -> None:
        """Finish the keys that the host has pushed, then those of GPUs; then raise the first error."""
        error: KVStoreError | None = None
        try:
            finish()
        except (PeerLostError, FencedError, TimeoutError):
            raise
        except KVStoreError as found:
            error = found
        self._finish_on_gpu(self._waiter.complete, on_gpu, later)
        if error is not None:
            raise error

    def _finish_on_gpu(self, finish: Complete, on_gpu: list[SplitOuts], later: OutDeliveries) -> None:
        """Complete rounds with parts on GPUs, and let the GPUs, or the host, write the results."""
        finish([shm.Call(device.handle, [], False, receives=True) for device, _ in on_gpu])
        with self._hold_moving([device.handle for device, _ in on_gpu]):
            self._deliver_by_gpu(on_gpu, later)
        later.defer_overlaps((device.handle, [], others) for device, others in on_gpu)
        calls = []
        for device, others in on_gpu:
            if others or device.handle.key in later:
                self._gpus.staging.copy_to_region(device.handle)
                calls.append(shm.Call(device.handle, others, False))
        self._finish_calls(self._waiter.read, calls, later)

    def _deliver_by_gpu(self, on_gpu: list[SplitOuts], later: OutDeliveries) -> None:
        """Let GPUs write the results that they have; the host writes the others."""
        gpus = self._gpus.staging_in_use()
        left = {device.handle.key: device for device in gpus.ipc.deliver([device for device, _ in on_gpu])}
        for device, others in on_gpu:
            if device.handle.key in left:
                others += gpus.host_outs(device, later.setdefault(device.handle.key, []))

    def _finish_calls(self, finish: Complete, calls: list[shm.Call], later: OutDeliveries) -> None:
        """Complete rounds, and write the results that the rounds do not write; then raise the first error.

        If GPUs are in use, this happens key by key: they copy one result during the work on the next.
        """
        apart = later and self._gpus.staging.in_use
        parts = [[call] for call in calls] if apart else [calls]
        errors = [
            error for part in parts if (error := self._finish_delivery(finish, part, later)) is not None
        ]
        if errors:
            raise errors[0]

    def _finish_delivery(
        self, finish: Complete, calls: list[shm.Call], later: OutDeliveries
    ) -> KVStoreError | None:
        """Finish calls; return the error of a failed round, and raise others."""
        try:
            finish(calls)
            if later.has_any:
                with self._hold_moving([call.handle for call in calls]):
                    later.deliver([call.handle.key for call in calls])
                self._waiter.check_open()  # the copies may be of a round without this worker
        except (PeerLostError, FencedError, TimeoutError):
            raise
        except KVStoreError as error:
            return error
        return None

    def _hold_moving(self, handles: list[Handle]) -> shm.Phase:
        only = handles[0] if len(handles) == 1 else None
        nbytes = sum(handle.nbytes for handle in handles)
        return shm.Phase(self._job, MOVING, only, 0 if only is None else only.arrived, nbytes)
