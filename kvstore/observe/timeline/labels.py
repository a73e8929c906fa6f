"""Texts that events of this process refer to by a number: the keys of a call, as its `round`."""

from __future__ import annotations

import threading
from typing import Any

_numbers: dict[str, int] = {}
_lock = threading.Lock()


def number_of(key: Any) -> int:
    """Return the number of the name of a key, or of a list of keys; 0 for none."""
    if not isinstance(key, (list, tuple)):
        return _number_of_text(str(key))
    if len(key) < 2:
        return number_of(key[0]) if key else 0
    return _number_of_text(f"{key[0]} and {len(key) - 1} more")


def _number_of_text(text: str) -> int:
    found = _numbers.get(text)
    if found is None:
        with _lock:
            found = _numbers.setdefault(text, len(_numbers) + 1)
    return found


def texts() -> list[str]:
    """Return all texts; that of number 1 is first."""
    return list(_numbers)
