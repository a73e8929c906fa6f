"""A reference engine for the tests: torch.distributed with gloo, in the plainest way there is.

It shows the demands of `collectives.engine.Collective`. A call runs when the caller waits for
it or for a later call, in the order of the calls; before each all processes compare their calls.
"""

from __future__ import annotations

import atexit
import os
import threading
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import numpy.typing as npt
import torch
import torch.distributed as dist

import kvstore as kv
from kvstore.settings.options import store_config
from kvstore.stores.collectives.backend import AllReduceBackend, operation_name
from kvstore.stores.collectives.call_matching import call_digest, calls_match, mismatch_error
from kvstore.stores.collectives.engine import Finish, Item


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Gloo:
    """One process's end; rank and size come from torchrun's variables, the meeting point from GLOO_FILE."""

    name = "gloo"
    dtypes = frozenset(("float32", "float64", "int8", "uint8", "int32", "int64"))
    compares = True

    def __init__(self, timeout: float, group: str) -> None:
        self.rank, self.size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        self.local_rank = int(os.environ["LOCAL_RANK"])
        self._lock = threading.Lock()
        self._queue: deque[_Sum] = deque()
        self._broken: str | None = None
        if not dist.is_initialized():
            place = f"file://{os.environ['GLOO_FILE']}"
            dist.init_process_group("gloo", init_method=place, rank=self.rank, world_size=self.size)
            atexit.register(_end)  # gloo's threads must not outlive the interpreter
        self._group = dist.new_group(timeout=timedelta(seconds=timeout))
        try:
            self._compare(f"a store of group {group!r}", call_digest("create", [], group))
        except kv.ConfigError as error:
            raise kv.ConfigError(f"a store of group {group!r}, and other workers one of another") from error

    def broadcast(self, items: Sequence[Item], meaning: str = "") -> None:
        what = operation_name("init, broadcast or load", items)
        tensors = [torch.from_numpy(array.reshape(-1)) for _, array in items]
        with self._lock:
            self._run_queue()
            self._compare(what, call_digest("init", items, meaning))
            for tensor in tensors:
                self._call(what, partial(dist.broadcast, tensor, 0, group=self._group))

    def allreduce(self, items: Sequence[Item], priority: int = 0) -> Finish:
        self._check()
        operation = _Sum(items)
        with self._lock:
            self._queue.append(operation)
        return partial(self._finish, operation)

    def barrier(self) -> None:
        with self._lock:
            self._run_queue()
            self._compare("a barrier", call_digest("barrier", []))

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

    def abandon(self) -> None:
        """The end of this process is sent to the others."""

    def close(self) -> None:
        if self._broken is None:
            with self._lock:
                self._run_queue()
            self._broken = "the store is closed"

    def _finish(self, operation: _Sum) -> None:
        with self._lock:
            while not operation.done:
                self._run_next()
        if operation.error is not None:
            raise operation.error

    def _run_queue(self) -> None:
        while self._queue:
            self._run_next()

    def _run_next(self) -> None:
        operation = self._queue.popleft()
        try:
            self._sum(operation)
        except kv.KVStoreError as error:
            operation.error = error
        operation.done = True

    def _sum(self, operation: _Sum) -> None:
        what = operation_name("the sum", operation.items)
        self._compare(what, call_digest("sum", operation.items))
        for _, array in operation.items:
            if array.size:
                tensor = torch.from_numpy(array.reshape(-1))
                self._call(what, partial(dist.all_reduce, tensor, group=self._group))

    def _compare(self, what: str, marks: npt.NDArray[Any]) -> None:
        self._call(what, partial(dist.all_reduce, torch.from_numpy(marks), dist.ReduceOp.MAX, self._group))
        if not calls_match(marks):
            raise mismatch_error(self.name, self.rank, what)

    def _check(self) -> None:
        if self._broken is not None:
            raise kv.KVStoreError(self._broken)

    def _call(self, what: str, operation: Callable[[], Any]) -> None:
        self._check()
        try:
            operation()
        except RuntimeError as error:
            self._broken = f"worker {self.rank}: {what} failed: {error}"
            late = "imed out" in str(error)
            raise (kv.TimeoutError if late else kv.PeerLostError)(self._broken) from error


class _Sum:
    def __init__(self, items: Sequence[Item]) -> None:
        self.items = items
        self.done = False
        self.error: kv.KVStoreError | None = None


def register() -> None:
    """Make ``kv.create("gloo")`` work in this process."""

    class GlooStore(kv.KVStore):
        def __init__(self, **options: Any) -> None:
            config = store_config(options)
            super().__init__("gloo", AllReduceBackend(config, Gloo(config.timeout, config.group)), config)

    GlooStore.__name__ = "gloo"
    kv.register(GlooStore)


__all__ = ["Gloo", "register"]
