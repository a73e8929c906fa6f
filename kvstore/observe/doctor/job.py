"""``python -m kvstore.observe.doctor.job``: what `kvstore doctor` has other processes do.

A process of its own ends at a deadline, and can crash without the command: libraries that are loaded here
may do either.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from importlib import import_module

import kvstore as kv
from kvstore.devices import driver
from kvstore.observe.doctor import peers, workers


def main(arguments: Sequence[str]) -> None:
    """Do what the first argument names."""
    match arguments:
        case ["sums", name]:
            workers.sums(name)
        case ["sums-of-all", name]:
            workers.sums_of_all(name)
        case ["spawned-sums", name, timeout]:
            kv.spawn(workers.sums, workers.PARTS, (name,), float(timeout))
        case ["copies"]:
            workers.copies()
        case ["round-trip"]:
            workers.round_trip()
        case ["read-from-sibling"]:
            peers.compare()
        case ["offer-memory"]:
            peers.offer()
        case ["read-memory", process, address]:
            peers.read(int(process), int(address))
        case ["mpi-library"]:
            _mpi_library()
        case ["gpus"]:
            print(driver.get().count)  # noqa: T201
        case ["nccl-library"]:
            print(import_module("nccl.bindings.nccl").get_version())  # noqa: T201
        case _:
            raise SystemExit(f"unknown arguments: {' '.join(arguments)}")


def _mpi_library() -> None:
    """Print what the MPI library calls itself, without starting it."""
    rc = import_module("mpi4py").rc
    rc.initialize = rc.finalize = False
    name = import_module("mpi4py.MPI").Get_library_version()
    print(name.strip("\0").splitlines()[0])  # noqa: T201


if __name__ == "__main__":
    main(sys.argv[1:])
