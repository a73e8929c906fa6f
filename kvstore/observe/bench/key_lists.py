"""The keys that are measured: those of a known network, or of a file of the user."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from kvstore import tensor_file
from kvstore.arrays.element_types import dtype_named
from kvstore.errors import ConfigError, DTypeError, StateFileError

from .models import MODELS

_DEFAULT_DTYPE = "float32"
_LONGEST = 64 << 20  # bytes of a list of shapes; what is longer is none
_SAFETENSORS = {
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64"},
}
_FORMS = (
    'a safetensors file, JSON such as {"layer.weight": [64, 3, 7, 7]}, or lines such as '
    "`layer.weight 64,3,7,7 float32`"
)


@dataclass(frozen=True)
class BenchKey:
    """Name, shape and element type of a key."""

    name: str
    shape: tuple[int, ...]
    dtype: str

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes of its value."""
        return self.size * dtype_named(self.dtype).itemsize


@dataclass(frozen=True)
class KeyList:
    """The keys of one call.

    Attributes
    ----------
    name : str
        What --keys was, for people.
    keys : tuple of BenchKey
        In the order of the call.
    """

    name: str
    keys: tuple[BenchKey, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of the gradients of one worker."""
        return sum(key.nbytes for key in self.keys)

    @property
    def dtypes(self) -> list[str]:
        """Element types, each once."""
        return list(dict.fromkeys(key.dtype for key in self.keys))


def load(source: str, dtype: str | None = None) -> KeyList:
    """Make the list that --keys and --dtype say.

    Parameters
    ----------
    source : str
        Name of a network in `MODELS`, or path of a file.
    dtype : str, optional
        Element type of all keys. With None, that of the file, or float32.

    Raises
    ------
    ConfigError
        There is no such network or file, the file is not a list of keys, or an element type is none of a
        store.
    """
    if source in MODELS:
        entries: Iterable[tuple[str, Any, str]] = ((name, s, "") for name, s in MODELS[source]().items())
    elif os.path.isfile(source):
        entries = _of_file(source)
    else:
        raise ConfigError(f"--keys {source}: neither a file nor one of {', '.join(MODELS)}")
    keys = tuple(key for key in _checked(source, entries, dtype) if key.size)
    if not keys:
        raise ConfigError(f"--keys {source}: there is no key with elements in it; it must be {_FORMS}")
    return KeyList(Path(source).name, keys)


def _checked(source: str, entries: Iterable[tuple[str, Any, str]], dtype: str | None) -> Iterator[BenchKey]:
    seen: set[str] = set()
    for name, shape, own in entries:
        where = f"--keys {source}: {name!r}"
        if not (isinstance(shape, (list, tuple)) and all(type(n) is int and n >= 0 for n in shape)):
            raise ConfigError(f"{where} has the shape {shape!r}, but a shape is a list of numbers: {_FORMS}")
        if name in seen:
            raise ConfigError(f"{where} is there twice; give each key a name of its own")
        seen.add(name)
        chosen = dtype or own or _DEFAULT_DTYPE
        try:
            dtype_named(chosen)
        except DTypeError as error:
            raise ConfigError(f"{where}: {error}; --dtype chooses one for all keys") from error
        yield BenchKey(name, tuple(shape), chosen)


def _of_file(path: str) -> Iterable[tuple[str, Any, str]]:
    try:
        with open(path, "rb") as file:
            head = file.read(9)
            if head[8:] == b"{" and b"\0" in head:  # a length of eight bytes: no text has a zero byte
                return [(n, s, _SAFETENSORS.get(d, d)) for n, s, d in tensor_file.read_header(path)]
            text = (head + file.read(_LONGEST)).decode()
    except (OSError, UnicodeDecodeError, StateFileError) as error:
        raise ConfigError(f"--keys {path}: {error}; it must be {_FORMS}") from error
    return _of_json(path, text) if text.lstrip().startswith("{") else _of_lines(path, text)


def _of_json(path: str, text: str) -> Iterator[tuple[str, Any, str]]:
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"--keys {path}: this is no JSON: {error}; it must be {_FORMS}") from error
    yield from ((name, shape, "") for name, shape in found.items())


def _of_lines(path: str, text: str) -> Iterator[tuple[str, Any, str]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        if not 2 <= len(words) <= 3 or not re.fullmatch(r"\d{1,18}([,x]\d{1,18})*", words[1]):
            raise ConfigError(f"--keys {path}: line {number} is not `name shape dtype`; it must be {_FORMS}")
        yield words[0], [int(n) for n in re.split("[,x]", words[1])], words[2] if len(words) == 3 else ""
