"""Which processes can share memory: those of one host, as far as the kernel lets them meet."""

from __future__ import annotations

import os
import secrets
from pathlib import Path

from .variables import text_of

#: A region is found by an abstract socket and opened by /proc: both are of a namespace.
_NAMESPACES = ("net", "pid")
_ALONE = f"{os.getpid()}-{secrets.token_hex(8)}"  # of a process that shares memory with no other
_NO_ADDRESS = "None"  # as `text_of` says that there is no default


def host_identity() -> str:
    """Name the host of this process: the same text in all processes that can share memory, and in no other.

    A process that has an address of its own (``KVSTORE_HOST``) counts as one of another host than those with
    another address, although it may be on the same machine. So does a process without /proc.
    """
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespaces = [os.readlink(f"/proc/self/ns/{name}") for name in _NAMESPACES]
    except FileNotFoundError:
        boot, namespaces = f"without-proc-{_ALONE}", []
    return " ".join((boot, *namespaces, str(os.geteuid()), text_of("host")))


def is_beside(one: str, other: str) -> bool:
    """Whether processes with these identities can share memory: an address counts if both have one.

    A launcher gives addresses to servers and not to workers.
    """
    (where, _, address), (there, _, another) = one.rpartition(" "), other.rpartition(" ")
    return where == there and (address == another or _NO_ADDRESS in (address, another))
