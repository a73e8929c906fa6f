"""The comparison of a call in all processes before data is sent, for engines that match operations by order.

If two processes called different operations, the engine would add one key to another, use a sum as a first
value, or crash. So all processes first compute the maxima of two numbers: a digest of the call, and its
negative. The call is the same in all processes if both maxima are of one digest.
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


def call_digest(kind: str, items: Sequence[Item], meaning: str = "") -> npt.NDArray[Any]:
    """Return the two numbers of an operation: its kind, its items, and the description by the store."""
    parts = [kind, meaning, *(f"{name!r} {array.size} {array.dtype}" for name, array in items)]
    digest = hashlib.blake2b(repr(parts).encode(), digest_size=_BYTES).digest()
    number = int.from_bytes(digest, "little")
    return np.array([number, -number], np.int64)


def calls_match(highest: npt.NDArray[Any]) -> bool:
    """Return whether the maxima of the numbers are those of one operation."""
    return bool(highest[0] == -highest[1])


def mismatch_error(engine: str, rank: int, what: str) -> ConfigError:
    """Make the error that all processes raise if their calls differ."""
    return ConfigError(
        f"worker {rank} begins {what}, and other workers begin another operation, or pass other keys, shapes "
        f"or types: with {engine} all workers make the same calls, with the same keys and in the same order; "
        "nothing has changed"
    )
