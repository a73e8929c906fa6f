"""One example at least of every message that there is, made from the types."""

from __future__ import annotations

import random
from typing import Any

import msgspec
import numpy as np
from msgspec import inspect

from kvstore.stores.parameter_server.protocol.messages import (
    Batch,
    Control,
    PayloadLocation,
    Record,
    RecordKind,
)


def control(seed: int = 0) -> list[Any]:
    """Make two messages of every control type, of which one has nothing in it that can be left out."""
    chance = random.Random(seed)
    types = inspect.type_info(Control)
    assert isinstance(types, inspect.UnionType)
    return [_made(one, chance, full) for one in types.types for full in (False, True)]


def batches(seed: int = 0) -> list[Batch]:
    """Make batches of some sizes, with payloads and without."""
    chance = random.Random(seed)
    return [_batch(count, frames, chance) for count in (0, 1, 3, 40) for frames in range(min(count, 2) + 1)]


def _batch(count: int, frames: int, chance: random.Random) -> Batch:
    payloads = tuple(np.frombuffer(chance.randbytes(64), np.uint8) for _ in range(frames))
    records = [_record(frames, chance) for _ in range(count)]
    return Batch(chance.randrange(5), chance.randrange(5), chance.getrandbits(63), 2, records, payloads, 9)


def _record(frames: int, chance: random.Random) -> Record:
    head = Record(
        chance.choice([kind for kind in RecordKind if kind != RecordKind.BAD]),
        chance.randrange(99),
        chance.randrange(99),
        3,
        1,
        7,
        0,
        0.5,
    )
    if not frames:
        return head
    where = {"place": PayloadLocation.FRAME, "frame": chance.randrange(frames), "offset": 16, "nbytes": 48}
    return head._replace(rows=chance.choice([-1, 2]), **where)


def _made(kind: inspect.Type, chance: random.Random, full: bool) -> Any:
    match kind:
        case inspect.StructType():
            fields = [field for field in kind.fields if full or field.required]
            return kind.cls(**{field.name: _made(field.type, chance, full) for field in fields})
        case inspect.UnionType():
            return _made(kind.types[-1 if full else 0], chance, full)
        case inspect.VarTupleType():
            return tuple(_made(kind.item_type, chance, full) for _ in range(2 if full else 0))
        case inspect.TupleType():
            return tuple(_made(one, chance, full) for one in kind.item_types)
        case inspect.DictType():
            return {"slice_bytes": 1 << 20, "mode": "sync"} if full else {}
        case inspect.IntType():
            return chance.randrange(1000)
        case inspect.FloatType():
            return chance.random()
        case inspect.StrType():
            return "text"
        case inspect.BoolType():
            return full
        case inspect.NoneType():
            return None
        case inspect.AnyType():
            return {"of": "any kind"}
    raise msgspec.MsgspecError(f"no example of {kind}")
