"""Role, rank and addresses of this process in a job with parameter servers.

They are read from the variables of kvstore (KVSTORE_*) and of MXNet's launchers (DMLC_*, PORT). The rank of a
worker is that of the launcher that `kvstore.settings.launchers` finds. No variable is read at import.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass

from ..errors import ConfigError
from . import addresses, launchers
from .definitions import DEFAULTS, IGNORED_ON_SERVERS, SETTINGS
from .environment import first_set, process_variables
from .keys import JobKeys

log = logging.getLogger("kvstore.roles")

ROLES = ("worker", "server", "scheduler")

_ROLE, _WORKERS, _SERVERS = (SETTINGS[name].names() for name in ("role", "num_workers", "num_servers"))
_ROOT = ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT")
#: If any of these variables is set, the job has parameter servers.
SIGNS = (*_ROLE, "KVSTORE_SCHEDULER", *_WORKERS, *_SERVERS, *_ROOT)

_MOST = 1 << 16  # processes of a role


@dataclass(frozen=True)
class Roles:
    """Role and addresses of this process in a job with parameter servers.

    Attributes
    ----------
    role : str
        ``"worker"``, ``"server"`` or ``"scheduler"``.
    rank : int
        Rank of this worker or server; 0 for the scheduler. With -1 the scheduler assigns ranks in the order
        of connection.
    num_workers, num_servers : int
        Numbers of workers and servers, or 0 if this process does not know them. The scheduler always knows
        them.
    job : str
        Name of the job, the same text in all processes. It is empty in a scheduler that has neither a name
        nor a port yet; see `bound`.
    scheduler : str
        Address of the scheduler: ``"tcp://127.0.0.1:4711"``, or ``"ipc://@kvstore/..."`` for a unix socket
        without a file.
    host : str
        Numeric address to which this process binds and at which others reach it.
    port : int
        Port to bind to; 0 means a free port.
    keys : Keys or None
        CURVE keys. With None, connections are not encrypted, and any process that knows the name of the job
        can join it.
    insecure : bool
        Whether the user accepts connections without keys although other machines can connect.
    restart : int
        Number of times that the launcher has restarted this process.
    """

    role: str
    rank: int
    num_workers: int
    num_servers: int
    job: str
    scheduler: str
    host: str
    port: int
    keys: JobKeys | None
    insecure: bool
    restart: int = 0

    @property
    def ipc(self) -> bool:
        """Whether the processes connect through unix sockets, so that the whole job is on this machine."""
        return self.scheduler.startswith("ipc://")

    def bound(self, port: int) -> Roles:
        """Return a copy with the port to which the scheduler is bound."""
        if self.ipc:
            return self
        address = f"tcp://{addresses.split_address(self.scheduler)[0]}:{port}"
        return dataclasses.replace(self, port=port, scheduler=address, job=self.job or address)


def find(environment: Mapping[str, str] | None = None, command: str = "") -> Roles | None:
    """Find the role of this process from environment variables.

    The function resolves names of hosts and sends nothing to other processes. A process without KVSTORE_ROLE
    and DMLC_ROLE is a worker. Variables of kvstore, of MXNet and of the launcher for the same setting must
    have the same value.

    Parameters
    ----------
    environment : mapping, optional
        The variables. With None, those of this process.
    command : str, optional
        The command, such as ``"kvstore server"``, that has put its role and its options among the variables;
        errors then name its options.

    Returns
    -------
    Roles or None
        None if no variable of a parameter server is set.

    Raises
    ------
    ConfigError
        A variable is missing, not valid, or contradicts another; or other machines could connect to this
        process and there are no keys.
    """
    env = process_variables() if environment is None else environment
    if not signs(env):
        return None
    for variable in IGNORED_ON_SERVERS:
        if env.get(variable, "0") != "0":
            _warn_once(variable)
    role = _find_role(env)
    scheduler = _scheduler_address(env, command)
    place = _worker_place(env, scheduler) if role == "worker" else None
    workers, servers = _process_counts(env, role, place, command)
    host = _bind_address(env, role, scheduler)
    found = Roles(
        role=role,
        rank=_find_rank(env, role, place, workers, servers),
        num_workers=workers,
        num_servers=servers,
        job=_job_name(env, scheduler),
        scheduler=scheduler,
        host=host,
        port=_bind_port(env, role, scheduler),
        keys=_read_keys(env),
        insecure=_flag_variable(env, "KVSTORE_INSECURE"),
        restart=(_number_variable(env, ("KVSTORE_RESTART",), 0) or ("", 0))[1],
    )
    found = _with_rank_of_keys(found)
    _refuse_unencrypted(found)
    return found


def signs(environment: Mapping[str, str] | None = None) -> list[str]:
    """Return the variables that are set and mean that the job has parameter servers, with their values."""
    env = process_variables() if environment is None else environment
    return [f"{name}={env[name]}" for name in SIGNS if env.get(name)]


def job_of(env: Mapping[str, str]) -> str:
    """Return the name of the job with servers to which these variables belong.

    Raises
    ------
    ConfigError
        The address of the scheduler is missing or not valid.
    """
    return _job_name(env, _scheduler_address(env))


def _find_role(env: Mapping[str, str]) -> str:
    name, role = _agreed_variable(env, _ROLE) or ("", DEFAULTS["role"])
    if role not in ROLES:
        raise ConfigError(f"{name}={role!r} is not a role: set it to {', '.join(ROLES[:2])} or {ROLES[2]}")
    return role


def _scheduler_address(env: Mapping[str, str], command: str = "") -> str:
    """Return the address of the scheduler that the variables give."""
    roots = [env.get(name, "") for name in _ROOT]
    from_roots = _from_roots(env) if all(roots) else None
    if address := env.get("KVSTORE_SCHEDULER"):
        addresses.check_address("KVSTORE_SCHEDULER", address)
        if from_roots and address.startswith("tcp://") and from_roots != address:
            raise _contradiction_error(("KVSTORE_SCHEDULER", address), (" and ".join(_ROOT), ":".join(roots)))
        return address
    if from_roots:
        return from_roots
    missing = " and ".join(name for name, value in zip(_ROOT, roots, strict=True) if not value)
    if command:
        raise ConfigError(
            f"`{command}` needs the address of the scheduler: give it as --scheduler (or set {missing} or "
            "KVSTORE_SCHEDULER); `kvstore scheduler` prints it"
        )
    raise ConfigError(
        f"{signs(env)[0]} is set, but the address of the scheduler is not ({missing} or KVSTORE_SCHEDULER): "
        "start the job with `kvstore run -n 2 -s 1`, or set KVSTORE_SCHEDULER to the address that "
        "`kvstore scheduler` prints"
    )


def _from_roots(env: Mapping[str, str]) -> str:
    """Return the address from MXNet's variables; DMLC_LOCAL means a unix socket, here without a file."""
    host, port = (env[name] for name in _ROOT)
    addresses.check_address(" and ".join(_ROOT), f"tcp://{host}:{port}")
    return (
        f"ipc://@kvstore/{os.getuid()}/{host}:{port}"
        if _flag_variable(env, "DMLC_LOCAL")
        else f"tcp://{host}:{port}"
    )


