"""The common part of calls with the same list of keys, kept from call to call, with arrays as columns.

A call of many keys creates no object for each key that the garbage collector would visit again and again: it
soon stops tracking tuples of arrays and numbers, but never lists.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

from ..arrays.grouping import Key
from ..kernels import cpu
from .entry import Array

T = TypeVar("T")

_LISTS = 16  # lists that are kept;
_LISTED = 4096  # more, if they have no more keys in all


class KeyColumns(Generic[T]):
    """Dense, distinct keys, with one array each in a call.

    Parameters
    ----------
    keys : sequence
        The store's object of each key.
    ranks : sequence of int
        Their positions in the order of updates.
    likes : sequence of numpy.ndarray
        For each key a plain array of its shape and type.
    """

    def __init__(self, keys: Sequence[T], ranks: Sequence[int], likes: Sequence[Array]) -> None:
        order = sorted(range(len(keys)), key=ranks.__getitem__)
        #: The positions of the keys in the caller's lists; None: the same as here.
        self.order = None if order == list(range(len(order))) else order
        #: In the order of updates, as all that follow.
        self.keys = [keys[at] for at in order]
        self.likes = [likes[at] for at in order]
        self.integral = any(like.dtype.kind in "iu" for like in likes)
        self.nbytes = sum(like.nbytes for like in likes)

    def checked_arrays(self, given: Any, write: bool) -> tuple[list[Array], bytes] | None:
        """Return the arrays of a call and their addresses; None: they need the general path."""
        if type(given) is not list or len(given) != len(self.keys):
            return None
        in_order = given if self.order is None else [given[at] for at in self.order]
        return cpu.plain_arrays(in_order, self.likes, write)


class KeyLists(Generic[T]):
    """Results for lists of keys. Equal lists share a result, until the keys change."""

    def __init__(self) -> None:
        self._known: dict[tuple[Any, ...], tuple[list[Key], T | None]] = {}
        self._listed = 0

    def find(self, names: list[Any], make: Callable[[list[Key]], T | None]) -> T | None:
        """Return the result of `make` for a list of keys; None: these keys need the general path.

        `make` is not kept: a method of the owner would be a reference cycle, and the owner's memory would be
        freed late, and in any order.
        """
        if not names or not {int, str}.issuperset(map(type, names)):
            return None
        ends = (len(names), names[0], names[-1])
        known, found = self._known.get(ends, (None, None))
        if known != names:
            if len(self._known) >= _LISTS and self._listed + len(names) > _LISTED:
                self.clear()
            own = list(names)  # another thread may change the caller's
            found = make(own)
            self._known[ends] = own, found
            self._listed += len(own)
        return found

    def clear(self) -> None:
        """Forget all: keys were made or discarded."""
        self._known.clear()
        self._listed = 0
