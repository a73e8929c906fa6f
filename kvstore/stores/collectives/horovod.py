"""The store on Horovod, by horovod.torch: sums start at the call, and run in Horovod's thread.

Horovod matches operations by their names, so the order of the calls need not be the same in all processes.
A name describes the summed arrays: a process that sums other arrays waits until the deadline. A name cannot
be used again while its operation runs; operations on the same keys therefore alternate between two names.
"""

from __future__ import annotations

import hashlib
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import numpy as np

from ...errors import ConfigError, KVStoreError, MissingBackendError, PeerLostError
from ...optimizer import Optimizer
from ...settings.options import StoreConfig
from .backend import AllReduceBackend, check_launched, operation_name
from .engine import Finish, Item, ascii_name
from .polling import PolledEngine, PolledOperation

log = logging.getLogger("kvstore.horovod")

# Element types of horovod.torch on the host; int8 and uint8 are not among them.
_DTYPES = frozenset(("float32", "float64", "int32", "int64"))
_TURNS = 2  # concurrent operations of one name

#: Group of stores -> number of its next store.
_numbers: dict[str, Iterator[int]] = {}


class HorovodBackend(AllReduceBackend):
    """See `kvstore.stores.protocol.Backend`. Methods for optimizers do nothing, as in MXNet."""

    engine: HorovodEngine

    def __init__(self, config: StoreConfig) -> None:
        super().__init__(config, HorovodEngine(config.timeout, config.group))
        self._ignored: set[str] = set()

    def set_optimizer(self, optimizer: Optimizer) -> None:
        """Do nothing."""
        self._log_ignored("set_optimizer")

    def save_states(self, path: str, dump_optimizer: bool) -> None:
        """Do nothing."""
        self._log_ignored("save_optimizer_states")

    def load_states(self, path: str) -> None:
        """Do nothing."""
        self._log_ignored("load_optimizer_states")

    def _log_ignored(self, verb: str) -> None:
        if verb not in self._ignored:
            self._ignored.add(verb)
            log.warning("%s does nothing with horovod, as in MXNet: update the weights after pushpull", verb)


