"""The hosts of `kvstore run --hosts`: which they are, and one connection to each."""

from __future__ import annotations

import itertools
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.settings.environment import process_variables, text_of

from ..child_process import ProcessSpec, SupervisedProcess
from ..orphan_reaper import OrphanReaper
from ..output_relay import OutputRelay
from .connection import HostConnection, RemoteProcess
from .host_list import HostLayout, of_file, of_list

#: Variables that other hosts get: those of kvstore and MXNet, and those that change what a program does.
_FORWARDED = ("KVSTORE_", "DMLC_", "PS_", "MXNET_")
_FORWARDED_TOO = ("PYTHONPATH", "PYTHONUNBUFFERED", "OMP_NUM_THREADS")
#: ssh must not ask, because its question would not be seen, and must detect a lost network.
_SSH_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-T")
_LEAVE = 4.0  # seconds that agents have to end what is left: longer than their grace


@dataclass(frozen=True)
class Hosts:
    """The hosts of a job: the host of each process, and how a command is run there.

    `ssh` is the program that runs a command on a host, with its options; name and command are appended.
    `python` is a Python on the hosts that has kvstore. Processes get `variables` in addition to those of the
    login shells, and run in `folder`.
    """

    layout: HostLayout
    ssh: tuple[str, ...]
    python: str
    variables: Mapping[str, str] = field(repr=False)
    folder: str


class RemoteHosts:
    """Starts processes on other hosts; its methods are those of `LocalHost`."""

    remote = True

    def __init__(self, hosts: Hosts, relay: OutputRelay, reaper: OrphanReaper, prefix: bool) -> None:
        self._layout, self._reaper = hosts.layout, reaper
        self._numbers = itertools.count()
        command = f"exec {shlex.quote(hosts.python)} -m kvstore.launch.hosts.remote_agent"
        self._connections: list[HostConnection] = []
        for host in hosts.layout.hosts:
            words = [*hosts.ssh, host.name, command]
            connection = HostConnection(host.name, words, hosts.folder, relay, prefix)
            reaper.add_group(connection.group)
            self._connections.append(connection)

    @property
    def ready(self) -> bool:
        """Whether all hosts have answered."""
        return all(connection.ready for connection in self._connections)

    @property
    def master(self) -> tuple[str, int]:
        """Address of worker 0, and a reserved port there."""
        return self._layout.addresses[0], self._connections[0].port

    def start_process(self, spec: ProcessSpec) -> RemoteProcess:
        """Start a process on its host."""
        connection = self._connections[self._layout.host(spec.part)]
        return connection.start_process(next(self._numbers), spec)

    def forget_process(self, process: SupervisedProcess) -> None:
        """Forget a process that is gone."""
        if isinstance(process, RemoteProcess):
            process.connection.forget_process(process)

    def check_connections(self) -> HostConnection | None:
        """Send signs of life, and return the connection to a lost host."""
        for connection in self._connections:
            connection.check_liveness()
        return next((connection for connection in self._connections if connection.lost), None)

    def close(self) -> None:
        """End the connections: the agents end what is left, and themselves."""
        for connection in self._connections:
            connection.close_input()
        until = time.monotonic() + _LEAVE
        for connection in self._connections:
            connection.close(until)
            self._reaper.forget_group(connection.group)


def hosts_of_options(workers: int | None, servers: int, options: dict[str, Any]) -> Hosts | None:
    """Return the hosts that options of the command line describe, and remove these from `options`.

    None: they name no hosts. With `workers` None, every host is used. ConfigError is raised if the options
    contradict each other, or a host cannot be used.
    """
    listed, file = options.pop("hosts"), options.pop("hostfile")
    ssh, python, exports = (options.pop(name, None) for name in ("ssh_command", "python", "exports"))
    if listed is None and file is None:
        given = {"ssh-command": ssh, "python": python, "export": exports}
        if found := next((name for name, value in given.items() if value), None):
            raise ConfigError(f"--{found} is for other hosts, but there are none: name them with --hosts")
        return None
    if listed is not None and file is not None:
        raise ConfigError("--hosts and --hostfile contradict each other: give one of them")
    hosts = of_list(listed) if listed is not None else of_file(file)
    return Hosts(
        HostLayout(hosts, sum(host.slots or 1 for host in hosts) if workers is None else workers, servers),
        ssh_command(ssh),
        python or sys.executable,
        forwarded_variables(process_variables(), exports or ()),
        str(Path.cwd()),
    )


def ssh_command(option: str | None) -> tuple[str, ...]:
    """Return the first words of a command for another host; ConfigError: the option is no command."""
    text = option or text_of("ssh")
    try:
        words = shlex.split(text)
    except ValueError as error:
        raise ConfigError(f"--ssh-command (KVSTORE_SSH) {text!r} is not a command: {error}") from error
    if not words:
        raise ConfigError("--ssh-command (KVSTORE_SSH) is empty: omit it to use ssh")
    return (*words, *(_SSH_OPTIONS if Path(words[0]).name == "ssh" else ()))


def forwarded_variables(environment: Mapping[str, str], exports: Sequence[str]) -> dict[str, str]:
    """Return the variables that other hosts get; ConfigError: a variable of --export is not set here."""
    prefixes, names = _FORWARDED, _FORWARDED_TOO
    found = {k: v for k, v in environment.items() if k.startswith(prefixes) or k in names}
    found.pop("KVSTORE_SSH", None)
    for text in exports:
        name, equals, value = text.partition("=")
        if not name or not (equals or name in environment):
            raise ConfigError(f"--export {text}: no such variable is set; write NAME=VALUE to set one")
        found[name] = value if equals else environment[name]
    return found
