"""What the processes of a self-test do: sums of random arrays, and the times of a few calls."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable

import numpy as np
import numpy.typing as npt

import kvstore as kv
from kvstore.kernels import cpu

Array = npt.NDArray[np.float32]

#: Parts of each sum: one from each worker, or all from the only one. A sum of two has one rounding, so that
#: its bits do not depend on an order.
PARTS = 2

#: Bytes of the array that `copies` measures with.
COPIED = 64 << 20

#: Elements by key: one is small, the other is cut into slices, whose last one is not full.
_SIZES = {"small": 1_000, "large": 700_001}
_ROUNDS = 2
_REPEATS = 7
_CALLS = 400
_WARM_UP = 50


def part(key: str, turn: int, rank: int) -> Array:
    """Make what a worker pushes into a round of a key."""
    seed = [list(_SIZES).index(key), turn, rank]
    return np.random.default_rng(seed).standard_normal(_SIZES[key], np.float32)


def expected() -> str:
    """Digest of all sums, made by NumPy alone."""
    found = hashlib.blake2b(digest_size=16)
    for turn in range(_ROUNDS):
        for key in _SIZES:
            found.update((part(key, turn, 0) + part(key, turn, 1)).data)
    return found.hexdigest()


def sums(name: str) -> None:
    """Push and pull with a store, and print the digest of what came back."""
    found = hashlib.blake2b(digest_size=16)
    with kv.create(name) as store:
        ranks = range(PARTS) if store.num_workers == 1 else [store.rank]
        for key, n in _SIZES.items():
            store.init(key, np.zeros(n, np.float32))
        for turn in range(_ROUNDS):
            for key, n in _SIZES.items():
                out = np.empty(n, np.float32)
                store.push(key, [part(key, turn, rank) for rank in ranks])
                store.pull(key, out=out)
                found.update(out.data)
    tell("sum", found.hexdigest())


def sums_of_all(name: str) -> None:
    """Do so in one of several processes; it is an error if it is the only worker of its job."""
    with kv.create(name) as store:
        if store.num_workers != PARTS:
            raise SystemExit(f"each process is a job of its own: this is worker 0 of {store.num_workers}")
    sums(name)


def copies() -> None:
    """Print the seconds of a copy of 64 MB, those of a push and a pull of them, and the store's threads."""
    value, out = np.ones(COPIED // 4, np.float32), np.zeros(COPIED // 4, np.float32)
    copied = _least(lambda: np.copyto(out, value))
    with kv.create("local") as store:
        store.init("w", value)

        def push_and_pull() -> None:
            store.push("w", value)
            store.pull("w", out=out)

        moved = _least(push_and_pull)
    tell("seconds", copied, moved, cpu.threads())


def round_trip() -> None:
    """Print the median of the seconds that a pushpull of 4 KB takes over a server."""
    value = np.ones(1024, np.float32)
    times = []
    with kv.create("dist_sync") as store:
        store.init("w", value)
        for _ in range(_WARM_UP + _CALLS):
            began = time.perf_counter()
            store.pushpull("w", value)
            times.append(time.perf_counter() - began)
    tell("seconds", sorted(times[_WARM_UP:])[_CALLS // 2])


def tell(*words: object) -> None:
    """Write a line to stdout at once: other processes write there too, and `print` may write in pieces."""
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def _least(call: Callable[[], object]) -> float:
    """Return the shortest of several times of a call, in seconds."""
    times = []
    for _ in range(_REPEATS):
        began = time.perf_counter()
        call()
        times.append(time.perf_counter() - began)
    return min(times)
