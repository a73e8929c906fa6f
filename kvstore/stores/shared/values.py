"""The values of the keys outside of rounds: the lowest member creates them for all.

Later they are overwritten, or read.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from ...arrays.grouping import Group, Key
from ...arrays.sparse import RowSparseArray
from ...errors import ArrayError
from ...observe.counters import MOVING
from ...settings.definitions import is_side
from ..entry import Array, check_same, check_shape, not_row_sparse, row_ids
from ..rows import Ids
from .arguments import CallArguments
from .native import _shared as shm
from .rows import SparseKeys
from .waiting import RoundWaiter

Handle = shm.Handle


class StoredValues:
    """Creates, replaces and reads the values of a job's keys, in one worker."""

    def __init__(self, arguments: CallArguments, rows: SparseKeys, waiter: RoundWaiter) -> None:
        self._job, self._keys, self._arguments = arguments.job, arguments.keys, arguments
        self._rows, self._gpus, self._waiter = rows, arguments.gpus, waiter
        self._reader = arguments.reader

    def init(self, groups: list[Group]) -> None:
        """Use the values of the lowest rank, and wait until they are readable."""
        self._waiter.check_open()
        new = [(key, self._arguments.first_value(key, values)) for key, values in groups if values]
        self._waiter.check_writing()
        for key, value in new:
            handle = self._make_key(key, value)
            check_same(handle, handle.sparse, value, "on worker 0", self._arguments.rank)
            self._arguments.initialised.add(key)

    def _make_key(self, key: Key, value: Array | RowSparseArray) -> Handle:
        """Find a key, make it, or wait for it: the initializer can die or leave during the wait."""
        while (handle := self._keys.find(key)) is None:
            if self._is_initializer():
                self._add_key(key, value)
            else:
                self._await_key(key)
        return handle

    def _is_initializer(self) -> bool:
        """Return whether this worker's values are used: it is the lowest member."""
        return self._arguments.rank == min(self._job.members(), default=self._arguments.rank)

    def _add_key(self, key: Key, value: Array | RowSparseArray) -> None:
        if not isinstance(value, RowSparseArray):
            self._keys.add(key, value, side=is_side(key))
            return
        self._keys.add(key, value.data, value.indices, value.shape)

    def _await_key(self, key: Key) -> None:
        """Wait until a key is there, or this worker becomes the initializer."""

        def come() -> int:
            known = len(self._keys)
            self._arguments.check_kind(key)
            is_over = self._keys.find(key) is not None or self._is_initializer()
            return shm.READY if is_over else self._keys.wait_for_more(known)

        while self._keys.find(key) is None and not self._is_initializer():
            self._waiter.wait(
                come, None, lambda: [min(self._job.members(), default=0)], f"the init of key {key!r}"
            )

    # ---------------------------------------------------------------------------------------- writing

    def overwrite(self, handle: Handle, value: Array | RowSparseArray) -> None:
        """Replace a value, between two rounds."""
        self._waiter.complete_pushed(handle)
        self._gpus.staging.copy_to_region(handle)
        holding, is_written = shm.KeyHold(handle), False
        try:
            self._waiter.wait(holding.begin, handle)
            if isinstance(value, RowSparseArray):
                self._rows.overwrite(handle, value)
            else:
                np.copyto(handle.value(other=True), value)
                self._arguments.updater.update_master(handle, handle.value(other=True))
            self._gpus.staging.note_overwritten(handle)
            is_written = True
        finally:
            holding.end(is_written)

    def copy_all_to_region(self) -> None:
        """Complete all rounds of this worker, and copy all values to the region."""
        self._waiter.complete_all_pushed()
        for handle in self._keys.all():
            self._gpus.staging.copy_to_region(handle)

    # ---------------------------------------------------------------------------------------- reading

    def view(self, key: Key) -> Array | RowSparseArray:
        """Return live memory, read-only; a copy if rounds do not wait for this worker."""
        self._waiter.check_open()
        handle = self._arguments.handle(key)
        self._waiter.complete_pushed(handle)
        if handle.sparse:
            return self._reader.read(handle, partial(self._rows.view, handle))
        self._gpus.staging.copy_to_region(handle)
        view = self._reader.read_value(handle).view()
        view.flags.writeable = False
        return view

    def view_all(self, keys: list[Key]) -> list[Array | RowSparseArray]:
        """Return views of all keys, once their rounds are complete."""
        handles = [self._arguments.handle(key) for key in keys]
        for handle in handles:
            self._waiter.complete_pushed(handle)
        self._waiter.even_out_calls(handles)
        return [self.view(key) for key in keys]

    def gather_rows(self, wanted: list[tuple[Key, list[tuple[RowSparseArray, Any]]]]) -> None:
        """Copy rows of row-sparse keys to outs."""
        self._waiter.check_open()
        jobs = []
        for key, pairs in wanted:
            handle = self._arguments.handle(key)
            if not handle.sparse:
                raise not_row_sparse(key)
            for out, ids in pairs:
                check_shape(handle, out, "out")
                jobs.append((handle, row_ids(handle, ids), out))
        for handle, _, _ in jobs:
            self._waiter.complete_pushed(handle)
        self._waiter.even_out_calls([handle for handle, _, _ in jobs])
        for handle, ids, out in jobs:
            self._reader.read(handle, partial(self._gather_rows, handle, ids, out))
            self._job.receive(out.data.nbytes)

    def _gather_rows(self, handle: Handle, ids: Ids, out: RowSparseArray) -> None:
        with shm.Phase(self._job, MOVING, handle, handle.arrived, handle.nbytes):
            self._rows.gather(handle, ids, out)

    def nbytes(self, handle: Handle) -> int:
        """Return the bytes of a value."""
        if not handle.sparse:
            return handle.nbytes
        return self._reader.read(handle, partial(self._rows.nbytes, handle))

    def empty(self, key: Key) -> Array:
        """Return a new array of the key's shape and type in the region."""
        self._waiter.check_open()
        handle = self._arguments.handle(key)
        if handle.sparse:
            raise ArrayError(f"key {key!r} is row-sparse; only dense keys have arrays in shared memory")
        return self._job.empty(handle.shape, handle.dtype)
