"""`Trainer`: Gluon's trainer without Gluon, for parameters that hold arrays of any library."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any, NamedTuple

import numpy as np

from ..arrays.host import readable
from ..arrays.sparse import RowSparseArray
from ..compression import create as create_codec
from ..errors import ArgumentError, ArrayError, CapabilityError, ConfigError, ShapeError
from ..optimizer import Optimizer, Updater, checks, create, states
from ..optimizer.optimizer import Array, Index
from ..store import KVStore
from ..store_kinds import is_on_servers
from . import updates
from .choice import Choice, choose
from .parameter import Parameter, Trainable, check_factors, factor

PathLike = str | os.PathLike[str]

_UNDECIDED = Choice(None, False, False, False)


class _StaleGradient(ConfigError, UserWarning):
    """A gradient is that of an earlier step. MXNet raises UserWarning here, so this is one too."""


class _Work(NamedTuple):
    """A parameter in one step: its key, and which of its gradients count."""

    key: int
    param: Trainable
    fresh: list[bool]

    def pushed(self) -> list[Any]:
        """Gradients of this step; zeros where there is none, for the others wait for this worker's part."""
        grads = self.param.list_grad()
        return [grad for grad, ok in zip(grads, self.fresh, strict=True) if ok] or [_zeros_like(grads[0])]

    def is_sparse(self) -> bool:
        """Whether its gradients are row-sparse."""
        return isinstance(self.param.list_grad()[0], RowSparseArray)


