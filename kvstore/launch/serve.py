"""``kvstore scheduler`` and ``kvstore server``: a scheduler or a server runs in this process."""

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

_ALL = ("0.0.0.0", "::")  # noqa: S104 - only compared with
#: Variables that an option replaces, by the variable of that option.
_REPLACED = {
    "KVSTORE_SCHEDULER": ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_LOCAL"),
    "KVSTORE_NUM_WORKERS": ("DMLC_NUM_WORKER",),
    "KVSTORE_NUM_SERVERS": ("DMLC_NUM_SERVER",),
    "KVSTORE_ROLE": ("DMLC_ROLE",),
    "KVSTORE_KEYS_FILE": ("KVSTORE_KEYS_FD",),
}


def environment_with(options: Mapping[str, object], environment: Mapping[str, str]) -> dict[str, str]:
    """Return the variables, with those of the options of the command; None leaves a variable as it is."""
    given = {name: str(value) for name, value in options.items() if value is not None}
    replaced = {alias for name in given for alias in _REPLACED.get(name, ())}
    return {name: value for name, value in environment.items() if name not in replaced} | given


def address_option(host: str | None, port: int | None, environment: Mapping[str, str]) -> str | None:
    """Return the address of --host and --port; None if neither is given and a variable has the address.

    A host that means all addresses is replaced by the first address that other hosts can reach.
    """
    has_variable = any(environment.get(name) for name in ("KVSTORE_SCHEDULER", "DMLC_PS_ROOT_URI"))
    if host is None and port is None and has_variable:
        return None
    host = host or addresses.loopback_address()
    if addresses.resolve_host(host) in _ALL:
        outward = (one for one in addresses.interface_addresses().values() if not addresses.is_loopback(one))
        host = next(outward, addresses.loopback_address())
    return addresses.tcp_address(host, port or 0)


def scheduler(environment: Mapping[str, str], report: Callable[[str], None], launched: bool = False) -> None:
    """Run the scheduler; `report` is called with its address when other processes can connect.

    With `launched`, a scheduler to which no worker has connected ends on SIGTERM with the code `DESERTED`.
    """
    found = _roles(environment, "kvstore scheduler")
    from kvstore.stores.parameter_server import role_process

    def bound(address: str) -> None:
        """Report the address for other processes, which can differ from that of the socket."""
        report(found.bound(addresses.split_address(address)[1]).scheduler)

    role_process.scheduler(found, ps_config(environment), bound, _report_if_deserted if launched else None)


def _report_if_deserted(deserted: Callable[[], bool]) -> None:
    def end(number: int, frame: object) -> NoReturn:
        write_timeline()
        os._exit(DESERTED if deserted() else 128 + number)

    signal.signal(signal.SIGTERM, end)


def server(environment: Mapping[str, str], imports: Sequence[str]) -> None:
    """Run a server, after the import of the modules that register its optimizers and codecs."""
    found = _roles(environment, "kvstore server")
    for name in imports:
        _import(name)
    from kvstore.stores.parameter_server import role_process

    role_process.server(found, ps_config(environment))


def _import(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"--import {name}: {error}; servers search the path of Python and the folder of the script "
            "(PYTHONPATH)"
        ) from error


def reporter(descriptor: int | None, show: Callable[[str], None]) -> Callable[[str], None]:
    """Return a function that writes the address to the descriptor of a launcher; `show` without one."""
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
                "have ended"
            ) from error

    return report


def _check_writable(descriptor: int) -> None:
    try:
        mode = fcntl.fcntl(descriptor, fcntl.F_GETFL) & os.O_ACCMODE
    except (OSError, OverflowError) as error:
        raise ConfigError(
            f"--report-fd {descriptor} is not an open file of this process: the option is for launchers, "
            "which open it first; omit it to print the address"
        ) from error
    if mode == os.O_RDONLY:
        raise ConfigError(f"--report-fd {descriptor} is open for reading only: name one to write to")


def _roles(environment: Mapping[str, str], command: str) -> roles.Roles:
    """Return the role of this process and its job."""
    found = roles.find(environment, command)
    if found is None:
        raise ConfigError("KVSTORE_ROLE is not set: call `kvstore scheduler` or `kvstore server`")
    return found
