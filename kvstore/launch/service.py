"""The parameter server of a job: the options of the user, and the variables of each process."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.settings import addresses, roles
from kvstore.settings.definitions import LAUNCHERS
from kvstore.settings.environment import process_variables, text_of
from kvstore.settings.keys import JobKeys
from kvstore.settings.parameter_server import ps_config

from .certificates import Certificates, write_to_memory
from .child_process import ProcessRole
from .hosts.remote_hosts import Hosts

#: The `kvstore` command.
COMMAND = (sys.executable, "-m", "kvstore.launch")
#: Variables that give a process its place among the workers; a server must not have them.
_PLACE = LAUNCHERS[0].signs
#: By default glibc maps and unmaps the memory of each large message: a third of the time of a receive.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
#: Variables of an earlier launcher that must not remain.
_LEFT_BEHIND = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "KVSTORE_KEYS_FD", "KVSTORE_KEYS_FILE")


@dataclass(frozen=True)
class Service:
    """Servers and a scheduler; the options are those of `kvstore run`.

    The servers search the modules `imports` in the folder `import_path` too. `restarts` counts failed
    servers, `scheduler_restarts` failures of the scheduler. The subcommands ``scheduler`` and ``server`` are
    those of `program`. ConfigError is raised if the options contradict each other.
    """

    servers: int
    transport: str = "tcp"
    host: str = field(default_factory=addresses.loopback_address)
    secure: bool = False
    insecure: bool = False
    imports: tuple[str, ...] = ()
    import_path: str = ""
    snapshot: str = ""
    snapshot_interval: float | None = None
    restarts: int = 0
    journal: str = ""
    scheduler_restarts: int = 0
    program: tuple[str, ...] = COMMAND

    def __post_init__(self) -> None:
        if self.secure and self.insecure:
            raise ConfigError("--secure and --insecure contradict each other: give one of them")
        if self.transport == "ipc" and self.host != addresses.loopback_address():
            raise ConfigError("--transport ipc takes no --host: unix sockets work on this machine only")
        if self.restarts and not self.snapshot:
            raise ConfigError(
                "--server-restarts needs --snapshot: a server restarts from the data that it has saved"
            )

    @property
    def is_encrypted(self) -> bool:
        """Whether the job gets keys: on request, and if other hosts can connect."""
        if self.insecure or self.transport == "ipc":
            return self.secure
        number = addresses.resolve_host(self.host)
        return self.secure or number is None or not addresses.is_loopback(number)


class ServiceProcesses:
    """Command lines, variables and keys of the processes of a job with servers.

    `address_of` returns the address of the host of a process, if there are several. ConfigError is raised if
    the scheduler could not start like this, or a variable of the environment is wrong.
    """

    def __init__(
        self, service: Service, workers: int, job: str, address_of: Callable[[ProcessRole], str] | None = None
    ) -> None:
        self.service = service
        self._workers, self._job, self._address_of = workers, job, address_of
        #: The address that the scheduler has reported.
        self.address = ""
        self._certificates = Certificates(workers, service.servers) if service.is_encrypted else None
        self._check_scheduler()

    def command_for(self, part: ProcessRole) -> list[str]:
        """Return the command line of the scheduler or of a server."""
        return service_command(self.service.program, part, self.service.imports)

    def variables_for(self, part: ProcessRole, base: Mapping[str, str]) -> dict[str, str]:
        """Return the variables of a process: those of `base`, and its role."""
        service, address = self.service, self.address
        if not address:  # a free port, or a name that only this job uses
            ipc = service.transport == "ipc"
            address = (
                f"ipc://@kvstore/{self._job}/scheduler" if ipc else addresses.tcp_address(service.host, 0)
            )
        return {
            **variables_of(part, base, self._workers, service.servers, address),
            "KVSTORE_JOB": self._job,
            "KVSTORE_SCHEDULER": address,
            "KVSTORE_HOST": self._address_of(part) if self._address_of else service.host,
            "KVSTORE_PORT": "0",
            "KVSTORE_INSECURE": str(int(service.insecure)),
            **self._option_variables(part, base),
        }

    def keys_for(self, part: ProcessRole) -> JobKeys | None:
        """Return the keys of a process; None without encryption."""
        return self._certificates.of(part.role, part.rank) if self._certificates else None

    def _check_scheduler(self) -> None:
        """Raise the errors of the scheduler before any process is started."""
        part = ProcessRole("scheduler", 0)
        environment = self.variables_for(part, process_variables())
        ps_config(environment)
        if self._address_of is not None:  # the scheduler runs on another host, and checks itself
            return
        number = addresses.resolve_host(self.service.host)
        if number is not None and addresses.is_wildcard(number):
            raise ConfigError(
                f"--host {self.service.host} is not an address at which other processes can reach the "
                f"servers; the interfaces are {addresses.addresses_text(addresses.interface_addresses())}"
            )
        with contextlib.ExitStack() as stack:
            if (keys := self.keys_for(part)) is not None:
                descriptor = write_to_memory(keys)
                stack.callback(os.close, descriptor)
                environment["KVSTORE_KEYS_FD"] = str(descriptor)
            roles.find(environment)

    def _option_variables(self, part: ProcessRole, base: Mapping[str, str]) -> dict[str, str]:
        service, found = self.service, {}
        if service.snapshot:
            found["KVSTORE_SNAPSHOT"] = str(Path(service.snapshot).absolute())
            found["KVSTORE_SERVER_RESTARTS"] = str(service.restarts)
        if service.journal and part.role == "scheduler":
            found["KVSTORE_JOURNAL"] = str(Path(service.journal).absolute())
        if service.snapshot_interval is not None:
            found["KVSTORE_SNAPSHOT_INTERVAL"] = str(service.snapshot_interval)
        if part.role == "server" and service.imports and service.import_path:
            found["PYTHONPATH"] = os.pathsep.join(filter(None, (service.import_path, base.get("PYTHONPATH"))))
        return found


def service_command(program: Sequence[str], part: ProcessRole, imports: Sequence[str]) -> list[str]:
    """Return the command line of the scheduler or of a server, which imports the modules `imports`."""
    names = imports if part.role == "server" else ()
    return [*program, part.role, *(word for name in names for word in ("--import", name))]


def variables_of(
    part: ProcessRole, base: Mapping[str, str], workers: int, servers: int, address: str
) -> dict[str, str]:
    """Return the variables of a process, with its role for kvstore and for MXNet's scripts; no keys."""
    left = _LEFT_BEHIND if part.role == "worker" else (*_LEFT_BEHIND, *_PLACE)
    kept = {name: value for name, value in base.items() if name not in left}
    ours = {"KVSTORE_ROLE": part.role, "DMLC_ROLE": part.role}
    ours |= {"KVSTORE_NUM_WORKERS": str(workers), "DMLC_NUM_WORKER": str(workers)}
    ours |= {"KVSTORE_NUM_SERVERS": str(servers), "DMLC_NUM_SERVER": str(servers)}
    ours["DMLC_LOCAL"] = str(int(address.startswith("ipc://")))
    host, port = addresses.split_address(address)
    if port:
        ours |= {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": str(port)}
    if part.role == "server":
        ours["KVSTORE_SERVER_RANK"] = str(part.rank)
    return {**_MALLOC, **kept, **ours}


def service_of_options(
    servers: int, program: str, options: Mapping[str, Any], hosts: Hosts | None = None
) -> Service | None:
    """Return the service that options of `kvstore run` describe; None without servers.

    ConfigError is raised if an option is for servers and there are none, or contradicts --hosts.
    """
    given = {name: value for name, value in options.items() if value not in (None, False, ())}
    if servers == 0:
        if given:
            name = "import" if "imports" in given else next(iter(given)).replace("_", "-")
            raise ConfigError(
                f"--{name} is for parameter servers, but there are none: give their number with -s"
            )
        return None
    if given.get("scheduler_restarts") and not given.get("journal") and (journal := text_of("journal")):
        given["journal"] = journal
    if hosts is not None:
        for name in ("transport", "host"):
            if name in given and given[name] != "tcp":
                raise ConfigError(
                    f"--{name} {given[name]} is for one machine: with --hosts servers run on the hosts"
                )
        given |= {"host": hosts.layout.addresses[0], "program": (hosts.python, "-m", "kvstore.launch")}
        if given.get("scheduler_restarts") and not given.get("journal"):
            raise ConfigError(
                "--scheduler-restarts needs --journal with --hosts: a folder on the first host, for what a "
                "scheduler that is started again must know"
            )
    given["restarts"] = given.pop("server_restarts", 0)
    if text_of("insecure") == "1" and not given.get("secure"):
        given["insecure"] = True
    if program.endswith(".py"):
        given["import_path"] = str(Path(program).absolute().parent)
    return Service(servers, **given)
