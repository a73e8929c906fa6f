"""`DistributedOptimizer`: an optimizer of torch with the gradients of all workers, or one in the store."""

from __future__ import annotations

import contextlib
import gc
import math
import numbers
import weakref
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from typing import Any, NoReturn, SupportsIndex

import torch

from ..averaging.agreement import make_agreement
from ..averaging.checks import check_not_late, check_store
from ..errors import ArgumentError, ClosedError, ConfigError, KVStoreError
from ..observe.timeline.marks import Marks
from ..optimizer import Optimizer
from ..store import KVStore, counters_of, uses_only_local_cpu
from .buckets import GradientBuckets, push_order
from .exchange import GradientExchange, StoreOptimizer, WeightExchange
from .fingerprints import describe_settings, sum_bits
from .gradient_slots import GradientSlot, broadcast_parameters, make_slots
from .hidden_gradients import hide_gradient, restore_gradient
from .overlap_choice import overlaps_backward
from .passes import BackwardPasses
from .progress import OptimizerProgress
from .tensors import Tensor, check_prefix, type_name

#: Attributes of the object itself; all others belong to the wrapped optimizer.
_OWN = frozenset(
    {
        *("store", "_optimizer", "_closed", "_marks", "_passes_per_step", "_slots", "_ours", "_counts"),
        *("_overlap", "_is_sent_in_step", "_exchange", "_buckets", "_agreement", "_passes", "_sums"),
        *("_updates", "_progress", "_has_hidden"),
    }
)