class Trainer:
    """Sum the gradients of all replicas and workers, and update the weights with them.

    Call `step` after each backward pass. Weights are updated by the store where it can do that, else by the
    trainer, once for each replica. Nothing is asked of a store before the first step, or the first call that
    saves, loads or reads rows.

    Parameters
    ----------
    params : list or dict of Parameter
        Or of anything that has ``name``, ``grad_req``, ``list_data()`` and ``list_grad()``, see
        `kvstore.trainer.parameter.Trainable`. All have equally many replicas. Those of a dict are taken
        in the order of its keys. The store's keys are their positions.
    optimizer : str or Optimizer
        A name that `kvstore.optimizer.create` knows, or an optimizer, which the trainer then uses and
        changes.
    optimizer_params : dict, optional
        Keywords of the optimizer, beside a name.
    kvstore : KVStore, KVStoreBase, str or None
        A store, the name of one, or None for none. By name, a store of one process is left out where
        parameters have one replica: there is nothing to sum.
    compression_params : dict, optional
        As `KVStore.set_gradient_compression` takes them.
    update_on_kvstore : bool, optional
        Whether the store updates the weights. None: it does where it can, unless MXNET_UPDATE_ON_KVSTORE is
        0, or gradients of dense weights are row-sparse and this is the only worker, or `kvstore` is
        ``"local"`` and a parameter has more than 2**24 elements.

    Raises
    ------
    ArgumentError, ConfigError, ShapeError
        Something that cannot be meant.

    Notes
    -----
    What holds for the store holds here: `step` waits for the other workers, never longer than the store's
    timeout, and raises what its verbs raise. Not to be used from several threads at once.

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
        params: Sequence[Trainable] | Mapping[str, Trainable],
        optimizer: str | Optimizer,
        optimizer_params: Mapping[str, Any] | None = None,
        kvstore: Any = "device",
        compression_params: dict[str, Any] | None = None,
        update_on_kvstore: bool | None = None,
    ) -> None:
        self._params = _in_order(params)
        self._keys = {id(param): key for key, param in enumerate(self._params)}
        self._optimizer = _made(optimizer, optimizer_params)
        self._attach_multipliers()
        self._scale = self._optimizer.rescale_grad
        self._wanted = kvstore, checks.optional(checks.flag)("update_on_kvstore", update_on_kvstore)
        self._compression = compression_params
        _count_replicas(self._params)
        for param in self._params:
            if isinstance(param, Parameter):
                param._trainer = self
        self._forget_store()

    def _attach_multipliers(self) -> None:
        self._optimizer.param_dict = {key: _Factors(param) for key, param in enumerate(self._params)}

    def _forget_store(self) -> None:
        self._choice: Choice = _UNDECIDED
        self._decided = False
        self._updaters: list[Updater] = []
        self._new = list(range(len(self._params)))  # keys that the store does not have yet
        #: The optimizer's settings as the store has them, where it works with a copy.
        self._told: dict[str, Any] | None = None

    # ---------------------------------------------------------------------------------------- training

    def step(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Sum the gradients, divide by `batch_size`, and update all weights.

        Parameters
        ----------
        batch_size : float
            Of all replicas and workers together where gradients are sums over samples; 1 where they are means
            already. The same in all workers; it may change from step to step.
        ignore_stale_grad : bool
            Leave gradients out that were not written since the last step. A parameter without any is not
            touched; where other workers wait for its sum, this one adds nothing to it.

        Raises
        ------
        ConfigError
            A gradient is stale (also a UserWarning); `batch_size` is not positive, or too small to divide by;
            a factor is no number; or the optimizer's settings do not fit its states. Nothing has changed.
        DTypeError, ShapeError, ArrayError
            The optimizer cannot update a weight, or a gradient does not fit it. Nothing has changed where the
            trainer updates.
        As the verbs of the store
        """
        self._rescale(batch_size)
        self._prepare()
        work = self._work(ignore_stale_grad)
        self._check(work)
        self._sum(work)
        if not self._choice.updates:
            self._update(work)
        _spend(work)

    def allreduce_grads(self) -> None:
        """Sum the gradients over replicas and workers, in place; then `update`.

        Raises
        ------
        ConfigError
            The store updates the weights, so gradients do not come back.
        """
        self._prepare()
        self._check_updates_here("allreduce_grads")
        self._sum(self._work(True))

    def update(self, batch_size: float, ignore_stale_grad: bool = False) -> None:
        """Update all weights with gradients that `allreduce_grads` has summed; see `step`.

        Raises
        ------
        ConfigError
            The store updates the weights, or as `step`.
        """
        self._prepare()
        self._check_updates_here("update")
        self._rescale(batch_size)
        work = self._work(ignore_stale_grad)
        self._check(work)
        self._update(work)
        _spend(work)

    def row_sparse_pull(self, parameter: Trainable, out: Any, row_ids: Any) -> None:
        """Write some rows of a row-sparse parameter to `out`, as `KVStore.row_sparse_pull` does.

        Parameters
        ----------
        parameter : Trainable
            One of the trainer's.
        out : RowSparseArray or list of them
        row_ids : array
        """
        self._prepare()
        key = self._key(parameter)
        store = self._choice.store
        if not isinstance(store, KVStore):
            raise ConfigError("row_sparse_pull: this trainer has no store with row-sparse weights")
        store.row_sparse_pull(key, out=out, row_ids=row_ids, priority=-key)

    def _rescale(self, batch_size: float) -> None:
        size = checks.finite("batch_size", batch_size)
        if size <= 0:
            raise ConfigError(f"batch_size must be a positive number, got {batch_size!r}")
        scale = self._scale / size
        if not math.isfinite(scale):
            raise ConfigError(
                f"batch_size {batch_size!r} is too small to divide by: gradients become infinite"
            )
        self._optimizer.rescale_grad = scale

    def _check_updates_here(self, verb: str) -> None:
        if self._choice.updates:
            raise ConfigError(
                f"{verb}: the store {self._choice.store.type!r} updates the weights; call step, or make the "
                "trainer with update_on_kvstore=False"
            )

    def _work(self, ignore_stale_grad: bool) -> list[_Work]:
        """Return what there is to do in a step."""
        active = [(key, param) for key, param in enumerate(self._params) if param.grad_req != "null"]
        for _, param in active:
            check_factors(param)
        work = [_Work(key, param, _freshness(param)) for key, param in active]
        for one in work:
            if not ignore_stale_grad and not all(one.fresh):
                raise _StaleGradient(
                    f"the gradient of parameter {one.param.name!r}, replica {one.fresh.index(False)}, was "
                    "not written since the last step; if not every batch uses it, pass ignore_stale_grad=True"
                )
        return [one for one in work if any(one.fresh) or self._choice.awaited]

    # ------------------------------------------------------------------------------------------- sums

    def _sum(self, work: list[_Work]) -> None:
        if self._choice.store is None:
            return
        self._tell()
        dense = [one for one in work if not one.is_sparse()]
        if isinstance(self._choice.store, KVStore):
            self._sum_together(dense)
        else:
            self._sum_one_by_one(dense)
        for one in work:
            if one.is_sparse():
                self._sum_rows(one)
        if self._told is not None:
            for one in work:
                self._optimizer._update_count(one.key)

    def _sum_together(self, work: list[_Work]) -> None:
        """All keys in one call, which our own stores do in one pass, or in one exchange."""
        if work:
            keys = [one.key for one in work]
            outs = [self._outs(one) for one in work]
            self._choice.store.pushpull(keys, [one.pushed() for one in work], out=outs)

    def _sum_one_by_one(self, work: list[_Work]) -> None:
        """One call for each key, as Gluon makes them."""
        for one in work:
            if self._choice.updates or not all(one.fresh):
                self._choice.store.pushpull(one.key, one.pushed(), out=self._outs(one), priority=-one.key)
            else:
                self._choice.store.pushpull(one.key, one.pushed(), priority=-one.key)

    def _outs(self, one: _Work) -> list[Any]:
        return one.param.list_data() if self._choice.updates else one.param.list_grad()

    def _sum_rows(self, one: _Work) -> None:
        store, key = self._choice.store, one.key
        store.push(key, one.pushed(), priority=-key)
        weights = one.param.list_data()
        if isinstance(weights[0], RowSparseArray):
            return  # rows are pulled when a batch needs them
        if self._choice.updates:
            store.pull(key, out=weights, priority=-key)
            return
        total = np.empty(weights[0].shape, one.param.list_grad()[0].dtype)
        store.pull(key, out=total, priority=-key)
        for grad in one.param.list_grad():
            rows = RowSparseArray.from_dense(total)
            grad.data, grad.indices = rows.data, rows.indices

    # ----------------------------------------------------------------------------------------- updates

    def _check(self, work: list[_Work]) -> None:
        """Raise before anything is touched, where an update would raise."""
        if self._choice.updates:
            return
        counts = self._updaters[0].snapshot_counts()
        try:
            for one in work:
                updates.check(self._updaters, one.key, one.param)
        finally:
            self._updaters[0].restore_counts(counts)

    def _update(self, work: list[_Work]) -> None:
        """Update every replica; all of them count as one update.

        One parameter after the other: an error of the optimizer, if it is of the user's own, leaves replicas
        alike.
        """
        for one in work:
            updates.update(self._updaters, one.key, one.param)

    # -------------------------------------------------------------------------------------- the store

    def _prepare(self) -> None:
        """Have a store, and all parameters in it whose shape is known."""
        replicas = _count_replicas(self._params) if self._new else 0
        if not self._decided:
            self._decide(replicas)
        if self._new:
            self._new = self._init(self._new)

    def _decide(self, replicas: int) -> None:
        if not any(param.list_data() for param in self._params):
            raise ConfigError("no parameter has data yet: give them some before the first step")
        choice = choose(*self._wanted, self._params, replicas)
        try:
            if choice.store is None and self._compression:
                create_codec(self._compression)  # nothing to compress, but what is wrong with it is told
            elif self._compression:
                choice.store.set_gradient_compression(self._compression)
            if choice.updates:  # before the first values, so that their float32 copies are exact
                choice.store.set_optimizer(self._optimizer)
        except BaseException:
            choice.close()
            raise
        self._choice, self._decided = choice, True
        self._updaters = [Updater(self._optimizer) for _ in range(replicas)]
        self._told = self._settings()

    def _init(self, keys: list[int]) -> list[int]:
        """Give the store its first values; return the keys of parameters that have none yet."""
        data = {key: arrays for key in keys if (arrays := self._params[key].list_data())}
        if self._choice.store is not None and data:
            self._init_store(data)
        return [key for key in keys if key not in data]

    def _init_store(self, data: dict[int, list[Any]]) -> None:
        together = isinstance(self._choice.store, KVStore)
        dense = [key for key, arrays in data.items() if not isinstance(arrays[0], RowSparseArray)]
        if together and dense:
            self._choice.store.broadcast(dense, [data[key][0] for key in dense], [data[key] for key in dense])
        for key, arrays in data.items():
            if isinstance(arrays[0], RowSparseArray):
                self._choice.store.init(key, arrays[0])
            elif not together:
                self._choice.store.broadcast(key, arrays[0], arrays)

    def _data_change(self) -> None:
        """Before a parameter gets other data: begin anew with another store, if this one has the weights."""
        if not self._decided or not self._choice.updates:
            return
        if not self._choice.made or is_on_servers(self._choice.store):
            what = "ready-made" if not self._choice.made else "on servers"
            raise CapabilityError(
                f"the store {self._choice.store.type!r} has the weights and is {what}, so it cannot be "
                "replaced: set data before the first step"
            )
        self._choice.close()
        self._forget_store()

    # -------------------------------------------------------------------------------------- settings

    @property
    def kvstore(self) -> Any:
        """The store in use; None before the first step, and where there is none."""
        return self._choice.store

    @property
    def optimizer(self) -> Optimizer:
        """The optimizer; what is changed in it holds from the next step on, wherever the updates run."""
        return self._optimizer

    @property
    def learning_rate(self) -> float:
        """The current rate, before the factors of parameters."""
        return self._optimizer.learning_rate

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate, from the next step on; in a job of several workers in all of them.

        Raises
        ------
        ConfigError
            A schedule gives the rate (also a UserWarning), or `lr` is no finite number.
        """
        self._optimizer.set_learning_rate(lr)

    def _settings(self) -> dict[str, Any] | None:
        """Return what the store must be told when it changes; None if it uses the very same optimizer."""
        if not self._choice.updates or not isinstance(self._choice.store, KVStore):
            return None
        updater = self._choice.store._updater
        same = updater is None or updater.optimizer is self._optimizer
        return None if same else self._optimizer.get_config()

    def _tell(self) -> None:
        if self._told is None:
            return
        now = self._optimizer.get_config()
        changes = {name: value for name, value in now.items() if value != self._told[name]}
        if changes:
            self._choice.store.update_optimizer(**changes)
            self._told = now

    # ---------------------------------------------------------------------------------------- states

    def save_states(self, fname: PathLike) -> None:
        """Write the optimizer, its states and its counts to a safetensors file, atomically.

        Where the store updates and there are several workers, one of them is enough.

        Raises
        ------
        ConfigError
            A parameter has no data yet, or the optimizer is of a class that is not registered.
        """
        self._prepare()
        self._check_complete("save_states")
        if self._choice.updates:
            self._choice.store.save_optimizer_states(fname, dump_optimizer=True)
        else:
            self._updaters[0].save(fname, dump_optimizer=True)

    def load_states(self, fname: PathLike) -> None:
        """Read a file of `save_states`; its optimizer takes the place of the present one.

        The factors ``lr_mult`` and ``wd_mult`` stay those of the parameters. All workers of a job do this, or
        none.

        Raises
        ------
        StateFileError
            The file is damaged or foreign. Nothing has changed then.
        ConfigError
            A parameter has no data yet.
        """
        self._prepare()
        self._check_complete("load_states")
        if self._choice.updates:
            self._choice.store.load_optimizer_states(fname)
            self._optimizer = self._loaded(fname)
        else:
            self._load_updaters(fname)
        self._attach_multipliers()

    def _loaded(self, fname: PathLike) -> Optimizer:
        """Return the optimizer as it came from the file."""
        updater = getattr(self._choice.store, "_updater", None)
        if updater is None or not isinstance(self._choice.store, KVStore) or self._told is None:
            return getattr(updater, "optimizer", self._optimizer)
        content = states.read(fname)
        self._told = updater.optimizer.get_config()
        own = Updater(content.optimizer or self._optimizer)
        own.restore_counts((content.counts, content.num_update))
        return own.optimizer

    def _load_updaters(self, fname: PathLike) -> None:
        weights: dict[Index, Array] = {key: param.list_data()[0] for key, param in enumerate(self._params)}
        for updater in self._updaters:
            updater.load(fname, weights)
        self._optimizer = self._updaters[0].optimizer
        for updater in self._updaters:
            updater.optimizer = self._optimizer

    def _check_complete(self, verb: str) -> None:
        missing = [param.name for param in self._params if not param.list_data()]
        if missing:
            raise ConfigError(f"{verb}: parameter {missing[0]!r} has no data yet")

    # -------------------------------------------------------------------------------------- lifetime

    def close(self) -> None:
        """Close the store, if the trainer has made it. A second call does nothing."""
        self._choice.close()

    def __enter__(self) -> Trainer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close; where an error leaves the block, the other workers of a job see this one as lost."""
        if self._choice.made and isinstance(self._choice.store, KVStore):
            self._choice.store.__exit__(kind, error, trace)
        else:
            self.close()

    def __repr__(self) -> str:
        store = self._choice.store.type if self._choice.store is not None else None
        where = f"store {store!r}" if self._decided else "no store yet"
        return f"<Trainer: {len(self._params)} parameters, {self._optimizer!r}, {where}>"

    def _key(self, parameter: Trainable) -> int:
        key = self._keys.get(id(parameter))
        if key is None:
            raise ArgumentError(f"parameter {parameter.name!r} is not one of this trainer")
        return key


