"""The exchange of gradients: their sum is received, or the weight that the store has updated."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import numpy as np
import torch

from ..arrays.sparse import RowSparseArray
from ..averaging.checks import check_sums
from ..engine import Work
from ..errors import CapabilityError, ConfigError
from ..optimizer import Optimizer
from ..optimizer.changes import REVISION, WatchedOptimizer
from ..store import KVStore, can_divide_values, start_pushpull
from .gradient_slots import GradientSlot
from .tensors import Tensor, as_array, divide_rows, in_memory_order, no_rows, rows_of, sparse_tensor

_ABSENT = (
    "worker {rank}: parameter {name!r} has no gradient in this step, so this worker pushes zeros. If no "
    "worker has a gradient, the store updates the weight with zeros: weight decay and momentum change it. "
    "Set requires_grad to False, or leave update_on_kvstore out"
)


class GradientExchange:
    """Sums of gradients, which are received in the memory of the gradients."""

    def __init__(
        self,
        store: KVStore,
        model: list[GradientSlot],
        divisor: int,
        whole: bool = False,
        at_once: bool = False,
    ) -> None:
        self._store, self._divisor, self._whole, self._at_once = store, divisor, whole, at_once
        tables = [slot for slot in model if slot.sparse]
        for slot in tables:  # rows, with the dense weight
            slot.key += ".rows"
        if tables:
            store.init([slot.key for slot in tables], [no_rows(slot.parameter) for slot in tables])

    def start(self, batch: list[GradientSlot], waits: bool = False) -> None:
        """Push the gradients of a batch, in one call. `waits`: the caller calls `finish` next."""
        check_sums(self._store)
        for slot in batch:
            slot.absent = slot.parameter.grad is None
        with self._store.step() if self._whole else nullcontext():
            for slot in [slot for slot in batch if slot.sparse]:
                rows = divide_rows(_pushed_rows(slot), self._divisor)
                slot.work = self._store.push(slot.key, rows, async_op=not self._whole)
            dense = [slot for slot in batch if not slot.sparse]
            if dense:
                self._start_dense(dense, waits or self._at_once)
        if self._whole:
            _mark_ended(batch)

    def _start_dense(self, dense: list[GradientSlot], waits: bool) -> None:
        gradients = [
            _absent_gradient(slot.parameter) if slot.absent else _gradient_of(slot) for slot in dense
        ]
        values = [
            as_array(in_memory_order(one, slot.order)) for slot, one in zip(dense, gradients, strict=True)
        ]
        divisor = self._divisor
        if divisor > 1 and (self._whole or not can_divide_values(self._store, values)):
            for gradient in gradients:
                gradient.div_(divisor)
            divisor = 1
        for slot, gradient, value in zip(dense, gradients, values, strict=True):
            slot.gradient = gradient
            if not slot.absent:
                _mark_gradient(value, divisor)
        keys = [slot.key for slot in dense]
        if self._whole:
            self._store.pushpull(keys, values)
            return
        work = start_pushpull(self._store, keys, values, None, divisor, waits)
        for slot in dense:
            slot.work = work

    def finish(self, taking_part: list[GradientSlot]) -> None:
        """Wait for the sums of all workers, and write them to the gradients."""
        _wait_for(taking_part)
        for slot in taking_part:
            if slot.sparse:
                self._finish_rows(slot)
            elif slot.absent and _is_absent(slot.gradient):
                slot.parameter.grad = None
            else:
                slot.parameter.grad = slot.gradient

    def _finish_rows(self, slot: GradientSlot) -> None:
        rows = no_rows(slot.parameter)
        self._store.pull(slot.key, out=rows, ignore_sparse=False)
        slot.parameter.grad = None if slot.absent and not rows.nnz_rows else sparse_tensor(rows)


class WeightExchange:
    """Gradients are pushed to the store, and weights are pulled."""

    def __init__(
        self,
        store: KVStore,
        optimizer: StoreOptimizer,
        divisor: int,
        whole: bool = False,
        at_once: bool = False,
    ) -> None:
        self._store, self._optimizer, self._whole = store, optimizer, whole
        self._warned = False
        self._at_once = at_once  # no backward pass reads the weights while they are received
        self._divisor = divisor
        self._watched = WatchedOptimizer(optimizer.rule)
        self._rule = copy.deepcopy(optimizer.rule)  # the caller's does not change
        self._rule.rescale_grad = self._rule.rescale_grad / divisor
        store.set_optimizer(self._rule)

    def start(self, batch: list[GradientSlot], waits: bool = False) -> None:
        """Push gradients in one call.

        `waits` is the argument of `GradientExchange.start`, and has no effect here.
        """
        if self._watched.seen != REVISION.number:
            self._change_rule()
        self._optimizer.send_rate(self._store)
        keys = [slot.key for slot in batch]
        values = [self._slot_value(slot) for slot in batch]
        if self._whole:
            with self._store.step():
                self._store.push(keys, values)
            _mark_ended(batch)
            return
        work: Work | None
        if self._at_once:
            work = start_pushpull(self._store, keys, values, _batch_weights(batch), waits=True)
        else:
            work = self._store.push(keys, values, async_op=True)
        for slot in batch:
            slot.work = work

    def _change_rule(self) -> None:
        """Change the store's optimizer as the program has changed its own optimizer."""
        changes, config, number = self._watched.changed_settings()
        if "rescale_grad" in changes:
            changes["rescale_grad"] /= self._divisor
        if "learning_rate" in changes:
            self._optimizer.param_groups[0]["lr"] = changes["learning_rate"]
        self._rule.configure(**changes)
        self._watched.note_config(config, number)

    def _slot_value(self, slot: GradientSlot) -> Any:
        if slot.sparse:
            return _pushed_rows(slot)
        absent = slot.parameter.grad is None
        if absent and not self._warned:
            self._warned = True
            warnings.warn(_ABSENT.format(rank=self._store.rank, name=slot.name), stacklevel=2)
        slot.gradient = torch.zeros_like(slot.parameter) if absent else _gradient_of(slot)
        return as_array(in_memory_order(slot.gradient, slot.order))

    def finish(self, taking_part: list[GradientSlot]) -> None:
        """Wait for the weights, and write them to the parameters."""
        _wait_for(taking_part)
        if taking_part and not self._at_once:
            self._store.pull([slot.key for slot in taking_part], out=_batch_weights(taking_part))


class StoreOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """The optimizer in the store as an optimizer of torch: one group, with the learning rate."""

    def __init__(self, rule: Optimizer, parameters: list[Tensor]) -> None:
        self.rule = rule
        self._sent_rate = rule.learning_rate
        super().__init__(parameters, {"lr": self._sent_rate})

    def send_rate(self, store: KVStore) -> None:
        """Pass the learning rate, which a schedule of torch may have set, to the store."""
        rate = float(self.param_groups[0]["lr"])
        if rate != self._sent_rate:
            store.set_learning_rate(rate)
            self._sent_rate = rate

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Do nothing: the store has updated the weights."""
        return None if closure is None else closure()

    def state_dict(self) -> Any:
        """Raise CapabilityError: the store saves the states."""
        raise CapabilityError("the states are in the store: store.save_optimizer_states(path), on one worker")

    def load_state_dict(self, state_dict: Any) -> None:
        """Raise CapabilityError: the store loads the states."""
        raise CapabilityError("the states are in the store: store.load_optimizer_states(path)")

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add the first group, which has all parameters."""
        if self.param_groups:
            raise CapabilityError(
                "an optimizer in the store has one group; use set_lr_mult and set_wd_mult for single keys"
            )
        super().add_param_group(param_group)


# ---------------------------------------------------------------------------------------------- gradients


def _batch_weights(batch: list[GradientSlot]) -> list[Any]:
    return [as_array(in_memory_order(slot.parameter, slot.order)) for slot in batch]


def _gradient_of(slot: GradientSlot) -> Tensor:
    """Return the gradient, in the memory order of the parameter."""
    gradient = slot.parameter.grad
    if gradient.is_sparse:
        raise ConfigError(
            f"parameter {slot.name!r} has a sparse gradient: add it to sparse=[{slot.name!r}], on all "
            "workers, or build the layer with sparse=False"
        )
    if not in_memory_order(gradient, slot.order).is_contiguous():
        gradient = torch.empty_like(slot.parameter, requires_grad=False).copy_(gradient.detach())
    return gradient.detach()


def _absent_gradient(parameter: Tensor) -> Tensor:
    """Return an array of -0.0, which changes no sum, and is a sum only if all workers push it.

    -0.0 + 0.0 is 0.0, and after `_mark_gradient` the first element of a gradient is never -0.0.
    """
    return torch.full_like(parameter, -0.0, requires_grad=False)


#: The least number above 0 of float32, the only type whose quotients need the mark.
_LEAST = 2.0**-149


def _mark_gradient(value: Any, divisor: int) -> None:
    """Make a gradient differ from `_absent_gradient`, also divided: its first element is not -0.0."""
    if type(value) is np.ndarray and value.size and abs(value.item(0)) > divisor * _LEAST:
        return
    first = value.reshape(-1)[:1]
    first += 0.0
    if divisor > 1:  # of float32, as the quotient; NumPy 1 would make it wider
        with np.errstate(all="ignore"):
            first[first / np.float32(divisor) == 0] = 0.0


def _is_absent(total: Any) -> bool:
    first = total[(0,) * total.ndim] if total.numel() else None
    return first is None or bool(first == 0 and torch.signbit(first))


def _pushed_rows(slot: GradientSlot) -> RowSparseArray:
    gradient = slot.parameter.grad
    if gradient is None:
        return no_rows(slot.parameter)
    if not gradient.is_sparse:
        raise ConfigError(
            f"parameter {slot.name!r} is in `sparse` but has a dense gradient: remove it from `sparse`, or "
            "build the layer with sparse=True"
        )
    return rows_of(gradient, repr(slot.name))


def _mark_ended(batch: list[GradientSlot]) -> None:
    for slot in batch:
        slot.ended = True


def _wait_for(taking_part: list[GradientSlot]) -> None:
    waited = None  # one work belongs to many slots
    for slot in taking_part:
        if slot.work is None or slot.work is not waited:
            waited = slot.work
            slot.wait()
        else:
            slot.ended, slot.work = True, None
    for slot in taking_part:
        if slot.error is not None:
            raise slot.error