def _worker_place(env: Mapping[str, str], scheduler: str) -> launchers.WorkerPlacement | None:
    """Return the place that a launcher gives this worker, if any; only KVSTORE_JOB names the job."""
    found = launchers.detect_placement({**env, "KVSTORE_JOB": env.get("KVSTORE_JOB") or scheduler})
    # DMLC_WORKER_ID takes precedence over a launcher that has started servers and workers alike.
    foreign = found.launcher != "kvstore" and bool(env.get("DMLC_WORKER_ID"))
    return None if found.launcher == "none" or foreign else found


def _process_counts(
    env: Mapping[str, str], role: str, place: launchers.WorkerPlacement | None, command: str
) -> tuple[int, int]:
    """Return the numbers of workers and servers; 0 for an unknown number."""
    workers, servers = (
        _number_variable(env, names, 1) if _agreed_variable(env, names) else None
        for names in (_WORKERS, _SERVERS)
    )
    if place and workers and workers[1] != place.size:
        raise ConfigError(
            f"{workers[0]}={workers[1]} contradicts {place.launcher}, which started {place.size} processes: "
            "correct it, or set DMLC_WORKER_ID to the rank of this worker"
        )
    missing = [names for names, found in ((_WORKERS, workers), (_SERVERS, servers)) if found is None]
    if role == "scheduler" and missing:
        names = " and ".join(" or ".join(names) for names in missing)
        sign = f"`{command}`" if command else f"{first_set(env, _ROLE)}=scheduler"
        raise ConfigError(
            f"this is the scheduler ({sign}), but {names} is not set: "
            "set it to the number of processes in the job, or run `kvstore scheduler -n 2 -s 1`"
        )
    return place.size if place else workers[1] if workers else 0, servers[1] if servers else 0


