"""The keys that are measured: those of a known network, or of a file of the user."""

from __future__ import annotations

import json
import math
import os
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from kvstore import tensor_file
from kvstore.arrays.element_types import dtype_named
from kvstore.errors import ConfigError, DTypeError, StateFileError

Shapes = dict[str, tuple[int, ...]]

_LONGEST = 64 << 20  # bytes of a list of shapes that are read
_LINE = re.compile(r"(\S+)\s+(\d{1,18}(?:[,x]\d{1,18})*)(?:\s+(\S+))?")
_SAFETENSORS = {
    **{"F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64"},
    **{"I8": "int8", "U8": "uint8", "I32": "int32", "I64": "int64"},
}
_FORMS = (
    'a safetensors file, JSON such as {"layer.weight": [64, 3, 7, 7]}, or lines such as '
    "`layer.weight 64,3,7,7 float32`"
)


class BenchKey(NamedTuple):
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


def load_keys(source: str, dtype: str | None = None) -> list[BenchKey]:
    """Make the list that --keys and --dtype name; a ConfigError says the fault in them."""
    if source not in MODELS and not os.path.isfile(source):
        raise ConfigError(f"--keys {source}: neither a file nor one of {', '.join(MODELS)}")
    entries = _untyped_entries(MODELS[source]()) if source in MODELS else _of_file(source)
    keys: dict[str, BenchKey] = {}
    for name, shape, own in entries:
        where = f"--keys {source}: {name!r}"
        if not (isinstance(shape, (list, tuple)) and all(type(n) is int and n >= 0 for n in shape)):
            raise ConfigError(f"{where} has the shape {shape!r}, but a shape is a list of numbers: {_FORMS}")
        if name in keys:
            raise ConfigError(f"{where} is there twice; give each key a name of its own")
        keys[name] = BenchKey(name, tuple(shape), dtype or own or "float32")
        try:
            dtype_named(keys[name].dtype)
        except DTypeError as error:
            raise ConfigError(f"{where}: {error}; --dtype chooses one for all keys") from error
    if not (found := [key for key in keys.values() if key.size]):
        raise ConfigError(f"--keys {source}: there is no key with elements in it; it must be {_FORMS}")
    return found


def _untyped_entries(shapes: Any) -> list[tuple[str, Any, str]]:
    return [(name, shape, "") for name, shape in shapes.items()]


def _of_file(path: str) -> list[tuple[str, Any, str]]:
    """Read names, shapes and element types; the type is empty where the file has none."""
    try:
        with open(path, "rb") as file:
            head = file.read(9)
            if head[8:] == b"{" and b"\0" in head:  # a length of eight bytes: no text has a zero byte
                return [(n, s, _SAFETENSORS.get(d, d)) for n, s, d in tensor_file.read_header(path)]
            text = (head + file.read(_LONGEST)).decode()
        if text.lstrip().startswith("{"):
            return _untyped_entries(json.loads(text))
    except (OSError, ValueError, RecursionError, StateFileError) as error:
        kind = "this is no JSON: " if isinstance(error, (json.JSONDecodeError, RecursionError)) else ""
        raise ConfigError(f"--keys {path}: {kind}{error}; it must be {_FORMS}") from error
    found = []
    for number, line in enumerate(text.splitlines(), 1):
        if words := line.partition("#")[0].strip():
            if not (entry := _LINE.fullmatch(words)):
                why = f"line {number} is not `name shape dtype`; it must be {_FORMS}"
                raise ConfigError(f"--keys {path}: {why}")
            found.append((entry[1], [int(n) for n in re.split("[,x]", entry[2])], entry[3] or ""))
    return found


def resnet50() -> Shapes:
    """List the 161 parameters of ResNet-50, 25.6 million numbers."""
    shapes: Shapes = {"conv1.weight": (64, 3, 7, 7), "bn1.weight": (64,), "bn1.bias": (64,)}
    width = 64
    for stage, (blocks, inner) in enumerate(((3, 64), (4, 128), (6, 256), (3, 512)), 1):
        for block in range(blocks):
            convolutions = [(inner, width, 1, 1), (inner, inner, 3, 3), (4 * inner, inner, 1, 1)]
            convolutions += [(4 * inner, width, 1, 1)] if block == 0 else []  # of the shortcut
            for number, shape in enumerate(convolutions, 1):
                name = f"layer{stage}.{block}.{{}}{number}.{{}}"
                shapes[name.format("conv", "weight")] = shape
                shapes |= {name.format("bn", part): shape[:1] for part in ("weight", "bias")}
            width = 4 * inner
    return {**shapes, "fc.weight": (1000, width), "fc.bias": (1000,)}


def llama_1b() -> Shapes:
    """List the 146 parameters of Llama 3.2 1B, 1.24 billion numbers; its output layer is the embedding."""
    hidden, inner, kv = 2048, 8192, 512
    layer: Shapes = {f"self_attn.{name}_proj": (hidden, hidden) for name in "qo"}
    layer |= {f"self_attn.{name}_proj": (kv, hidden) for name in "kv"}
    layer |= {f"mlp.{name}_proj": (inner, hidden) for name in ("gate", "up")}
    layer |= {"mlp.down_proj": (hidden, inner)}
    layer |= {"input_layernorm": (hidden,), "post_attention_layernorm": (hidden,)}
    layers = {f"layers.{n}.{name}.weight": shape for n in range(16) for name, shape in layer.items()}
    return {"embed_tokens.weight": (128256, hidden), **layers, "norm.weight": (hidden,)}


#: By the name that --keys takes.
MODELS: dict[str, Callable[[], Shapes]] = {"resnet50": resnet50, "llama-1b-shapes": llama_1b}
