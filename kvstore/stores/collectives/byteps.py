"""The store on BytePS, by byteps.torch: sums start at the call, and BytePS's servers compute them.

BytePS numbers its tensors in the order in which each process declares them, and matches operations by these
numbers. It never releases the memory of a tensor, and never changes its size. So tensors are declared when a
key is initialised, which all workers do in the same order. Each tensor has its own memory, and arrays are
copied from and to it.

These statements are from the source of BytePS 0.2.5.post15; the module was not tested with a running BytePS.
"""

from __future__ import annotations

import itertools
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from ...arrays import pages
from ...arrays.grouping import Group
from ...errors import ConfigError, KVStoreError, MissingBackendError
from ...settings.options import StoreConfig
from ..entry import StoredKey
from .backend import AllReduceBackend, check_launched, operation_name
from .engine import Finish, Item, ascii_name
from .polling import PolledEngine, PolledOperation

log = logging.getLogger("kvstore.byteps")

Array = npt.NDArray[Any]

# Element types of byteps.torch on the host, without half floats.
_DTYPES = frozenset(("float32", "float64", "uint8", "int32", "int64"))

#: Group of stores -> number of its next store.
_numbers: dict[str, Iterator[int]] = {}
#: Started modules, with the thread of the start: a second start would double BytePS's threads.
_started: dict[Any, int] = {}


class BytePSBackend(AllReduceBackend):
    """See `kvstore.stores.protocol.Backend`."""

    engine: BytePS

    def __init__(self, config: StoreConfig) -> None:
        super().__init__(config, BytePS(config.timeout, config.group))

    def init(self, groups: list[Group]) -> None:
        """As in the base class; only in one thread of the process."""
        self.engine.check_thread()
        super().init(groups)

    def _compare_new_keys(self, entries: list[StoredKey]) -> None:
        """Declare keys that are summed for the first time without init.

        All workers do so in the same order.
        """
        new = {name: e for e in entries if not self.engine.knows_name(name := self._engine_name(e))}
        if new:
            self.engine.check_thread()
            self._compare_keys(
                [(e.key, e.value) for e in new.values()], "\0".join(["sum", *sorted(new)]), "sums"
            )
            self.engine.declare_sizes({name: e.value.nbytes for name, e in new.items()})


@dataclass(eq=False, slots=True)
class _DeclaredTensor:
    """A declared tensor, with its memory from the first sum on."""

    name: str
    array: Array | None = None
    tensor: Any = None
    under_way: PolledOperation | None = None


