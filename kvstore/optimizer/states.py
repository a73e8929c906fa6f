"""Optimizer states as files: safetensors without code, replaced atomically.

The tensors are called ``state/<path>/<key>``, where the path is ``v`` for a bare array and else the indices
into nested tuples, joined by dots. The text, called ``content``, is JSON: counts, structure of each key's
state, name and perhaps configuration of the optimizer. Text and tensors are checked (`kvstore.tensor_file`).
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import tensor_file
from ..arrays import pages
from ..arrays.element_types import bfloat16
from ..atomic_files import atomic_replacement
from ..errors import ConfigError, StateFileError
from .descriptions import text_of
from .optimizer import Array, Index, Optimizer, State

_FORMAT = "kvstore.optimizer_states"
_DTYPES = frozenset(
    f"{kind}{bits}" for kind, sizes in (("float", (16, 32, 64)), ("int", (8, 16, 32, 64))) for bits in sizes
) | {"uint8", "uint16", "uint32", "uint64", "bool", "bfloat16"}


@dataclass(frozen=True)
class StatesContent:
    """The checked content of a file of states."""

    states: dict[Index, State]
    counts: dict[Index, int]
    num_update: int
    rule: str
    optimizer: Optimizer | None


# ------------------------------------------------------------------------------------------------ packing


def pack_states(states: Mapping[Index, State], optimizer: Optimizer, dump_optimizer: bool) -> bytes:
    """Return states, counts and, if requested, the optimizer as bytes.

    Raises
    ------
    ConfigError
        If keys are of two kinds, a state contains other objects than arrays, or the optimizer cannot be
        described.
    """
    content, tensors = describe_states(states, optimizer, dump_optimizer)
    return tensor_file.pack_file(_FORMAT, content, tensors)


def describe_states(
    states: Mapping[Index, State], optimizer: Optimizer, dump_optimizer: bool
) -> tuple[str, dict[str, Array]]:
    """Return the content of a file as text, and its tensors, which can be the arrays of the states."""
    tensors: dict[str, Array] = {}
    structure = [[_key_text(key), _state_outline(state, key, (), tensors)] for key, state in states.items()]
    counts = optimizer._index_update_count
    content = json.dumps(
        {
            "key_type": _key_type([*states, *counts]),
            "structure": structure,
            "counts": [[_key_text(key), n] for key, n in counts.items()],
            "num_update": optimizer.num_update,
            "rule": type(optimizer).__name__.lower(),
            "optimizer": json.loads(text_of(optimizer)) if dump_optimizer else None,
        }
    )
    return content, tensors


def _key_text(key: Index) -> Index:
    return key if isinstance(key, str) else int(key)


def _key_type(keys: list[Index]) -> str:
    kinds = {"str" if isinstance(key, str) else "int" for key in keys}
    if len(kinds) > 1:
        raise ConfigError("keys must be all int or all str")
    return kinds.pop() if kinds else "str"


def _state_outline(state: Any, key: Index, path: tuple[int, ...], tensors: dict[str, Array]) -> Any:
    """Return None, the name of an array's type, or a list of these; add the arrays to `tensors`."""
    if state is None:
        return None
    if isinstance(state, tuple):
        return [_state_outline(part, key, (*path, i), tensors) for i, part in enumerate(state)]
    if not isinstance(state, np.ndarray) or state.dtype.name not in _DTYPES:
        what = f"an array of {state.dtype}" if isinstance(state, np.ndarray) else type(state).__name__
        raise ConfigError(
            f"the state of key {key!r} holds {what}; only None, arrays of numbers and tuples can be saved"
        )
    array = np.ascontiguousarray(state, state.dtype.newbyteorder("=")).reshape(state.shape)
    tensors[_tensor_name(path, key)] = array
    return array.dtype.name


def _tensor_name(path: tuple[int, ...], key: Index) -> str:
    return f"state/{'.'.join(map(str, path)) or 'v'}/{key}"


# ---------------------------------------------------------------------------------------------- unpacking


def unpack_states(data: bytes) -> StatesContent:
    """Return the arguments of `pack_states`.

    Raises
    ------
    StateFileError
        If `data` is not an undamaged result of `pack_states`.
    """
    return tensor_file.unpack_file(data, _FORMAT, parse_states)


def parse_states(text: str, tensors: dict[str, Array]) -> StatesContent:
    """Return the arguments of `describe_states`; the tensors are copied, and removed from `tensors`."""
    content = json.loads(text)
    key_type = {"int": int, "str": str}[content["key_type"]]
    keys = [key for table in ("structure", "counts") for key, _ in content[table]]
    numbers = [content["num_update"], *(n for _, n in content["counts"])]
    if any(type(key) is not key_type for key in keys) or any(type(n) is not int or n < 0 for n in numbers):
        raise StateFileError("the optimizer states name keys or counts that cannot be")
    states = {key: _build_state(outline, key, (), tensors) for key, outline in content["structure"]}
    if tensors:
        raise StateFileError(
            f"the optimizer states hold tensors that belong to no key: {sorted(tensors)[:3]}"
        )
    made = content["optimizer"]
    optimizer = None if made is None else Optimizer.from_config(made["name"], made["config"])
    return StatesContent(states, dict(content["counts"]), content["num_update"], content["rule"], optimizer)


def _build_state(outline: Any, key: Index, path: tuple[int, ...], tensors: dict[str, Array]) -> State:
    if outline is None:
        return None
    if isinstance(outline, list):
        return tuple(_build_state(part, key, (*path, i), tensors) for i, part in enumerate(outline))
    # a copy: the library returns views of read-only bytes
    array = pages.copy(tensors.pop(_tensor_name(path, key)))
    if outline == "bfloat16" and array.dtype == np.uint16:
        return array.view(bfloat16(f"the state of key {key!r}"))
    if array.dtype.name != outline:
        raise StateFileError(
            f"the state of key {key!r} is of type {array.dtype}, and {outline!r} was written"
        )
    return array


# -------------------------------------------------------------------------------------------------- files


def read_states(path: str | os.PathLike[str]) -> StatesContent:
    """Read the result of `pack_states` from a file; errors contain the name of the file."""
    return tensor_file.read_file(os.fspath(path), _FORMAT, parse_states)


def write_states(path: str | os.PathLike[str], data: bytes) -> None:
    """Write a file atomically: it has its old or its new content at any time."""
    with atomic_replacement(path) as beside:
        beside.write_bytes(data)
