"""The stores on which tests run, and the store that bodies of several processes work with."""

from __future__ import annotations

import os
from typing import Any

from references import total

import kvstore as kv
from kvstore.stores.rows import sum_rows

#: Names for `kv.create`, those on servers with the number of these. A new kind of store is added here, and
#: must pass test_contract.py.
STORES = ("local", "device", "shared", "dist_sync:1", "dist_sync:2", "dist_async:1")
#: Variable that names the store of bodies; `shared` without it.
NAME = "TESTED_STORE"
#: Variable with the number of each worker's host, where these sum first.
HOSTS = "TESTED_HOSTS"


def create(**options: Any) -> Any:
    return kv.create(os.environ.get(NAME, "shared"), **options)


def hosts() -> list[int]:
    """Return the number of each worker's host; nothing, where workers do not sum by hosts."""
    return [int(host) for host in os.environ.get(HOSTS, "").split()]


def together(rank: int) -> list[int]:
    """Return the workers whose parts are sent as one with that of this one."""
    there = hosts() or list(range(rank + 1))
    return [other for other, host in enumerate(there) if host == there[rank]]


def by_hosts(parts: list[Any], places: list[int] | None = None) -> list[Any]:
    """Return what travels of the parts of all workers: themselves, or the sums of their hosts, in order."""
    places = hosts() if places is None else places
    if not places:
        return parts
    by_host = [
        [part for part, there in zip(parts, places, strict=True) if there == host]
        for host in dict.fromkeys(places)
    ]
    return [sum_rows(some) if isinstance(some[0], kv.RowSparseArray) else total(some) for some in by_host]


def held(store: Any, key: Any) -> Any:
    """Return the value of a key after this worker's pushes: live where it is in reach, else pulled."""
    return store.view(key) if store.type in ("local", "shared") else store._backend.fetch(key)
