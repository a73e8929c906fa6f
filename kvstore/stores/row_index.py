"""The positions of a table's rows by their ids: a large sorted list, and a small one of the latest.

An insertion into a sorted list of millions copies it; so new ids gather in a separate list until the copy is
worth it.
"""

from __future__ import annotations

import numpy as np

from ..kernels import cpu
from .rows import Ids

_SHARE = 8  # the small list has at most this part of the large one ...
_LEAST = 4096  # ... or this many ids

#: Ascending ids, and the position of each.
IdPositions = tuple[Ids, Ids]

NONE: IdPositions = (np.empty(0, np.int64), np.empty(0, np.int64))


class RowIndex:
    """Positions of rows. A result of `mark` never changes, so it can be restored."""

    def __init__(self, ids: Ids, where: Ids) -> None:
        self._old: IdPositions = ids, where
        self._new: IdPositions = NONE
        self._last: IdPositions = NONE  # ids of the last search: a push often has the rows that were pulled

    @property
    def nbytes(self) -> int:
        """Memory of the index, in bytes."""
        return sum(array.nbytes for array in (*self._old, *self._new))

    def positions(self, ids: Ids) -> Ids:
        """Return the positions of rows of ascending ids; -1 for absent ones."""
        last_ids, last_found = self._last
        if len(ids) == len(last_ids) and np.array_equal(ids, last_ids):
            return last_found.copy()
        found = _locate_ids(self._old, ids)
        if len(self._new[0]) and (missing := np.flatnonzero(found < 0)).size:
            found[missing] = _locate_ids(self._new, ids[missing])
        self._last = ids.copy(), found.copy()
        return found

    def add(self, ids: Ids, where: Ids) -> None:
        """Add absent rows, by ascending ids."""
        self._new, self._last = _insert_ids(self._new, ids, where), NONE
        if len(self._new[0]) > max(_LEAST, len(self._old[0]) // _SHARE):
            self.all_ids()

    def all_ids(self) -> IdPositions:
        """Return all ids, ascending, and the position of each."""
        if len(self._new[0]):
            self._old, self._new = _insert_ids(self._old, *self._new), NONE
        return self._old

    def mark(self) -> tuple[IdPositions, IdPositions]:
        """Return the state for `restore_mark`."""
        return self._old, self._new

    def restore_mark(self, mark: tuple[IdPositions, IdPositions]) -> None:
        """Restore the state of a mark."""
        (self._old, self._new), self._last = mark, NONE


def _locate_ids(pair: IdPositions, ids: Ids) -> Ids:
    found = cpu.locate_ids(pair[0], ids)
    return np.where(found >= 0, pair[1][found], -1) if len(pair[1]) else found


def _insert_ids(pair: IdPositions, ids: Ids, where: Ids) -> IdPositions:
    at = np.searchsorted(pair[0], ids)
    return np.insert(pair[0], at, ids), np.insert(pair[1], at, where)
