"""Programs that a check runs in a child process: with a deadline, and without anything left of them."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from kvstore.launch.process import tied_to
from kvstore.observe.processes import facts, running, shared_files
from kvstore.settings.definitions import LAUNCHERS, PLACE
from kvstore.settings.environment import process_variables

#: Seconds between SIGTERM and SIGKILL: `kvstore run` ends its processes within them.
_GRACE = 6.0
_DEADLINE = 20.0

#: The command that runs a program of `job`, without the name of the program.
JOB = (sys.executable, "-c", "from kvstore.observe.doctor.job import main; main()")


def launched(workers: int, servers: int) -> tuple[str, ...]:
    """Return the command that runs a program of `job` in the workers of a job, without the program's name."""
    launch = (sys.executable, "-m", "kvstore", "run", "-n", str(workers), "-s", str(servers), "--no-prefix")
    return (*launch, "--", *JOB)


class ProgramEnd(NamedTuple):
    """The end of a program: its exit code, or None if its deadline has passed, and its output."""

    code: int | None
    out: str
    err: str

    @property
    def reason(self) -> str:
        """Describe how it failed, with the last line of its stderr."""
        last = self.err.strip().rpartition("\n")[2].strip()
        if self.code is None:
            return "it did not end within its deadline" + (f": {last}" if last else "")
        return f"it ended with exit code {self.code}" + (f": {last}" if last else ", with an empty stderr")


def run_program(*words: str) -> ProgramEnd:
    """Run a program of `job` with these arguments."""
    return run([*JOB, *words], _DEADLINE)


def run(command: Sequence[str], deadline: float, environment: Mapping[str, str] | None = None) -> ProgramEnd:
    """Run a program until it ends; after `deadline` seconds it gets SIGTERM, and then SIGKILL.

    The kernel kills it if the thread that called this function ends.
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
            return ProgramEnd(None, *_end_program(process))
        except BaseException:
            _end_program(process)
            raise
        return ProgramEnd(process.returncode, out, err)


def alone() -> dict[str, str]:
    """Return the variables of this process without those that give it a place in a job."""
    names = {name for row in PLACE for name in row.names()}
    for row in LAUNCHERS:
        for more in (row.signs, row.rank, row.size, row.local_rank, row.local_size, row.job, row.more):
            names.update(more)
    return {name: value for name, value in process_variables().items() if name not in names}


def _end_program(process: subprocess.Popen[str]) -> tuple[str, str]:
    """End a program and remove the files of its MPI; return the output that can be read."""
    files = {name for one in _process_tree(process.pid) for name in shared_files(one)}
    try:
        for number, seconds in ((signal.SIGTERM, _GRACE), (signal.SIGKILL, 1.0)):
            process.send_signal(number)
            with contextlib.suppress(subprocess.TimeoutExpired):
                return process.communicate(timeout=seconds)
        for pipe in (process.stdout, process.stderr):  # a process that it has started holds them open
            if pipe is not None:
                pipe.close()
        return "", ""
    finally:
        for name in files:
            with contextlib.suppress(OSError):
                os.unlink(name)


def _process_tree(process: int) -> list[int]:
    """List a process, its children, and theirs."""
    parents = {number: found.parent for number in running() if (found := facts(number))}
    listed = [process]
    for one in listed:
        listed += [child for child, parent in parents.items() if parent == one]
    return listed
