"""Sockets, names and encryption of jobs with servers. No addresses are told: a report may be public."""

from __future__ import annotations

import socket
import stat
from collections.abc import Mapping
from pathlib import Path

from kvstore.settings import addresses
from kvstore.settings.variables import process_variables

from .findings import Finding

_DEADLINE = 5.0


def interfaces(found: Mapping[str, str] | None = None) -> Finding:
    """List the network interfaces by which other machines can reach this one."""
    found = addresses.interfaces() if found is None else found
    others = [name for name, address in found.items() if not addresses.is_loopback(address)]
    if not others:
        text = "none with an address but loopback: a job has all of its processes on this machine"
        return Finding("interfaces", "ok", text)
    text = ", ".join(others)
    if len(others) > 1:
        text += "; if other machines can reach only one, set DMLC_INTERFACE or KVSTORE_HOST"
    return Finding("interfaces", "ok", text)


def host_name(name: str | None = None) -> Finding:
    """Look up the name of this machine: MPI, Horovod and torchrun do, kvstore does not."""
    name = socket.gethostname() if name is None else name
    if addresses.resolved(name) is None:
        text = "the name of this machine has no address: MPI, Horovod and torchrun may not start"
        cure = 'echo "127.0.1.1 $(hostname)" | sudo tee -a /etc/hosts'
        return Finding("host name", "warning", text, cure)
    return Finding("host name", "ok", "has an address")


def ports(host: str | None = None) -> Finding:
    """Listen at a free port, connect to it, and send a byte."""
    host = addresses.loopback() if host is None else host
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
    except OSError as error:
        text = f"no connection over {host} ({error}): stores on servers cannot start over tcp"
        cure = "bring the interface up (sudo ip link set lo up), or use `kvstore run --transport ipc`"
        return Finding("ports", "error", text, cure)
    return Finding("ports", "ok", f"a free port of {host} accepts connections")


def encryption() -> Finding:
    """Look whether ZeroMQ has CURVE, and which ciphers streams have."""
    import zmq

    from kvstore.stores.parameter_server.transport import ciphers

    name = f"ZeroMQ {zmq.zmq_version()}"
    cure = "pip install --force-reinstall --only-binary pyzmq pyzmq, whose wheels have libsodium"
    if not zmq.has("curve"):
        text = f"{name} has no CURVE: jobs with keys, on several machines, cannot start"
        return Finding("encryption", "warning", text, cure)
    numbers = ciphers.available()
    if not numbers:
        text = f"{name} with CURVE, without libsodium's ciphers: data of jobs with keys is encrypted slowly"
        return Finding("encryption", "warning", text, cure)
    return Finding("encryption", "ok", f"{name} with CURVE, and {len(numbers)} ciphers for streams")


def keys_file(environment: Mapping[str, str] | None = None) -> Finding:
    """Look at the permissions of the file of keys, where one is set; its content is not read."""
    env = process_variables() if environment is None else environment
    path = env.get("KVSTORE_KEYS_FILE")
    if not path:
        return Finding("keys file", "ok", "KVSTORE_KEYS_FILE is not set; `kvstore run` creates keys itself")
    try:
        mode = stat.S_IMODE(Path(path).stat().st_mode)
        with open(path, "rb"):
            pass
    except OSError as error:
        text = f"the file that KVSTORE_KEYS_FILE names cannot be read: {error.strerror}"
        cure = "create keys with `kvstore keys`, one file for each process"
        return Finding("keys file", "error", text, cure)
    text = f"the file that KVSTORE_KEYS_FILE names has mode {mode:o}"
    if mode & 0o077:
        text += ": others can read it, and kvstore refuses it"
        cure = 'create new keys (`kvstore keys`), or at least chmod 600 "$KVSTORE_KEYS_FILE"'
        return Finding("keys file", "error", text, cure)
    return Finding("keys file", "ok", text)