def _find_rank(
    env: Mapping[str, str], role: str, place: launchers.WorkerPlacement | None, workers: int, servers: int
) -> int:
    if role == "scheduler":
        return 0
    if place:
        return place.rank
    names = SETTINGS["worker_rank" if role == "worker" else "server_rank"].names()
    count = workers if role == "worker" else servers
    found, first = _number_variable(env, names, 0), 0
    if found is None:
        # dmlc's tracker numbers the workers first, and then the servers.
        found, first = _number_variable(env, ("DMLC_TASK_ID",), 0), 0 if role == "worker" else workers
    if found is None:
        return -1
    name, rank = found[0], found[1] - first
    if rank < 0 or (count and rank >= count):
        raise ConfigError(
            f"{name}={env[name]} is not the rank of one of {count} {role}s: correct or unset it"
        )
    return rank


def _job_name(env: Mapping[str, str], scheduler: str) -> str:
    """Return the name of the job; without KVSTORE_JOB the scheduler's address, if it is complete."""
    complete = scheduler.startswith("ipc://") or addresses.split_address(scheduler)[1]
    return env.get("KVSTORE_JOB") or (scheduler if complete else "")


def _bind_address(env: Mapping[str, str], role: str, scheduler: str) -> str:
    """Return the numeric address to which this process binds."""
    if scheduler.startswith("ipc://"):
        return addresses.loopback_address()
    name, given = _given_host(env, role, scheduler)
    if given is None:
        return _route_to_scheduler(role, addresses.split_address(scheduler)[0])
    host = addresses.resolve_host(given.strip("[]"))
    if not host:
        raise _unusable_host(name, given, "not a known host")
    if role == "worker":
        return host
    if addresses.is_wildcard(host):
        if role == "scheduler":
            return host
        raise _unusable_host(name, given, "not an address at which other processes can reach this server")
    if not addresses.is_here(host):
        raise _unusable_host(name, given, "not an address of this machine")
    return host


def _given_host(env: Mapping[str, str], role: str, scheduler: str) -> tuple[str, str | None]:
    """Return the variable that gives the address to bind to, and its value."""
    if name := first_set(env, SETTINGS["host"].names()):
        return name, env[name]
    if role == "scheduler" and _flag_variable(env, "DMLC_USE_KUBERNETES"):
        return "DMLC_USE_KUBERNETES", "0.0.0.0"  # noqa: S104 - a pod's address; keys or --insecure all the same
    if env.get("DMLC_INTERFACE"):
        return "DMLC_INTERFACE", _of_interface(env["DMLC_INTERFACE"])
    if role == "scheduler":
        return "the scheduler's address", addresses.split_address(scheduler)[0]
    return "", None


def _of_interface(prefix: str) -> str:
    found = addresses.interface_addresses()
    for name, address in found.items():
        if name.startswith(prefix):
            return address
    raise ConfigError(
        f"DMLC_INTERFACE={prefix!r}: no network interface with an address has a name that begins so; "
        f"the interfaces are {addresses.addresses_text(found)}"
    )


def _unusable_host(name: str, host: str, reason: str) -> ConfigError:
    here = addresses.interface_addresses()
    cure = f"set KVSTORE_HOST (--host) to one of {addresses.addresses_text(here)}"
    if not here:
        cure = "no network interface of this machine has an address: bring one up (ip link set lo up)"
    return ConfigError(f"{name} is {host!r}, which is {reason}; {cure}")


def _route_to_scheduler(role: str, scheduler_host: str) -> str:
    """Return the address of this machine on the route to the scheduler."""
    there = addresses.resolve_host(scheduler_host.strip("[]"))
    here = addresses.route_address(there) if there else None
    if here:
        return here
    if role == "worker":  # it does not bind, and DNS may know the name by the time it connects
        return addresses.loopback_address()
    raise _unusable_host("the scheduler's address", scheduler_host, "unknown or not reachable from here")


