"""Plans: a `pushpull` of the same arrays, checked once and done many times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arrays.grouping import Group

if TYPE_CHECKING:
    from .store import KVStore


class Plan:
    """A `pushpull` that is ready to be done again; made by `KVStore.bind`.

    Calling it does what ``store.pushpull(keys, values, out)`` does with the same arrays, without looking at
    them again: on a GPU one launch for all keys of a type. The arrays stay alive as long as the plan does.
    """

    def __init__(self, store: KVStore, groups: list[Group], outs: list[Group] | None) -> None:
        self._store, self._groups, self._outs = store, groups, outs
        self._bound: Any = None
        store._do(groups, self._bind)

    def __call__(self) -> None:
        """Push and pull.

        Where the optimizer, the compression or the place of a key has changed, the plan is made anew first.

        Raises
        ------
        ClosedError
            The store is closed.
        As `KVStore.pushpull`, where the plan no longer fits.
        """
        store = self._store
        store._do(self._groups, self._run)
        store._pushes += 1
        store._pulls += 1

    def refresh(self) -> None:
        """Look again at where the arrays lie; needed only where their memory was exchanged under them.

        PyTorch does that in ``tensor.data = other`` and ``tensor.set_()``.
        """
        self._store._do(self._groups, self._refresh)

    def _bind(self) -> None:
        self._bound = self._store._backend.bind(self._groups, self._outs)

    def _run(self) -> None:
        if not self._bound.fits():
            self._bind()
        self._bound.run()

    def _refresh(self) -> None:
        if not self._bound.is_current():
            self._bind()

    def __repr__(self) -> str:
        keys = [key for key, _ in self._groups]
        what = repr(keys[0]) if len(keys) == 1 else f"{len(keys)} keys"
        return f"<Plan: pushpull of {what}>"
