"""Sums with each store that can run on this machine, in processes of their own, and what they must be."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from . import children, launchers
from .findings import Finding
from .workers import PARTS, expected

#: Seconds after which the processes of a self-test are ended.
DEADLINE = 60.0

_PATIENCE = 0.75  # part of the deadline after which a store reports by itself whom it waits for
_CURE = (
    "fix the errors and warnings above first; if there are none, report this with all lines of this command"
)


@dataclass(frozen=True)
class StoreTest:
    """A program that makes the sums with one store, and prints their digest in each worker."""

    store: str
    command: tuple[str, ...]
    workers: int

    @property
    def subject(self) -> str:
        """Name the line of the report."""
        return f"test {self.store}"


def store_tests(deadline: float = DEADLINE) -> list[StoreTest]:
    """List the tests: one process, two that share memory, two with a server and a scheduler, two of MPI."""
    mpi = launchers.mpi_launcher()
    return [
        StoreTest("local", (*children.JOB, "sums", "local"), 1),
        StoreTest("device", (*children.JOB, "sums", "device"), 1),
        StoreTest("shared", (*children.JOB, "spawned-sums", "shared", f"{_PATIENCE * deadline}"), PARTS),
        StoreTest("dist_sync", (*children.with_a_server(PARTS), "sums", "dist_sync"), PARTS),
    ] + [StoreTest("mpi", (*mpi, "-n", f"{PARTS}", *children.JOB, "sums-of-all", "mpi"), PARTS)] * bool(mpi)


def outcome(test: StoreTest, deadline: float = DEADLINE) -> Finding:
    """Run a test; each of its workers must have the sums of `expected`, bit for bit."""
    environment = {**children.alone(), "KVSTORE_TIMEOUT": f"{_PATIENCE * deadline}"}
    ran = children.run(test.command, deadline, environment)
    if ran.code is None:
        text = f"not finished after {deadline:g} s, and ended: {ran.reason}"
        return Finding(test.subject, "error", text, _CURE)
    if ran.code != 0:
        return Finding(test.subject, "error", ran.reason, _CURE)
    return judged(test, _digests(ran.out))


def judged(test: StoreTest, digests: Sequence[str]) -> Finding:
    """Compare the digests of all workers with what they must be."""
    if len(digests) != test.workers:
        text = f"{len(digests)} of {test.workers} workers have printed their sums"
        return Finding(test.subject, "error", text, _CURE)
    if set(digests) != {expected()}:
        text = "the sums are not those of NumPy: values of this store are wrong on this machine"
        return Finding(test.subject, "error", text, _CURE)
    count = "1 process" if test.workers == 1 else f"{test.workers} processes"
    return Finding(test.subject, "ok", f"{count}: sums have the bits that they must have")


def reads_between_processes(deadline: float = DEADLINE) -> Finding:
    """Have a process read the memory of another with the same parent, as workers of `shared` do."""
    ran = children.run([*children.JOB, "read-from-sibling"], deadline)
    answer = ran.out.strip()
    if answer == "yes":
        return Finding("reads between processes", "ok", "process_vm_readv works")
    text = f"process_vm_readv does not work ({answer or ran.reason}): `shared` copies arrays once more"
    cure = "see the line on ptrace; in a container use `docker run --cap-add=SYS_PTRACE`"
    return Finding("reads between processes", "warning", text, cure)


def _digests(text: str) -> list[str]:
    return [line.split()[1] for line in text.splitlines() if line.startswith("sum ")]
