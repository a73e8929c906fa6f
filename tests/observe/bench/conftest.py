"""The command in a process of its own, of which nothing may be left."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pty
import re
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pace
import pytest
from launched import Job, until

KEYS = "layer.weight 64,30\nlayer.bias 64 float32\nembedding 70000x2\n"


class Command:
    """``kvstore bench``, with a terminal as its stderr."""

    def __init__(self, job: Job, *arguments: str) -> None:
        self.job = job
        self.folder = job.folder / "tmp"
        self.folder.mkdir(exist_ok=True)
        self.keys = job.folder / "keys.txt"
        self.keys.write_text(KEYS)
        self._terminal, theirs = pty.openpty()
        python = os.environ.get("KVSTORE_TEST_TORCH") if "gloo" in arguments else None
        self.process = subprocess.Popen(
            [python or sys.executable, "-m", "kvstore", "bench", "--keys", str(self.keys), *arguments],
            cwd=job.folder,
            env={**job.environment, "TMPDIR": str(self.folder)},
            stdout=subprocess.PIPE,
            stderr=theirs,
            text=True,
        )
        os.close(theirs)
        self.shown = ""
        self.out = ""

    def wait_for(self, word: str) -> None:
        """Wait until the terminal shows a word."""
        deadline = pace.deadline(60)
        while word not in self.shown:
            assert self._read(deadline), f"the terminal never showed {word!r}: {self.shown}"

    def finish(self, seconds: float = 100) -> int:
        """Wait for the end, after which nothing is left; return the exit code."""
        deadline = pace.deadline(seconds)
        while self._read(deadline):
            pass
        self.out, _ = self.process.communicate(timeout=max(0.1, deadline - time.monotonic()))
        until(lambda: not self.job.alive())
        assert list(self.folder.iterdir()) == []
        return self.process.returncode

    @property
    def error(self) -> str:
        """Return the last line on its terminal, if that is an error."""
        found = re.findall(r"^Error: .*$", self.shown.replace("\r", ""), re.MULTILINE)
        return found[-1] if found else ""

    def workers(self, peer: str) -> dict[int, int]:
        """Processes of a peer, by rank."""
        found = {}
        for pid in self.job.alive():
            with contextlib.suppress(OSError, KeyError):
                words = Path(f"/proc/{pid}/cmdline").read_bytes().decode().split("\0")
                text = Path(f"/proc/{pid}/environ").read_bytes().decode()
                variables = dict(line.partition("=")[::2] for line in text.split("\0"))
                rank = variables.get("KVSTORE_RANK") or variables["PMI_RANK"]
                if words[1:4] == ["-m", "kvstore.observe.bench.worker", peer]:
                    found[int(rank)] = pid
        return found

    def close(self) -> None:
        """Kill the processes that a failed test has left; those of the command end with it."""
        self.process.kill()
        self.process.communicate()
        os.close(self._terminal)

    def _read(self, deadline: float) -> bool:
        left = max(0.0, deadline - time.monotonic())
        if not select.select([self._terminal], [], [], left)[0]:
            return False
        try:
            data = os.read(self._terminal, 1 << 16)
        except OSError:  # its other end is closed
            return False
        self.shown += data.decode(errors="replace")
        return bool(data)


@pytest.fixture
def bench(job: Job) -> Iterator[Callable[..., Command]]:
    """Start the command with small keys: `bench("--store", "local")`."""
    made: list[Command] = []

    def start(*arguments: str) -> Command:
        made.append(Command(job, *arguments))
        return made[-1]

    yield start
    for command in made:
        command.close()


@pytest.fixture
def mpi() -> None:
    """Skip where there is no MPI."""
    beside = Path(sys.executable).with_name("mpiexec")
    if importlib.util.find_spec("mpi4py") is None or not (beside.exists() or shutil.which("mpiexec")):
        pytest.skip("there is no MPI: pip install '.[test]'")


@pytest.fixture
def gloo() -> None:
    """Skip where there is no PyTorch."""
    if not os.environ.get("KVSTORE_TEST_TORCH") and importlib.util.find_spec("torch") is None:
        pytest.skip("PyTorch is not here, and KVSTORE_TEST_TORCH names no Python with it")
