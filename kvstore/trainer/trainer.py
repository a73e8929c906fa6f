"""`Trainer`, with the interface of Gluon's Trainer, for arrays of any library."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from types import TracebackType
from typing import Any

from ..checkpoint.manager import CheckpointManager
from ..checkpoint.restoring import Checkpoint
from ..compression import create as create_codec
from ..errors import ArgumentError, CapabilityError, ConfigError
from ..factory import create
from ..optimizer import Optimizer, checks, states
from ..store import KVStore
from ..store_kinds import is_on_servers
from . import checkpoints, gradients
from .arguments import count_replicas, in_order, make_optimizer
from .exchange import StoreExchange
from .gradients import StepGradients
from .parameter import Parameter, TrainableParameter, multiplier_of
from .store_choice import StoreChoice, choose_store
from .updates import ReplicaUpdaters, assign_replicas, check_writable

PathLike = str | os.PathLike[str]

_UNDECIDED = StoreChoice(None, False, False, False)


class Trainer:
    """Sum the gradients of all replicas and workers, and update the weights with the sums.

    Call `step` after each backward pass. The store updates the weights if it can, else the trainer updates
    each replica. The trainer creates and calls its store at the first step, or at the first call that saves,
    loads or reads rows.

    Parameters
    ----------
    params : list or dict of Parameter
        The parameters, or other objects with ``name``, ``grad_req``, ``list_data()`` and ``list_grad()``; see
        `kvstore.trainer.parameter.TrainableParameter`. All must have the same number of replicas. The
        parameters of a dict are sorted by its keys. The keys in the store are the positions of the
        parameters.
    optimizer : str or Optimizer
        A name for `kvstore.optimizer.create`, or an optimizer object, which the trainer uses and changes.
    optimizer_params : dict, optional
        Keyword arguments of the optimizer, if `optimizer` is a name.
    kvstore : KVStore, KVStoreBase, str or None
        A store, the name of a store, or None for no store. If the name is that of a store of one process and
        the parameters have one replica, the trainer does not use a store, because there is nothing to sum.
    compression_params : dict, optional
        See `KVStore.set_gradient_compression`.
    update_on_kvstore : bool, optional
        Whether the store updates the weights. With None, the store does if it can, except in these cases:
        MXNET_UPDATE_ON_KVSTORE is 0; gradients of dense weights are row-sparse and there is one worker;
        `kvstore` is ``"local"`` and a parameter has more than 2**24 elements.
    check_every : int
        Where the trainer updates, the workers compare the learning rate, the weight decay and the batch size
        in each step, and all settings of the optimizer in one of this many steps. With 0 they compare none.

    Raises
    ------
    ArgumentError, ConfigError, ShapeError
        An argument is not valid.

    Notes
    -----
    `step` waits for the other workers, at most for the timeout of the store, and raises the errors of the
    store's methods. In stores that support it, the call is one `KVStore.step`: if a worker dies, its last
    step counts for all parameters or for none. Do not use a trainer from several threads at the same time.

    Examples
    --------
    >>> import numpy as np
    >>> weight = Parameter("weight", np.ones(2, np.float32))
    >>> trainer = Trainer([weight], "sgd", {"learning_rate": 0.5})
    >>> weight.grad()[:] = [2, 4]
    >>> trainer.step(batch_size=2)
    >>> weight.data()
    array([0.5, 0. ], dtype=float32)
    """

    def __init__(
        self,
        params: Sequence[TrainableParameter] | Mapping[str, TrainableParameter],
        optimizer: str | Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: Any = "device",
        compression_params: dict[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
        check_every: int = 100,
    ) -> None:
        self._params = in_order(params)
        self._keys = {id(param): key for key, param in enumerate(self._params)}
        self._optimizer = make_optimizer(optimizer, optimizer_params)
        self._attach_multipliers()
        self._scale = self._optimizer.rescale_grad
        self._wanted = kvstore, checks.optional(checks.flag)("update_on_kvstore", update_on_kvstore)
        self._compression = compression_params
        self._check_every = checks.count("check_every", check_every)
        count_replicas(self._params)
        for param in self._params:
            if isinstance(param, Parameter):
                param._trainer = self
        self._forget_store()

    def _attach_multipliers(self) -> None:
        self._optimizer.param_dict = {key: _ParameterFactors(param) for key, param in enumerate(self._params)}

    def _forget_store(self) -> None:
        self._choice: StoreChoice = _UNDECIDED
        self._decided = False
        self._exchange = StoreExchange(_UNDECIDED, self._optimizer, self._check_every)
        self._updaters = ReplicaUpdaters(self._optimizer, 0)
        self._new = list(range(len(self._params)))  # keys that the store does not have yet

    # ---------------------------------------------------------------------------------------- training

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients, divide by `batch_size`, and update all weights.

        Parameters
        ----------
        batch_size : float
            Number of samples of all replicas and workers together, if the gradients are sums over samples; 1
            if they are means. It must be the same in all workers, and can change from step to step.
        ignore_stale_grad : bool
            If True, skip gradients that were not written since the last step. A parameter without a new
            gradient does not change. If other workers wait for its sum, this worker adds nothing to it.

        Raises
        ------
        ConfigError
            A gradient is stale (also a UserWarning); `batch_size` is not positive, or too small to divide by;
            a factor is not a number; or the settings of the optimizer do not match its states. Nothing has
            changed.
        DTypeError, ShapeError, ArrayError
            The optimizer cannot update a weight, or a gradient does not match its weight. If the trainer
            updates, nothing has changed.
        KVStoreError
            A method of the store raised it.
        """
        self._set_rescale(batch_size)
        self._prepare_store()
        found = self._step_gradients(ignore_stale_grad)
        if not self._choice.updates:
            self._updaters.check(found)
        self._exchange.sum(found, self._optimizer)
        if not self._choice.updates:
            self._updaters.update(found)
        gradients.mark_stale(found)

    def allreduce_grads(self) -> None:
        """Sum the gradients over replicas and workers, in place. Call `update` after it.

        Raises
        ------
        ConfigError
            The store updates the weights, so it does not return gradients.
        """
        self._prepare_store()
        self._check_updates_here("allreduce_grads")
        self._exchange.sum(self._step_gradients(True), self._optimizer)

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update all weights with the gradients that `allreduce_grads` has summed; see `step`.

        Raises
        ------
        ConfigError
            The store updates the weights, or one of the reasons of `step`.
        """
        self._prepare_store()
        self._check_updates_here("update")
        self._set_rescale(batch_size)
        found = self._step_gradients(ignore_stale_grad)
        self._updaters.check(found)
        self._updaters.update(found)
        gradients.mark_stale(found)

    def row_sparse_pull(self, parameter: TrainableParameter, out: Any, row_ids: Any) -> None:
        """Write the requested rows of a row-sparse parameter to `out`; see `KVStore.row_sparse_pull`.

        Parameters
        ----------
        parameter : Trainable
            A parameter of this trainer.
        out : RowSparseArray or list of them
            Outputs.
        row_ids : array
            Ids of the rows.
        """
        self._prepare_store()
        key = self._parameter_key(parameter)
        store = self._choice.store
        if not isinstance(store, KVStore):
            raise ConfigError("row_sparse_pull: this trainer has no store with row-sparse weights")
        store.row_sparse_pull(key, out=out, row_ids=row_ids, priority=-key)

    def _set_rescale(self, batch_size: float) -> None:
        size = checks.finite("batch_size", batch_size)
        if size <= 0:
            raise ConfigError(f"batch_size must be a positive number, got {batch_size!r}")
        scale = self._scale / size
        if not math.isfinite(scale):
            raise ConfigError(
                f"batch_size {batch_size!r} is too small to divide by: gradients would be infinite"
            )
        self._optimizer.rescale_grad = scale

    def _check_updates_here(self, verb: str) -> None:
        if self._choice.updates:
            raise ConfigError(
                f"{verb}: the store {self._choice.store.type!r} updates the weights; call step, or create "
                "the trainer with update_on_kvstore=False"
            )

    def _step_gradients(self, ignore_stale: bool) -> list[StepGradients]:
        """Return the gradients of this step, including absent ones whose sum other workers wait for."""
        found = gradients.of_step(self._params, ignore_stale)
        return [one for one in found if any(one.fresh) or self._choice.is_awaited]

    # -------------------------------------------------------------------------------------- the store

    def _prepare_store(self) -> None:
        """Create the store, and initialise all parameters whose shape is known."""
        replicas = count_replicas(self._params) if self._new else 0
        if not self._decided:
            self._choose_store(replicas)
        if self._new:
            self._new = self._init_parameters(self._new)

    def _choose_store(self, replicas: int) -> None:
        if not any(param.list_data() for param in self._params):
            raise ConfigError("no parameter has data yet: give them some before the first step")
        choice = choose_store(*self._wanted, self._params, replicas)
        try:
            if choice.store is None and self._compression:
                create_codec(self._compression)  # for its errors: there is nothing to compress
            elif self._compression:
                choice.store.set_gradient_compression(self._compression)
            if choice.updates:  # before the first values, so that their float32 copies are exact
                choice.store.set_optimizer(self._optimizer)
        except BaseException:
            choice.close()
            raise
        self._choice, self._decided = choice, True
        self._exchange = StoreExchange(choice, self._optimizer, self._check_every)
        self._updaters = ReplicaUpdaters(self._optimizer, replicas)

    def _init_parameters(self, keys: list[int]) -> list[int]:
        """Set the first values in the store; return the keys of parameters that have none yet."""
        data = {key: arrays for key in keys if (arrays := self._params[key].list_data())}
        self._exchange.init(data)
        return [key for key in keys if key not in data]

    def _data_change(self) -> None:
        """Before a parameter gets new data: replace the store, if it has the weights."""
        if not self._decided or not self._choice.updates:
            return
        if not self._choice.made or is_on_servers(self._choice.store):
            what = "not created by the trainer" if not self._choice.made else "on servers"
            raise CapabilityError(
                f"the store {self._choice.store.type!r} holds the weights and is {what}, so it cannot be "
                "replaced: set data before the first step"
            )
        self._choice.close()
        self._forget_store()

    # -------------------------------------------------------------------------------------- settings

    @property
    def kvstore(self) -> Any:
        """The store in use, or None before the first step and without a store."""
        return self._choice.store

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer. A change of its settings takes effect at the next step, with any store."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """Current learning rate, without the factors of the parameters."""
        return self._optimizer.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate from the next step. With several workers, call it on all of them.

        Raises
        ------
        ConfigError
            The optimizer has a schedule (also a UserWarning), or `lr` is not a finite number.
        """
        self._optimizer.set_learning_rate(lr)

    # ---------------------------------------------------------------------------------------- states

    def save_states(self, fname: PathLike) -> None:
        """Write the optimizer, its states and its update counts to a safetensors file, atomically.

        If the store updates and there are several workers, call it on one of them.

        Raises
        ------
        ConfigError
            A parameter has no data yet, or the optimizer is of a class that is not registered.
        """
        self._prepare_store()
        self._check_complete("save_states")
        if self._choice.updates:
            self._choice.store.save_optimizer_states(fname, dump_optimizer=True)
        else:
            self._updaters.save(fname)

    def load_states(self, fname: PathLike) -> None:
        """Read a file that `save_states` wrote. Its optimizer replaces the present one.

        The factors ``lr_mult`` and ``wd_mult`` of the parameters do not change. With several workers, call it
        on all of them.

        Raises
        ------
        StateFileError
            The file is damaged or has another format. Nothing has changed.
        ConfigError
            A parameter has no data yet.
        """
        self._prepare_store()
        self._check_complete("load_states")
        if self._choice.updates:
            self._optimizer = self._exchange.load_states(fname, self._optimizer)
        else:
            self._optimizer = self._updaters.load(partial(states.read_states, fname), self._pulled_weights())
        self._attach_multipliers()

    def save_checkpoint(
        self, manager: CheckpointManager, step: int, extra: dict[str, Any] | None = None
    ) -> None:
        """Save weights, optimizer and states as one step, in one file that is written during training.

        Call it between two steps, on all workers or on worker 0, which writes; see `CheckpointManager.save`.
        One replica of each parameter is saved. Residuals of gradient compression are not saved.

        Parameters
        ----------
        manager : CheckpointManager
            The manager of the folder.
        step : int
            Number of the step.
        extra : dict, optional
            Further data of the step, such as the position in the data, of types that JSON has.

        Raises
        ------
        ConfigError
            A parameter has no data yet, or the optimizer is of a class that is not registered.
        ArgumentError, StateFileError, TimeoutError, KVStoreError
            As `CheckpointManager.save`.
        """
        _check_manager(manager)
        self._prepare_store()
        self._check_complete("save_checkpoint")
        store, updates = self._choice.store, self._choice.updates
        said = checkpoints.description_of(extra, self._params, self._optimizer, updates)
        arrays = checkpoints.local_weights(self._params, updates)
        if updates:
            manager.save(store, step, said, arrays)
        elif store is None or store.rank == 0:
            with create("local", processes=1) as empty:
                manager.save(empty, step, said, arrays | checkpoints.packed_states(self._updaters.packed()))

    def restore_checkpoint(self, manager: CheckpointManager) -> Checkpoint | None:
        """Load the newest complete checkpoint: weights, optimizer and states.

        All workers call it, before their first step. The optimizer must be of the same class; it gets the
        settings of the checkpoint. The factors ``lr_mult`` and ``wd_mult`` of the parameters do not change.

        Returns
        -------
        Checkpoint or None
            Its `step`, and the `extra` of `save_checkpoint`. None if there is no checkpoint; then nothing has
            changed.

        Raises
        ------
        StateFileError
            The file was not written by `save_checkpoint`, has another `update_on_kvstore`, other parameters
            or another optimizer; see `CheckpointManager.restore`. Nothing has changed.
        ArgumentError, ArrayError
            `manager` is not a `CheckpointManager`; or a replica cannot be written. Nothing has changed.
        ConfigError
            A parameter has no data yet.
        """
        _check_manager(manager)
        self._prepare_store()
        self._check_complete("restore_checkpoint")
        check_writable(self._params)
        updates = self._choice.updates
        fits = partial(
            checkpoints.check_checkpoint, params=self._params, optimizer=self._optimizer, updates=updates
        )
        with self._store_for_restore() as store:
            found = manager.restore(store, check=fits)
        if found is None:
            return None
        if updates:
            self._exchange.set_counts(self._optimizer, checkpoints.counts_of(found))
            self._optimizer = self._exchange.current_optimizer(self._optimizer)
            self._exchange.pull({key: param.list_data() for key, param in enumerate(self._params)})
        else:
            read = partial(states.unpack_states, checkpoints.states_of(found))
            self._optimizer = self._updaters.load(read, self._pulled_weights())
        for key, weight in checkpoints.weights_of(found).items():
            assign_replicas(self._params[key], weight)
        self._attach_multipliers()
        return checkpoints.user_checkpoint(found)

    def _store_for_restore(self) -> AbstractContextManager[Any]:
        """Return the store whose workers restore a checkpoint.

        An empty one if the store is not a `KVStore`.
        """
        store = self._choice.store
        if self._choice.updates or isinstance(store, KVStore):
            return nullcontext(store)
        return create("local", processes=1)

    def _pulled_weights(self) -> dict[int, Any]:
        return {key: param.list_data()[0] for key, param in enumerate(self._params)}

    def _check_complete(self, verb: str) -> None:
        missing = [param.name for param in self._params if not param.list_data()]
        if missing:
            raise ConfigError(f"{verb}: parameter {missing[0]!r} has no data yet")

    # -------------------------------------------------------------------------------------- lifetime

    def close(self) -> None:
        """Close the store if the trainer has created it. A second call does nothing."""
        self._choice.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the store. If an error ends the block, the other workers see this worker as lost."""
        if self._choice.made and isinstance(self._choice.store, KVStore):
            self._choice.store.__exit__(kind, error, trace)
        else:
            self.close()

    def __repr__(self) -> str:
        store = self._choice.store.type if self._choice.store is not None else None
        where = f"store {store!r}" if self._decided else "no store yet"
        return f"<Trainer: {len(self._params)} parameters, {self._optimizer!r}, {where}>"

    def _parameter_key(self, parameter: TrainableParameter) -> int:
        key = self._keys.get(id(parameter))
        if key is None:
            raise ArgumentError(f"parameter {parameter.name!r} does not belong to this trainer")
        return key


def _check_manager(manager: Any) -> None:
    if not isinstance(manager, CheckpointManager):
        raise ArgumentError(f"manager must be a CheckpointManager, not {type(manager).__name__}")


class _ParameterFactors:
    """The multipliers of a parameter, read at each use; 1 if it has none."""

    def __init__(self, param: TrainableParameter) -> None:
        self._param = param

    @property
    def lr_mult(self) -> float:
        return multiplier_of(self._param, "lr_mult")

    @property
    def wd_mult(self) -> float:
        return multiplier_of(self._param, "wd_mult")
