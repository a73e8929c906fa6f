"""The reaper: a process that outlives a killed launcher, for the moment it takes to kill its workers.

The kernel ends the workers with their launcher, but not what the workers started. The reaper holds the
reading end of a pipe. Its end says that the launcher is gone, and the groups that it was told of are killed.

This file is run as a script, without the package, so that it starts quickly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys


class OrphanReaper:
    """The launcher's side. A reaper that dies is not missed until the launcher is killed as well."""

    def __init__(self) -> None:
        quiet = subprocess.DEVNULL
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )

    def add(self, group: int) -> None:
        """Have `group` killed if this process ends before it is forgotten."""
        self._tell(f"+{group}\n")

    def forget(self, group: int) -> None:
        """Leave `group` alone: it is gone."""
        self._tell(f"-{group}\n")

    def remove(self, folder: str) -> None:
        """Have a folder of ours, which has only files, removed with them, if it is still there in the end."""
        self._tell(f"/{folder}\n")

    def close(self) -> None:
        """End the reaper; groups that were not forgotten are killed."""
        pipe = self._process.stdin
        assert pipe is not None
        pipe.close()
        self._process.wait()

    def _tell(self, text: str) -> None:
        pipe = self._process.stdin
        assert pipe is not None
        with contextlib.suppress(BrokenPipeError):
            os.write(pipe.fileno(), text.encode())


def _keep() -> None:
    groups: set[int] = set()
    folders: list[str] = []
    for line in sys.stdin:
        if line[0] == "/":
            folders.append(line[1:-1])
            continue
        (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    for folder in folders:
        with contextlib.suppress(OSError):
            _remove(folder)


def _remove(folder: str) -> None:
    for name in os.listdir(folder):
        os.unlink(os.path.join(folder, name))
    os.rmdir(folder)


if __name__ == "__main__":
    for _signal in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_signal, signal.SIG_IGN)
    _keep()
