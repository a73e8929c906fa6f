"""Calls of a store of one process with fixed arrays; see `kvstore.plan.Plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from ...arrays.grouping import Group
from ...arrays.host import direct_view
from ...arrays.sparse import RowSparseArray
from ...kernels import cpu
from ..entry import Array, StoredKey
from ..key_lists import KeyColumns

if TYPE_CHECKING:
    from .backend import LocalBackend

#: A key with the arrays to sum and those to fill, all of them plain.
Plain = list[tuple[StoredKey, list[Array], list[Array]]]


class BoundCall:
    """A `pushpull` with fixed arrays."""

    def is_unchanged(self) -> bool:
        """Return whether keys and updates are unchanged since the plan was made."""
        return True

    def is_current(self) -> bool:
        """Return whether the arrays also have the same addresses."""
        return True

    def run(self) -> None:
        """Run the call, if it fits."""
        raise NotImplementedError


class GeneralCall(BoundCall):
    """Any call, by the general path: everything is checked each time."""

    def __init__(self, backend: LocalBackend, groups: list[Group], outs: list[Group] | None) -> None:
        self._backend, self._groups, self._outs = backend, groups, outs

    def run(self) -> None:
        """Check, and run the call."""
        self._backend.pushpull(self._groups, self._outs)


class HostCall(BoundCall):
    """Dense keys with plain arrays of the host."""

    def __init__(self, backend: LocalBackend, work: Plain, exchangeable: bool, call: GeneralCall) -> None:
        self._backend, self._work, self._exchangeable = backend, work, exchangeable
        self._call = call
        self._apply, self._feedback = backend._apply, backend.feedback
        self._columns = self._as_columns()

    def is_unchanged(self) -> bool:
        """Return whether updates and keys are the same."""
        backend = self._backend
        if backend._apply is not self._apply or backend.feedback is not self._feedback:
            return False
        return all(backend._entries.get(entry.key) is entry for entry, _, _ in self._work)

    def is_current(self) -> bool:
        """Return whether these are NumPy arrays: their memory is not replaced while a view of it exists."""
        return not self._exchangeable and self.is_unchanged()

    def run(self) -> None:
        """Sum, update, write the outs.

        If an array was reshaped in place, or locked, the general path raises the error.
        """
        if self._columns is not None:
            self._run_columns(*self._columns)
            return
        for entry, values, outs in self._work:
            if cpu.first_misfit(values, entry.value) >= 0 or cpu.first_misfit(outs, entry.value, True) >= 0:
                self._call.run()
                return
        self._backend._push_values(self._work, [])

    def _as_columns(self) -> tuple[KeyColumns[StoredKey], list[Array], list[Array]] | None:
        """Return the arrays as columns, if several keys have one value and one out each."""
        work = self._work
        if len(work) < 2 or any(len(values) != 1 or len(outs) != 1 for _, values, outs in work):
            return None
        columns = columns_of([entry for entry, _, _ in work])
        if not self._backend.may_push(columns):
            return None
        return columns, [values[0] for _, values, _ in work], [outs[0] for _, _, outs in work]

    def _run_columns(self, columns: KeyColumns[StoredKey], values: list[Array], outs: list[Array]) -> None:
        fit = (
            cpu.plain_arrays(values, columns.likes) is not None
            and cpu.plain_arrays(outs, columns.likes, True) is not None
        )
        if fit:
            self._backend.push_columns(columns, values, outs)
        else:
            self._call.run()


def columns_of(entries: list[StoredKey]) -> KeyColumns[StoredKey]:
    """Return dense keys as columns."""
    return KeyColumns(entries, [entry.number for entry in entries], [entry.value for entry in entries])


def bind_call(backend: LocalBackend, groups: list[Group], outs: list[Group] | None) -> BoundCall:
    """Check a call once, and return the shortest way to repeat it.

    Raises
    ------
    As `LocalBackend.pushpull`, if it would raise an error before any change.
    """
    backend._check_sources(groups)
    backend._check_outs(groups if outs is None else outs)
    targets = dict(groups if outs is None else outs)
    work = [_plain_views(backend._key_entry(key), values, targets.pop(key, [])) for key, values in groups]
    plain = [one for one in work if one is not None]
    if targets or len(plain) < len(work):
        return GeneralCall(backend, groups, outs)
    given = [array for _, arrays in (*groups, *(outs or ())) for array in arrays]
    exchangeable = any(type(array) is not np.ndarray for array in given)
    ordered = sorted(plain, key=lambda one: one[0].number)
    return HostCall(backend, ordered, exchangeable, GeneralCall(backend, groups, outs))


def _plain_views(
    entry: StoredKey, values: list[Any], outs: list[Any]
) -> tuple[StoredKey, list[Array], list[Array]] | None:
    """Return views of a key's arrays if kernels can use them directly.

    None if one would have to be copied.
    """
    if (
        entry.table is not None
        or not values
        or any(isinstance(one, RowSparseArray) for one in (*values, *outs))
    ):
        return None
    views = [view for view in map(direct_view, values) if view is not None]
    filled = [view for view in (direct_view(out, write=True) for out in outs) if view is not None]
    if len(views) < len(values) or len(filled) < len(outs):
        return None
    fits = cpu.first_misfit(views, entry.value) < 0 and cpu.first_misfit(filled, entry.value, True) < 0
    return (entry, views, filled) if fits else None
