"""How a key comes to be: by the lowest member, for all."""

from __future__ import annotations

from ...arrays.grouping import Group, Key
from ...arrays.sparse import RowSparseArray
from ..entry import Array
from .arguments import CallArguments
from .native import _shared as shm
from .rows import SparseKeys
from .waiting import RoundWaiter

Handle = shm.Handle


class KeyCreator:
    """What one worker does to initialise keys."""

    def __init__(
        self,
        job: shm.Job,
        keys: shm.Keys,
        arguments: CallArguments,
        rows: SparseKeys,
        waiter: RoundWaiter,
        rank: int,
    ) -> None:
        self._job, self._keys, self._arguments = job, keys, arguments
        self._rows, self._waiter, self._rank = rows, waiter, rank

    def init(self, groups: list[Group]) -> None:
        """Take the value of the lowest rank, and wait until it is there."""
        self._waiter.check_open()
        new = [(key, self._arguments.first_value(key, values)) for key, values in groups if values]
        self._waiter.check_writing()
        for key, value in new:
            handle = self._keys.find(key)
            if handle is None and self._is_initializer():
                handle = self._add(key, value)
            if handle is None:
                handle = self._await_key(key)
            self._arguments.check_same(handle, value)
            self._arguments.initialised.add(key)

    def _is_initializer(self) -> bool:
        """Whether this worker's values count: it is the lowest member."""
        return self._rank == min(self._job.members(), default=self._rank)

    def _add(self, key: Key, value: Array | RowSparseArray) -> Handle | None:
        if isinstance(value, RowSparseArray):
            return self._rows.add(self._keys, key, value)
        return self._keys.add(key, value)

    def _await_key(self, key: Key) -> Handle:
        def come() -> int:
            known = len(self._keys)
            self._arguments.check_kind(key)
            return shm.READY if self._keys.find(key) is not None else self._keys.wait_for_more(known)

        while (handle := self._keys.find(key)) is None:
            self._waiter.wait(
                come, None, lambda: [min(self._job.members(), default=0)], f"the init of key {key!r}"
            )
        return handle
