"""A reference engine for the tests: torch.distributed with gloo, in the plainest way there is.

It shows what `kvstore.backends.collective.Collective` asks for. What is begun is done when somebody waits for
it or for something later, in the order of the calls; before each sum all processes compare what they mean.
"""

from __future__ import annotations

import atexit
import os
import threading
import zlib
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

import kvstore as kv
from kvstore.backends.allreduce import AllReduceBackend, told
from kvstore.backends.collective import Finish, Item
from kvstore.config import store_config


def _end() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


class Gloo:
    """One process's end; rank and size come from torchrun's variables, the meeting point from GLOO_FILE."""

    name = "gloo"
    dtypes = frozenset(("float32", "float64", "int8", "uint8", "int32", "int64"))

    def __init__(self, timeout: float) -> None:
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

    def broadcast(self, items: Sequence[Item]) -> None:
        tensors = [torch.from_numpy(array.reshape(-1)) for _, array in items]
        with self._lock:
            self._run_queue()
            for tensor in tensors:
                self._call("a broadcast", partial(dist.broadcast, tensor, 0, group=self._group))

    def allreduce(self, items: Sequence[Item], priority: int = 0) -> Finish:
        self._check()
        operation = _Sum(items)
        with self._lock:
            self._queue.append(operation)
        return partial(self._finish, operation)

    def barrier(self) -> None:
        with self._lock:
            self._run_queue()
            self._call("a barrier", partial(dist.barrier, group=self._group))

    def versions(self) -> dict[str, str]:
        return {"torch": torch.__version__}

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
        what = f"the sum of {told([name for name, _ in operation.items])}"
        extremes = torch.tensor([operation.number, -operation.number])
        self._call(what, partial(dist.all_reduce, extremes, dist.ReduceOp.MAX, self._group))
        if extremes[0] != -extremes[1]:
            raise kv.ConfigError(f"worker {self.rank} begins {what}, and other workers something else")
        for _, array in operation.items:
            if array.size:
                tensor = torch.from_numpy(array.reshape(-1))
                self._call(what, partial(dist.all_reduce, tensor, group=self._group))

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
        self.number = zlib.crc32("\0".join(f"{name} {a.size} {a.dtype}" for name, a in items).encode())
        self.done = False
        self.error: kv.KVStoreError | None = None


def register() -> None:
    """Make ``kv.create("gloo")`` work in this process."""

    class GlooStore(kv.KVStore):
        def __init__(self, **options: Any) -> None:
            config = store_config(options)
            super().__init__("gloo", AllReduceBackend(config, Gloo(config.timeout)), config)

    GlooStore.__name__ = "gloo"
    kv.register(GlooStore)


__all__ = ["Gloo", "register"]
