"""Stores of a process that records a timeline: each call of a verb is an event."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from .arrays.grouping import Group, bytes_of
from .engine import Work
from .observe.counters import CALLS
from .observe.events import CALL
from .observe.native._observe import Counters, now
from .observe.timeline.labels import number_of
from .plan import Plan
from .store import KVStore


class _Recorded:
    """One call as an event, from the beginning of the context to its end."""

    __slots__ = ("_begin", "_call", "_counters", "_label", "_nbytes")

    def __init__(self, counters: Counters, verb: str, key: Any, nbytes: int) -> None:
        self._label = number_of(key)
        self._counters, self._call, self._nbytes = counters, CALLS.index(verb), nbytes
        self._begin = now()

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        self._counters.record(CALL, self._begin, now(), self._call, self._label, self._nbytes)


class RecordedPlan(Plan):
    """A plan whose calls are recorded."""

    def __call__(self) -> None:
        """See `Plan.__call__`."""
        values = [values for _, values in self._groups]
        with _Recorded(self._store._counters, "pushpull", [key for key, _ in self._groups], bytes_of(values)):
            super().__call__()


class RecordedKVStore(KVStore):
    """A `KVStore` whose calls are recorded; asynchronous ones from the call to the end of the operation."""

    _plan = RecordedPlan

    def init(self, key: Any, value: Any) -> None:
        """See `KVStore.init`."""
        with self._recorded("init", key, value):
            super().init(key, value)

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        """See `KVStore.broadcast`; it is an init."""
        with self._recorded("init", key, value):
            super().broadcast(key, value, out, priority)

    def push(self, key: Any, value: Any, priority: int = 0, async_op: bool = False) -> Work | None:
        """See `KVStore.push`."""
        if async_op:
            return super().push(key, value, priority, async_op)
        with self._recorded("push", key, value):
            return super().push(key, value, priority)

    def pull(
        self, key: Any, out: Any = None, priority: int = 0, ignore_sparse: bool = True, async_op: bool = False
    ) -> Work | None:
        """See `KVStore.pull`."""
        if async_op:
            return super().pull(key, out, priority, ignore_sparse, async_op)
        with self._recorded("pull", key, out):
            return super().pull(key, out, priority, ignore_sparse)

    def pushpull(
        self, key: Any, value: Any, out: Any = None, priority: int = 0, async_op: bool = False
    ) -> Work | None:
        """See `KVStore.pushpull`."""
        if async_op:
            return super().pushpull(key, value, out, priority, async_op)
        with self._recorded("pushpull", key, value):
            return super().pushpull(key, value, out, priority)

    def row_sparse_pull(
        self, key: Any, out: Any = None, priority: int = 0, row_ids: Any = None, async_op: bool = False
    ) -> Work | None:
        """See `KVStore.row_sparse_pull`."""
        if async_op:
            return super().row_sparse_pull(key, out, priority, row_ids, async_op)
        with self._recorded("row_sparse_pull", key, None):
            return super().row_sparse_pull(key, out, priority, row_ids)

    def barrier(self) -> None:
        """See `KVStore.barrier`."""
        with self._recorded("barrier", (), None):
            super().barrier()

    def _recorded(self, verb: str, key: Any, values: Any) -> _Recorded:
        return _Recorded(self._counters, verb, key, bytes_of(values))

    def _ending(self, verb: str, groups: list[Group]) -> Callable[[Callable[[], Any]], Any]:
        recorded = self._recorded(verb, [key for key, _ in groups], [values for _, values in groups])

        def end(run: Callable[[], Any]) -> Any:
            with recorded:
                return self._end(verb, run)

        return end
