"""``kvstore scheduler`` and ``kvstore server``: one of them in this process, until its job is over."""

from __future__ import annotations

import fcntl
import importlib
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from typing import NoReturn

from kvstore.errors import ConfigError, KVStoreError
from kvstore.settings import addresses, roles
from kvstore.settings.parameter_server import ps_config

from .process import DESERTED
from .signals import write_timeline

_ALL = ("0.0.0.0", "::")  # noqa: S104 - compared with, not listened at
#: Variables in the place of which an option stands.
_BEATEN = {
    "KVSTORE_SCHEDULER": ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_LOCAL"),
    "KVSTORE_NUM_WORKERS": ("DMLC_NUM_WORKER",),
    "KVSTORE_NUM_SERVERS": ("DMLC_NUM_SERVER",),
    "KVSTORE_ROLE": ("DMLC_ROLE",),
    "KVSTORE_KEYS_FILE": ("KVSTORE_KEYS_FD",),
}


def environment_with(options: Mapping[str, object], environment: Mapping[str, str]) -> dict[str, str]:
    """Put options of the command line into the variables that they stand for; None leaves one as it is."""
    given = {name: str(value) for name, value in options.items() if value is not None}
    beaten = {alias for name in given for alias in _BEATEN.get(name, ())}
    return {name: value for name, value in environment.items() if name not in beaten} | given


def address_option(host: str | None, port: int | None, environment: Mapping[str, str]) -> str | None:
    """Address that --host and --port make; None where neither is given and a variable says it.

    For a host that stands for all addresses the first that others can reach is told.
    """
    told = any(environment.get(name) for name in ("KVSTORE_SCHEDULER", "DMLC_PS_ROOT_URI"))
    if host is None and port is None and told:
        return None
    host = host or addresses.loopback()
    if addresses.resolved(host) in _ALL:
        outward = (one for one in addresses.interfaces().values() if not addresses.is_loopback(one))
        host = next(outward, addresses.loopback())
    return addresses.tcp(host, port or 0)


def scheduler(environment: Mapping[str, str], report: Callable[[str], None], launched: bool = False) -> None:
    """Run the scheduler; `report` is called with its address as soon as others can connect.

    Where a launcher asks it to end and no worker has ever come, its exit code says so.
    """
    found = _part(environment, "kvstore scheduler")
    from kvstore.stores.parameter_server import role_process

    def bound(address: str) -> None:
        """Tell the address that others use, which need not be the one that the socket has."""
        report(found.bound(addresses.split(address)[1]).scheduler)

    role_process.scheduler(found, ps_config(environment), bound, _tell_if_deserted if launched else None)


def _tell_if_deserted(deserted: Callable[[], bool]) -> None:
    def end(number: int, frame: object) -> NoReturn:
        write_timeline()
        os._exit(DESERTED if deserted() else 128 + number)

    signal.signal(signal.SIGTERM, end)


def server(environment: Mapping[str, str], imports: Sequence[str]) -> None:
    """Run a server, after the modules that register what it needs.

    Raises
    ------
    ConfigError
        A module cannot be imported.
    """
    found = _part(environment, "kvstore server")
    for name in imports:
        _import(name)
    from kvstore.stores.parameter_server import role_process

    role_process.server(found, ps_config(environment))


def reporter(descriptor: int | None, show: Callable[[str], None]) -> Callable[[str], None]:
    """Make what tells the address: to the descriptor of a launcher, or where there is none to people.

    Raises
    ------
    ConfigError
        Nothing can be written to the descriptor.
    """
    if descriptor is None:
        return show
    _check_writable(descriptor)

    def report(address: str) -> None:
        try:
            os.write(descriptor, address.encode() + b"\n")
            os.close(descriptor)
        except OSError as error:
            raise KVStoreError(
                f"cannot write the address to --report-fd {descriptor}: {error.strerror}; the launcher may "
                f"have "
                "ended"
            ) from error

    return report


def _check_writable(descriptor: int) -> None:
    try:
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--report-fd {descriptor} is not an open file of this process: the option is for launchers, "
            f"which "
            "open it first; omit it to print the address"
        ) from error
    if mode == os.O_RDONLY:
        raise ConfigError(f"--report-fd {descriptor} is open for reading only: name one to write to")


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"--import {name}: {error}; servers search the path of Python and the folder of the script "
            "(PYTHONPATH)"
        ) from error


def _part(environment: Mapping[str, str], command: str) -> roles.Roles:
    """Return the part, which the command has put among the variables."""
    found = roles.find(environment, command)
    if found is None:
        raise ConfigError("KVSTORE_ROLE is not set: call `kvstore scheduler` or `kvstore server`")
    return found
