"""Stores on servers by streams, and a count of their quick calls."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
from quick_counter import Quick

import kvstore as kv


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Quick:
    return Quick(monkeypatch)


@pytest.fixture
def create(on_servers: Callable[[str], str]) -> Iterator[Callable[..., kv.KVStore]]:
    stores: list[kv.KVStore] = []

    def make(servers: int = 1, kind: str = "dist_sync", **options: Any) -> kv.KVStore:
        options = {"same_host_shm": False, **options}
        stores.append(kv.create(on_servers(f"{kind}:{servers}"), **options))
        return stores[-1]

    yield make
    for store in stores:
        store.close()
