"""A store that moves its NumPy arguments to a GPU before a call, and copies the results to the host after it.

So a test that was written for host arrays runs on arrays of a GPU, real or not.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from typing import Any

import numpy as np

import kvstore as kv
from kvstore.arrays.element_types import DTYPES
from kvstore.devices.arrays import DeviceArray
from kvstore.settings.options import store_config
from kvstore.store_kinds import STORES

#: Makes an array on a GPU of a host array, and has a method `get` that waits and copies it back.
Make = Callable[..., Any]


class OnGpu(kv.KVStore):
    """A store with every plain NumPy array of its calls on a GPU."""

    def __init__(self, make: Make, name: str = "device", **options: Any) -> None:
        config = store_config(options)
        self._make = make
        kind = STORES[name]
        made = getattr(importlib.import_module(f"kvstore.stores.{kind.module}"), kind.backend)(config)
        super().__init__(name, made, config)

    # A call's arrays, by the object that stands for them, so that one array stays one array.

    def _there(self, given: Any, known: dict[int, Any]) -> Any:
        if isinstance(given, (list, tuple)):
            return type(given)(self._there(one, known) for one in given)
        if type(given) is not np.ndarray or given.dtype.name not in DTYPES:
            return given
        if id(given) not in known:
            known[id(given)] = given, self._make(given, readonly=not given.flags.writeable)
        return known[id(given)][1]

    @staticmethod
    def _home(known: dict[int, Any]) -> None:
        for host, there in known.values():
            if host.flags.writeable:
                host[...] = there.get()

    def _work(self, call: Callable[..., Any], *given: Any, back: bool, **options: Any) -> Any:
        known: dict[int, Any] = {}
        work = call(*(self._there(one, known) for one in given), **options)
        if work is not None:
            return _HomeWork(work, known, back)
        if back:
            self._home(known)
        return None

    def init(self, key: Any, value: Any) -> None:
        self._work(lambda v: super(OnGpu, self).init(key, v), value, back=False)

    def push(self, key: Any, value: Any, priority: int = 0, async_op: bool = False) -> Any:
        return self._work(lambda v: super(OnGpu, self).push(key, v, priority, async_op), value, back=False)

    def pull(self, key: Any, out: Any = None, *rest: Any, **options: Any) -> Any:
        return self._work(lambda o: super(OnGpu, self).pull(key, o, *rest, **options), out, back=True)

    def pushpull(self, key: Any, value: Any, out: Any = None, *rest: Any, **options: Any) -> Any:
        return self._work(
            lambda v, o: super(OnGpu, self).pushpull(key, v, o, *rest, **options), value, out, back=True
        )

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        self._work(lambda v, o: super(OnGpu, self).broadcast(key, v, o, priority), value, out, back=True)

    def view(self, key: Any) -> Any:
        seen = super().view(key)
        return seen.numpy() if isinstance(seen, DeviceArray) else seen

    def set_updater(self, updater: Any) -> None:
        if not callable(updater):
            super().set_updater(updater)
            return

        def there_and_back(key: Any, merged: Any, stored: Any) -> None:
            if not isinstance(stored, DeviceArray):
                updater(key, merged, stored)
                return
            sums, weight = merged.numpy(), stored.numpy()
            try:
                updater(key, sums, weight)
            finally:
                self._backend.copy_into(stored, weight, key)  # type: ignore[attr-defined]

        super().set_updater(there_and_back)

    _set_updater = set_updater


class _HomeWork(kv.Work):
    """A `Work` that brings the arrays home."""

    def __init__(self, work: kv.Work, known: dict[int, Any], back: bool) -> None:
        self._inner, self._known, self._back = work, known, back

    def wait(self, timeout: float | None = None) -> None:
        self._inner.wait(timeout)
        if self._back:
            OnGpu._home(self._known)

    def done(self) -> bool:
        return self._inner.done()

    def exception(self) -> BaseException | None:
        return self._inner.exception()

    def __del__(self) -> None:
        pass
