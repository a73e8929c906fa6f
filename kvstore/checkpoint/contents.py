"""The content of a checkpoint, between a store and a file.

Tensors of values have the names of `values`, those of the optimizer the names of `kvstore.optimizer.states`,
and those of the caller ``array/<name>``. The metadata have ``format``, ``version`` and ``content``: JSON with
the step, the extra, the description of each key, the optimizer, and the types of the caller's arrays.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

from .. import tensor_file
from ..arrays import pages
from ..arrays.element_types import bfloat16
from ..arrays.grouping import Key
from ..arrays.host import readable_array
from ..errors import ArgumentError, KVStoreError, StateFileError
from ..optimizer import states
from ..optimizer.states import StatesContent
from . import file, values
from .values import Value

if TYPE_CHECKING:
    import numpy.typing as npt

    from ..stores.protocol import Backend

Array: TypeAlias = "npt.NDArray[Any]"

_FORMAT, _VERSION = "kvstore.checkpoint", "1"


class CheckpointData(NamedTuple):
    """A checkpoint that can be written: no array is shared with a store or the caller."""

    head: bytes
    tensors: dict[str, Array]

    @property
    def nbytes(self) -> int:
        """Bytes of the file."""
        return len(self.head) + sum(array.nbytes for array in self.tensors.values())


class CheckpointContents(NamedTuple):
    """The content of a checkpoint file."""

    path: str
    step: int
    extra: dict[str, Any]
    arrays: dict[str, Array]
    values: dict[Key, Value]
    optimizer: StatesContent | None


# ------------------------------------------------------------------------------------------------ writing


def collect_data(backend: Backend, step: int, extra: str, arrays: Mapping[str, Array]) -> CheckpointData:
    """Copy the content of a store; `extra` is JSON, and the arrays are copies already."""
    keys, tensors = values.describe_values(backend)
    tensors = {name: _private_copy(array) for name, array in tensors.items()}
    optimizer = None
    if backend.updater is not None:
        updater = backend.gather_states()
        optimizer, live = states.describe_states(updater.states, updater.optimizer, dump_optimizer=True)
        tensors |= {name: pages.copy(array) for name, array in live.items()}
    tensors |= {f"array/{name}": array for name, array in arrays.items()}
    tensors = tensor_file.as_bits(tensors)
    types = {name: array.dtype.name for name, array in arrays.items()}
    content = json.dumps(
        {"step": step, "extra": json.loads(extra), "keys": keys, "optimizer": optimizer, "arrays": types}
    )
    metadata = {"format": _FORMAT, "version": _VERSION, "content": content}
    return CheckpointData(file.file_header(metadata, tensors), tensors)


def _private_copy(array: Array) -> Array:
    """Return an array that no store writes to; arrays of live memory are views, and are copied."""
    return array if array.flags.owndata and array.flags.c_contiguous else pages.copy(array)


def as_json(extra: Any) -> str:
    """Return a dict as JSON that decodes to an equal dict.

    Raises
    ------
    ArgumentError
        JSON cannot represent the dict, or decodes to another one.
    """
    if not isinstance(extra, dict):
        raise ArgumentError(f"extra must be a dict, not {type(extra).__name__}")
    try:
        text = json.dumps(extra, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentError(
            f"extra is stored as JSON, which cannot represent this: {error}; pass arrays as `arrays`"
        ) from error
    if json.loads(text) != extra:
        raise ArgumentError(
            "extra is stored as JSON, where keys are str and tuples become lists, so a restore would return "
            f"another dict: {text[:200]}"
        )
    return text


def copied_arrays(arrays: Any) -> dict[str, Array]:
    """Return copies of the caller's arrays.

    Raises
    ------
    ArgumentError, ArrayError, DTypeError
        The argument is not a dict with str keys, or a value is not an array in host memory, or has a type
        that no store supports.
    """
    if not isinstance(arrays, Mapping) or not all(isinstance(name, str) for name in arrays):
        raise ArgumentError("arrays must be a dict of arrays by name (str)")
    return {name: pages.copy(readable_array(array, f"array {name!r}")) for name, array in arrays.items()}


# ------------------------------------------------------------------------------------------------ reading


def read_checkpoint(path: str) -> CheckpointContents:
    """Read a complete file.

    Raises
    ------
    StateFileError
        The file is not a checkpoint, or of another version; or its optimizer is not registered here.
    """
    metadata, tensors = tensor_file.read_raw(path)
    tensors.pop(file.DIGEST, None)
    if metadata.get("format") != _FORMAT or metadata.get("version") != _VERSION:
        found = f"{metadata.get('format')!r}, version {metadata.get('version')!r}"
        raise StateFileError(f"{path} is not a checkpoint that this version reads: its format is {found}")
    try:
        return _parsed_content(path, json.loads(metadata["content"]), tensors)
    except (KVStoreError, KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise StateFileError(f"{path} cannot be read: {error}") from error


def _parsed_content(path: str, content: dict[str, Any], tensors: dict[str, Array]) -> CheckpointContents:
    arrays = {
        name: _typed_array(tensors.pop(f"array/{name}"), dtype) for name, dtype in content["arrays"].items()
    }
    found = values.parse_values(content["keys"], tensors)
    text, optimizer = content["optimizer"], None
    if text is not None:
        of_optimizer = {name: array for name, array in tensors.items() if name.startswith("state/")}
        optimizer = states.parse_states(text, of_optimizer)
    return CheckpointContents(path, content["step"], content["extra"], arrays, found, optimizer)


def _typed_array(array: Array, dtype: str) -> Array:
    return array.view(bfloat16("an array")) if dtype == "bfloat16" else array
