"""The store that the bodies of several processes work with: `shared`, or the one that the test names."""

from __future__ import annotations

import os
from typing import Any

from references import total

import kvstore as kv

#: Variable that names it.
NAME = "TESTED_STORE"
#: Variable with the number of each worker's host, where these sum first.
HOSTS = "TESTED_HOSTS"


def create(**options: Any) -> Any:
    return kv.create(os.environ.get(NAME, "shared"), **options)


def by_hosts(parts: list[Any]) -> list[Any]:
    """Return what travels of the parts of all workers: themselves, or the sums of their hosts, in order."""
    hosts = [int(host) for host in os.environ.get(HOSTS, "").split()]
    if not hosts:
        return parts
    return [
        total([part for part, there in zip(parts, hosts, strict=True) if there == host])
        for host in dict.fromkeys(hosts)
    ]


def held(store: Any, key: Any) -> Any:
    """What a key is, after what this worker has pushed: live where it is in reach, else pulled."""
    return store.view(key) if store.type in ("local", "shared") else store._backend.fetch(key)
