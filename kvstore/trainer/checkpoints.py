"""A trainer's weights and its optimizer in a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from ..arrays.host import readable
from ..checkpoint.restoring import Checkpoint
from ..errors import StateFileError
from ..optimizer import Optimizer
from ..optimizer.optimizer import Array
from ..optimizer.updater import Counts
from .parameter import Trainable

_TRAINER, _STATES, _WEIGHT = "trainer", "trainer.states", "trainer.weight/"


def described(extra: dict[str, Any] | None, optimizer: Optimizer, updates: bool) -> dict[str, Any]:
    """Return what a file says beside its arrays: of the trainer, and what the caller adds.

    `updates`: whether the store updates the weights, and so has them.
    """
    counts = [[key, count] for key, count in optimizer._index_update_count.items()]
    mine = {"updates": updates, "counts": counts, "num_update": optimizer.num_update}
    return {_TRAINER: mine, "user": {} if extra is None else extra}


def arrays(params: Sequence[Trainable], states: bytes) -> dict[str, Any]:
    """Return what no store has: weights of the first replica, and the optimizer's states."""
    weights = {f"{_WEIGHT}{key}": param.list_data()[0] for key, param in enumerate(params)}
    return {**weights, _STATES: np.frombuffer(states, np.uint8)}


def check(found: Checkpoint, params: Sequence[Trainable], updates: bool) -> None:
    """Raise StateFileError unless a checkpoint is one of such a trainer."""
    where = f"the checkpoint of step {found.step}"
    mine = found.extra.get(_TRAINER)
    if not isinstance(mine, dict):
        raise StateFileError(f"{where} is not of Trainer.save_checkpoint")
    if mine.get("updates") is not updates:
        raise StateFileError(f"{where} is of a trainer with another update_on_kvstore")
    if updates:
        return  # its store compares values
    for key, param in enumerate(params):
        name, weight = f"{_WEIGHT}{key}", readable(param.list_data()[0], f"data of {param.name!r}")
        there = found.arrays.get(name)
        if there is None or there.shape != weight.shape or there.dtype != weight.dtype:
            kind = "nothing" if there is None else f"{there.dtype}{list(there.shape)}"
            raise StateFileError(
                f"{where} has {kind} for parameter {param.name!r}, which is "
                f"{weight.dtype}{list(weight.shape)}"
            )


def weight_of(found: Checkpoint, key: int) -> Array:
    """Return the weight of a parameter."""
    return found.arrays[f"{_WEIGHT}{key}"]


def states_of(found: Checkpoint) -> bytes:
    """Return the optimizer's states, as `Updater.get_states` gave them."""
    return found.arrays[_STATES].tobytes()


def counts_of(found: Checkpoint) -> Counts:
    """Return the update counts, as `Updater.snapshot_counts`."""
    mine: Mapping[str, Any] = found.extra[_TRAINER]
    return {int(key): int(count) for key, count in mine["counts"]}, int(mine["num_update"])


def users_part(found: Checkpoint) -> Checkpoint:
    """Return what the caller gets to see."""
    return Checkpoint(found.step, found.extra["user"], {})
