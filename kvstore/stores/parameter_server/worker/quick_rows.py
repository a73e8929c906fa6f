"""A push of rows of one table, or a pull of some, in few steps; as `quick_calls` has it of dense keys.

What is not as usual goes the usual way, which checks it and says what is wrong.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import numpy as np

from ....arrays.grouping import Key
from ....arrays.sparse import RowSparseArray, is_canonical, trusted_rows
from ....kernels import cpu
from ....observe.counters import MOVING
from ...entry import Array
from ...rows import Ids
from ..protocol.messages import RecordKind
from ..protocol.payload_bytes import as_bytes
from ..transport.frames import MessageLimits
from .call_plans import CallPlan, CallPlans
from .client import WorkerClient
from .key_directory import KeyDirectory
from .operations import Finish, PartRequest
from .quick_calls import QuickCall, QuickCalls, ServerWay
from .replies import CollectRows
from .request_builder import PushHeader, row_requests, split_rows

_MOST_BYTES = MessageLimits().frame  # of rows: the usual way refuses more

#: By slice: which of a call's ids are of its rows.
Places = dict[int, tuple[int, int]]


class QuickRowCalls:
    """Begins the quick calls of one store about rows."""

    def __init__(self, client: WorkerClient, keys: KeyDirectory, calls: QuickCalls) -> None:
        self._client, self._calls = client, calls
        self._pushes = CallPlans(RecordKind.PUSH, client, keys, tables=True)
        self._pulls = CallPlans(RecordKind.PULL_ROWS, client, keys, tables=True)

    def push(self, name: Any, value: RowSparseArray) -> bool | Finish:
        """Send; what is left to do is to see it accepted. False: nothing has happened."""
        plan = self._plan(self._pushes, name)
        if plan is None or self._calls.pushes.feedback is not None or not self._calls.may_push(plan):
            return False
        key = plan.keys[0]
        if not is_canonical(value) or value.dtype != key.dtype or value.shape != key.shape:
            return False
        places = _places(plan, value.indices, value.data)
        return places is not None and self._calls.begun(QuickRows(self._calls, plan, value, places, None))

    def pull(self, name: Key, out: Any, wanted: Any) -> bool | Finish:
        """Ask; what is left to do is to receive. False: nothing has happened."""
        plan = self._plan(self._pulls, name)
        ids = None if plan is None else _plain_ids(plan, wanted)
        if plan is None or ids is None:
            return False
        if not isinstance(out, RowSparseArray) or out.shape != plan.keys[0].shape:
            return False
        rows = CollectRows(plan.keys[0], out, ids)
        rows.begin(direct=True)
        places = _places(plan, ids, rows.rows)
        if places is None:
            return False
        asked = trusted_rows(rows.rows, ids, out.shape)
        begun = self._calls.begun(QuickRows(self._calls, plan, asked, places, rows))
        return partial(self._received, begun, rows) if callable(begun) else begun

    def _plan(self, plans: CallPlans, name: Any) -> CallPlan | None:
        if type(name) is list or self._client.joined:
            return None
        return plans.find(name)

    def _received(self, finish: Finish, rows: CollectRows) -> None:
        finish()
        with self._calls.counters.during(MOVING):
            rows.deliver()


class QuickRows(QuickCall):
    """A call about rows."""

    __slots__ = ("_places", "_rows", "_take")

    def __init__(
        self,
        calls: QuickCalls,
        plan: CallPlan,
        rows: RowSparseArray,
        places: Places,
        take: CollectRows | None,
    ) -> None:
        super().__init__(calls, plan, None, None)
        self._pushes = take is None
        self._rows, self._places, self._take = rows, places, take

    def _set(self, ways: list[ServerWay]) -> bool:
        data = as_bytes(self._rows.data)
        for way in ways:
            places = [self._places[slice_] for slice_ in way.plan.slices]
            way.plan.exchange.set_rows(places, self._rows.indices, data)
        return True

    def _requests(self) -> Iterator[PartRequest]:
        key = self._plan.keys[0]
        if self._take is not None:
            return row_requests(key, self._rows.indices, self._take)
        head = PushHeader(RecordKind.PUSH, self._version, self._stamps[0])
        return self._calls.slices.row_requests(key, [self._rows], head)


def sole(given: Any) -> Any:
    """Return what is alone in a list, or is given without one."""
    return given[0] if type(given) is list and len(given) == 1 else given


def _plain_ids(plan: CallPlan, wanted: Any) -> Ids | None:
    """Sorted, unique ids of a copy; None: they are of another kind, or out of range."""
    if type(wanted) is not np.ndarray or wanted.dtype.kind not in "iu":
        return None
    try:
        return cpu.unique_ids(wanted.astype(np.int64).ravel(), plan.keys[0].shape[0])
    except IndexError:
        return None


def _places(plan: CallPlan, ids: Ids, rows: Array) -> Places | None:
    """Find the rows of each slice; None: one has none, or they are too many for a message."""
    if not rows.nbytes or rows.nbytes > _MOST_BYTES:
        return None
    found = {part.id: (low, high) for part, low, high in split_rows(plan.keys[0], ids)}
    return found if all(low < high for low, high in found.values()) else None
