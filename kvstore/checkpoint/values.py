"""The values of a store in a file: safetensors with a JSON manifest in its metadata, without code.

A dense key is the tensor ``value/<key>``; a row-sparse one is ``rows/<key>`` and ``ids/<key>``, or
``table/<key>`` when all its rows are there. bfloat16 is stored as its bits (the manifest names the type).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from .. import tensor_file
from ..arrays.element_types import bfloat16
from ..arrays.grouping import Key, plain_key
from ..arrays.sparse import RowSparseArray, kind_of
from ..errors import KeyKindError, StateFileError

if TYPE_CHECKING:
    from ..stores.protocol import Backend

_FORMAT = "kvstore.values"

Array = npt.NDArray[Any]
Value = Array | RowSparseArray


def save_values(backend: Backend, path: str) -> None:
    """Write the values of all keys."""
    manifest, tensors = describe_values(backend)
    tensor_file.write_file(path, _FORMAT, json.dumps(manifest), tensors, field="keys")


def load_values(backend: Backend, path: str) -> None:
    """Overwrite keys that the store has, and initialise the others; all keys, or none."""
    assign_values(backend, _read_values(path), path)


def describe_values(backend: Backend) -> tuple[list[dict[str, Any]], dict[str, Array]]:
    """Return the description of each key, and the arrays by their names in the file.

    These can be live memory.
    """
    tensors: dict[str, Array] = {}
    keys = backend.keys()
    values = backend.fetch_all(keys)
    return [_describe_value(key, value, tensors) for key, value in zip(keys, values, strict=True)], tensors


def parse_values(entries: Any, tensors: Mapping[str, Array]) -> dict[Key, Value]:
    """Return the values that were passed to `describe_values`."""
    return {entry["key"]: _parsed_value(entry, tensors) for entry in _checked_entries(entries)}


def check_values(backend: Backend, values: Mapping[Key, Value], path: str) -> None:
    """Raise StateFileError if a key is of another kind in the store."""
    known = backend.keys()
    if len({isinstance(key, str) for key in (*known, *values)}) > 1:
        raise StateFileError(f"{path}: its keys are not of the type of this store's, int or str")
    for key in set(known) & set(values):
        here, there = backend.kind(key), kind_of(values[key])
        if here != there:
            raise StateFileError(f"{path}: key {key!r} is {there} there and {here} in this store")


def assign_values(backend: Backend, values: Mapping[Key, Value], path: str) -> None:
    """Overwrite keys that the store has, and initialise the others; all keys, or none."""
    check_values(backend, values, path)
    try:
        backend.assign([(key, [value]) for key, value in values.items()])
    except KeyKindError as error:
        raise StateFileError(f"{path}: {error}") from error


def _describe_value(key: Key, value: Value, tensors: dict[str, Array]) -> dict[str, Any]:
    entry: dict[str, Any] = {"key": key, "dtype": value.dtype.name, "shape": list(value.shape)}
    if not isinstance(value, RowSparseArray):
        parts = {"value": value}
    elif len(value.indices) == value.shape[0]:
        parts = {"table": value.data}
    else:
        parts = {"rows": value.data, "ids": value.indices}
    tensors.update({f"{part}/{key}": array for part, array in parts.items()})
    return {**entry, "parts": list(parts)}


def _read_values(path: str) -> dict[Key, Value]:
    return tensor_file.read_file(
        path,
        _FORMAT,
        lambda text, tensors: parse_values(json.loads(text), tensors),
        field="keys",
    )


def _checked_entries(entries: Any) -> list[dict[str, Any]]:
    if not isinstance(entries, list):
        raise ValueError("the manifest is not a list")
    for entry in entries:
        plain_key(entry["key"])
    kinds = {type(entry["key"]) for entry in entries}
    if not kinds <= {str} and not kinds <= {int}:
        raise ValueError("keys of two kinds")
    checked: list[dict[str, Any]] = entries
    return checked


def _parsed_value(entry: dict[str, Any], tensors: Mapping[str, Array]) -> Value:
    key, shape = entry["key"], tuple(entry["shape"])
    parts = {part: tensors[f"{part}/{key}"] for part in entry["parts"]}
    if "value" in parts:
        return _typed_array(parts["value"], entry["dtype"], shape)
    if "table" in parts:
        table = _typed_array(parts["table"], entry["dtype"], shape)
        return RowSparseArray(table, np.arange(shape[0], dtype=np.int64), shape)
    ids = parts["ids"]
    return RowSparseArray(_typed_array(parts["rows"], entry["dtype"], (len(ids), *shape[1:])), ids, shape)


def _typed_array(array: Array, dtype: str, shape: tuple[int, ...]) -> Array:
    if dtype == "bfloat16":
        array = array.view(bfloat16("a value"))
    if array.dtype.name != dtype or array.shape != shape:
        raise ValueError(f"a tensor of {array.dtype} {array.shape} where the manifest says {dtype} {shape}")
    return array
