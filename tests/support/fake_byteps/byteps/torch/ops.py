"""Sums over `dist_sync`. The first of a tensor begins on a thread of its own, as in BytePS."""

from __future__ import annotations

import itertools
import os
import threading
import time
from typing import Any

import numpy as np

import kvstore as kv

TYPES = ("uint8", "int32", "int64", "float16", "float32", "float64")

_store: Any = None
_numbers: dict[str, int] = {}  # by the order of declaration, which must be the same in all processes
_declaring = threading.Lock()
_known: set[int] = set()
_memory: dict[str, tuple[int, int, str]] = {}
_results: dict[int, Any] = {}
_handles = itertools.count()


def init(lazy: bool = True) -> None:
    global _store
    assert _store is None, "a second start would double BytePS's threads"
    alone = not os.environ.get("KVSTORE_SCHEDULER")  # BytePS, too, is one worker then
    _store = kv.create("local", processes=1) if alone else kv.create("dist_sync", timeout=60)


def size() -> int:
    return int(_store.num_workers)


def rank() -> int:
    return int(_store.rank)


def local_rank() -> int:
    return int(_store.local_rank)


def declare(name: str) -> int:
    with _declaring:
        _numbers.setdefault(name, len(_numbers))
    return 0


def push_pull_async_inplace(
    tensor: Any, average: bool = True, name: str | None = None, version: int = 0, priority: int = 0
) -> int:
    array = np.asarray(tensor)
    assert name is not None
    assert not average
    if array.dtype.name not in TYPES:
        raise ValueError(f"Tensor type {array.dtype} is not supported.")
    declare(name)
    seen = array.ctypes.data, array.size, array.dtype.name
    known = _memory.setdefault(name, seen)
    assert known == seen, f"{name}: BytePS aborts if a size changes, and locks the pages of each new place"
    assert all(one.name != name or one.done() for one in _results.values()), f"{name} is busy"
    handle = next(_handles)
    _results[handle] = _Sum(name, _numbers[name], array)
    return handle


class _Sum:
    """A sum under way. The first sum of a tensor initialises it, which may wait for other workers."""

    def __init__(self, name: str, number: int, array: Any) -> None:
        self.name, self.number, self.array = name, number, array
        self.work: Any = None
        if number in _known:
            self._begin()
        else:
            threading.Thread(target=self._init, daemon=True).start()

    def _init(self) -> None:
        _store.init(self.number, np.zeros(self.array.size, self.array.dtype))
        _known.add(self.number)
        self._begin()

    def _begin(self) -> None:
        self.work = _store.pushpull(self.number, self.array, async_op=True)

    def done(self) -> bool:
        return self.work is not None and self.work.done()


def poll(handle: int) -> bool:
    return bool(_results[handle].done())


def synchronize(handle: int) -> Any:
    if handle not in _results:
        return None
    found = _results[handle]
    while not found.done():
        time.sleep(0.001)
    found.work.wait()
    del _results[handle]
    return found.array
