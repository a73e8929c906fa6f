"""Checks of sockets, names and encryption of jobs with servers. A report has no addresses."""

from __future__ import annotations

import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from kvstore.settings import addresses
from kvstore.settings.environment import process_variables

from .checks import CheckFinding, error, ok, warning

_DEADLINE = 5.0


def interfaces(found: Mapping[str, str] | None = None) -> CheckFinding:
    """List the network interfaces by which other machines can reach this one."""
    found = addresses.interface_addresses() if found is None else found
    others = [name for name, address in found.items() if not addresses.is_loopback(address)]
    if not others:
        return ok("none with an address but loopback: a job has all of its processes on this machine")
    choice = "; if other machines can reach only one, set DMLC_INTERFACE or KVSTORE_HOST"
    return ok(", ".join(others) + choice * (len(others) > 1))


def host_name(name: str | None = None) -> CheckFinding:
    """Resolve the name of this machine, as MPI, Horovod and torchrun do, and kvstore does not."""
    if addresses.resolve_host(socket.gethostname() if name is None else name) is None:
        return warning("the name of this machine has no address: MPI, Horovod and torchrun may not start")
    return ok("has an address")


def ports(host: str | None = None) -> CheckFinding:
    """Listen at a free port, connect to it, and send a byte."""
    host = addresses.loopback_address() if host is None else host
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.create_server((host, 0), family=family) as listener:
            listener.settimeout(_DEADLINE)
            with socket.create_connection(listener.getsockname()[:2], _DEADLINE) as here:
                there, _ = listener.accept()
                with there:
                    here.sendall(b"x")
                    there.settimeout(_DEADLINE)
                    if there.recv(1) != b"x":
                        raise OSError("the connection was closed")
    except OSError as refused:
        return error(f"no connection over {host} ({refused}): stores on servers cannot start over tcp")
    return ok(f"a free port of {host} accepts connections")


def encryption() -> CheckFinding:
    """Check that ZeroMQ has CURVE, and count the ciphers of streams."""
    import zmq

    from kvstore.stores.parameter_server.transport import ciphers

    name = f"ZeroMQ {zmq.zmq_version()}"
    if not zmq.has("curve"):
        return warning(f"{name} has no CURVE: jobs with keys, on several machines, cannot start")
    numbers = ciphers.available_ciphers()
    if not numbers:
        slow = "without libsodium's ciphers: data of jobs with keys is encrypted slowly"
        return warning(f"{name} with CURVE, {slow}")
    return ok(f"{name} with CURVE, and {len(numbers)} ciphers for streams")


def keys_file(environment: Mapping[str, str] | None = None) -> CheckFinding:
    """Check the permissions of the file of keys, if one is set; its content is not read."""
    env = process_variables() if environment is None else environment
    path = env.get("KVSTORE_KEYS_FILE")
    if not path:
        return ok("KVSTORE_KEYS_FILE is not set; `kvstore run` creates keys itself")
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode)
        with open(path, "rb"):
            pass
    except OSError as refused:
        text = f"the file that KVSTORE_KEYS_FILE names cannot be read: {refused.strerror}"
        return error(text, "create keys with `kvstore keys`, one file for each process")
    text = f"the file that KVSTORE_KEYS_FILE names has mode {mode:o}"
    if mode & 0o077:
        return error(f"{text}: others can read it, and kvstore refuses it")
    return ok(text)
