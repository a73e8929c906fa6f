"""`DistributedOptimizer`: an optimizer of torch on gradients of all workers, or one in the store."""

from __future__ import annotations

import gc
import numbers
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import torch

from ..averaging import check_not_late, check_store
from ..errors import ArgumentError, ClosedError, ConfigError, KVStoreError
from ..optimizer import Optimizer
from ..store import KVStore
from .exchange import Gradients, OnStore, Weights
from .slots import Slot, agree, slots
from .tensors import Tensor, check_prefix, kind


class DistributedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer whose gradients are averaged over all workers of a store, while the backward pass runs.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        Updates the weights of this worker, with the averaged gradients. With `update_on_kvstore` a
        `kvstore.optimizer.Optimizer`: it becomes the store's.
    named_parameters : iterable of (str, parameter)
        ``model.named_parameters()``: all parameters of `optimizer`, in the order in which the model uses
        them; the first have the highest priority. Their values become those of rank 0.
    store : KVStore
        Of any kind. Its keys are the names.
    backward_passes_per_step : int
        Gradients are handed over after so many backward passes. They add up: divide the loss if you want
        their mean. A step may end after fewer.
    average : bool
        Divide by the number of workers; else gradients are summed.
    overlap : bool
        Hand over gradients as soon as they are there; else all of them in `synchronize`, for models that come
        back to a parameter in one pass, as with reentrant checkpointing.
    bucket_bytes : int
        So much of gradients is handed over in one call; a larger one goes by itself.
    sparse : iterable of str
        Names of the parameters with sparse gradients (``nn.Embedding(..., sparse=True)``).
    prefix : str
        Goes before the names to make the keys; models that share a store need different ones.
    update_on_kvstore : bool
        The store updates the weights, and these come back in place of the gradients.

    Raises
    ------
    ConfigError
        Parameters lack names, or another DistributedOptimizer that is not closed has them; the workers'
        models differ; the store has an optimizer already, or none and workers that do not wait for each
        other (`dist_async`, which is for `update_on_kvstore`).
    ArgumentError
        The optimizer is not of the kind that `update_on_kvstore` asks for, or another argument of a type
        that cannot be meant.
    CapabilityError
        The store has no optimizers, or no rows; or this worker came back, and finds gradients.
    ArrayError, DTypeError, MissingBackendError
        A parameter that the store cannot take.

    Notes
    -----
    From ``backward`` to `step` or `synchronize` the gradients are the store's. To read or change them
    (clipping, ``GradScaler.unscale_``), call `synchronize` first. All workers make the same steps. A
    parameter without a gradient on this worker counts as zeros; if it has none on any, it stays None (but
    becomes zeros with gradient compression, and with `update_on_kvstore` is updated with zeros).
    """

    def __init__(
        self,
        optimizer: Any,
        named_parameters: Iterable[tuple[str, Tensor]],
        store: KVStore,
        *,
        backward_passes_per_step: int = 1,
        average: bool = True,
        overlap: bool = True,
        bucket_bytes: int = 1 << 20,
        sparse: Iterable[str] = (),
        prefix: str = "",
        update_on_kvstore: bool = False,
    ) -> None:
        _check_count("backward_passes_per_step", backward_passes_per_step, 1)
        _check_count("bucket_bytes", bucket_bytes, 0)
        _check_kind(optimizer, update_on_kvstore)
        check_store(store, sums=not update_on_kvstore)
        check_prefix(prefix)
        self.store, self._closed = store, False
        self._passes, self._overlap, self._full = backward_passes_per_step, overlap, bucket_bytes
        self._batch: list[Slot] = []  # complete, and pushed next
        self._bytes = 0
        self._synchronized = False
        self._slots = slots(named_parameters, prefix, sparse)
        self._optimizer: Any = optimizer
        if update_on_kvstore:
            self._optimizer = OnStore(optimizer, [slot.parameter for slot in self._slots])
        self._ours = self._find_ours()
        self._exchange = self._begin(store, prefix, store.num_workers if average else 1)
        # Engines of collectives want one order on all workers: about that of a backward pass.
        self._turns = None if store.is_capable("optimizer") else self._slots[::-1]
        self._hook()
        _living.add(self)

    def _begin(self, store: KVStore, prefix: str, divisor: int) -> Gradients | Weights:
        if isinstance(self._optimizer, OnStore):
            agree(store, self._slots, prefix)
            return Weights(store, self._optimizer, divisor)
        check_not_late(store)
        agree(store, self._slots, prefix)
        return Gradients(store, self._slots, divisor)

    def __getattr__(self, name: str) -> Any:
        """``param_groups``, ``state`` and all else are the optimizer's own."""
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    # ------------------------------------------------------------------------------------------ verbs

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the gradients, and update the weights.

        Parameters
        ----------
        closure : callable, optional
            Computes loss and gradients anew, which are averaged each time. All workers must call it equally
            often: an optimizer that decides by the loss needs one that is the same on all.

        Raises
        ------
        KVStoreError
            What the store has raised, such as PeerLostError; the weights are as they were.
        """
        if closure is not None:
            result = self._optimizer.step(partial(self._evaluate, closure))
        else:
            self.synchronize()
            result = self._optimizer.step()
        self._synchronized = False
        return result

    def synchronize(self) -> None:
        """Wait until the gradients of this step are averaged (or the weights updated); then they are yours.

        `step` calls this if you have not. After a TimeoutError it may be called again, and waits on.
        """
        if self._synchronized:
            return
        self._hook()
        taking_part = [slot for slot in self._slots if self._takes_part(slot)]
        for slot in self._turns or reversed(self._slots):
            if self._takes_part(slot) and not slot.queued:
                self._queue(slot)
        self._push()
        self._exchange.finish(taking_part)
        for slot in self._slots:
            slot.reset()
        self._synchronized = True

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Drop the gradients, or set them to zero.

        Raises
        ------
        KVStoreError
            Gradients are on their way to the other workers.
        """
        if self._batch or any(slot.work is not None for slot in self._slots):
            raise KVStoreError(
                "zero_grad between backward and step: gradients are on their way to the other workers; call "
                "step first, or synchronize to leave this step out"
            )
        self._hook()
        self._optimizer.zero_grad(set_to_none)
        for slot in self._slots:
            slot.reset()
        self._synchronized = False

    def state_dict(self) -> Any:
        """Return the optimizer's own.

        Raises
        ------
        CapabilityError
            With `update_on_kvstore`: the states are in the store.
        """
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load into the optimizer; all workers load the same."""
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters that were among `named_parameters`, on all workers: frozen ones, for instance.

        Raises
        ------
        ConfigError
            One was not among them, or another DistributedOptimizer has it. Nothing has changed then.
        """
        groups = self._optimizer.param_groups
        before = len(groups)
        try:
            self._optimizer.add_param_group(param_group)
            self._ours = self._find_ours()
        except BaseException:
            del groups[before:]
            raise

    def close(self) -> None:
        """Take the hooks off the parameters, so that another optimizer can have them; this one is over."""
        self._closed = True
        _living.discard(self)
        for slot in self._slots:
            if slot.hook is not None:
                slot.hook.remove()
                slot.hook = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse copies and pickles, which could not have the store."""
        raise ArgumentError(
            "a DistributedOptimizer cannot be copied or pickled, as its store belongs to this process: keep "
            "its state_dict(), and load that into a new one"
        )

    # ---------------------------------------------------------------------------------------- plumbing

    def _evaluate(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self.synchronize()
        return loss

    def _find_ours(self) -> set[Slot]:
        """Return the slots of the optimizer's parameters; only these take part."""
        known = {slot.parameter: slot for slot in self._slots}
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            if parameter not in known:
                raise ConfigError(
                    f"a parameter of the optimizer, of shape {tuple(parameter.shape)}, is not among "
                    "named_parameters: pass those of the whole model, model.named_parameters()"
                )
        ours = {known[parameter] for parameter in parameters}
        _refuse_taken(self, ours)
        return ours

    def _takes_part(self, slot: Slot) -> bool:
        return slot.queued or (slot in self._ours and slot.parameter.requires_grad)

    def _hook(self) -> None:
        """Put hooks on what needs gradients, also on what was frozen before."""
        if self._closed:
            raise ClosedError("this DistributedOptimizer is closed: make another one")
        me = weakref.ref(self)
        for slot in self._slots:
            if slot.hook is None and slot.parameter.requires_grad:
                hook = partial(_noticed, me, slot)
                slot.hook = slot.parameter.register_post_accumulate_grad_hook(hook)

    def _notice(self, slot: Slot) -> None:
        """Push a gradient that is complete, if its turn has come."""
        if slot.ready:
            raise KVStoreError(
                f"worker {self.store.rank}: parameter {slot.name!r} got another gradient while the first was "
                f"on its way, and both are spoilt. backward_passes_per_step is {self._passes}: set it to the "
                "passes that you make, or overlap=False if the model comes back to a parameter in one pass"
            )
        self._synchronized = False
        slot.passes += 1
        if not self._overlap or slot.passes < self._passes or slot not in self._ours:
            return
        slot.ready = True
        if self._turns is None:
            self._queue(slot)
        else:
            self._take_turns(self._turns)

    def _take_turns(self, turns: list[Slot]) -> None:
        """Queue what is ready, up to the first that is not."""
        for slot in turns:
            if slot.ready and not slot.queued:
                self._queue(slot)
            elif not slot.ready and self._takes_part(slot):
                return

    def _queue(self, slot: Slot) -> None:
        """Put a gradient among those that are pushed next, and push them if they are enough."""
        slot.queued = True
        self._batch.append(slot)
        self._bytes += slot.nbytes
        if self._bytes >= self._full:
            self._push()

    def _push(self) -> None:
        batch, self._batch, self._bytes = self._batch, [], 0
        if not batch:
            return
        try:
            self._exchange.start(batch)
        except Exception as error:
            for slot in batch:  # `step` must not take for averages what has not left
                if slot.work is None:
                    slot.error = error
            raise


