"""A communication hook for torch's DistributedDataParallel that sums gradients with a store."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import torch

from ..averaging.agreement import StepAgreement
from ..averaging.checks import check_size, check_store, check_sums
from ..engine import Work, ended_at
from ..errors import ArgumentError
from ..observe.timeline.marks import Marks
from ..store import KVStore, can_divide_values, counters_of, start_pushpull
from .overlap_choice import overlaps_backward
from .tensors import (
    Tensor,
    as_array,
    check_prefix,
    check_tensor,
    divide_rows,
    no_rows,
    rows_of,
    sparse_tensor,
    type_name,
)


@dataclass
class _DDPBucket:
    """Gradients that DistributedDataParallel has in one array, and the call that averages them."""

    buffer: Tensor
    keys: list[str]
    arrays: list[Any]
    begin: int = 0
    work: Work | None = None


class HookState:
    """State of `allreduce_hook`: the store, and the operations in progress.

    Parameters
    ----------
    store : KVStore
        A store without an optimizer that has as many workers as the process group of the model, such as
        ``"shared"``, ``"dist_sync"`` or ``"mpi"``; for a group of one process, ``"local"``.
    prefix : str
        Prefix of the keys, before the number of the parameter. Each model needs its own state and its own
        prefix.
    process_group
        The process group of the model, if it is not the default group.
    overlap : bool, optional
        If True, push each bucket as soon as it is complete. If False, push all of them with the last one. If
        None, False for a ``"shared"`` store whose workers compute with all processors
        (``torch.get_num_threads()`` each) and not on GPUs, because an exchange during the backward pass costs
        more time there than an exchange after it. Otherwise True.

    Raises
    ------
    ConfigError
        The store has an optimizer, has another number of workers than the process group, or has no rounds
        (``"dist_async"``).
    ArgumentError
        `kvstore.create` did not create `store`, or `prefix` is not a str.

    Notes
    -----
    Each parameter is a key. Buckets are not keys, because DistributedDataParallel rebuilds its buckets after
    the first iteration, and the residuals of gradient compression belong to parameters. Each bucket is one
    call of the store, or all buckets are.

    A copy, for example by ``copy.deepcopy`` of a whole model, has the same store and no keys.
    """

    def __init__(
        self,
        store: KVStore,
        prefix: str = "ddp.",
        process_group: Any = None,
        overlap: bool | None = None,
    ) -> None:
        check_store(store)
        check_prefix(prefix)
        check_size(store, torch.distributed.get_world_size(process_group))
        self.store = store
        self._prefix, self._overlap = prefix, overlap
        self._keys: dict[Tensor, str] = {}
        self._waiting: list[_DDPBucket] = []  # buckets of the next call
        self._pending: list[tuple[Callable[[], Tensor], Any]] = []
        self._at_once = False
        self._marks = Marks(counters_of(store))
        self._agreement = StepAgreement(store, 0, prefix)
        self._passes = 0

    def start(self, bucket: Any) -> Any:
        """Start to average a bucket, and return the future of its gradients.

        The call for the last bucket completes all futures, because DistributedDataParallel waits for them
        there. This call also raises the errors of the store.
        """
        check_sums(self.store)
        self._check_new(bucket.parameters())
        buffer = bucket.buffer()
        begin = self._start_rows if buffer.is_sparse else self._start_dense
        devices = [buffer.device] if buffer.is_cuda else []
        self._detect_numbering(bucket)
        self._pending.append((begin(bucket, buffer), torch.futures.Future(devices=devices)))
        _, future = self._pending[-1]
        if self._at_once or bucket.is_last():
            self._finish_bucket()
        return future

    def _detect_numbering(self, bucket: Any) -> None:
        """Find out whether each bucket must be completed by itself, because no bucket is marked as the last.

        In the first backward pass of a static graph, all buckets have the number 0 and arrive at the end of
        the pass. The second such bucket shows this. From then on no bucket waits for a last bucket, until
        another number shows that the pass is over.
        """
        if bucket.index() or bucket.is_last():
            self._at_once = False
        elif self._pending:
            self._at_once = True

    def _finish_bucket(self) -> None:
        pending, self._pending = self._pending, []
        begin = self._marks.begin()
        self._push_collected(waits=True)
        results = [finish() for finish, _ in pending]
        if not self._at_once:
            self._compare_workers()
            self._marks.step(begin)
        for (_, future), result in zip(pending, results, strict=True):
            future.set_result(result)

    def _compare_workers(self) -> None:
        """Raise KVStoreError if a worker has closed its store: the sums are without its gradients."""
        self._passes += 1
        self._agreement.compare(self._passes)

    def _check_new(self, parameters: list[Tensor]) -> None:
        new = [parameter for parameter in parameters if parameter not in self._keys]
        for number, parameter in enumerate(new, len(self._keys)):
            check_tensor(f"{self._prefix}{number}", parameter)

    def _start_dense(self, bucket: Any, buffer: Tensor) -> Callable[[], Tensor]:
        parameters = bucket.parameters()
        parts = buffer.split([parameter.numel() for parameter in parameters])
        arrays = [as_array(part.detach()) for part in parts]
        one = _DDPBucket(buffer, self._keys_of(parameters, arrays), arrays)
        self._waiting.append(one)
        if overlaps_backward(self.store, self._overlap, [buffer]):
            self._push_collected()
        return partial(self._complete_bucket, one)

    def _push_collected(self, waits: bool = False) -> None:
        """Start to average the collected gradients, in one call.

        `waits`: the caller waits for the call next.
        """
        buckets, self._waiting = self._waiting, []
        if not buckets:
            return
        keys = [key for one in buckets for key in one.keys]
        arrays = [value for one in buckets for value in one.arrays]
        divisor = self.store.num_workers
        if divisor > 1 and not can_divide_values(self.store, arrays):
            for one in buckets:
                one.buffer.div_(divisor)
            divisor = 1
        begin = self._marks.begin()
        work = start_pushpull(self.store, keys, arrays, None, divisor, waits)
        for one in buckets:
            one.begin, one.work = begin, work

    def _complete_bucket(self, bucket: _DDPBucket) -> Tensor:
        work, buffer = bucket.work, bucket.buffer
        _wait_for_work(work)
        if bucket.begin and work is not None:
            self._marks.bucket(bucket.begin, ended_at(work), buffer.numel() * buffer.element_size())
        return buffer

    def _start_rows(self, bucket: Any, gradient: Tensor) -> Callable[[], Tensor]:
        (parameter,) = bucket.parameters()
        rows = divide_rows(rows_of(gradient, f"bucket {bucket.index()}"), self.store.num_workers)
        (key,) = self._keys_of([parameter], [rows])
        work = self.store.push(key, rows, async_op=True)
        return partial(self._finish_rows, work, key, parameter)

    def _finish_rows(self, work: Work | None, key: str, parameter: Tensor) -> Tensor:
        _wait_for_work(work)
        rows = no_rows(parameter)
        self.store.pull(key, out=rows, ignore_sparse=False)
        return sparse_tensor(rows)

    def _keys_of(self, parameters: list[Tensor], values: list[Any]) -> list[str]:
        """Return the keys of parameters, which are numbered at their first use: equal on all workers."""
        new = [(p, value) for p, value in zip(parameters, values, strict=True) if p not in self._keys]
        for parameter, _ in new:
            self._keys[parameter] = f"{self._prefix}{len(self._keys)}"
        if new:
            self.store.init([self._keys[parameter] for parameter, _ in new], [value for _, value in new])
        return [self._keys[parameter] for parameter in parameters]

    def __copy__(self) -> HookState:
        other = object.__new__(type(self))
        other.__dict__.update(self.__dict__, _keys={}, _waiting=[], _pending=[], _at_once=False)
        return other

    def __deepcopy__(self, memo: dict[int, Any]) -> HookState:
        return self.__copy__()

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Raise ArgumentError, because the store belongs to this process."""
        raise ArgumentError(
            "a HookState cannot be pickled, because its store belongs to this process: save the state_dict() "
            "of the model, and register a new HookState after you load it"
        )


def allreduce_hook(state: HookState, bucket: Any) -> Any:
    """Average gradients with a store: ``model.register_comm_hook(HookState(store), allreduce_hook)``.

    This is a communication hook of DistributedDataParallel. Gradients are divided by the number of workers
    and then summed, as without a hook. ``backward`` raises the errors of the store; the model cannot be used
    after such an error.

    Parameters
    ----------
    state : HookState
        The store and its keys.
    bucket : torch.distributed.GradBucket
        The gradients.

    Returns
    -------
    torch.futures.Future
        Future of the averaged gradients of the bucket.

    Raises
    ------
    ArgumentError
        `state` is not a `HookState`.
    DTypeError
        Stores do not sum the type of a parameter.
    """
    if not isinstance(state, HookState):
        raise ArgumentError(
            f"allreduce_hook needs a HookState, not {type_name(state)}: "
            "model.register_comm_hook(HookState(store), allreduce_hook)"
        )
    return state.start(bucket)


allreduce_hook.__annotations__.clear()  # DistributedDataParallel expects types here, not texts


def _wait_for_work(work: Work | None) -> None:
    assert work is not None  # from a call with async_op
    work.wait()
