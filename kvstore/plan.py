"""Plans: a `pushpull` of the same arrays that is checked once and run many times."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from .arrays.grouping import Group

if TYPE_CHECKING:
    from .store import KVStore


class Plan:
    """A `pushpull` of fixed arrays that can be repeated. `KVStore.bind` creates it.

    A call of the plan does the same as ``store.pushpull(keys, values, out)`` with the same arrays, without
    checking them again. On a GPU it is one launch for all keys of one element type. The plan keeps references
    to the arrays.
    """

    def __init__(self, store: KVStore, groups: list[Group], outs: list[Group] | None) -> None:
        self._store, self._groups, self._outs = store, groups, outs
        self._bound: Any = None
        store._run_after(groups, self._bind_call)

    def __call__(self) -> None:
        """Push and pull.

        If the optimizer, the compression or the device of a key has changed, the plan first checks the arrays
        again. It then raises the same errors as `KVStore.pushpull`.

        Raises
        ------
        ClosedError
            The store is closed.
        """
        store = self._store
        if store._steps and (step := store._own_step(async_op=False)) is not None:
            step.push(self._groups, self._outs or self._groups)
            return
        store._send_new_settings()
        store._run_after(self._groups, self._run_bound)
        store._count_call("pushpull")

    def refresh(self) -> None:
        """Read the addresses of the arrays again. Call it after the memory of an array was replaced.

        PyTorch replaces the memory of a tensor in ``tensor.data = other`` and ``tensor.set_()``. It does not
        resize or free the memory of a tensor on the host that has been in a plan
        (``untyped_storage().resize_()`` raises RuntimeError), as after ``tensor.numpy()``. Before the memory
        of a tensor on a GPU is freed in this way, as FSDP does, drop the plan.
        """
        self._store._run_after(self._groups, self._bind_if_changed)

    def _bind_call(self) -> None:
        self._bound = self._store._backend.bind(self._groups, self._outs)

    def _run_bound(self) -> None:
        if not self._bound.is_unchanged():
            self._bind_call()
        self._bound.run()

    def _bind_if_changed(self) -> None:
        if not self._bound.is_current():
            self._bind_call()

    def __repr__(self) -> str:
        keys = [key for key, _ in self._groups]
        what = repr(keys[0]) if len(keys) == 1 else f"{len(keys)} keys"
        return f"<Plan: pushpull of {what}>"
