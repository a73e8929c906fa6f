"""Which processes can share memory: those of one host, in the same namespaces of the kernel."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from .environment import text_of

#: A region is found by an abstract socket and opened through /proc: each belongs to a namespace.
_NAMESPACES = ("net", "pid")
_ALONE = f"{os.getpid()}-{secrets.token_hex(8)}"  # for a process that shares memory with no other process
_NO_ADDRESS = "None"  # text of a setting without variable and default


def host_identity() -> str:
    """Return the same text in all processes that can share memory with this process, and in no other process.

    Processes with different addresses (``KVSTORE_HOST``) count as processes of different hosts, also on one
    machine. A process without /proc counts as the only process of its host.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
    except FileNotFoundError:
        boot, namespaces = f"without-proc-{_ALONE}", []
    return " ".join((boot, *namespaces, str(os.geteuid()), text_of("host")))


def is_same_host(identity: str, other: str) -> bool:
    """Return whether processes with these identities can share memory.

    Addresses are compared only if both have one: a launcher gives addresses to servers and not to workers.
    """
    (host, _, address), (other_host, _, other_address) = identity.rpartition(" "), other.rpartition(" ")
    return host == other_host and (address == other_address or _NO_ADDRESS in (address, other_address))
