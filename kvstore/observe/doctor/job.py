"""The programs that `kvstore doctor` runs in child processes: a library that crashes or hangs ends only them.

A program is a function of this module; `children.JOB` starts it by its name.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from collections.abc import Callable
from importlib import import_module

import numpy as np
import numpy.typing as npt

import kvstore as kv
from kvstore.devices import driver
from kvstore.kernels import cpu

Array = npt.NDArray[np.float32]

#: Parts of each sum: one of each worker, or all of a single worker. A sum of two values is rounded once, so
#: its bits do not depend on an order.
PARTS = 2
#: Bytes of the array that `copies` measures.
COPIED = 64 << 20

#: Elements of each key; the large key is cut into slices, and its last slice is not full.
_SIZES = {"small": 1_000, "large": 700_001}
_ROUNDS = 2
_REPEATS = 7
_CALLS = 400
_WARM_UP = 50


def main() -> None:
    """Run the program that the command line names."""
    name, *arguments = sys.argv[1:]
    _PROGRAMS[name](*arguments)


def part(key: str, round_: int, rank: int) -> Array:
    """Return the value that a worker pushes in a round of a key."""
    seed = [list(_SIZES).index(key), round_, rank]
    return np.random.default_rng(seed).standard_normal(_SIZES[key], np.float32)


def expected() -> str:
    """Return the digest of all sums, as NumPy alone computes them."""
    digest = hashlib.blake2b(digest_size=16)
    for round_ in range(_ROUNDS):
        for key in _SIZES:
            digest.update((part(key, round_, 0) + part(key, round_, 1)).data)
    return digest.hexdigest()


def sums(name: str) -> None:
    """Push to a store, pull from it, and print the digest of the pulled values."""
    digest = hashlib.blake2b(digest_size=16)
    with kv.create(name) as store:
        ranks = range(PARTS) if store.num_workers == 1 else [store.rank]
        for key, n in _SIZES.items():
            store.init(key, np.zeros(n, np.float32))
        for round_ in range(_ROUNDS):
            for key, n in _SIZES.items():
                out = np.empty(n, np.float32)
                store.push(key, [part(key, round_, rank) for rank in ranks])
                store.pull(key, out=out)
                digest.update(out.data)
    write_line("sum", digest.hexdigest())


def sums_of_all(name: str) -> None:
    """Run `sums` as one of several workers; a job with another number of workers is an error."""
    with kv.create(name) as store:
        if store.num_workers != PARTS:
            raise SystemExit(f"each process is a job of its own: this is worker 0 of {store.num_workers}")
    sums(name)


def copies() -> None:
    """Print the seconds of a copy of 64 MB, of a push and a pull of 64 MB, and the number of threads."""
    value, out = np.ones(COPIED // 4, np.float32), np.zeros(COPIED // 4, np.float32)
    copied = _shortest_time(lambda: np.copyto(out, value))
    with kv.create("local") as store:
        store.init("w", value)

        def push_and_pull() -> None:
            store.push("w", value)
            store.pull("w", out=out)

        moved = _shortest_time(push_and_pull)
    write_line("seconds", copied, moved, cpu.threads())


def round_trip() -> None:
    """Print the median of the seconds that a pushpull of 4 KB through a server takes."""
    value = np.ones(1024, np.float32)
    with kv.create("dist_sync") as store:
        store.init("w", value)
        times = [_call_seconds(lambda: store.pushpull("w", value)) for _ in range(_WARM_UP + _CALLS)]
    write_line("seconds", sorted(times[_WARM_UP:])[_CALLS // 2])


def mpi_library() -> None:
    """Print the name of the MPI library, which is loaded and not initialised."""
    rc = import_module("mpi4py").rc
    rc.initialize = rc.finalize = False
    name = import_module("mpi4py.MPI").Get_library_version()
    write_line(name.strip("\0").splitlines()[0])


def gpus() -> None:
    """Print the number of GPUs; no context is created."""
    write_line(driver.get_driver().count)


def nccl_library() -> None:
    """Print the version of NCCL."""
    write_line(import_module("nccl.bindings.nccl").get_version())


def write_line(*words: object) -> None:
    """Write a line to stdout in one piece: other workers write to the same pipe."""
    os.write(1, f"{' '.join(map(str, words))}\n".encode())


def _shortest_time(call: Callable[[], object]) -> float:
    return min(_call_seconds(call) for _ in range(_REPEATS))


def _call_seconds(call: Callable[[], object]) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


_PROGRAMS: dict[str, Callable[..., None]] = {
    one.__name__: one for one in (sums, sums_of_all, copies, round_trip, mpi_library, gpus, nccl_library)
}
