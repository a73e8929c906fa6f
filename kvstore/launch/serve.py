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
from kvstore.settings.definitions import SETTINGS
from kvstore.settings.environment import first_set, process_variables
from kvstore.settings.parameter_server import ps_config

from .process import DESERTED
from .signals import write_timeline

#: Variables that an option replaces besides the aliases of its setting.
_REPLACED = {
    "scheduler": ("DMLC_PS_ROOT_URI", "DMLC_PS_ROOT_PORT", "DMLC_LOCAL"),
    "keys_file": ("KVSTORE_KEYS_FD",),
}


def role_variables(role: str, options: Mapping[str, object]) -> dict[str, str]:
    """Return the variables of this process, with its role and the options of the command, named as settings.

    None leaves a variable as it is.
    """
    options = {**options, "role": role, "insecure": 1 if options["insecure"] else None}
    given = {name: str(value) for name, value in options.items() if value is not None}
    replaced = {alias for name in given for alias in (*SETTINGS[name].names()[1:], *_REPLACED.get(name, ()))}
    kept = {variable: text for variable, text in process_variables().items() if variable not in replaced}
    return kept | {SETTINGS[name].variable: text for name, text in given.items()}


def address_option(host: str | None, port: int | None) -> str | None:
    """Return the address of --host and --port; None if neither is given and a variable has the address.

    A host that means all addresses is replaced by the first address that other hosts can reach.
    """
    variable = first_set(process_variables(), ("KVSTORE_SCHEDULER", "DMLC_PS_ROOT_URI"))
    if host is None and port is None and variable:
        return None
    host = host or addresses.loopback_address()
    number = addresses.resolve_host(host)
    if number is not None and addresses.is_wildcard(number):
        host = addresses.outward_address()
    return addresses.tcp_address(host, port or 0)


def run_scheduler(
    environment: Mapping[str, str], report: Callable[[str], None], launched: bool = False
) -> None:
    """Run the scheduler; `report` is called with its address when other processes can connect.

    With `launched`, a scheduler to which no worker has connected ends on SIGTERM with the code `DESERTED`.
    """
    found = _found_roles(environment, "kvstore scheduler")
    from kvstore.stores.parameter_server import role_process

    def bound(address: str) -> None:
        """Report the address for other processes, which can differ from that of the socket."""
        report(found.bound(addresses.split_address(address)[1]).scheduler)

    role_process.serve_scheduler(
        found, ps_config(environment), bound, _report_if_deserted if launched else None
    )


def _report_if_deserted(deserted: Callable[[], bool]) -> None:
    def end(number: int, frame: object) -> NoReturn:
        write_timeline()
        os._exit(DESERTED if deserted() else 128 + number)

    signal.signal(signal.SIGTERM, end)


def run_server(environment: Mapping[str, str], imports: Sequence[str]) -> None:
    """Run a server, after the import of the modules that register its optimizers and codecs."""
    found = _found_roles(environment, "kvstore server")
    for name in imports:
        _import_module(name)
    from kvstore.stores.parameter_server import role_process

    role_process.serve_server(found, ps_config(environment))


def _import_module(name: str) -> None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        raise ConfigError(
            f"--import {name}: {error}; servers search the path of Python and the folder of the script "
            "(PYTHONPATH)"
        ) from error


def address_reporter(descriptor: int | None, show: Callable[[str], None]) -> Callable[[str], None]:
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


def _found_roles(environment: Mapping[str, str], command: str) -> roles.Roles:
    """Return the role of this process and its job."""
    found = roles.find(environment, command)
    if found is None:
        raise ConfigError("KVSTORE_ROLE is not set: call `kvstore scheduler` or `kvstore server`")
    return found
