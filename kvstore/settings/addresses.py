"""Network addresses: their syntax, those of this machine, and the one that faces another machine."""

from __future__ import annotations

import contextlib
import functools
import ipaddress
import re
import socket
import struct
from pathlib import Path

from ..errors import ConfigError

_LOOPBACK, _LOOPBACK6 = "127.0.0.1", "::1"
_LINK_SCOPE = 0x20
_SIOCGIFADDR = 0x8915  # Linux: the IPv4 address of an interface
_LONGEST_NAME = 107  # bytes of a unix socket's name
_IPC = re.compile(r"ipc://(\S+)")
_TCP = re.compile(r"tcp://(\[[0-9a-fA-F:.]+(?:%\w+)?\]|[^\s:\[\]/]+):([0-9]{1,5})")


def check_address(name: str, address: str) -> None:
    """Raise ConfigError unless the value of variable `name` is ``tcp://host:port`` or ``ipc://name``."""
    if match := _IPC.fullmatch(address):
        if len(match[1].encode()) > _LONGEST_NAME:
            raise ConfigError(
                f"{name}={address!r} is longer than the {_LONGEST_NAME} bytes of a socket's name"
            )
        return
    match = _TCP.fullmatch(address)
    if match is None or int(match[2]) > 65535:
        raise ConfigError(
            f"{name} is {address!r}, which is not an address: use one such as tcp://10.0.0.5:4711 "
            "or ipc://@name"
        )


def split_address(address: str) -> tuple[str, int]:
    """Return host and port of a tcp address that was checked; an IPv6 host keeps its brackets."""
    match = _TCP.fullmatch(address)
    return (match[1], int(match[2])) if match else ("", 0)


def tcp_address(host: str, port: int) -> str:
    """Return the tcp address of host and port; brackets around an IPv6 host are added if missing."""
    return f"tcp://[{host}]:{port}" if ":" in host and not host.startswith("[") else f"tcp://{host}:{port}"


def interface_addresses() -> dict[str, str]:
    """Return the addresses of the network interfaces that have one, by name: IPv4, or else IPv6."""
    found = {}
    sixes = _ipv6_addresses()
    for _, name in socket.if_nameindex():
        with contextlib.suppress(OSError):
            found[name] = sixes.get(name, "")
            found[name] = _address_of(name)
    return {name: address for name, address in found.items() if address}


def outward_address(prefix: str = "") -> str:
    """Return the address of the first network interface that other hosts can reach, else the loopback.

    With `prefix`, only interfaces with a name that begins with it count, and the loopback is one of them.
    """
    found = [address for name, address in interface_addresses().items() if name.startswith(prefix)]
    return next((address for address in found if prefix or not is_loopback(address)), loopback_address())


def addresses_text(found: dict[str, str]) -> str:
    """Return a text that lists interfaces and addresses."""
    return ", ".join(f"{name} {address}" for name, address in found.items()) or "none with an address"


@functools.cache
def loopback_address() -> str:
    """Return the loopback address of this machine: IPv4 if it has one, else IPv6."""
    return _LOOPBACK6 if is_here(_LOOPBACK6) and not is_here(_LOOPBACK) else _LOOPBACK


def resolve_host(host: str) -> str | None:
    """Return the numeric address of a host, IPv4 if it has one; None if the name cannot be resolved."""
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError):
        return None
    numbers = sorted(found, key=lambda one: one[0] != socket.AF_INET)
    return str(numbers[0][4][0])


def is_loopback(number: str) -> bool:
    """Return whether a numeric address can be reached from this machine only."""
    return ipaddress.ip_address(number.partition("%")[0]).is_loopback


def is_wildcard(number: str) -> bool:
    """Return whether a numeric address stands for all addresses of the machine."""
    return ipaddress.ip_address(number.partition("%")[0]).is_unspecified


def is_here(number: str) -> bool:
    """Return whether a socket of this machine can be bound to the numeric address."""
    family = socket.AF_INET6 if ":" in number else socket.AF_INET
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        try:
            probe.bind((number, 0))
        except OSError:
            return False
    return True


def route_address(number: str) -> str | None:
    """Return the address of this machine on the route to `number`; None without a route. Sends nothing."""
    family = socket.AF_INET6 if ":" in number else socket.AF_INET
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((number, 9))
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _ipv6_addresses() -> dict[str, str]:
    """Return the IPv6 addresses of the network interfaces, by name: the first one that is not link-local."""
    found: dict[str, str] = {}
    with contextlib.suppress(OSError):  # no /proc, or no IPv6
        for line in Path("/proc/net/if_inet6").read_text().splitlines():
            digits, _, _, scope, _, name = line.split()
            if int(scope, 16) != _LINK_SCOPE:
                found.setdefault(name, str(ipaddress.IPv6Address(bytes.fromhex(digits))))
    return found


def _address_of(name: str) -> str:
    from fcntl import ioctl

    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        answer = ioctl(any_socket.fileno(), _SIOCGIFADDR, struct.pack("16s24x", name.encode()[:15]))
    return socket.inet_ntoa(answer[20:24])
