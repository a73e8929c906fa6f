"""The weights and the optimizer of a trainer in a checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np

from ..arrays.host import readable_array
from ..arrays.sparse import RowSparseArray
from ..checkpoint import contents
from ..checkpoint.restoring import Checkpoint
from ..errors import StateFileError
from ..optimizer import Optimizer
from ..optimizer.optimizer import Array
from ..optimizer.updater import Counts
from .parameter import TrainableParameter

_TRAINER, _USER, _STATES, _WEIGHT = "trainer", "user", "trainer.states", "trainer.weight/"


class _TrainerDescription(msgspec.Struct):
    """The description of a trainer in a file."""

    updates: bool  # whether the store updates the weights, and so has them
    names: list[str]
    optimizer: str
    counts: list[tuple[int | str, int]]
    num_update: int


def description_of(
    extra: dict[str, Any] | None, params: Sequence[TrainableParameter], optimizer: Optimizer, updates: bool
) -> dict[str, Any]:
    """Return the text of a file for a trainer: the description of the trainer, and the caller's `extra`."""
    user = {} if extra is None else extra
    contents.as_json(user)  # raises for an argument that is not a dict, or that JSON cannot represent
    mine = _TrainerDescription(
        updates,
        [str(param.name) for param in params],
        type(optimizer).__name__.lower(),
        list(optimizer._index_update_count.items()),
        optimizer.num_update,
    )
    return {_TRAINER: msgspec.to_builtins(mine) | {"counts": [list(one) for one in mine.counts]}, _USER: user}


def local_weights(params: Sequence[TrainableParameter], updates: bool) -> dict[str, Any]:
    """Return the weights that no store updates, of the first replica."""
    mine = _own_keys(params, updates)
    return {f"{_WEIGHT}{key}": params[key].list_data()[0] for key in mine}


def packed_states(packed: bytes) -> dict[str, Any]:
    """Return the optimizer's states, which `Updater.get_states` has packed, as an array."""
    return {_STATES: np.frombuffer(packed, np.uint8)}


def _own_keys(params: Sequence[TrainableParameter], updates: bool) -> list[int]:
    """Return the keys of weights that the trainer has: a store updates no weight without gradients."""
    return [
        key
        for key, param in enumerate(params)
        if not updates or (param.grad_req == "null" and not isinstance(param.list_data()[0], RowSparseArray))
    ]


def check_checkpoint(
    found: Checkpoint, params: Sequence[TrainableParameter], optimizer: Optimizer, updates: bool
) -> None:
    """Raise StateFileError unless a checkpoint matches the trainer."""
    where = f"the checkpoint of step {found.step}"
    mine = _description_in(found, where)
    if mine.updates is not updates:
        raise StateFileError(
            f"{where} is of a trainer with update_on_kvstore={mine.updates}, by choice or by default: "
            "pass that"
        )
    names, rule = [str(param.name) for param in params], type(optimizer).__name__.lower()
    if mine.names != names:
        raise StateFileError(f"{where} has parameters {mine.names}, and the trainer {names}")
    if mine.optimizer != rule:
        raise StateFileError(
            f"{where} has states of optimizer {mine.optimizer!r}, and the trainer has {rule!r}: use the same"
        )
    if not updates and _STATES not in found.arrays:
        raise StateFileError(f"{where} has no states")
    for key in _own_keys(params, updates):
        _check_weight(found, params[key], f"{_WEIGHT}{key}", where)


def _description_in(found: Checkpoint, where: str) -> _TrainerDescription:
    try:
        if not isinstance(found.extra[_USER], dict):
            raise TypeError(_USER)
        return msgspec.convert(found.extra[_TRAINER], _TrainerDescription)
    except (KeyError, TypeError, msgspec.ValidationError):
        raise StateFileError(f"{where} is not of Trainer.save_checkpoint") from None


def _check_weight(found: Checkpoint, param: TrainableParameter, name: str, where: str) -> None:
    weight, there = readable_array(param.list_data()[0], f"data of {param.name!r}"), found.arrays.get(name)
    if there is None or there.shape != weight.shape or there.dtype != weight.dtype:
        kind = "nothing" if there is None else f"{there.dtype}{list(there.shape)}"
        raise StateFileError(
            f"{where} has {kind} for parameter {param.name!r}, which is {weight.dtype}{list(weight.shape)}"
        )


def weights_of(found: Checkpoint) -> dict[int, Array]:
    """Return the weights that are not in the store, by key."""
    names = [name for name in found.arrays if name.startswith(_WEIGHT)]
    return {int(name.removeprefix(_WEIGHT)): found.arrays[name] for name in names}


def states_of(found: Checkpoint) -> bytes:
    """Return the optimizer's states."""
    return found.arrays[_STATES].tobytes()


def counts_of(found: Checkpoint) -> Counts:
    """Return the update counts for `Updater.snapshot_counts`."""
    mine = _description_in(found, "")
    return dict(mine.counts), mine.num_update


def user_checkpoint(found: Checkpoint) -> Checkpoint:
    """Return the caller's part of the checkpoint."""
    return Checkpoint(found.step, found.extra[_USER], {})
