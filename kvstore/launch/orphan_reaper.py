"""The reaper: a process that outlives a killed launcher until it has killed the launcher's process groups.

The kernel ends the children of the launcher, but not what these have started. The reaper reads lines from a
pipe: the groups, and the temporary folders. At the end of the pipe the launcher is gone.

This file is run as a script, without the package, so that it starts quickly.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys


class OrphanReaper:
    """The launcher's side. It does not observe the reaper itself."""

    def __init__(self) -> None:
        quiet = subprocess.DEVNULL
        command = [sys.executable, "-I", "-S", __file__]
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=quiet, stderr=quiet, start_new_session=True
        )

    def add_group(self, group: int) -> None:
        """Have `group` killed if this process ends before `forget_group`."""
        self._send_line(f"+{group}\n")

    def forget_group(self, group: int) -> None:
        """Leave `group` alone: it is gone."""
        self._send_line(f"-{group}\n")

    def remove_folder(self, folder: str) -> None:
        """Have a temporary folder and its files removed, if it still exists in the end."""
        self._send_line(f"/{folder}\n")

    def close(self) -> None:
        """End the reaper; it kills the groups that it was not told to forget."""
        assert self._process.stdin is not None
        self._process.stdin.close()
        self._process.wait()

    def _send_line(self, text: str) -> None:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            os.write(self._process.stdin.fileno(), text.encode())


def _kill_groups() -> None:
    groups: set[int] = set()
    folders: list[str] = []
    for line in sys.stdin:
        if line[0] == "/":
            folders.append(line[1:-1])
        else:
            (groups.add if line[0] == "+" else groups.discard)(int(line[1:]))
    for group in groups:
        with contextlib.suppress(OSError):
            os.killpg(group, signal.SIGKILL)
    for folder in folders:
        with contextlib.suppress(OSError):
            for name in os.listdir(folder):
                os.unlink(os.path.join(folder, name))
            os.rmdir(folder)


if __name__ == "__main__":
    for _signal in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(_signal, signal.SIG_IGN)
    _kill_groups()
