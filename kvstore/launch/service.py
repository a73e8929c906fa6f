"""The parameter server of a job: what the user asks for, and what each process is told of its part in it."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from kvstore.errors import ConfigError
from kvstore.settings import addresses, roles
from kvstore.settings.definitions import LAUNCHERS
from kvstore.settings.environment import process_variables, text_of
from kvstore.settings.keys import Keys
from kvstore.settings.parameter_server import ps_config

from .certificates import Certificates, written
from .child_process import ProcessRole
from .hosts.remote_hosts import Hosts

#: Variables that give a process its place among the workers: a server must not take itself for one.
_PLACE = LAUNCHERS[0].signs
#: glibc maps the memory of each large message anew, and gives it back, unless told otherwise: a third of the
#: time that a worker spends on receiving.
_MALLOC = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(256 << 20)}
#: What an earlier launcher may have left behind, and what stands in its place.
_LEFT_BEHIND = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "KVSTORE_KEYS_FD", "KVSTORE_KEYS_FILE")


@dataclass(frozen=True)
class Service:
    """Servers and a scheduler, on this machine or on the hosts of a list.

    Attributes
    ----------
    servers : int
        How many.
    transport : str
        ``"tcp"`` or ``"ipc"``.
    host : str
        Address at which the scheduler and the servers are reached over tcp.
    secure, insecure : bool
        Encrypt with keys made for the job, also where only this machine can connect; leave that out, also
        where others can.
    imports : tuple of str
        Modules that servers import, for the optimizers and codecs that they register.
    import_path : str
        A folder where these modules are found, apart from the usual ones.
    snapshot : str
        Folder for snapshots of the servers; empty: none.
    snapshot_interval : float or None
        Seconds between two of them; None leaves it to the environment.
    restarts : int
        How many failed servers are started again, in all.
    journal : str
        Folder for the scheduler's journal; empty: none, unless the scheduler is started again.
    scheduler_restarts : int
        How often a failed scheduler is started again.
    program : tuple of str
        What takes ``scheduler`` or ``server`` and their options as arguments.

    Raises
    ------
    ConfigError
        The options contradict each other, the host is none of this machine, or it is reached by others and
        nothing is said of keys.
    """

    servers: int
    transport: str = "tcp"
    host: str = field(default_factory=addresses.loopback)
    secure: bool = False
    insecure: bool = False
    imports: tuple[str, ...] = ()
    import_path: str = ""
    snapshot: str = ""
    snapshot_interval: float | None = None
    restarts: int = 0
    journal: str = ""
    scheduler_restarts: int = 0
    program: tuple[str, ...] = field(default=(sys.executable, "-m", "kvstore.launch"))

    def __post_init__(self) -> None:
        if self.secure and self.insecure:
            raise ConfigError("--secure and --insecure contradict each other: give one of them")
        if self.transport not in ("tcp", "ipc"):
            raise ConfigError(f"transport must be tcp or ipc, got {self.transport!r}")
        if self.transport == "ipc" and self.host != addresses.loopback():
            raise ConfigError("--transport ipc takes no --host: unix sockets work on this machine only")
        if self.restarts and not self.snapshot:
            raise ConfigError(
                "--server-restarts needs --snapshot: a server restarts from the data that it has saved"
            )

    @property
    def encrypted(self) -> bool:
        """Whether the job gets keys: where asked for, and where other machines can connect."""
        if self.insecure or self.transport == "ipc":
            return self.secure
        number = addresses.resolved(self.host)
        return self.secure or number is None or not addresses.is_loopback(number)


class Cast:
    """Tells each process of a job its part.

    Parameters
    ----------
    service : Service
        What the user wants.
    workers : int
        Number of workers.
    job : str
        Name of the job.
    address_of : callable, optional
        Address of the host on which a process runs, where there are several; the scheduler's is that of the
        service.

    Raises
    ------
    ConfigError
        The scheduler could not start like this, or a variable of the environment is wrong.
    """

    def __init__(
        self, service: Service, workers: int, job: str, address_of: Callable[[ProcessRole], str] | None = None
    ) -> None:
        self.service = service
        self._workers, self._job, self._address_of = workers, job, address_of
        #: Where the scheduler is, once it has said so.
        self.address = ""
        self._certificates = Certificates(workers, service.servers) if service.encrypted else None
        self._check()

    def command(self, part: ProcessRole) -> list[str]:
        """Command line of the scheduler or of a server."""
        if part.role == "scheduler":
            return [*self.service.program, "scheduler"]
        imports = [word for name in self.service.imports for word in ("--import", name)]
        return [*self.service.program, "server", *imports]

    def environment(self, part: ProcessRole, base: Mapping[str, str]) -> dict[str, str]:
        """Variables of a process: those of `base`, and its part."""
        service, address = self.service, self.address
        if not address:  # any free port, or a name that only this job has
            ipc = service.transport == "ipc"
            address = f"ipc://@kvstore/{self._job}/scheduler" if ipc else addresses.tcp(service.host, 0)
        return {
            **variables_of(part, base, self._workers, service.servers, address),
            "KVSTORE_JOB": self._job,
            "KVSTORE_SCHEDULER": address,
            "KVSTORE_HOST": self._address_of(part) if self._address_of else service.host,
            "KVSTORE_PORT": "0",
            "KVSTORE_INSECURE": str(int(service.insecure)),
            **self._options(part, base),
        }

    def keys(self, part: ProcessRole) -> Keys | None:
        """Keys of a process; None without keys."""
        return self._certificates.of(part.role, part.rank) if self._certificates else None

    def _check(self) -> None:
        """Find what is wrong before anything is started, with the eyes of the scheduler."""
        part = ProcessRole("scheduler", 0)
        environment = self.environment(part, process_variables())
        ps_config(environment)
        if self._address_of is not None:  # the scheduler runs elsewhere, and looks for itself
            return
        if addresses.resolved(self.service.host) in ("0.0.0.0", "::"):  # noqa: S104 - refused
            raise ConfigError(
                f"--host {self.service.host} is not an address at which other processes can reach the "
                f"servers; "
                f"the interfaces are {addresses.told(addresses.interfaces())}"
            )
        with contextlib.ExitStack() as stack:
            if (keys := self.keys(part)) is not None:
                descriptor = written(keys)
                stack.callback(os.close, descriptor)
                environment["KVSTORE_KEYS_FD"] = str(descriptor)
            roles.find(environment)

    def _options(self, part: ProcessRole, base: Mapping[str, str]) -> dict[str, str]:
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


def variables_of(
    part: ProcessRole, base: Mapping[str, str], workers: int, servers: int, address: str
) -> dict[str, str]:
    """Make the variables of a process from those of `base`: its part, for us and for MXNet's scripts.

    Where it finds the others, and its keys, is not among them.
    """
    left = _LEFT_BEHIND if part.role == "worker" else (*_LEFT_BEHIND, *_PLACE)
    kept = {name: value for name, value in base.items() if name not in left}
    ours = {"KVSTORE_ROLE": part.role, "DMLC_ROLE": part.role}
    ours |= {"KVSTORE_NUM_WORKERS": str(workers), "DMLC_NUM_WORKER": str(workers)}
    ours |= {"KVSTORE_NUM_SERVERS": str(servers), "DMLC_NUM_SERVER": str(servers)}
    ours["DMLC_LOCAL"] = str(int(address.startswith("ipc://")))
    host, port = addresses.split(address)
    if port:
        ours |= {"DMLC_PS_ROOT_URI": host, "DMLC_PS_ROOT_PORT": str(port)}
    if part.role == "server":
        ours["KVSTORE_SERVER_RANK"] = str(part.rank)
    return {**_MALLOC, **kept, **ours}


def wanted(
    servers: int, program: str, options: Mapping[str, Any], hosts: Hosts | None = None
) -> Service | None:
    """Make the service that options of `kvstore run` describe; None where they want no servers.

    Raises
    ------
    ConfigError
        An option is about servers, and there are none; or it says where they run, as the hosts do.
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
        for name, value in (("transport", "ipc"), ("host", given.get("host"))):
            if name in given and given[name] == value:
                raise ConfigError(
                    f"--{name} {value} is for one machine: with --hosts servers run on the hosts"
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