class DistributedOptimizer(torch.optim.Optimizer):  # type: ignore[misc]
    """An optimizer that averages gradients over all workers of a store, while the backward pass runs.

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
        to get their mean. A step can end after fewer passes. Until the last of these passes `.grad` cannot be
        read or changed. `no_sync` is the other way to accumulate gradients.
    average : bool
        If True, divide the sums by the number of workers. If False, a step has no more backward passes than
        `backward_passes_per_step`.
    overlap : bool, optional
        If True, push gradients as soon as they are complete. If False, push all of them at the end of the
        backward pass (in `step` with `update_on_kvstore`), for models that compute a gradient twice in one
        pass, as with reentrant checkpointing. If None, False for
        a ``"shared"`` store whose workers compute with all processors (``torch.get_num_threads()`` each) and
        not on GPUs, because an exchange during the backward pass costs more time there than an exchange after
        it. Otherwise True.
    bucket_bytes : int
        Size of the gradients that one call pushes, in bytes, if they are pushed during the backward pass or
        sent over a network. A larger gradient is pushed by its own call.
    sparse : iterable of str
        Names of the parameters with sparse gradients (``nn.Embedding(..., sparse=True)``).
    prefix : str
        Prefix of the keys, before the names. Models that share a store need different prefixes.
    update_on_kvstore : bool
        If True, the store updates the weights, and workers pull weights instead of gradients.
    whole_steps : bool
        If True, all gradients of a step are pushed in one `KVStore.step`: if a worker dies, its last step
        counts for all parameters or for none. Gradients are then not sent during the backward pass.
    check_every : int
        The settings of the optimizer (``param_groups``) and the weights are compared between the workers
        when the optimizer is created and then in one of this many steps. 0: never. The number of completed
        steps is compared in each step. A store without rounds (``"dist_async"``) compares nothing.

    Raises
    ------
    ConfigError
        A parameter has no name, or belongs to another DistributedOptimizer that is not closed; the models or
        the settings of the workers differ; the store already has an optimizer; or it has no rounds
        (``"dist_async"``) and `update_on_kvstore` is False.
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
    ``backward`` returns when the gradients are averaged, as with DistributedDataParallel: gradients are sent
    during the pass, and its end waits for the rest of the exchange. So a program can read and change
    gradients between ``backward`` and `step` (clipping, ``GradScaler``, noise), and ``backward`` raises the
    errors of the store. Several backward passes before a step give the mean of their sums; each pass is an
    exchange, unless `backward_passes_per_step` or `no_sync` avoids it.

    All workers must make the same passes and steps. If a parameter has no gradient on this worker, this
    worker contributes zeros. If it has no gradient on any worker, it gets none; but with gradient compression
    it gets zeros, and with `update_on_kvstore` it is updated with zeros (a UserWarning says so once).

    With `update_on_kvstore` the store has the gradients when ``backward`` returns, so reading or changing
    `.grad` raises KVStoreError, and each pass (or group of `backward_passes_per_step` passes) needs a `step`.

    Attributes of the wrapped optimizer can be read and set here.
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
        check_every: int = 100,
    ) -> None:
        _check_count("backward_passes_per_step", backward_passes_per_step, 1)
        _check_count("bucket_bytes", bucket_bytes, 0)
        _check_count("check_every", check_every, 0)
        _check_kind(optimizer, update_on_kvstore)
        check_store(store, sums=not update_on_kvstore)
        check_prefix(prefix)
        if whole_steps:
            with store.step():  # raises if a parameter is missing
                pass
        self.store, self._closed = store, False
        self._marks = Marks(counters_of(store))
        self._passes_per_step = backward_passes_per_step
        self._slots = make_slots(named_parameters, prefix, sparse)
        wanted = False if whole_steps else overlap
        self._counts = wanted is not False  # gradients: a wrong program fails on all machines
        self._overlap = overlaps_backward(store, wanted, [slot.parameter for slot in self._slots])
        self._updates = update_on_kvstore
        self._is_sent_in_step = update_on_kvstore and not self._counts
        self._optimizer: Any = optimizer
        if update_on_kvstore:
            self._optimizer = StoreOptimizer(optimizer, [slot.parameter for slot in self._slots])
        self._ours = self._own_slots()
        at_once = uses_only_local_cpu(store) and not (self._overlap or whole_steps)
        divisor = store.num_workers if average else 1
        self._sums = not update_on_kvstore and divisor < store.num_workers
        self._exchange = self._new_exchange(store, prefix, divisor, whole_steps, at_once)
        full = math.inf if whole_steps or at_once else bucket_bytes
        self._buckets = GradientBuckets(self._exchange, self._marks, full, push_order(store, self._slots))
        self._progress = OptimizerProgress()
        self._has_hidden = False
        self._agreement = make_agreement(store, prefix, check_every, restarts=self._updates)
        self._start_comparison()
        self._finish_comparison()
        self.note_weights()
        self._passes = BackwardPasses(
            self._slots, self, DistributedOptimizer._on_gradient, DistributedOptimizer._end_pass
        )
        _living.add(self)

    def _new_exchange(
        self, store: KVStore, prefix: str, divisor: int, whole: bool, at_once: bool
    ) -> GradientExchange | WeightExchange:
        if isinstance(self._optimizer, StoreOptimizer):
            broadcast_parameters(store, self._slots, prefix)
            return WeightExchange(store, self._optimizer, divisor, whole, at_once)
        check_not_late(store)
        broadcast_parameters(store, self._slots, prefix)
        return GradientExchange(store, self._slots, divisor, whole, at_once)

    def __getattr__(self, name: str) -> Any:
        """Return an attribute of the wrapped optimizer, such as ``param_groups`` or ``state``."""
        if name in _OWN:
            raise AttributeError(name)
        return getattr(self._optimizer, name)

    def __setattr__(self, name: str, value: Any) -> None:
        """Set an attribute of the wrapped optimizer: ``GradScaler`` sets attributes that its `step` reads."""
        if name in _OWN or self._is_own(name):
            object.__setattr__(self, name, value)
        else:
            setattr(self._optimizer, name, value)

    def __delattr__(self, name: str) -> None:
        """Delete an attribute of the wrapped optimizer."""
        if self._is_own(name):
            object.__delattr__(self, name)
        else:
            delattr(self._optimizer, name)

    @classmethod
    def _is_own(cls, name: str) -> bool:
        """Return whether an attribute is of this object; schedules of torch replace its `step`."""
        return name in _OWN or hasattr(cls, name)

    # ------------------------------------------------------------------------------------------ verbs

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update the weights with the averaged gradients.

        Parameters
        ----------
        closure : callable, optional
            Function that computes the loss and the gradients again; the gradients are averaged each time. All
            workers must call it the same number of times. An optimizer that makes decisions by the loss
            therefore needs the same loss on all workers.

        Raises
        ------
        KVStoreError
            All passes since the last step were in `no_sync`, or an error of the store, such as
            `PeerLostError`. Or a backward pass calls it from a hook. The weights have not changed.
        """
        if torch._C._current_graph_task_id() != -1:
            raise KVStoreError(
                f"worker {self.store.rank}: step was called in a backward pass, by a hook of a gradient, "
                "before gradients are averaged: call it after backward"
            )
        if closure is not None:
            result = self._optimizer.step(partial(self._evaluate_closure, closure))
        else:
            self._finish_step()
            result = self._optimizer.step()
        self._progress.steps += 1
        self._progress.begin_step()
        self._reveal_gradients()
        return result

    def synchronize(self) -> None:
        """Wait until the gradients of this step are averaged, or the weights are updated.

        ``backward`` has done so, unless passes are still missing (`backward_passes_per_step`), or were in
        `no_sync`, or this worker has made no pass. After a `TimeoutError` you can call it again; it then
        continues to wait.
        """
        self._check_usable()
        if not self._progress.is_exchanged:
            self._run_exchange()

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Accumulate the gradients of the backward passes in this context on this worker.

        The first pass outside of the context averages the accumulated gradients.
        """
        progress = self._progress
        before, progress.is_paused = progress.is_paused, True
        try:
            yield
        finally:
            progress.is_paused = before

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Remove the gradients, or set them to zero.

        Raises
        ------
        KVStoreError
            Gradients are being sent: a backward pass has not reached its end, or, with `update_on_kvstore`,
            `step` was not called after it.
        """
        if not self._buckets.is_empty or any(slot.is_being_sent for slot in self._slots):
            raise KVStoreError(f"worker {self.store.rank}: zero_grad {self._explain_under_way()}")
        self._check_usable()
        self._passes.check()
        self._reveal_gradients()
        for slot in self._slots:
            slot.reset()
            slot.total = None
        self._optimizer.zero_grad(set_to_none)
        self._progress.begin_step()

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
            self._ours = self._own_slots()
        except BaseException:
            del groups[before:]
            raise

    def close(self) -> None:
        """Remove the hooks from the parameters, so that another optimizer can use them."""
        self._closed = True
        _living.discard(self)
        self._passes.close()
        for slot in self._slots:
            restore_gradient(slot.parameter)

    def __reduce_ex__(self, protocol: SupportsIndex) -> NoReturn:
        """Refuse copies and pickles, because they cannot contain the store."""
        raise ArgumentError(
            "a DistributedOptimizer cannot be copied or pickled, because its store belongs to this process: "
            "save its state_dict(), and load it into a new one"
        )

    # ------------------------------------------------------------------------------------------ passes

    def _on_gradient(self, slot: GradientSlot) -> None:
        """Push a gradient that a pass has accumulated, if it was the last pass of the step."""
        if slot not in self._ours:
            return
        self._check_gradient(slot)
        progress = self._progress
        if progress.is_exchanged or not progress.has_gradients:
            self._check_weights()
            progress.has_gradients, progress.is_exchanged = True, False
        if self._is_sent_in_step or progress.is_paused or progress.passes_ended + 1 < self._passes_per_step:
            return
        slot.ready = True
        if self._overlap:
            if self._has_hidden:
                restore_gradient(slot.parameter)
            self._buckets.add(slot, self._takes_part)

    def _check_gradient(self, slot: GradientSlot) -> None:
        """Raise KVStoreError if a gradient was added to a sent gradient, or is a sum over the workers."""
        if slot.queued or (slot.ready and self._counts):
            raise KVStoreError(
                f"worker {self.store.rank}: parameter {slot.name!r} got another gradient "
                f"{self._explain_under_way()}"
            )
        self._check_total(slot)

    def _check_total(self, slot: GradientSlot) -> None:
        """Raise KVStoreError if a gradient that will be summed is a sum over the workers already."""
        if slot.total is not None and slot.total is slot.parameter.grad:
            raise KVStoreError(
                f"worker {self.store.rank}: the gradient of parameter {slot.name!r} is a sum over the "
                "workers, and would be summed again: with average=False a step has backward_passes_per_step "
                f"({self._passes_per_step}) backward passes, and zero_grad is called before the next. "
                "Checkpoints need use_reentrant=False"
            )

    def _explain_under_way(self) -> str:
        """Return the reason why gradients are being sent, and a remedy, as the end of an error message."""
        if self._updates:
            return (
                "while the store updates the weights with the gradients of the pass before: with "
                "update_on_kvstore call step after each backward pass, set backward_passes_per_step "
                f"(it is {self._passes_per_step}) to the number of your passes, or pass overlap=False, then "
                "step sends the gradients"
            )
        return (
            "while gradients are being sent: the backward pass computes a gradient twice (pass "
            "overlap=False), or an exception has ended the pass before (call synchronize, on this worker, to "
            "complete its exchange)"
        )

    def _end_pass(self) -> None:
        """Run the exchange if the pass was the last of those that accumulate gradients.

        A pass with gradients of other optimizers only is counted as well: on another worker it can have had
        gradients of this optimizer, which are averaged when ``backward`` returns there. Sums and updates in
        the store cannot be repeated, so `step` runs them.
        """
        progress = self._progress
        has_gradients, progress.has_gradients = progress.has_gradients, False
        if not has_gradients and (self._updates or self._sums or self._passes_per_step > 1):
            return
        if progress.is_paused:
            progress.has_local_passes = True
            return
        progress.passes_ended += 1
        if progress.passes_ended < self._passes_per_step:
            self._hide_gradients(
                f"only {progress.passes_ended} of {self._passes_per_step} backward passes are over "
                "(backward_passes_per_step), so the gradients are not averaged: call synchronize first"
            )
        elif self._updates:
            self._send_to_update()
        else:
            self._check_usable()
            self._run_exchange()

    def _send_to_update(self) -> None:
        """Push the gradients for updates in the store, unless `step` does, and hide them."""
        self._progress.has_local_passes = False
        if not self._is_sent_in_step:
            self._reveal_gradients()
            self._buckets.add_remaining(self._slots, self._takes_part)
        self._hide_pushed()

    def _hide_pushed(self) -> None:
        self._hide_gradients(
            "with update_on_kvstore the store updates the weights with the gradients of this worker, so they "
            "can be neither changed nor read: clip with the clip_gradient of the store's optimizer, or leave "
            "update_on_kvstore out; then clip_grad_norm_ and GradScaler work",
            sparse=True,
        )
        for slot in self._ours:
            slot.hidden = slot.parameter.grad

    def _check_hidden(self) -> None:
        """Raise KVStoreError if the program has replaced a gradient that the store already has."""
        for slot in self._ours if self._has_hidden else ():
            if slot.hidden is not None and slot.parameter.grad is not slot.hidden:
                raise KVStoreError(
                    f"worker {self.store.rank}: the gradient of parameter {slot.name!r} was replaced between "
                    "backward and step, but with update_on_kvstore the store has the gradient already: leave "
                    "update_on_kvstore out to change gradients"
                )

    def note_weights(self) -> None:
        """Record the versions of the weights, if the store updates them."""
        if self._updates:
            for slot in self._slots:
                slot.version = slot.parameter._version

    def _check_weights(self) -> None:
        """Raise KVStoreError if the program has changed a weight that the store updates."""
        if not self._updates or any(slot.is_being_sent for slot in self._slots):
            return
        for slot in self._ours:
            if slot.parameter._version != slot.version:
                raise KVStoreError(
                    f"worker {self.store.rank}: the program has changed parameter {slot.name!r}, but with "
                    "update_on_kvstore the store has the weights, and the change would be lost: load weights "
                    "before the DistributedOptimizer is created or with restore_checkpoint, or leave "
                    "update_on_kvstore out to change weights between steps"
                )

    def _run_exchange(self) -> None:
        """Push the remaining gradients, and wait for the results of all workers."""
        begin = self._marks.begin()
        self._passes.check()
        self._check_weights()
        self._check_hidden()
        self._reveal_gradients()
        taking_part = [slot for slot in self._slots if self._takes_part(slot)]
        if self._sums:
            for slot in taking_part:
                self._check_total(slot)
        self._start_comparison()
        self._buckets.add_remaining(self._slots, self._takes_part, waits=True)
        # Before `finish` of the exchange, which would not end if other parameters take part on another
        # worker.
        self._finish_comparison()
        self._exchange.finish(taking_part)
        self.note_weights()
        self._buckets.record_step(begin)
        self._progress.is_exchanged = True  # first: Ctrl-C between it and `reset` would send gradients twice
        self._progress.has_local_passes = False
        for slot in self._slots:
            slot.total = slot.parameter.grad if self._sums else None
            slot.reset()
        if self._updates:
            self._hide_pushed()

    def _start_comparison(self) -> None:
        """Start to compare the steps, settings and weights of the workers.

        Errors are kept for the end of it.
        """
        if self._agreement is None:
            return
        try:
            self._agreement.start(
                self._progress.steps,
                [slot.number for slot in self._ours if slot.parameter.requires_grad],
                lambda: describe_settings(self._optimizer.param_groups),
                lambda: sum_bits(self._ours),
            )
        except KVStoreError as error:
            self._progress.error = error
            raise

    def _finish_comparison(self) -> None:
        """Raise an error, now and in all later calls, if the workers differ."""
        if self._agreement is None:
            return
        try:
            self._agreement.finish()
        except KVStoreError as error:
            self._progress.error = error
            raise

    # ---------------------------------------------------------------------------------------- helpers

    def _evaluate_closure(self, closure: Callable[[], Any]) -> Any:
        loss = closure()
        self._finish_step()
        return loss

    def _finish_step(self) -> None:
        """Wait for the exchange of this step."""
        if self._progress.has_local_passes:
            raise KVStoreError(
                f"worker {self.store.rank}: the last backward pass was in no_sync, so its gradients are not "
                "averaged: run the last pass of a step outside of no_sync, or call synchronize before you "
                "read the gradients"
            )
        self.synchronize()

    def _check_usable(self) -> None:
        if self._closed:
            raise ClosedError("this DistributedOptimizer is closed: create another one")
        if self._progress.error is not None:
            raise self._progress.error

    def _hide_gradients(self, reason: str, sparse: bool = False) -> None:
        self._has_hidden = True
        for slot in self._ours:
            hide_gradient(
                slot.parameter, f"worker {self.store.rank}, parameter {slot.name!r}: {reason}", sparse
            )

    def _reveal_gradients(self) -> None:
        for slot in self._ours if self._has_hidden else ():
            restore_gradient(slot.parameter)
            slot.hidden = None

    def _own_slots(self) -> dict[GradientSlot, None]:
        """Return the slots of the optimizer's parameters, in the order of the model; only these take part."""
        known = {slot.parameter: slot for slot in self._slots}
        parameters = [p for group in self._optimizer.param_groups for p in group["params"]]
        for parameter in parameters:
            if parameter not in known:
                raise ConfigError(
                    f"a parameter of the optimizer, of shape {tuple(parameter.shape)}, is not among "
                    "named_parameters: pass those of the whole model, model.named_parameters()"
                )
        ours = {known[parameter] for parameter in parameters}
        _refuse_shared(self, ours)
        return {slot: None for slot in self._slots if slot in ours}

    def _takes_part(self, slot: GradientSlot) -> bool:
        return slot.queued or (slot in self._ours and slot.parameter.requires_grad)