def _bind_port(env: Mapping[str, str], role: str, scheduler: str) -> int:
    if role == "scheduler":
        return addresses.split_address(scheduler)[1]
    # Many programs use PORT: it counts only together with the variables of MXNet.
    names = SETTINGS["port"].names() if env.get("DMLC_ROLE") else ("KVSTORE_PORT",)
    found = None if role == "worker" else _number_variable(env, names, 0)
    if found is None:
        return 0
    name, port = found
    if port > 65535:
        raise ConfigError(
            f"{name}={port} is not a port: set it to a number below 65536, or 0 for a free port"
        )
    return port


def _read_keys(env: Mapping[str, str]) -> JobKeys | None:
    """Read the keys from an inherited descriptor or a file; each call reads again."""
    if descriptor := _number_variable(env, ("KVSTORE_KEYS_FD",), 0):
        return JobKeys.from_descriptor(descriptor[1])
    return JobKeys.from_file(env["KVSTORE_KEYS_FILE"]) if env.get("KVSTORE_KEYS_FILE") else None


def _with_rank_of_keys(found: Roles) -> Roles:
    """Check that the keys belong to this role; the rank of a server is the position of its key."""
    keys = found.keys
    if keys is None:
        return found
    role = "worker"
    if keys.public == keys.scheduler:
        role = "scheduler"
    elif keys.public in keys.servers:
        role = "server"
    rank = keys.servers.index(keys.public) if role == found.role == "server" else found.rank
    if role != found.role or found.rank not in (-1, rank):
        name = f"server {found.rank}" if role == found.role else f"a {found.role}"
        raise ConfigError(
            f"the keys (KVSTORE_KEYS_FD or KVSTORE_KEYS_FILE) are those of a {role}, but this is {name}: "
            "each process has its own file"
        )
    return dataclasses.replace(found, rank=rank)


def _refuse_unencrypted(found: Roles) -> None:
    """Raise ConfigError for unencrypted connections over a network, unless the user has allowed them."""
    if found.ipc or found.keys or found.insecure:
        return
    there = addresses.resolve_host(addresses.split_address(found.scheduler)[0].strip("[]"))
    for number in (found.host, there):
        if number is None or not addresses.is_loopback(number):
            raise ConfigError(
                f"the {found.role} would use the network ({number or found.scheduler}) without encryption, "
                "and any machine could connect: give it keys (KVSTORE_KEYS_FILE, written by `kvstore keys`), "
                "or use --insecure (KVSTORE_INSECURE=1) if you trust all machines in the network"
            )


def _agreed_variable(env: Mapping[str, str], names: tuple[str, ...]) -> tuple[str, str] | None:
    """Return the first variable that is set, and its value; all that are set must have the same value."""
    found = [(name, env[name]) for name in names if env.get(name)]
    for other in found[1:]:
        if other[1] != found[0][1]:
            raise _contradiction_error(found[0], other)
    return found[0] if found else None


def _number_variable(env: Mapping[str, str], names: tuple[str, ...], least: int) -> tuple[str, int] | None:
    """Return the first variable that is set, and its value as an integer."""
    name = first_set(env, names)
    if name is None:
        return None
    text = env[name]
    if not re.fullmatch(r"[0-9]{1,9}", text) or not least <= int(text) <= _MOST:
        raise ConfigError(f"{name}={text!r} is not an integer from {least} to {_MOST}: correct or unset it")
    return name, int(text)


def _flag_variable(env: Mapping[str, str], name: str) -> bool:
    text = env.get(name, "")
    if text not in ("", "0", "1"):
        raise ConfigError(f"{name}={text!r} is neither 0 nor 1: correct or unset it")
    return text == "1"


def _contradiction_error(first: tuple[str, str], other: tuple[str, str]) -> ConfigError:
    return ConfigError(
        f"{first[0]} ({first[1]}) contradicts {other[0]} ({other[1]}): unset the variable of an earlier "
        "launcher"
    )


@functools.cache
def _warn_once(variable: str) -> None:
    """Warn once in a process."""
    log.warning("%s is set and has no effect here: %s", variable, IGNORED_ON_SERVERS[variable])
