"""Run a program with a deadline, and leave nothing of it behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstore.launch.process import tied_to
from kvstore.observe.shared_files import shared_files
from kvstore.observe.top.proc import facts
from kvstore.settings.definitions import LAUNCHERS, PLACE
from kvstore.settings.variables import process_variables

#: Seconds between asking a program to end and killing it: `kvstore run` ends its processes in the meantime.
_GRACE = 6.0

_PROGRAM = "kvstore.observe.doctor.job"
#: What the job programs of this package are started with.
JOB = (sys.executable, "-m", _PROGRAM)


def with_a_server(workers: int) -> tuple[str, ...]:
    """Return what starts a job program in so many workers, beside a server and a scheduler."""
    launch = (sys.executable, "-m", "kvstore", "run", "-n", str(workers), "-s", "1", "--no-prefix")
    return (*launch, "-m", _PROGRAM)


class Ran(NamedTuple):
    """What became of a program: its exit code, None if it was ended at the deadline, and its output."""

    code: int | None
    out: str
    err: str

    @property
    def reason(self) -> str:
        """Say how it failed: its exit code, and the last line on its stderr."""
        lines = [line.strip() for line in self.err.splitlines() if line.strip()]
        last = f": {lines[-1]}" if lines else ", with an empty stderr"
        if self.code is None:
            return "it did not end within its deadline" + (last if lines else "")
        return f"it ended with exit code {self.code}" + last


def run(command: Sequence[str], deadline: float, environment: Mapping[str, str] | None = None) -> Ran:
    """Run a program to its end, or for `deadline` seconds; then it is asked to end, and killed.

    It dies with the thread that calls this, as what `kvstore run` and `kvstore.spawn` start dies with them.
    """
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="replace",
        env=alone() if environment is None else environment,
        preexec_fn=tied_to(os.getpid()),
    )
    with process:
        try:
            out, err = process.communicate(timeout=deadline)
        except subprocess.TimeoutExpired:
            return Ran(None, *_ended(process))
        except BaseException:
            _ended(process)
            raise
        return Ran(process.returncode, out, err)


def alone() -> dict[str, str]:
    """Variables of this process without those that give it a place in a job."""
    taken = {name for row in PLACE for name in row.names()}
    for row in LAUNCHERS:
        for names in (row.signs, row.rank, row.size, row.local_rank, row.local_size, row.job, row.more):
            taken.update(names)
    return {name: value for name, value in process_variables().items() if name not in taken}


def _ended(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a program; return its output, as far as it can be read, and remove what its MPI leaves behind."""
    files = {name for one in _descendants(process.pid) for name in shared_files(one)}
    try:
        return _asked_to_end(process)
    finally:
        for name in files:
            with contextlib.suppress(OSError):
                os.unlink(name)


def _descendants(process: int) -> list[int]:
    """List a process and all that it has started, with what those have."""
    numbers = [int(name) for name in os.listdir("/proc") if name.isdecimal()]
    parents = {number: found.parent for number in numbers if (found := facts(number))}
    listed = [process]
    for one in listed:
        listed += [child for child, parent in parents.items() if parent == one]
    return listed


def _asked_to_end(process: subprocess.Popen[str]) -> tuple[str, str]:
    for number, seconds in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, 1.0)):
        process.send_signal(number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            return process.communicate(timeout=seconds)
    for pipe in (process.stdout, process.stderr):  # held by what it has started
        if pipe is not None:
            pipe.close()
    return "", ""