class _Factors:
    """The multipliers of a parameter, live; 1 where it has none."""

    def __init__(self, param: Trainable) -> None:
        self._param = param

    @property
    def lr_mult(self) -> float:
        return factor(self._param, "lr_mult")

    @property
    def wd_mult(self) -> float:
        return factor(self._param, "wd_mult")


def _in_order(params: Any) -> list[Trainable]:
    if isinstance(params, Mapping):
        params = [params[name] for name in _sorted(params)]
    if not isinstance(params, (list, tuple)):
        raise ArgumentError(f"params must be a list or a dict of parameters, not {type(params).__name__}")
    for param in params:
        if not all(hasattr(param, name) for name in ("name", "grad_req", "list_data", "list_grad")):
            raise ArgumentError(
                f"{param!r} is no parameter: it needs name, grad_req, list_data() and list_grad(), as "
                "kvstore.trainer.Parameter has"
            )
    _check_once(params)
    return list(params)


def _sorted(params: Mapping[str, Any]) -> list[str]:
    try:
        return sorted(params)
    except TypeError:
        kinds = ", ".join(sorted({type(name).__name__ for name in params}))
        raise ArgumentError(
            f"params must be a dict from names to parameters, and its keys are of types {kinds}: make all str"
        ) from None


def _check_once(params: Sequence[Trainable]) -> None:
    seen: set[int] = set()
    for param in params:
        if id(param) in seen:
            raise ArgumentError(
                f"parameter {param.name!r} is there twice, and each step would update it twice; list it once"
            )
        seen.add(id(param))


