"""`DistributedOptimizer`: an optimizer of torch with the gradients of all workers, or one in the store."""

from __future__ import annotations

import gc
import math
import numbers
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import torch

from ..averaging import check_not_late, check_store
from ..engine import Work, ended_at
from ..errors import ArgumentError, ClosedError, ConfigError, KVStoreError
from ..observe.timeline.marks import Marks
from ..optimizer import Optimizer
from ..store import KVStore, counters_of, is_bound_by_processors
from .exchange import Gradients, OnStore, Weights
from .overlap import overlaps
from .slots import Slot, agree, slots
from .tensors import Tensor, check_prefix, kind


class DistributedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer whose gradients are averaged over all workers of a store, while the backward pass runs.

    Parameters
    ----------
    optimizer : torch.optim.Optimizer
        The optimizer that updates the weights of this worker with the averaged gradients. With
        `update_on_kvstore`, a `kvstore.optimizer.Optimizer` for the store.
    named_parameters : iterable of (str, parameter)
        ``model.named_parameters()``. It must contain all parameters of `optimizer`, in the order in which the
        model uses them. Their values are overwritten by those of rank 0.
    store : KVStore
        A store of any type. Its keys are the names of the parameters.
    backward_passes_per_step : int
        Number of backward passes after which gradients are pushed. The gradients are summed; divide the loss
        to get their mean. A step can end after fewer passes.
    average : bool
        If True, divide the sums by the number of workers.
    overlap : bool, optional
        If True, push gradients as soon as they are complete. If False, push all of them in `synchronize`, for
        models that compute a gradient twice in one pass, as with reentrant checkpointing. If None, False for
        a ``"shared"`` store whose workers compute with all processors (``torch.get_num_threads()`` each) and
        not on GPUs, because an exchange beside the backward pass slows that down by more than it takes after
        it. Otherwise True.
    bucket_bytes : int
        Size of the gradients that one call pushes, in bytes, if they are pushed during the backward pass or
        travel over a network. A larger gradient is pushed by its own call.
    sparse : iterable of str
        Names of the parameters with sparse gradients (``nn.Embedding(..., sparse=True)``).
    prefix : str
        Prefix of the keys, before the names. Models that share a store need different prefixes.
    update_on_kvstore : bool
        If True, the store updates the weights, and workers pull weights instead of gradients.
    whole_steps : bool
        If True, all gradients of a step are pushed in one `KVStore.step`, when `synchronize` or `step` is
        called: if a worker dies, its last step counts for all parameters or for none. Gradients then do not
        travel during the backward pass.

    Raises
    ------
    ConfigError
        A parameter has no name, or belongs to another DistributedOptimizer that is not closed; the models of
        the workers differ; the store already has an optimizer; or it has no rounds (``"dist_async"``) and
        `update_on_kvstore` is False.
    ArgumentError
        The optimizer does not have the type that `update_on_kvstore` requires, or another argument has a
        wrong type.
    CapabilityError
        The store does not support optimizers, row-sparse arrays or `whole_steps`; or this worker was
        restarted, and the job averages gradients.
    ArrayError, DTypeError, MissingBackendError
        The store does not accept a parameter.

    Notes
    -----
    From ``backward`` to `step` or `synchronize` the gradients belong to the store. To read or change them
    (clipping, ``GradScaler.unscale_``), call `synchronize` first. All workers must make the same steps. If a
    parameter has no gradient on this worker, this worker contributes zeros. If it has no gradient on any
    worker, it gets none; but with gradient compression it gets zeros, and with `update_on_kvstore` it is
    updated with zeros.
    """

    def __init__(
        self,
        optimizer: Any,
        named_parameters: Iterable[tuple[str, Tensor]],
        store: KVStore,
        *,
        backward_passes_per_step: int = 1,
        average: bool = True,
        overlap: bool | None = None,
        bucket_bytes: int = 1 << 20,
        sparse: Iterable[str] = (),
        prefix: str = "",
        update_on_kvstore: bool = False,
        whole_steps: bool = False,
    ) -> None:
        _check_count("backward_passes_per_step", backward_passes_per_step, 1)
        _check_count("bucket_bytes", bucket_bytes, 0)
        _check_kind(optimizer, update_on_kvstore)
        check_store(store, sums=not update_on_kvstore)
        check_prefix(prefix)
        if whole_steps:
            with store.step():  # raises where there are none
                pass
        self.store, self._closed = store, False
        self._marks = Marks(counters_of(store))
        self._passes, self._whole = backward_passes_per_step, whole_steps
        self._batch: list[Slot] = []  # complete, and pushed next
        self._bytes = 0
        self._pushed: list[tuple[int, set[Work], int]] = []  # in this step, for a timeline
        self._synchronized = False
        self._slots = slots(named_parameters, prefix, sparse)
        wanted = False if whole_steps else overlap
        self._counts = wanted is not False  # passes, so that a program is right or wrong on all machines
        self._overlap = overlaps(store, wanted, [slot.parameter for slot in self._slots])
        self._at_once = is_bound_by_processors(store) and not (self._overlap or whole_steps)
        self._full = math.inf if whole_steps or self._at_once else bucket_bytes
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
            return Weights(store, self._optimizer, divisor, self._whole, self._at_once)
        check_not_late(store)
        agree(store, self._slots, prefix)
        return Gradients(store, self._slots, divisor, self._whole, self._at_once)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped optimizer, such as ``param_groups`` or ``state``."""
        if name == "_optimizer":
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    # ------------------------------------------------------------------------------------------ verbs

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Wait for the averaged gradients and update the weights.

        Parameters
        ----------
        closure : callable, optional
            Function that computes the loss and the gradients again; the gradients are averaged each time. All
            workers must call it the same number of times. An optimizer that makes decisions by the loss
            therefore needs the same loss on all workers.

        Raises
        ------
        KVStoreError
            An error of the store, such as `PeerLostError`. The weights have not changed.
        """
        if closure is not None:
            result = self._optimizer.step(partial(self._evaluate, closure))
        else:
            self.synchronize()
            result = self._optimizer.step()
        self._synchronized = False
        return result

    def synchronize(self) -> None:
        """Wait until the gradients of this step are averaged, or the weights are updated.

        After that you can read and change them. `step` calls `synchronize` if you have not called it. After a
        `TimeoutError` you can call it again; it then continues to wait.
        """
        if self._synchronized:
            return
        self._hook()
        begin = self._marks.begin()
        taking_part = [slot for slot in self._slots if self._takes_part(slot)]
        for slot in self._turns or reversed(self._slots):
            if self._takes_part(slot) and not slot.queued:
                self._queue(slot)
        self._push()
        self._exchange.finish(taking_part)
        self._mark(begin)
        self._synchronized = True  # first: what has been reset would be sent again
        for slot in self._slots:
            slot.reset()

    def _mark(self, begin: int) -> None:
        """Record a step that ends, and what it has pushed."""
        for pushed, works, nbytes in self._pushed:
            self._marks.bucket(pushed, max(map(ended_at, works), default=0), nbytes)
        self._pushed.clear()
        self._marks.step(begin)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, or set them to zero.

        Raises
        ------
        KVStoreError
            Gradients are being sent to the other workers.
        """
        if self._batch or any(slot.is_under_way for slot in self._slots):
            raise KVStoreError(
                "zero_grad between backward and step: gradients are being sent to the other workers; call "
                "step first, or call synchronize to skip this step"
            )
        self._hook()
        self._optimizer.zero_grad(set_to_none)
        for slot in self._slots:
            slot.reset()
        self._synchronized = False

    def state_dict(self) -> Any:
        """Return the `state_dict` of the wrapped optimizer.

        Raises
        ------
        CapabilityError
            With `update_on_kvstore` the states are in the store.
        """
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: Any) -> None:
        """Load a `state_dict` into the wrapped optimizer. All workers must load the same one."""
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """Add parameters of `named_parameters`, for example frozen ones, on all workers.

        Raises
        ------
        ConfigError
            A parameter was not in `named_parameters`, or belongs to another DistributedOptimizer. Nothing has
            changed.
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
        """Remove the hooks from the parameters, so that another optimizer can use them."""
        self._closed = True
        _living.discard(self)
        for slot in self._slots:
            if slot.hook is not None:
                slot.hook.remove()
                slot.hook = None

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse copies and pickles, because they cannot contain the store."""
        raise ArgumentError(
            "a DistributedOptimizer cannot be copied or pickled, because its store belongs to this process: "
            "save its state_dict(), and load it into a new one"
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
            raise ClosedError("this DistributedOptimizer is closed: create another one")
        me = weakref.ref(self)
        for slot in self._slots:
            if slot.hook is None and slot.parameter.requires_grad:
                hook = partial(_noticed, me, slot)
                slot.hook = slot.parameter.register_post_accumulate_grad_hook(hook)

    def _notice(self, slot: Slot) -> None:
        """Push a gradient that is complete, if its turn has come."""
        if slot.ready:
            raise KVStoreError(
                f"worker {self.store.rank}: parameter {slot.name!r} got another gradient when the first was "
                f"to be sent; both are lost. backward_passes_per_step is {self._passes}: set it to the "
                "number of your backward passes, or pass overlap=False if one pass computes a gradient twice"
            )
        self._synchronized = False
        slot.passes += 1
        if not self._counts or slot.passes < self._passes or slot not in self._ours:
            return
        slot.ready = True
        if not self._overlap:
            return
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
        batch, nbytes = self._batch, self._bytes
        self._batch, self._bytes = [], 0
        if not batch:
            return
        begin = self._marks.begin()
        try:
            self._exchange.start(batch)
        except Exception as error:
            for slot in batch:  # `step` must not take for averages what has not left
                if slot.work is None:
                    slot.error = error
            raise
        if begin:
            self._pushed.append((begin, {slot.work for slot in batch if slot.work is not None}, nbytes))


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
            f"parameter {taken.name!r} already has a DistributedOptimizer, and its gradient would be "
            "averaged twice: close() the other one first, or give each optimizer its own parameters"
        )


def _first_taken(optimizer: DistributedOptimizer, ours: set[Slot]) -> Slot | None:
    others = {slot.parameter for other in _living if other is not optimizer for slot in other._ours}
    taken = [slot for slot in ours if slot.parameter in others]
    return min(taken, key=lambda slot: slot.number, default=None)


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
            "optimizer is already a DistributedOptimizer, and gradients would be averaged twice: use it as "
            "it is, or wrap the inner optimizer"
        )
    if not update_on_kvstore and not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"optimizer must be a torch.optim.Optimizer, not {kind(optimizer)}; an optimizer of "
            "kvstore.optimizer needs update_on_kvstore=True"
        )
