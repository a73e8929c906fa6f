"""Updates by the trainer: each replica has its own states, and all replicas count as one update."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from ..arrays.host import readable_array, writable_array
from ..arrays.sparse import RowSparseArray
from ..errors import ConfigError, KVStoreError
from ..optimizer import Optimizer, Updater, states
from ..optimizer.builtin import BuiltInOptimizer, ElementwiseOptimizer, arrays_of, check_fit
from ..optimizer.optimizer import Array
from ..optimizer.states import StatesContent
from ..optimizer.updater import check_states
from .gradients import StepGradients
from .parameter import TrainableParameter

PathLike = str | os.PathLike[str]


class ReplicaUpdaters:
    """An updater for each replica; they share one optimizer."""

    def __init__(self, optimizer: Optimizer, replicas: int) -> None:
        self._updaters = [Updater(optimizer) for _ in range(replicas)]

    def check(self, gradients: Sequence[StepGradients]) -> None:
        """Raise the errors of an update, before anything is changed."""
        counts = self._updaters[0].snapshot_counts()
        try:
            for one in gradients:
                _check_update(self._updaters, one.key, one.param)
        finally:
            self._updaters[0].restore_counts(counts)

    def update(self, gradients: Sequence[StepGradients]) -> None:
        """Update every replica.

        Parameters are updated one after the other: after an error of a user-defined optimizer, all replicas
        of a parameter are equal.
        """
        for one in gradients:
            _update_replicas(self._updaters, one.key, one.param)

    def packed(self) -> bytes:
        """Return the optimizer, and the states of the first replica."""
        return self._updaters[0].get_states(dump_optimizer=True)

    def save(self, fname: PathLike) -> None:
        """Write the result of `packed` to a file."""
        states.write_states(fname, self.packed())

    def load(self, read: Callable[[], StatesContent], weights: Mapping[Any, Array]) -> Optimizer:
        """Load the states of `packed` into each replica's updater, and return the loaded optimizer."""
        for updater in self._updaters:
            updater.adopt(read(), weights)
        optimizer = self._updaters[0].optimizer
        for updater in self._updaters:
            updater.optimizer = optimizer
        return optimizer


def _check_update(updaters: Sequence[Updater], key: int, param: TrainableParameter) -> None:
    """Raise the errors of an update of a parameter, and count one update; nothing is written.

    A user-defined rule is not checked here: its errors are raised by the update.
    """
    with _errors_named(param):
        for replica, updater in enumerate(updaters):
            weight, _ = writable_array(param.list_data()[replica], f"replica {replica}")
            grad = _replica_gradient(param, replica)
            rule = updater.optimizer
            if isinstance(rule, BuiltInOptimizer) and _is_compiled(rule):
                _check_state(updater, key, weight)
                check_fit(grad, weight)
                if replica == 0:
                    _count_update(rule, key, weight)


def _is_compiled(rule: BuiltInOptimizer) -> bool:
    kind = type(rule)
    return (
        kind.update is BuiltInOptimizer.update
        and kind.update_multi_precision is BuiltInOptimizer.update_multi_precision
    )


def _check_state(updater: Updater, key: int, weight: Any) -> None:
    rule = updater.optimizer
    if key not in updater.states:
        rule.create_state_multi_precision(key, weight)  # raises for weights that it cannot update
    elif isinstance(rule, ElementwiseOptimizer):
        master, inner = _state_parts(rule, key, updater.states[key], rule.keeps_master(weight))
        check_states(rule, key, weight, master, arrays_of(inner))


def _state_parts(rule: ElementwiseOptimizer, key: int, state: Any, has_master: bool) -> tuple[Any, Any]:
    """Return the float32 copy of the weight, if the state holds one, and the rest."""
    if not has_master:
        return None, state
    if not isinstance(state, tuple):
        raise ConfigError(
            f"key {key} has no float32 copy of its weight, and {type(rule).__name__} wants one as it is set "
            "now; multi_precision must be as it was when the states were made"
        )
    master, inner = state
    return master, inner


def _count_update(rule: BuiltInOptimizer, key: int, weight: Any) -> None:
    """Count one update, and let the rule check its rate."""
    if isinstance(rule, ElementwiseOptimizer):
        rule.advance(key, weight)
    else:
        rule._update_count(key)
        rule._get_lr(key)


def _update_replicas(updaters: Sequence[Updater], key: int, param: TrainableParameter) -> None:
    """Update all replicas of a parameter; the updaters share their optimizer."""
    rule = updaters[0].optimizer
    count, num_update = rule._index_update_count.get(key), rule.num_update
    for replica, updater in enumerate(updaters):
        if replica:
            _restore_count(rule, key, count, num_update)
        with _in_memory(param, replica) as weight:
            updater(key, _replica_gradient(param, replica), weight)


def _restore_count(rule: Optimizer, key: int, count: int | None, num_update: int) -> None:
    """Restore the count of one key; copies of all counts for each key would need quadratic time."""
    rule.num_update = num_update
    if count is None:
        rule._index_update_count.pop(key, None)
    else:
        rule._index_update_count[key] = count


def _replica_gradient(param: TrainableParameter, replica: int) -> Any:
    grad = param.list_grad()[replica]
    return grad if isinstance(grad, RowSparseArray) else readable_array(grad, f"gradient of {param.name!r}")


def check_writable(params: Sequence[TrainableParameter]) -> None:
    """Raise ArrayError for a replica that cannot be written."""
    for param in params:
        for array in param.list_data():
            if not isinstance(array, RowSparseArray):
                writable_array(array, f"data of {param.name!r}")


def assign_replicas(param: TrainableParameter, value: Array) -> None:
    """Copy a value to all replicas of a parameter."""
    for replica in range(len(param.list_data())):
        with _in_memory(param, replica) as weight:
            weight[...] = value


@contextlib.contextmanager
def _in_memory(param: TrainableParameter, replica: int) -> Iterator[Any]:
    """Return a context with a replica's memory, or with a copy that is written back at its end."""
    array = param.list_data()[replica]
    memory, deliver = writable_array(array, f"data of {param.name!r}")
    if deliver is not None:
        memory[...] = readable_array(array, f"data of {param.name!r}")
    yield memory
    if deliver is not None:
        deliver()


@contextlib.contextmanager
def _errors_named(param: TrainableParameter) -> Iterator[None]:
    """Prefix errors of the body with the name of the parameter."""
    try:
        yield
    except KVStoreError as error:
        raise type(error)(f"parameter {param.name!r}: {error}") from error
