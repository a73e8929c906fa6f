"""Named arrays and a text in one safetensors file: written atomically, read only if it is complete and valid.

The metadata (strings, as safetensors requires) hold ``format``, ``version``, the text, and ``checksum``, a
CRC-32 over the text and all arrays. bfloat16 is stored as its bits.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import zlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .atomic_files import atomic_replacement, open_regular_file, read_error
from .errors import KeyKindError, KVStoreError, MissingBackendError, StateFileError

Array = npt.NDArray[Any]
Content = TypeVar("Content")
#: Function of a text and arrays that returns the content of a file.
Parse = Callable[[str, dict[str, Array]], Content]

_VERSION = "1"
_MAX_HEADER = 100_000_000  # as in the safetensors library

# Errors of reading a damaged or edited file.
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


# ------------------------------------------------------------------------------------------------ writing


def write_file(
    path: str, format_: str, content: str, tensors: Mapping[str, Array], field: str = "content"
) -> str:
    """Write `tensors` and the text `content`, under the name `field` in the metadata; return the checksum.

    Raises
    ------
    StateFileError
        The file cannot be written; an old file is unchanged.
    """
    from safetensors import SafetensorError
    from safetensors.numpy import save_file

    bits, metadata = _add_checksum(format_, content, tensors, field)
    with atomic_replacement(path) as beside:
        try:
            save_file(bits, beside, metadata)
        except SafetensorError as error:  # no space, for instance: an OSError of other writers
            raise _as_system_says(error) from error
    return metadata["checksum"]


def pack_file(format_: str, content: str, tensors: Mapping[str, Array]) -> bytes:
    """Return the bytes of the file that `write_file` writes."""
    from safetensors.numpy import save

    return save(*_add_checksum(format_, content, tensors, "content"))


def checksum(text: str, tensors: Mapping[str, Array]) -> str:
    """Return the CRC-32 over a text and named arrays, as eight hexadecimal digits."""
    total = zlib.crc32(text.encode())
    for name in sorted(tensors):
        array = tensors[name]
        total = zlib.crc32(f"{name}:{array.dtype.name}:{array.shape}".encode(), total)
        total = zlib.crc32(array.reshape(-1).view("u1").data, total) if array.size else total
    return f"{total:08x}"


def as_bits(tensors: Mapping[str, Array]) -> dict[str, Array]:
    """Return arrays as files have them: safetensors.numpy writes bfloat16 but does not read it."""
    return {name: a.view(np.uint16) if a.dtype.name == "bfloat16" else a for name, a in tensors.items()}


def _add_checksum(
    format_: str, content: str, tensors: Mapping[str, Array], field: str
) -> tuple[dict[str, Array], dict[str, str]]:
    try:
        content.encode(), [name.encode() for name in tensors]
    except UnicodeEncodeError as error:
        raise KeyKindError(f"a key has characters that no file can hold: {error}") from error
    bits = as_bits(tensors)
    return bits, {
        "format": format_,
        "version": _VERSION,
        field: content,
        "checksum": checksum(content, bits),
    }


def _as_system_says(error: Exception) -> OSError:
    """Return the OSError in a text with ``(os error 28)``, or ``code: 28`` from older releases."""
    found = re.search(r"(?:\(os error |Os { code: )(\d+)", str(error))
    return OSError(int(found[1]), os.strerror(int(found[1]))) if found else OSError(str(error))


# ------------------------------------------------------------------------------------------------ reading


def read_file(
    path: str, format_: str, parse: Parse[Content], field: str = "content", checksum: str | None = None
) -> Content:
    """Read a file of `write_file`, and return the result of ``parse(content, tensors)``.

    Raises
    ------
    StateFileError
        The file is damaged, has another format or another `checksum` than `write_file` has returned, or
        `parse` fails. The error for a file that cannot be read is also the OSError of the system.
    """
    metadata, tensors = read_raw(path)
    with _damage_errors(format_, f"{os.fsdecode(path)}: "):
        if checksum not in (None, metadata.get("checksum")):
            raise StateFileError("it is damaged, or another file than the one that was written")
        return _parse_content(metadata, tensors, format_, parse, field)


def unpack_file(data: bytes, format_: str, parse: Parse[Content]) -> Content:
    """Return the result of ``parse(content, tensors)`` for the bytes of `pack_file`.

    The errors are those of `read_file`.
    """
    from safetensors.numpy import load

    data = bytes(data)
    with _damage_errors(format_):
        return _parse_content(_file_metadata(data), load(data), format_, parse, "content")


def read_raw(path: str) -> tuple[dict[str, str], dict[str, Array]]:
    """Return the metadata and tensors of any safetensors file, unchecked.

    The errors are those of `read_header`.
    """
    with _open_tensors(path) as file:
        names = file.keys()
        return file.metadata() or {}, {name: file.get_tensor(name) for name in names}


def read_header(path: str) -> list[tuple[str, list[int], str]]:
    """List the name, shape and element type of each tensor in any safetensors file, without the values.

    Raises
    ------
    StateFileError
        The file is damaged, or is no safetensors file.
    """
    with _open_tensors(path) as file:
        slices = [(name, file.get_slice(name)) for name in file.keys()]  # noqa: SIM118 - no mapping
        return [(name, list(one.get_shape()), str(one.get_dtype())) for name, one in slices]


@contextlib.contextmanager
def _open_tensors(path: str) -> Iterator[Any]:
    from safetensors import SafetensorError, safe_open

    try:
        with open_regular_file(path) as file:
            _check_head(file.read(9), os.fstat(file.fileno()).st_size)
        with safe_open(path, framework="numpy") as tensors:
            yield tensors
    except OSError as error:
        raise read_error(path, error) from error
    except StateFileError as error:
        raise StateFileError(f"{os.fsdecode(path)}: {error}") from error
    except (SafetensorError, *_DAMAGE) as error:
        raise StateFileError(f"{path} is damaged or no safetensors file: {error}") from error


@contextlib.contextmanager
def _damage_errors(format_: str, where: str = "") -> Iterator[None]:
    """Raise StateFileError for any damage that the body finds."""
    from safetensors import SafetensorError

    try:
        yield
    except (StateFileError, MissingBackendError) as error:
        raise StateFileError(f"{where}{error}") from error
    except (SafetensorError, KVStoreError, *_DAMAGE) as error:
        raise StateFileError(f"{where}it is damaged or no file of {format_}: {error}") from error


def _check_head(head: bytes, size: int) -> None:
    """Raise StateFileError if the head of a file is not that of a safetensors file."""
    if head[8:9] != b"{":
        raise StateFileError(_foreign_error(head))
    if int.from_bytes(head[:8], "little") > min(size - 8, _MAX_HEADER):
        raise StateFileError("this is a damaged safetensors file: it is cut short")


def _foreign_error(head: bytes) -> str:
    if head[:1] == b"\x80" and head[1:2] in (b"\2", b"\3", b"\4", b"\5"):
        return (
            "this is a pickle, as MXNet writes its .states files; reading one runs the code in it, so "
            "it is refused. Load it in MXNet, and put the arrays into updater.states[key] as NumPy arrays "
            "(and the number of updates into the optimizer's begin_num_update)"
        )
    return "this is not a safetensors file: it is empty, damaged or in another format"


def _file_metadata(data: bytes) -> dict[str, str]:
    _check_head(data[:9], len(data))
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    return dict(header.get("__metadata__") or {})


def _parse_content(
    metadata: Mapping[str, str],
    tensors: dict[str, Array],
    format_: str,
    parse: Parse[Content],
    field: str,
) -> Content:
    if metadata.get("format") != format_:
        raise StateFileError(f"this is not a file of {format_} (format {metadata.get('format')!r})")
    if metadata.get("version") != _VERSION:
        raise StateFileError(
            f"it is of version {metadata.get('version')!r} of {format_}, and this kvstore reads {_VERSION!r}"
        )
    if metadata["checksum"] != checksum(metadata[field], tensors):
        raise StateFileError("it is damaged: its checksum is wrong")
    return parse(metadata[field], tensors)
