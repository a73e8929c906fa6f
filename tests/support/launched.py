"""Jobs of real processes for the tests of the launcher: start one, find all of it, wait until it is gone."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pace

PATIENCE = 30.0
MARK = "KVSTORE_TEST_MARK"

#: What every script of a test begins with.
PRELUDE = """
import os, signal, subprocess, sys, time
from pathlib import Path
RANK = int(os.environ["KVSTORE_RANK"])
RESTART = int(os.environ["KVSTORE_RESTART"])
HERE = Path(__file__).parent
def say(name):
    part = HERE / f"part-{name}-{RANK}"
    part.write_text(str(os.getpid()))
    part.rename(HERE / f"{name}-{RANK}")
def wait_for(name, rank):
    while not (HERE / f"{name}-{rank}").exists():
        time.sleep(0.005)
def forever():
    while True:
        signal.pause()
"""


def until(true: Callable[[], object], besides: float = 0.0) -> None:
    """Wait until it is so, with much patience: the machine may be busy; `besides` does not follow it."""
    deadline = pace.deadline(PATIENCE) + besides
    while not true():
        assert time.monotonic() < deadline, "the expected state was not reached"
        time.sleep(0.01)


class Job:
    """A command; its processes and their children are found by an environment variable."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environment = {**os.environ, MARK: secrets.token_hex(8)}

    def start(self, *arguments: str, **options: object) -> subprocess.Popen[bytes]:
        """Start Python with these arguments."""
        defaults = {"cwd": self.folder, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        settings = {**defaults, "env": self.environment, **options}
        return subprocess.Popen([sys.executable, *arguments], **settings)  # type: ignore[call-overload, no-any-return]

    def script(self, text: str) -> str:
        """Write a worker and return its name."""
        (self.folder / "worker.py").write_text(PRELUDE + text)
        return "worker.py"

    def run(self, *arguments: str, text: str | None = None, **options: object) -> subprocess.Popen[bytes]:
        """Start ``kvstore run``; `text` is the worker's script."""
        program = [] if text is None else [self.script(text)]
        return self.start("-m", "kvstore.launch", "run", *arguments, *program, **options)

    def said(self, name: str, *ranks: int) -> bool:
        """Whether the workers of these ranks have said it."""
        return all((self.folder / f"{name}-{rank}").exists() for rank in ranks)

    def pid(self, name: str, rank: int) -> int:
        """Process that said it."""
        return int((self.folder / f"{name}-{rank}").read_text())

    def alive(self) -> list[int]:
        """Every process of the job, the launcher too; zombies are not alive."""
        wanted = f"{MARK}={self.environment[MARK]}".encode()
        return [
            pid for pid in map(int, filter(str.isdigit, os.listdir("/proc"))) if wanted in _variables(pid)
        ]


@contextlib.contextmanager
def gone_after(folder: Path) -> Iterator[Job]:
    """Make a job of which nothing may be left at the end."""
    made = Job(folder)
    try:
        yield made
        until(lambda: not made.alive())
    finally:
        for pid in made.alive():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _variables(pid: int) -> list[bytes]:
    try:
        return Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
    except OSError:
        return []