class HorovodEngine(PolledEngine):
    """See `kvstore.stores.collectives.engine.Collective`.

    Raises
    ------
    MissingBackendError
        Horovod is not installed, or was built without PyTorch.
    ConfigError
        Horovod has one process, and a launcher has started more.
    KVStoreError
        Horovod does not start; or this process is a fork of a process that uses Horovod.
    """

    name, _title, _needs = "horovod", "Horovod", "with the same keys"
    dtypes = _DTYPES
    compares = False

    def __init__(self, timeout: float, group: str) -> None:
        super().__init__(timeout, log)
        self._hvd, self._tensor = _import_horovod()
        self._turns: dict[str, Iterator[int]] = {}
        self._last: dict[str, PolledOperation] = {}  # by full name
        self._start_horovod()
        self.rank, self.size = int(self._hvd.rank()), int(self._hvd.size())
        self.local_rank = int(self._hvd.local_rank())
        check_launched(self.name, self.size, "horovodrun -np {n}")
        self._prefix = f"kvstore.{ascii_name(group)}.{next(_numbers.setdefault(group, itertools.count()))}"

    def _start_horovod(self) -> None:
        """Start Horovod, once in a process; the first store does so."""
        if self._hvd.is_initialized():
            return
        try:
            self._hvd.init()
        except ValueError as error:
            raise KVStoreError(f"Horovod did not start: {error}; its own lines above say why") from error

    # --------------------------------------------------------------------------------------- operations

    def broadcast(self, items: Sequence[Item], meaning: str = "") -> None:
        """Overwrite the items with those of rank 0."""
        operation = PolledOperation(operation_name("init, broadcast or load", items))
        for name, array in items:
            self._start_operation(
                operation,
                f"first.{ascii_name(name)}",
                partial(self._hvd.broadcast_async_, self._tensor(array.reshape(-1)), 0),
            )
        self._finish_operation(operation)

    def allreduce(self, items: Sequence[Item], priority: int = 0) -> Finish:
        """Start a sum; horovod.torch has no `priority`."""
        operation = PolledOperation(operation_name("the sum", items))
        by_type: dict[np.dtype[Any], list[Item]] = {}
        for name, array in items:
            if array.size:
                by_type.setdefault(array.dtype, []).append((name, array.reshape(-1)))
        for some in by_type.values():
            self._start_operation(operation, *self._sum_operation(some))
        return partial(self._finish_operation, operation)

    def _sum_operation(self, items: list[Item]) -> tuple[str, Callable[..., Any]]:
        """Return the name of a sum over arrays of one type, and the function that starts it.

        If several arrays are summed in one call, Horovod reports the error of the last one only. The name
        therefore contains shapes and types of all arrays, so that processes with different arrays do not
        match.
        """
        if len(items) == 1:
            name, array = items[0]
            begin = partial(self._hvd.allreduce_async_, self._tensor(array), op=self._hvd.Sum)
            return f"key.{ascii_name(name)}", begin
        text = "\0".join(f"{ascii_name(name)} {array.size} {array.dtype}" for name, array in items)
        tensors = [self._tensor(array) for _, array in items]
        begin = partial(self._hvd.grouped_allreduce_async_, tensors, op=self._hvd.Sum)
        return f"keys.{hashlib.sha256(text.encode()).hexdigest()[:16]}", begin

    def barrier(self) -> None:
        """Wait until all processes have called `barrier`."""
        operation = PolledOperation("a barrier")
        tensor = self._tensor(np.zeros(1, np.int32))
        self._start_operation(
            operation, "barrier", partial(self._hvd.allreduce_async_, tensor, op=self._hvd.Sum)
        )
        self._finish_operation(operation)

    def versions(self) -> dict[str, str]:
        """Return the versions of Horovod, of the PyTorch that it was built for, and of its transport here."""
        import horovod
        import torch

        controller = "MPI" if self._hvd.mpi_enabled() else "Gloo"
        return {"horovod": horovod.__version__, "torch": torch.__version__, "controller": controller}

    def close(self) -> None:
        """Complete the running operations; Horovod itself runs until the process ends."""
        if self._broken is None:
            for operation in list(self._last.values()):
                self._until_complete(operation)
            self._broken = "the store is closed"

    # ------------------------------------------------------------------------------------------ waiting

    def _start_operation(self, operation: PolledOperation, base: str, begin: Callable[..., Any]) -> None:
        """Start an operation, under the next of its names, once that name is not in use."""
        turn = next(self._turns.setdefault(base, itertools.count())) % _TURNS
        name = f"{self._prefix}.{base}.{turn}"
        if (earlier := self._last.get(name)) is not None:
            self._until_complete(earlier)
        self._check_open()
        try:
            operation.left.append(begin(name=name))
        except self._hvd.HorovodInternalError as error:
            raise self._error_of(operation, error) from error
        self._last[name] = operation

    def _is_done(self, one: Any) -> bool:
        return bool(self._hvd.poll(one))

    def _receive_result(self, operation: PolledOperation, one: Any) -> None:
        try:
            self._hvd.synchronize(one)
        except self._hvd.HorovodInternalError as error:
            operation.error = operation.error or self._error_of(operation, error)

    # ------------------------------------------------------------------------------------------ trouble

    def _error_of(self, operation: PolledOperation, error: Exception) -> KVStoreError:
        """Make the error of the exception of Horovod, which has one class for all causes."""
        if "Mismatched" in str(error):
            return ConfigError(
                f"worker {self.rank} and other workers have different arrays in {operation.what}: with "
                f"horovod all workers push a key with the same shape and element type; {error}"
            )
        if self._broken is None:
            self._broken = f"Horovod ended in {operation.what}: another worker has failed or left ({error})"
        return PeerLostError(f"worker {self.rank}: {self._broken}")


def _import_horovod() -> tuple[Any, Callable[[Any], Any]]:
    """Import `horovod.torch`, and the function that makes a tensor of an array without a copy."""
    try:
        import horovod.torch as hvd
        import torch
    except (ImportError, OSError) as error:
        raise MissingBackendError(
            "store 'horovod' needs PyTorch and a Horovod that was built for it: "
            "`HOROVOD_WITH_PYTORCH=1 pip install --no-build-isolation horovod`, and start with "
            f"`horovodrun -np 2 python train.py`; {error}"
        ) from error
    return hvd, torch.from_numpy
