"""A model and its optimizer in a checkpoint of a store."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from ..checkpoint.manager import CheckpointManager
from ..checkpoint.restoring import Checkpoint
from ..errors import ArgumentError, StateFileError
from ..store import KVStore
from .exchange import StoreOptimizer
from .optimizer import DistributedOptimizer
from .tensors import Tensor, type_name

_PLAIN = (bool, int, float, str, type(None))
_MODEL, _OPTIMIZER = "torch.model", "torch.optimizer"


def save_checkpoint(
    manager: CheckpointManager,
    step: int,
    model: Any,
    optimizer: DistributedOptimizer,
    extra: dict[str, Any] | None = None,
) -> None:
    """Save a model, its optimizer and their store as one step, in one file that is written during training.

    Call it between two steps, on all workers or on worker 0, which writes; see `CheckpointManager.save`.

    Parameters
    ----------
    manager : CheckpointManager
        The manager of the folder.
    step : int
        Number of the step.
    model : torch.nn.Module
        All tensors of its ``state_dict()`` are saved, buffers too.
    optimizer : DistributedOptimizer
        Its ``state_dict()`` is saved; with `update_on_kvstore` the store has the states.
    extra : dict, optional
        Further data of the step, such as the position in the data, of types that JSON has.

    Raises
    ------
    ArgumentError
        A state has a value that is not a tensor, a number or a text.
    DTypeError
        A tensor has a type that no store supports, such as bool or complex.
    ConfigError, StateFileError, TimeoutError, KVStoreError
        As `CheckpointManager.save`.
    """
    if _checked_optimizer(optimizer).store.rank != 0:
        return
    arrays: dict[str, Any] = {}
    states = None if _is_on_store(optimizer) else optimizer.state_dict()
    said = {_MODEL: _pack_value(dict(model.state_dict()), "model", arrays)}
    said[_OPTIMIZER] = _pack_value(states, "optimizer", arrays)
    manager.save(optimizer.store, step, extra={"user": extra or {}, **said}, arrays=arrays)


def restore_checkpoint(
    manager: CheckpointManager, model: Any, optimizer: DistributedOptimizer
) -> Checkpoint | None:
    """Load the newest complete checkpoint into a model, its optimizer and their store.

    All workers call it, after they have created the `DistributedOptimizer`, and before their first step.

    Returns
    -------
    Checkpoint or None
        Its `step`, and the `extra` of `save_checkpoint`. None if there is no checkpoint; then nothing has
        changed.

    Raises
    ------
    StateFileError
        The file was not written by `save_checkpoint`, or does not match the store; see
        `CheckpointManager.restore`.
    """
    store: KVStore = _checked_optimizer(optimizer).store
    found = manager.restore(store)
    if found is None:
        return None
    if _MODEL not in found.extra:
        raise StateFileError(
            f"the checkpoint of step {found.step} has no model: it is not of save_checkpoint"
        )
    model.load_state_dict(_unpack_value(found.extra[_MODEL], found.arrays))
    optimizer.note_weights()
    states = _unpack_value(found.extra[_OPTIMIZER], found.arrays)
    if (states is None) != _is_on_store(optimizer):
        raise StateFileError(
            f"the checkpoint of step {found.step} is of an optimizer with another update_on_kvstore"
        )
    if states is not None:
        optimizer.load_state_dict(states)
    return Checkpoint(found.step, found.extra["user"], {})


def _checked_optimizer(optimizer: Any) -> DistributedOptimizer:
    if not isinstance(optimizer, DistributedOptimizer):
        raise ArgumentError(
            f"a checkpoint is of a DistributedOptimizer, not of {type_name(optimizer)}; with another one use "
            "CheckpointManager.save and its `arrays`"
        )
    return optimizer


def _is_on_store(optimizer: DistributedOptimizer) -> bool:
    return isinstance(optimizer._optimizer, StoreOptimizer)


def _pack_value(value: Any, name: str, arrays: dict[str, Any]) -> Any:
    """Return a value in types that JSON has, and put its tensors into `arrays`."""
    if isinstance(value, torch.Tensor):
        arrays[name] = value.detach().cpu().contiguous()
        return {"tensor": name}
    if isinstance(value, Mapping):
        return {"dict": [[key, _pack_value(one, f"{name}/{key}", arrays)] for key, one in value.items()]}
    if isinstance(value, (list, tuple)):
        parts = [_pack_value(one, f"{name}/{at}", arrays) for at, one in enumerate(value)]
        return {"tuple" if isinstance(value, tuple) else "list": parts}
    if not isinstance(value, _PLAIN):
        raise ArgumentError(f"{name} is {type_name(value)}, which a checkpoint cannot hold")
    return value


def _unpack_value(said: Any, arrays: Mapping[str, Any]) -> Any:
    if not isinstance(said, dict):
        return said
    ((form, content),) = said.items()
    if form == "tensor":
        return _tensor_of(arrays[content])
    if form == "dict":
        return {key: _unpack_value(one, arrays) for key, one in content}
    parts = [_unpack_value(one, arrays) for one in content]
    return tuple(parts) if form == "tuple" else parts


def _tensor_of(array: Any) -> Tensor:
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(array)