def _made(optimizer: str | Optimizer, settings: Mapping[str, Any] | None) -> Optimizer:
    if isinstance(optimizer, Optimizer):
        if settings:
            raise ArgumentError("optimizer_params go with the name of an optimizer, not with an optimizer")
        return optimizer
    if not isinstance(optimizer, str):
        raise ArgumentError(
            f"optimizer must be a name such as 'sgd', or an Optimizer such as kv.optimizer.SGD(), not "
            f"{optimizer!r}"
        )
    if settings is not None and not _is_keywords(settings):
        raise ArgumentError(
            f"optimizer_params must be a dict of keywords, such as {{'learning_rate': 0.1}}, not {settings!r}"
        )
    return create(optimizer, **(settings or {}))


def _is_keywords(settings: Any) -> bool:
    return isinstance(settings, Mapping) and all(isinstance(name, str) for name in settings)


def _count_replicas(params: list[Trainable]) -> int:
    counts = {len(arrays): param.name for param in params if (arrays := param.list_data())}
    if len(counts) > 1:
        (few, one), (many, other) = sorted(counts.items())[:2]
        raise ShapeError(
            f"all parameters need equally many replicas: {one!r} has {few}, {other!r} has {many}"
        )
    return next(iter(counts), 1)


def _freshness(param: Trainable) -> list[bool]:
    """Say of each gradient whether it was written since the last step."""
    grads = param.list_grad()
    if not grads:
        raise ArrayError(f"parameter {param.name!r} has no data yet; give it some before the first step")
    fresh = getattr(param, "fresh", None)
    return [True] * len(grads) if fresh is None else list(fresh)


def _spend(work: list[_Work]) -> None:
    for one in work:
        if getattr(one.param, "fresh", None) is not None:
            one.param.fresh = [False] * len(one.fresh)  # type: ignore[attr-defined]


def _zeros_like(grad: Any) -> Any:
    if isinstance(grad, RowSparseArray):
        return RowSparseArray.zeros(grad.shape, grad.dtype)
    return np.zeros_like(readable(grad, "gradient"))


__all__ = ["Parameter", "Trainer"]