#: Optimizers that are not closed: a gradient of two of them would be averaged twice.
_living: weakref.WeakSet[DistributedOptimizer] = weakref.WeakSet()


def _refuse_shared(optimizer: DistributedOptimizer, ours: set[GradientSlot]) -> None:
    """Raise for a parameter that belongs to another optimizer."""
    if _first_shared(optimizer, ours) is None:
        return
    gc.collect()  # schedules of torch keep a dropped optimizer in a reference cycle
    taken = _first_shared(optimizer, ours)
    if taken is not None:
        raise ConfigError(
            f"parameter {taken.name!r} already has a DistributedOptimizer, and its gradient would be "
            "averaged twice: close() the other one first, or give each optimizer its own parameters"
        )


def _first_shared(optimizer: DistributedOptimizer, ours: set[GradientSlot]) -> GradientSlot | None:
    others = {slot.parameter for other in _living if other is not optimizer for slot in other._ours}
    taken = [slot for slot in ours if slot.parameter in others]
    return min(taken, key=lambda slot: slot.number, default=None)


def _check_count(name: str, value: Any, least: int) -> None:
    if isinstance(value, bool) or not isinstance(value, numbers.Integral):
        raise ArgumentError(f"{name} must be an int, not {type_name(value)}: {value!r}")
    if value < least:
        raise ConfigError(f"{name} must be at least {least}, got {value}")


def _check_kind(optimizer: Any, update_on_kvstore: bool) -> None:
    if update_on_kvstore and not isinstance(optimizer, Optimizer):
        raise ArgumentError(
            "with update_on_kvstore the store runs the optimizer: pass one of kvstore.optimizer, such as "
            f"kv.optimizer.SGD(learning_rate=0.1), not {type_name(optimizer)}"
        )
    if isinstance(optimizer, DistributedOptimizer):
        raise ArgumentError(
            "optimizer is already a DistributedOptimizer, and gradients would be averaged twice: use it as "
            "it is, or wrap the inner optimizer"
        )
    if not update_on_kvstore and not isinstance(optimizer, torch.optim.Optimizer):
        raise ArgumentError(
            f"optimizer must be a torch.optim.Optimizer, not {type_name(optimizer)}; an optimizer of "
            "kvstore.optimizer needs update_on_kvstore=True"
        )
