"""What the processes of a job compare before data moves, over engines that match operations by their order.

Two processes that call something else would add one key to another, take a sum for a first value, or crash.
So all take the highest of two numbers first: a digest of what each means, and the same with the other sign.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ...errors import ConfigError
from .engine import Item

_BYTES = 7  # of a digest: an int64 has its negative, too


def mark(kind: str, items: Sequence[Item], meaning: str = "") -> npt.NDArray[Any]:
    """Make two numbers of an operation's kind, of what it works on, and of what the store says of it."""
    parts = [kind, meaning, *(f"{name!r} {array.size} {array.dtype}" for name, array in items)]
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=_BYTES).digest()
    number = int.from_bytes(digest, "little")
    return np.array([number, -number], np.int64)


def all_mean_the_same(highest: npt.NDArray[Any]) -> bool:
    """Whether the highest marks of all processes are of one operation."""
    return bool(highest[0] == -highest[1])


def difference(engine: str, rank: int, what: str) -> ConfigError:
    """Make the error that all processes raise if they do not mean the same."""
    return ConfigError(
        f"worker {rank} begins {what}, and other workers something else, or it with other keys, shapes or "
        f"types: with {engine} all workers call init, push, barrier and the rest alike, with the same keys "
        "and in the same order; nothing has changed"
    )