class BytePS(PolledEngine):
    """See `kvstore.stores.collectives.engine.Collective`.

    Raises
    ------
    MissingBackendError
        BytePS is not installed, or was built without PyTorch.
    ConfigError
        BytePS has one process, and a launcher has started more.
    KVStoreError
        This process is a fork of one that uses BytePS.
    """

    name, _title, _needs = "byteps", "BytePS", "the servers live"
    dtypes = _DTYPES
    compares = False

    def __init__(self, timeout: float, group: str) -> None:
        super().__init__(timeout, log)
        self._bps, self._ops, self._from_numpy = _import_byteps()
        self._tensors: dict[str, _DeclaredTensor] = {}
        self._sizes: dict[str, tuple[int, int]] = {}  # name -> bytes, and the number of changes of that size
        if self._bps not in _started:
            self._bps.init()
            _started[self._bps] = threading.get_ident()
        self.rank, self.size = int(self._bps.rank()), int(self._bps.size())
        self.local_rank = int(self._bps.local_rank())
        check_launched("BytePS", self.size, "DMLC_NUM_WORKER={n} DMLC_WORKER_ID=... bpslaunch")
        self._prefix = f"kvstore.{group}.{next(_numbers.setdefault(group, itertools.count()))}"
        self._declare_tensor("barrier")
        self._declare_key("kvstore.init", 16)  # keys are compared by this sum, before any key is declared

    # --------------------------------------------------------------------------------------- operations

    def broadcast(self, items: Sequence[Item], meaning: str = "") -> None:
        """Overwrite the items with those of rank 0: the other processes add zeros."""
        operation = PolledOperation(operation_name("init, broadcast or load", items))
        for name, array in items:
            self._declare_key(name, array.nbytes)
        for name, array in items:
            if self.rank:
                array[...] = 0
            self._start_operation(operation, f"first.{self._sized_name(name)}", array.reshape(-1), 0)
        self._finish_operation(operation)

    def allreduce(self, items: Sequence[Item], priority: int = 0) -> Finish:
        """Start a sum; sums with a higher `priority` run first."""
        operation = PolledOperation(operation_name("the sum", items))
        for name, array in items:
            if array.size:
                self._start_operation(operation, f"key.{self._sized_name(name)}", array.reshape(-1), priority)
        return partial(self._finish_operation, operation)

    def barrier(self) -> None:
        """Wait until all processes have called `barrier`."""
        operation = PolledOperation("a barrier")
        self._start_operation(operation, "barrier", np.zeros(1, np.int32), 0)
        self._finish_operation(operation)

    def versions(self) -> dict[str, str]:
        """Return the versions of BytePS and PyTorch."""
        import byteps
        import torch

        return {"byteps": getattr(byteps, "__version__", "unknown"), "torch": torch.__version__}

    def close(self) -> None:
        """Complete the running operations; BytePS and its memory stay until the process ends."""
        if self._broken is None:
            for tensor in list(self._tensors.values()):
                if tensor.under_way is not None:
                    self._until_complete(tensor.under_way)
            self._broken = "the store is closed"

    # ----------------------------------------------------------------------------------------- tensors

    def check_thread(self) -> None:
        """Raise unless this thread declares the tensors of all stores of the process.

        The order in which two threads declare tensors would differ between processes, and sums would be
        stored under wrong keys.
        """
        if threading.get_ident() != _started[self._bps]:
            raise ConfigError(
                f"worker {self.rank} initialises keys in thread {threading.current_thread().name!r}, and "
                "made its first store of BytePS in another: BytePS numbers keys as they are "
                "initialised, so initialise those of all its stores in that thread; any thread may push"
            )

    def knows_name(self, name: str) -> bool:
        """Return whether tensors of a name are declared."""
        return name in self._sizes

    def declare_sizes(self, sizes: dict[str, int]) -> None:
        """Declare tensors, by name and size, for sums without an earlier broadcast."""
        for name in sorted(sizes):
            self._declare_key(name, sizes[name])

    def _declare_key(self, name: str, nbytes: int) -> None:
        """Declare a key's tensors; all workers do so with the same keys in the same order."""
        known = self._sizes.get(name)
        if known is None or known[0] != nbytes:
            self._sizes[name] = nbytes, known[1] + 1 if known else 0
            for kind in ("first", "key"):
                self._declare_tensor(f"{kind}.{self._sized_name(name)}")

    def _sized_name(self, name: str) -> str:
        """Return the name of a key at its present size."""
        _, changes = self._sizes.get(name, (0, 0))
        return f"{name}.{changes}"

    def _declare_tensor(self, base: str) -> _DeclaredTensor:
        made = self._tensors[base] = _DeclaredTensor(ascii_name(f"{self._prefix}.{base}"))
        self._bps.declare(made.name)
        return made

    def _tensor_for(self, base: str, like: Array) -> _DeclaredTensor:
        """Return a tensor with memory for an array."""
        tensor = self._tensors.get(base) or self._declare_tensor(base)
        if tensor.array is not None and (tensor.array.dtype, tensor.array.size) != (like.dtype, like.size):
            other = f"{base}.{like.dtype}.{like.size}"
            tensor = self._tensors.get(other) or self._declare_tensor(other)
        if tensor.array is None:
            tensor.array = pages.empty(like.shape, like.dtype)
            tensor.tensor = self._from_numpy(tensor.array)
        return tensor

    # ------------------------------------------------------------------------------------------ waiting

    def _start_operation(self, operation: PolledOperation, base: str, array: Array, priority: int) -> None:
        tensor = self._tensor_for(base, array)
        if tensor.under_way is not None:
            self._until_complete(tensor.under_way)
        self._check_open()
        assert tensor.array is not None
        tensor.array[...] = array
        begin: Callable[..., Any] = self._ops.push_pull_async_inplace
        try:
            handle = begin(tensor.tensor, average=False, name=tensor.name, version=0, priority=priority)
        except (RuntimeError, ValueError) as error:
            raise self._operation_failed(operation, error) from error
        tensor.under_way = operation
        operation.left.append((handle, tensor, array))

    def _is_done(self, one: Any) -> bool:
        return bool(self._bps.poll(one[0]))

    def _receive_result(self, operation: PolledOperation, one: tuple[Any, _DeclaredTensor, Array]) -> None:
        handle, tensor, array = one
        tensor.under_way = None
        try:
            self._bps.synchronize(handle)
        except (RuntimeError, ValueError) as error:
            operation.error = operation.error or self._operation_failed(operation, error)
            return
        array[...] = tensor.array

    # ------------------------------------------------------------------------------------------ trouble

    def _operation_failed(self, operation: PolledOperation, error: Exception) -> KVStoreError:
        self._broken = f"BytePS failed in {operation.what}: {error}"
        return KVStoreError(f"worker {self.rank}: {self._broken}; its own lines above say more")


def _import_byteps() -> tuple[Any, Any, Callable[[Array], Any]]:
    """Import byteps.torch, its operations, and the function that views an array as a tensor."""
    try:
        import byteps.torch as bps
        import torch
        from byteps.torch import ops
    except (ImportError, OSError) as error:
        raise MissingBackendError(
            "store 'byteps' needs PyTorch and a BytePS that was built for it, with CUDA and NCCL: "
            "`BYTEPS_WITH_PYTORCH=1 pip install --no-build-isolation byteps`, and start with "
            f"`bpslaunch python train.py`; {error}"
        ) from error
    return bps, ops, torch.from_numpy
