"""A store under torch's DistributedDataParallel, as its communication hook."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from ..averaging import check_store
from ..engine import Work
from ..errors import ConfigError
from ..store import KVStore
from .tensors import Tensor, array, divided, no_rows, rows_of, sparse_tensor


class HookState:
    """What `allreduce_hook` needs: the store, and what is on its way.

    Parameters
    ----------
    store : KVStore
        Of as many workers as the model's process group, without an optimizer. Any kind: `shared`,
        `dist_sync`, `mpi`, and for a group of one process `local`.
    prefix : str
        Goes before the number of a parameter to make its key. Each model needs a state and a prefix of its
        own.
    process_group
        The model's, where it is not the default one.

    Raises
    ------
    ConfigError
        The store has an optimizer, or another number of workers than the process group.
    ArgumentError
        `store` was not made by `kvstore.create`.

    Notes
    -----
    Each parameter is a key, not each bucket: DistributedDataParallel cuts other buckets after the first
    iteration, and residuals of gradient compression belong to parameters. A bucket is one call of the store.
    """

    def __init__(self, store: KVStore, prefix: str = "ddp.", process_group: Any = None) -> None:
        check_store(store)
        size = torch.distributed.get_world_size(process_group)
        if size != store.num_workers:
            raise ConfigError(
                f"the process group has {size} processes, and store {store.type!r} {store.num_workers}: "
                "create 'shared', or another store of all of them"
            )
        self.store = store
        self._prefix = prefix
        self._keys: dict[Tensor, str] = {}
        self._pending: list[tuple[Callable[[], Tensor], Any]] = []

    def start(self, bucket: Any) -> Any:
        """Begin to average a bucket, and return the future of its gradients.

        All futures are completed in the call for the last bucket, where DistributedDataParallel would wait
        for them anyway. What the store raises is raised there.
        """
        buffer = bucket.buffer()
        begin = self._start_rows if buffer.is_sparse else self._start_dense
        devices = [buffer.device] if buffer.is_cuda else []
        self._pending.append((begin(bucket, buffer), torch.futures.Future(devices=devices)))
        _, future = self._pending[-1]
        if bucket.is_last():
            self._finish()
        return future

    def _finish(self) -> None:
        pending, self._pending = self._pending, []
        for finish, future in pending:
            future.set_result(finish())

    def _start_dense(self, bucket: Any, buffer: Tensor) -> Callable[[], Tensor]:
        if self.store.num_workers > 1:
            buffer.div_(self.store.num_workers)
        parameters = bucket.parameters()
        parts = buffer.split([parameter.numel() for parameter in parameters])
        arrays = [array(part.detach()) for part in parts]
        keys = self._keys_of(parameters, arrays)
        work = self.store.pushpull(keys, arrays, priority=bucket.index(), async_op=True)
        return partial(_complete, work, buffer)

    def _start_rows(self, bucket: Any, gradient: Tensor) -> Callable[[], Tensor]:
        (parameter,) = bucket.parameters()
        rows = divided(rows_of(gradient, f"bucket {bucket.index()}"), self.store.num_workers)
        (key,) = self._keys_of([parameter], [rows])
        work = self.store.push(key, rows, priority=bucket.index(), async_op=True)
        return partial(self._finish_rows, work, key, parameter)

    def _finish_rows(self, work: Work | None, key: str, parameter: Tensor) -> Tensor:
        _wait(work)
        rows = no_rows(parameter)
        self.store.pull(key, out=rows, ignore_sparse=False)
        return sparse_tensor(rows)

    def _keys_of(self, parameters: list[Tensor], values: list[Any]) -> list[str]:
        """Keys of parameters, which are numbered as they are first seen: alike on all workers."""
        new = [(p, value) for p, value in zip(parameters, values, strict=True) if p not in self._keys]
        for parameter, _ in new:
            self._keys[parameter] = f"{self._prefix}{len(self._keys)}"
        if new:
            self.store.init([self._keys[parameter] for parameter, _ in new], [value for _, value in new])
        return [self._keys[parameter] for parameter in parameters]


def allreduce_hook(state: HookState, bucket: Any) -> Any:
    """Average gradients by a store: ``model.register_comm_hook(HookState(store), allreduce_hook)``.

    A communication hook of DistributedDataParallel. Gradients are divided by the number of workers and then
    summed, as without a hook. What the store raises leaves ``backward``; the model cannot be used after that.

    Parameters
    ----------
    state : HookState
    bucket : torch.distributed.GradBucket

    Returns
    -------
    torch.futures.Future
        Of the bucket's gradients.
    """
    return state.start(bucket)


allreduce_hook.__annotations__.clear()  # DistributedDataParallel compares them with types; they are texts


def _complete(work: Work | None, buffer: Tensor) -> Tensor:
    _wait(work)
    return buffer


def _wait(work: Work | None) -> None:
    assert work is not None  # asked for with async_op
    work.wait()
