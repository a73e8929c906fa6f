"""Calls of a store of one process with fixed arrays; see `kvstore.plan.Plan`."""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

from ..grouping import Group
from ..kernels import cpu
from .entry import Array, Entry

if TYPE_CHECKING:
    from .local import LocalBackend

#: A key with the arrays to sum and those to fill, all of them plain.
Plain = list[tuple[Entry, list[Array], list[Array]]]


class Bound(Protocol):
    """A `pushpull` with fixed arrays."""

    def fits(self) -> bool:
        """Whether keys and updates are still those that it was made for."""

    def is_current(self) -> bool:
        """Whether the arrays also lie where they lay."""

    def run(self) -> None:
        """Do it; where it fits."""


class Anything:
    """Any call, done the long way each time."""

    def __init__(self, backend: LocalBackend, groups: list[Group], outs: list[Group] | None) -> None:
        self._backend, self._groups, self._outs = backend, groups, outs

    def fits(self) -> bool:
        """Return True: everything is looked at each time."""
        return True

    def is_current(self) -> bool:
        """Return True: everything is looked at each time."""
        return True

    def run(self) -> None:
        """Check, and do it."""
        self._backend.pushpull(self._groups, self._outs)


class HostCall:
    """Dense keys with plain arrays of the host."""

    def __init__(self, backend: LocalBackend, work: Plain) -> None:
        self._backend, self._work = backend, work
        self._apply, self._feedback = backend._apply, backend.feedback

    def fits(self) -> bool:
        """Whether updates and keys are the same."""
        backend = self._backend
        if backend._apply is not self._apply or backend.feedback is not self._feedback:
            return False
        return all(backend._entries.get(entry.key) is entry for entry, _, _ in self._work)

    def is_current(self) -> bool:
        """Memory of NumPy arrays is not exchanged while somebody has a view of it."""
        return self.fits()

    def run(self) -> None:
        """Sum, update, fill the outs."""
        self._backend._push(self._work, [])


def bind(backend: LocalBackend, groups: list[Group], outs: list[Group] | None) -> Bound:
    """Check a call once, and return the shortest way to do it again.

    Raises
    ------
    As `LocalBackend.pushpull`, where it would find fault before anything is changed.
    """
    backend._sources(groups)
    backend._check_outs(groups if outs is None else outs)
    targets = dict(groups if outs is None else outs)
    work = [(backend._entry(key), values, targets.pop(key, [])) for key, values in groups]
    if targets or not all(_is_plain(*one) for one in work):
        return Anything(backend, groups, outs)
    return HostCall(backend, sorted(work, key=lambda one: one[0].number))


def _is_plain(entry: Entry, values: list[Array], outs: list[Array]) -> bool:
    if entry.table is not None or not values:
        return False
    return cpu.first_misfit(values, entry.value) < 0 and cpu.first_misfit(outs, entry.value, True) < 0
