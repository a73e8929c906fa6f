"""The store that the bodies of several processes work with: `shared`, or the one that the test names."""

from __future__ import annotations

import os
from typing import Any

import kvstore as kv

#: Variable that names it.
NAME = "TESTED_STORE"


def create(**options: Any) -> Any:
    return kv.create(os.environ.get(NAME, "shared"), **options)


def held(store: Any, key: Any) -> Any:
    """What a key is, after what this worker has pushed: live where it is in reach, else pulled."""
    return store.view(key) if store.type in ("local", "shared") else store._backend.fetch(key)