#: Optimizers that are not closed: a gradient of two of them would be averaged twice.
_living: weakref.WeakSet[DistributedOptimizer] = weakref.WeakSet()


def _refuse_taken(optimizer: DistributedOptimizer, ours: set[Slot]) -> None:
    """Raise for a parameter that another optimizer has."""
    if _first_taken(optimizer, ours) is None:
        return
    gc.collect()  # schedules of torch keep a dropped optimizer in a cycle
    taken = _first_taken(optimizer, ours)
    if taken is not None:
        raise ConfigError(
            f"parameter {taken.name!r} has a DistributedOptimizer already, and its gradient would be "
            "averaged twice: close() the other one before, or give each optimizer parameters of its own"
        )


def _first_taken(optimizer: DistributedOptimizer, ours: set[Slot]) -> Slot | None:
    others = {slot.parameter for other in _living if other is not optimizer for slot in other._ours}
    taken = [slot for slot in ours if slot.parameter in others]
    return max(taken, key=lambda slot: slot.priority, default=None)


def _noticed(optimizer: weakref.ref[DistributedOptimizer], slot: Slot, parameter: Tensor) -> None:
    """Run as the hook of a parameter, which does not keep the optimizer alive."""
    there = optimizer()
    if there is not None:
        there._notice(slot)


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentError(f"{name} must be an int, not {kind(value)}: {value!r}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


def _check_kind(optimizer: Any, update_on_kvstore: bool) -> None:
    if update_on_kvstore and not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            "with update_on_kvstore the store runs the optimizer: pass one of kvstore.optimizer, such as "
            f"kv.optimizer.SGD(learning_rate=0.1), not {kind(optimizer)}"
        )
    if isinstance(optimizer, DistributedOptimizer):
        raise ArgumentError(
            "optimizer is a DistributedOptimizer already, and gradients would be averaged twice: use it as "
            "it is, or wrap the optimizer that it was made of"
        )
    if not update_on_kvstore and not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"optimizer must be a torch.optim.Optimizer, not {kind(optimizer)}; one of kvstore.optimizer "
            "goes with update_on_kvstore=True"
        )
