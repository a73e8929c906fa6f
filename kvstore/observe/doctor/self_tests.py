"""Sums and speeds of the stores that can run on this machine, in child processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

from . import children
from .checks import CheckFinding, error, ok, warning
from .children import JOB, launched
from .job import COPIED, PARTS, expected
from .launchers import mpi_launcher

#: Seconds after which the processes of a self-test are ended.
DEADLINE = 60.0

_PATIENCE = 0.75  # part of the deadline after which a store itself reports which process it waits for
_SPEED_DEADLINE = 120.0
_SHARED = (*launched(PARTS, 0), "sums", "shared")


def commands() -> dict[str, tuple[tuple[str, ...], int]]:
    """Return for each store the command that prints the digests of its sums, and its number of workers."""
    found = {
        "local": ((*JOB, "sums", "local"), 1),
        "device": ((*JOB, "sums", "device"), 1),
        "shared": (_SHARED, PARTS),
        "dist_sync": ((*launched(PARTS, 1), "sums", "dist_sync"), PARTS),
    }
    with contextlib.suppress(OSError):  # the check of MPI reports it
        if mpi := mpi_launcher():
            found["mpi"] = (*mpi, "-n", f"{PARTS}", *JOB, "sums_of_all", "mpi"), PARTS
    return found


def sums(command: Sequence[str], workers: int, deadline: float = DEADLINE) -> CheckFinding:
    """Run a self-test; each worker must have the sums of NumPy, bit for bit."""
    environment = {**children.alone(), "KVSTORE_TIMEOUT": f"{_PATIENCE * deadline}"}
    ran = children.run(command, deadline, environment)
    if ran.code is None:
        return error(f"not finished after {deadline:g} s, and ended: {ran.reason}")
    if ran.code != 0:
        return error(ran.reason)
    digests = [line.split()[1] for line in ran.out.splitlines() if line.startswith("sum ")]
    if len(digests) != workers:
        return error(f"{len(digests)} of {workers} workers have printed their sums")
    if set(digests) != {expected()}:
        return error("the sums are not those of NumPy: values of this store are wrong on this machine")
    count = "1 process" if workers == 1 else f"{workers} processes"
    return ok(f"{count}: sums have the bits that they must have")


def reads_between_processes() -> CheckFinding:
    """Have two workers of `shared` read each other's memory; their log says whether they can."""
    ran = children.run(_SHARED, DEADLINE, {**children.alone(), "KVSTORE_LOG": "info:kvstore.shared"})
    if "workers read each other's memory" in ran.err:
        return ok("process_vm_readv works")
    refused = "the system refuses it" if "workers do not read each other's memory" in ran.err else ran.reason
    return warning(f"process_vm_readv does not work ({refused}): `shared` copies arrays once more")


def speed_of_memory() -> CheckFinding:
    """Measure one thread that copies 64 MB."""
    text = "one thread copies 64 MB at {:.1f} GB/s"
    return _measure((*JOB, "copies"), lambda copied, *_: text.format(COPIED / copied / 1e9))


def speed_of_local() -> CheckFinding:
    """Measure a push and a pull of 64 MB, and compare them with a copy."""

    def described(copied: float, moved: float, threads: float) -> str:
        ratio = f"{2 * copied / moved:.2f} times that speed, with {threads:.0f} threads"
        return f"a push and a pull of 64 MB take {moved * 1e3:.1f} ms: {ratio}"

    return _measure((*JOB, "copies"), described)


def speed_of_dist_sync() -> CheckFinding:
    """Measure a pushpull of 4 KB between a worker and a server on this machine."""
    text = "a pushpull of 4 KB over one server takes {:.0f} µs (median)"
    return _measure((*launched(1, 1), "round_trip"), lambda seconds: text.format(seconds * 1e6))


def _measure(command: Sequence[str], describe: Callable[..., str]) -> CheckFinding:
    """Run a program that prints numbers, and describe these."""
    ran = children.run(command, _SPEED_DEADLINE)
    lines = [line for line in ran.out.splitlines() if line.startswith("seconds ")]
    return ok(describe(*map(float, lines[0].split()[1:]))) if lines and ran.code == 0 else error(ran.reason)
