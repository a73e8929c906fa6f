"""Two hosts on one machine: namespaces for the network and the processes, joined by a pair of veth devices.

Abstract unix sockets, loopback and process ids of one are not those of the other, so kvstore takes them for two
machines. Files and processors are the same. Needs unshare, nsenter and ip, and a kernel that lets a user have
namespaces of his own.
"""

from __future__ import annotations

import contextlib
import shlex
import subprocess
import time
from pathlib import Path
from types import TracebackType

ADDRESSES = ("10.77.0.1", "10.77.0.2")
LINK = "kvlink"  # what both ends are called
_HOLD = ("unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child", "sleep", "infinity")
_OWN = ("unshare", "--user", "--map-root-user")
_PATIENCE = 10.0  # seconds


class Hosts:
    """Both hosts, while this is entered.

    Raises
    ------
    OSError
        They cannot be made here; the message says what was tried.
    """

    def __init__(self) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        self.first: list[int] = []

    def __enter__(self) -> Hosts:
        try:
            self._hold([*_OWN, *_HOLD])
            self._hold([*self._within(0, "-U"), *_HOLD])
            self._join()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def command(self, host: int) -> list[str]:
        """Return what goes before a command to run it on a host."""
        return self._within(host, "-U", "-m", "-n", "-p")

    def shell(self) -> str:
        """Return a program for ``--ssh-command``: of the arguments, host and command."""
        cases = "".join(
            f"{address}) exec {shlex.join(self.command(host))} sh -c \"$2\" ;;\n"
            for host, address in enumerate(ADDRESSES)
        )
        return f'#!/bin/sh\ncase "$1" in\n{cases}esac\nexit 1\n'

    def close(self) -> None:
        """End both, and all that runs in them."""
        for holder in reversed(self._holders):
            with holder:  # waits, and closes its pipe
                holder.kill()
        self._holders, self.first = [], []

    def _hold(self, command: list[str]) -> None:
        """Start the first process of a host, which keeps it."""
        holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self._holders.append(holder)
        end = time.monotonic() + _PATIENCE
        while not (found := _sleeper(holder.pid)):
            if holder.poll() is not None or time.monotonic() > end:
                holder.kill()
                said = holder.communicate()[1].decode(errors="replace").strip()
                raise OSError(f"no namespaces: {shlex.join(command)}: {said}")
            time.sleep(0.01)
        self.first.append(found)

    def _within(self, host: int, *namespaces: str) -> list[str]:
        return ["nsenter", "-t", str(self.first[host]), *namespaces, "--preserve-credentials", "--"]

    def _join(self) -> None:
        peer = ("peer", "name", LINK, "netns", str(self.first[1]))
        self._ip(0, "link", "add", LINK, "type", "veth", *peer)
        for host, address in enumerate(ADDRESSES):
            self._ip(host, "link", "set", "lo", "up")
            self._ip(host, "address", "add", f"{address}/24", "dev", LINK)
            self._ip(host, "link", "set", LINK, "up")

    def _ip(self, host: int, *words: str) -> None:
        command = [*self._within(host, "-U", "-n"), "ip", *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"no link: {shlex.join(command)}: {done.stderr.strip()}")


def _sleeper(pid: int) -> int:
    """Return the process below this one that sleeps, once it does: its namespaces are whole then."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        if Path(f"/proc/{pid}/comm").read_text() == "sleep\n":
            return pid
        return _sleeper(int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]))
    return 0
