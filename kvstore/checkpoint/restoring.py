"""The restore of a checkpoint into a store, on all of its workers together."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from ..arrays.element_types import dtype_named
from ..arrays.sparse import kind_of
from ..errors import KVStoreError, StateFileError
from ..optimizer import Optimizer
from ..optimizer.states import StatesContent
from ..store import KVStore, load_settings_with, read_with, updater_of, write_with
from . import values
from .contents import CheckpointContents
from .transfer import CheckpointTransfer

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..stores.protocol import Backend


class Checkpoint(NamedTuple):
    """The content of a checkpoint, without the store's values and its optimizer.

    Attributes
    ----------
    step : int
        The step.
    extra : dict
        The `extra` of `save`.
    arrays : dict
        The `arrays` of `save`: NumPy arrays by name.
    """

    step: int
    extra: dict[str, Any]
    arrays: dict[str, npt.NDArray[Any]]


def restore_store(store: KVStore, find: Callable[[], CheckpointContents | None]) -> Checkpoint | None:
    """Load the checkpoint that worker 0 finds, completely or not at all; all workers call this."""
    if store.num_workers == 1:
        contents = find()
        return None if contents is None else _load_contents(store, contents)
    with CheckpointTransfer(store) as workers:
        found = (
            _restore_and_send(store, workers, find)
            if store.rank == 0
            else _receive_and_restore(store, workers)
        )
    if isinstance(found, Exception):  # only after the other workers have received it
        raise found
    return found


# ------------------------------------------------------------------------------------------------ worker 0


def _restore_and_send(
    store: KVStore, workers: CheckpointTransfer, find: Callable[[], CheckpointContents | None]
) -> Checkpoint | Exception | None:
    """Find a checkpoint, send it to the other workers, load it, and send them the result."""
    try:
        contents = find()
        if contents is not None:
            read_with(store, partial(_check_contents, contents=contents))
    except Exception as error:  # any exception of the caller's check
        kind = "" if isinstance(error, KVStoreError) else f"{type(error).__name__}: "
        workers.send({"error": f"{kind}{error}"}, {})
        return error
    if contents is None:
        workers.send({}, {})
        return None
    workers.send(_message_of(contents), contents.arrays)
    try:
        found = _load_contents(store, contents)
    except KVStoreError as error:
        workers.send({"error": str(error)}, {})
        return error
    workers.send({}, {})
    return found


def _message_of(contents: CheckpointContents) -> dict[str, Any]:
    optimizer = contents.optimizer
    return {
        "step": contents.step,
        "extra": contents.extra,
        "keys": [(key, *kind_of(value)) for key, value in contents.values.items()],
        "optimizer": None
        if optimizer is None or optimizer.optimizer is None
        else optimizer.optimizer.describe(),
        "num_update": 0 if optimizer is None else optimizer.num_update,
    }


def _load_contents(store: KVStore, contents: CheckpointContents) -> Checkpoint:
    read_with(store, partial(_check_contents, contents=contents))
    _set_optimizer(store, contents.optimizer)
    write_with(store, partial(_assign_contents, contents=contents))
    return Checkpoint(contents.step, contents.extra, contents.arrays)


def _check_contents(backend: Backend, contents: CheckpointContents) -> None:
    """Raise StateFileError if the checkpoint does not match the store."""
    values.check_values(backend, contents.values, contents.path)
    there = None if contents.optimizer is None else contents.optimizer.rule
    here = None if backend.updater is None else type(backend.updater.optimizer).__name__.lower()
    if there is not None and not backend.runs_optimizer:
        raise StateFileError(f"{contents.path} has states of optimizer {there!r}, and this store runs none")
    if here is not None and here != there:
        found = "no optimizer" if there is None else f"states of optimizer {there!r}"
        raise StateFileError(
            f"{contents.path} has {found}, and the store's is {here!r}: set the same optimizer, or none, "
            "before the restore"
        )


def _assign_contents(backend: Backend, contents: CheckpointContents) -> None:
    values.assign_values(backend, contents.values, contents.path)
    if contents.optimizer is not None:
        backend.adopt_states(contents.optimizer)


def _set_optimizer(store: KVStore, found: StatesContent | None) -> None:
    if found is not None and found.optimizer is not None and updater_of(store) is None:
        store.set_optimizer(found.optimizer)


# ---------------------------------------------------------------------------------------- the other workers


def _receive_and_restore(store: KVStore, workers: CheckpointTransfer) -> Checkpoint | KVStoreError | None:
    """Receive a checkpoint from worker 0, load it together with worker 0, and receive the result."""
    told, arrays = workers.receive()
    if "step" not in told:
        return _error_of(told)
    optimizer = _settings_of(told)
    _set_optimizer(store, optimizer)
    read_with(store, partial(_assign_values, told=told))
    ended, _ = workers.receive()
    if ended:
        return _error_of(ended)
    if optimizer is not None:
        load_settings_with(store, lambda backend: backend.follow_states(optimizer))
    return Checkpoint(told["step"], told["extra"], arrays)


def _error_of(told: dict[str, Any]) -> StateFileError | None:
    return StateFileError(f"worker 0 cannot restore: {told['error']}") if told else None


def _settings_of(told: dict[str, Any]) -> StatesContent | None:
    """Return the description of the optimizer for this worker; worker 0 has the states."""
    if told["optimizer"] is None:
        return None
    optimizer = Optimizer.from_config(**told["optimizer"])
    return StatesContent({}, {}, told["num_update"], type(optimizer).__name__.lower(), optimizer)


def _assign_values(backend: Backend, told: dict[str, Any]) -> None:
    if backend.assigns_together:
        keys = [(key, np.zeros(shape, dtype_named(dtype))) for key, _, dtype, shape in told["keys"]]
        backend.assign([(key, [value]) for key, value in keys])
