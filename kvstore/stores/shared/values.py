"""The values of the keys outside of rounds: overwritten, looked at."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...arrays.grouping import Key
from ...arrays.sparse import RowSparseArray
from ...errors import ArrayError
from ..entry import Array, check_shape, not_row_sparse
from ..protocol import Kind
from .arguments import CallArguments
from .gpu_access import GpuAccess
from .native import _shared as shm
from .optimizer import JobUpdater
from .rows import SparseKeys
from .waiting import RoundWaiter

Handle = shm.Handle


class StoredValues:
    """The values of a job's keys, as one worker reads and replaces them."""

    def __init__(
        self,
        job: shm.Job,
        keys: shm.Keys,
        arguments: CallArguments,
        updater: JobUpdater,
        rows: SparseKeys,
        gpus: GpuAccess,
        waiter: RoundWaiter,
    ) -> None:
        self._job, self._keys, self._arguments = job, keys, arguments
        self._updater, self._rows, self._gpus, self._waiter = updater, rows, gpus, waiter

    # ---------------------------------------------------------------------------------------- writing

    def overwrite(self, handle: Handle, value: Array | RowSparseArray) -> None:
        """Put a value in the place of another, between two rounds."""
        self._waiter.settle(handle)
        self._gpus.staging.copy_to_region(handle)
        self._waiter.wait(handle.borrow, handle)
        try:
            if isinstance(value, RowSparseArray):
                self._rows.overwrite(handle, value)
            else:
                np.copyto(handle.value(other=True), value)
                self._updater.follow(handle, handle.value(other=True))
        except BaseException:
            handle.give_back(False)
            raise
        self._gpus.staging.overwritten(handle)
        handle.give_back(True)

    def copy_all_to_region(self) -> None:
        """See all rounds of this worker complete, and all values in the region."""
        self._waiter.settle_all()
        for handle in self._keys.all():
            self._gpus.staging.copy_to_region(handle)

    # ---------------------------------------------------------------------------------------- reading

    def view(self, key: Key) -> Array | RowSparseArray:
        """Live memory, read-only."""
        self._waiter.check_open()
        handle = self._arguments.handle(key)
        self._waiter.settle(handle)
        if handle.sparse:
            return self._rows.view(handle)
        self._gpus.staging.copy_to_region(handle)
        view = handle.value().view()
        view.flags.writeable = False
        return view

    def view_all(self, keys: list[Key]) -> list[Array | RowSparseArray]:
        """View one by one, once all are complete."""
        handles = [self._arguments.handle(key) for key in keys]
        for handle in handles:
            self._waiter.settle(handle)
        self._waiter.see_whole(handles)
        return [self.view(key) for key in keys]

    def gather_rows(self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]]) -> None:
        """Fill outs with some rows of row-sparse keys."""
        self._waiter.check_open()
        jobs = []
        for key, pairs in wanted:
            handle = self._arguments.handle(key)
            if not handle.sparse:
                raise not_row_sparse(key)
            for out, ids in pairs:
                check_shape(handle, out, "out")
                jobs.append((handle, self._rows.wanted(handle, ids), out))
        for handle, _, _ in jobs:
            self._waiter.settle(handle)
        self._waiter.see_whole([handle for handle, _, _ in jobs])
        for handle, ids, out in jobs:
            self._rows.gather(handle, ids, out)

    def empty(self, key: Key) -> Array:
        """Return a new array of the key's shape and type that lives in the region."""
        self._waiter.check_open()
        handle = self._arguments.handle(key)
        if handle.sparse:
            raise ArrayError(f"key {key!r} is row-sparse; only dense keys have arrays in shared memory")
        return self._job.empty(handle.shape, handle.dtype)

    def kind(self, key: Key) -> Kind:
        """Whether a key is dense or row-sparse, its element type, and its shape."""
        handle = self._arguments.handle(key)
        return "row-sparse" if handle.sparse else "dense", handle.dtype.name, handle.shape
