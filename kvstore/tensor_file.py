"""Named arrays and a text in one safetensors file: written in one step, read only if it is whole and ours."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .errors import KeyKindError, KVStoreError, MissingBackendError, StateFileError
from .files import checksum, open_regular, replacing, unreadable

Array = npt.NDArray[Any]
Content = TypeVar("Content")

_VERSION = "1"

# What reading a file that somebody has changed may raise.
_DAMAGE = (
    KeyError,
    TypeError,
    ValueError,
    IndexError,
    AttributeError,
    OverflowError,
    RecursionError,
    ImportError,
)


def write(
    path: str, format_: str, content: str, tensors: Mapping[str, Array], field: str = "content"
) -> None:
    """Write `tensors`, bfloat16 as its bits, and beside them the text `content` under the name `field`.

    Raises
    ------
    StateFileError
        The file cannot be written; the old one is still there then.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    try:
        content.encode(), [name.encode() for name in tensors]
    except UnicodeEncodeError as error:
        raise KeyKindError(f"a key has characters that no file can hold: {error}") from error
    # safetensors.numpy writes bfloat16 but does not read it.
    bits = {name: a.view(np.uint16) if a.dtype.name == "bfloat16" else a for name, a in tensors.items()}
    metadata = {"format": format_, "version": _VERSION, field: content, "checksum": checksum(content, bits)}
    with replacing(path) as beside:
        try:
            save_file(bits, beside, metadata)
        except SafetensorError as error:  # no space, for instance: what other writers call an OSError
            raise _as_system_says(error) from error


def _as_system_says(error: Exception) -> OSError:
    """Return the system's error out of a text with ``(os error 28)``, or ``code: 28`` from older releases."""
    found = re.search(r"(?:\(os error |Os { code: )(\d+)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else OSError(str(error))


def read(
    path: str, format_: str, parse: Callable[[str, dict[str, Array]], Content], field: str = "content"
) -> Content:
    """Read what `write` wrote, and return what ``parse(content, tensors)`` makes of it.

    Raises
    ------
    StateFileError
        Damaged, foreign, of another format, or nothing that `parse` understands. What cannot be read is the
        system's OSError, too.
    """
    from safetensors import SafetensorError, safe_open

    _refuse_what_is_no_file_of_ours(path)
    try:
        with safe_open(path, framework="numpy") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != format_ or metadata.get("version") != _VERSION:
                raise StateFileError(f"it is not a file of {format_} (format {metadata.get('format')!r})")
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - no mapping
            if metadata["checksum"] != checksum(metadata[field], tensors):
                raise StateFileError("it is damaged: its checksum is wrong")
            return parse(metadata[field], tensors)
    except (StateFileError, MissingBackendError) as error:
        raise StateFileError(f"{path}: {error}") from error
    except (SafetensorError, KVStoreError, *_DAMAGE) as error:
        raise StateFileError(f"{path} is damaged or no file of {format_}: {error}") from error


def read_header(path: str) -> list[tuple[str, list[int], str]]:
    """List name, shape and element type of the tensors in any safetensors file, without their values.

    Raises
    ------
    StateFileError
        Damaged, or no safetensors file.
    """
    from safetensors import SafetensorError, safe_open

    _refuse_what_is_no_file_of_ours(path)
    try:
        with safe_open(path, framework="numpy") as file:
            slices = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118 - no mapping
            return [(name, list(one.get_shape()), str(one.get_dtype())) for name, one in slices]
    except (SafetensorError, *_DAMAGE) as error:
        raise StateFileError(f"{path} is damaged or no safetensors file: {error}") from error


def _refuse_what_is_no_file_of_ours(path: str) -> None:
    try:
        with open_regular(path) as file:
            head = file.read(9)
    except OSError as error:
        raise unreadable(path, error) from error
    if head[8:] != b"{":
        raise StateFileError(f"{path} is not a safetensors file (damaged, empty, or another format)")
