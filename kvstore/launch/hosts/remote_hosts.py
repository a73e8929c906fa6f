"""The hosts of a job, each behind a connection: where processes are started, and who looks after them."""

from __future__ import annotations

import itertools
import shlex
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.settings.environment import process_variables, text_of
from kvstore.settings.keys import Keys

from ..child_process import ProcessRole
from ..orphan_reaper import OrphanReaper
from ..output_relay import OutputRelay
from ..process import HostLoss
from .connection import LEAVE, Connection, RemoteProcess
from .host_list import Host, Layout, of_file, of_list

#: Variables that go to other hosts: ours, MXNet's, and those without which the same program is another.
_CARRIED = ("KVSTORE_", "DMLC_", "PS_", "MXNET_")
_CARRIED_TOO = ("PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS")
#: Never ask: nobody would see the question. Notice a network that is gone.
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-T")


@dataclass(frozen=True)
class Hosts:
    """Where a job runs, and how one gets there.

    Attributes
    ----------
    layout : Layout
        Which process runs on which host.
    ssh : tuple of str
        Program that runs a command on a host, and its options; name and command are added.
    python : str
        Python on the hosts, in which kvstore is installed.
    variables : mapping
        What processes find in their environment beside what the hosts' login shells put there.
    folder : str
        Where they run.
    """

    layout: Layout
    ssh: tuple[str, ...]
    python: str
    variables: Mapping[str, str] = field(repr=False)
    folder: str


class RemoteHosts:
    """Starts processes on other hosts.

    Parameters
    ----------
    hosts : Hosts
        Which.
    relay : OutputRelay
        Where their words go.
    reaper : OrphanReaper
        Kills the connections if this process is killed.
    prefix : bool
        Mark each line of output with the process it comes from.
    """

    def __init__(self, hosts: Hosts, relay: OutputRelay, reaper: OrphanReaper, prefix: bool) -> None:
        self._hosts, self._reaper, self._prefix = hosts, reaper, prefix
        self._numbers = itertools.count()
        command = f"exec {shlex.quote(hosts.python)} -m kvstore.launch.hosts.remote_agent"
        self._connections: list[Connection] = []
        for host in hosts.layout.hosts:
            connection = Connection(host.name, [*hosts.ssh, host.name, command], hosts.folder, relay)
            reaper.add(connection.group)
            self._connections.append(connection)

    @property
    def ready(self) -> bool:
        """Whether all hosts have answered."""
        return all(connection.ready for connection in self._connections)

    @property
    def variables(self) -> Mapping[str, str]:
        """What processes find in their environment, unless told otherwise."""
        return self._hosts.variables

    def local(self, rank: int) -> tuple[int, int]:
        """Rank and number of a worker on its host."""
        return self._hosts.layout.local(rank)

    def host(self, rank: int) -> int:
        """Return the number of the host on which a worker runs."""
        return self._hosts.layout.host(ProcessRole("worker", rank))

    @property
    def master(self) -> tuple[str, int]:
        """Address of worker 0, and a port there that nothing else uses."""
        return self._hosts.layout.addresses[0], self._connections[0].port

    def start(
        self,
        part: ProcessRole,
        command: Sequence[str],
        environment: Mapping[str, str],
        keys: Keys | None = None,
        told: Callable[[str], None] | None = None,
    ) -> RemoteProcess:
        """Start a process on its host; `told` is called with the address that it tells."""
        connection = self._connections[self._hosts.layout.host(part)]
        mark = part.mark if self._prefix else b""
        return connection.start(next(self._numbers), part, command, environment, mark, keys, told)

    def forget(self, process: Any) -> None:
        """Forget a process of these hosts that is gone."""
        process.connection.forget(process)

    def look(self) -> HostLoss | None:
        """Give signs of life, and say which host gives none or is not reached."""
        losses = [loss for connection in self._connections if (loss := connection.look())]
        return losses[0] if losses else None

    def close(self) -> None:
        """End the connections: the agents then end what is left, and themselves."""
        for connection in self._connections:
            connection.leave()
        until = time.monotonic() + LEAVE
        for connection in self._connections:
            connection.close(until)
            self._reaper.forget(connection.group)


def wanted(
    workers: int | None,
    servers: int,
    listed: str | None,
    file: str | None,
    ssh: str | None,
    python: str | None,
    exports: Sequence[str],
) -> Hosts | None:
    """Make of options of `kvstore run` what they say about hosts; None where they name none.

    Without a number of workers every host is used.

    Raises
    ------
    ConfigError
        They contradict each other, or the hosts are not as they should be.
    """
    if listed is None and file is None:
        given = {"ssh-command": ssh, "python": python, "export": exports}
        if found := next((name for name, value in given.items() if value), None):
            raise ConfigError(f"--{found} is for other hosts, but there are none: name them with --hosts")
        return None
    if listed is not None and file is not None:
        raise ConfigError("--hosts and --hostfile contradict each other: give one of them")
    hosts: tuple[Host, ...] = of_list(listed) if listed is not None else of_file(file or "")
    return Hosts(
        Layout(hosts, sum(host.slots or 1 for host in hosts) if workers is None else workers, servers),
        ssh_command(ssh),
        python or sys.executable,
        carried(process_variables(), exports),
        str(Path.cwd()),
    )


def ssh_command(option: str | None) -> tuple[str, ...]:
    """Make the words with which a command on another host begins.

    Raises
    ------
    ConfigError
        There is nothing in it, or a quote is not closed.
    """
    text = option or text_of("ssh")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--ssh-command (KVSTORE_SSH) {text!r} is not a command: {error}") from error
    if not words:
        raise ConfigError("--ssh-command (KVSTORE_SSH) is empty: omit it to use ssh")
    options = _SSH_OPTIONS if Path(words[0]).name == "ssh" else ()
    return (*words, *options)


def carried(environment: Mapping[str, str], exports: Sequence[str]) -> dict[str, str]:
    """Choose the variables that other hosts get.

    Raises
    ------
    ConfigError
        One to be exported is not set here.
    """
    found = {
        name: value
        for name, value in environment.items()
        if name.startswith(_CARRIED) or name in _CARRIED_TOO
    }
    found.pop("KVSTORE_SSH", None)
    for text in exports:
        name, equals, value = text.partition("=")
        if not name or not (equals or name in environment):
            raise ConfigError(f"--export {text}: no such variable is set; write NAME=VALUE to set one")
        found[name] = value if equals else environment[name]
    return found
