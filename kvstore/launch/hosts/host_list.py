"""The hosts of a job: --hosts and host files, the workers of each host, and the addresses of the hosts."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.settings import addresses

from ..child_process import ProcessRole

_MOST = 1 << 16  # slots of a host
#: A name never begins with a dash: ssh would read it as an option.
_NAME = r"(?:[A-Za-z0-9_][^\s@:,\[\]]*@)?(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_][^\s@:,\[\]]*)"
_ENTRY = re.compile(rf"({_NAME})(?::([0-9]{{1,6}}))?")
_SLOTS = re.compile(r"(slots|max_slots|max-slots)=([0-9]{1,6})")


@dataclass(frozen=True)
class Host:
    """One host: its name for ssh, with or without ``user@``, and its slots, if the list has slots."""

    name: str
    slots: int | None = None

    @property
    def address(self) -> str | None:
        """The numeric address that this host resolves the name to."""
        return addresses.resolve_host(self.name.rpartition("@")[2])


def of_list(text: str) -> tuple[Host, ...]:
    """Return the hosts of --hosts: ``a:4,b:4`` or ``a,b``.

    ConfigError is raised if an entry is no host, a host is listed twice, or only some hosts have slots.
    """
    return _checked_hosts("--hosts", [_host_of_word(word.strip()) for word in text.split(",")])


def of_file(path: str) -> tuple[Host, ...]:
    """Return the hosts of a file as for Open MPI and MXNet: one host per line, with or without ``slots=4``.

    ConfigError is raised if the file cannot be read, and as from `of_list`.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the host file {path} cannot be read: {error}") from error
    return _checked_hosts(path, list(_hosts_of_lines(path, lines)))


def worker_counts(hosts: Sequence[Host], workers: int) -> list[int]:
    """Return the number of workers of each host: its slots, in order; without slots they are equal.

    ConfigError is raised if there are more workers than slots.
    """
    if hosts[0].slots is None:
        least, more = divmod(workers, len(hosts))
        return [least + (index < more) for index in range(len(hosts))]
    found: list[int] = []
    for host in hosts:
        found.append(min(host.slots or 0, workers - sum(found)))
    if left := workers - sum(found):
        raise ConfigError(
            f"{workers} workers do not fit on hosts with {workers - left} slots: give the hosts more slots, "
            "or omit the slots to distribute the workers evenly"
        )
    return found


class HostLayout:
    """The host of each process of a job: contiguous ranks share a host, servers are distributed in turn.

    Hosts without a worker are omitted. ConfigError is raised if the workers do not fit, or a host has no
    address at which the others can reach it.
    """

    def __init__(self, hosts: Sequence[Host], workers: int, servers: int) -> None:
        counts = worker_counts(hosts, workers)
        chosen = [(host, count) for host, count in zip(hosts, counts, strict=True) if count]
        self.hosts = tuple(host for host, _ in chosen)
        #: The numeric address of each host.
        self.addresses = _reachable_addresses(self.hosts)
        #: For each worker its host, its rank there, and the number of workers there.
        self._places = [(index, rank, n) for index, (_, n) in enumerate(chosen) for rank in range(n)]

    def host(self, part: ProcessRole) -> int:
        """Return the index of the host of a process. The scheduler runs on the first."""
        if part.role == "worker":
            return self._places[part.rank][0]
        return part.rank % len(self.hosts)

    def local(self, rank: int) -> tuple[int, int]:
        """Return the rank of a worker on its host, and the number of workers there."""
        return self._places[rank][1:]

    def address(self, part: ProcessRole) -> str:
        """Return the address of the host of a process."""
        return self.addresses[self.host(part)]


def _host_of_word(word: str) -> Host:
    match = _ENTRY.fullmatch(word)
    if match is None:
        raise ConfigError(f"{word!r} in --hosts is not a host: write names or addresses, as in a:4,b:4")
    return Host(_without_brackets(match[1]), None if match[2] is None else _slot_count(word, match[2]))


def _hosts_of_lines(path: str, lines: Sequence[str]) -> Iterator[Host]:
    for number, line in enumerate(lines, 1):
        name, *settings = line.partition("#")[0].split() or [""]
        if not name:
            continue
        where = f"line {number} of {path}"
        if re.fullmatch(rf"{_NAME}:[0-9]+", name):
            raise ConfigError(
                f"{where} says {name!r}, which could be a port or a number of slots: write slots=4 for "
                "slots; put a port of ssh into ~/.ssh/config or --ssh-command"
            )
        if not re.fullmatch(_NAME, name):
            raise ConfigError(f"{where} begins with {name!r}, which is not a host")
        yield Host(_without_brackets(name), _slots_of_line(where, settings))


def _slots_of_line(where: str, settings: Sequence[str]) -> int | None:
    """Return the slots of a line; max_slots has no effect, since no host gets more workers than slots."""
    found = None
    for setting in settings:
        match = _SLOTS.fullmatch(setting)
        if match is None:
            raise ConfigError(f"{where} says {setting!r}; known is slots=4")
        if match[1] == "slots":
            found = _slot_count(where, match[2])
    return found


def _slot_count(where: str, text: str) -> int:
    if not 1 <= int(text) <= _MOST:
        raise ConfigError(f"{where}: the number of slots must be from 1 to {_MOST}")
    return int(text)


def _without_brackets(name: str) -> str:
    """Remove the brackets of an IPv6 address: ssh does not accept them."""
    return name.replace("[", "").replace("]", "")


def _checked_hosts(source: str, hosts: list[Host]) -> tuple[Host, ...]:
    if not hosts:
        raise ConfigError(f"{source} names no host")
    names = [host.name for host in hosts]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise ConfigError(f"{source} names {twice[0]!r} twice: name it once, with all of its slots")
    if len({host.slots is None for host in hosts}) > 1:
        raise ConfigError(
            f"{source} gives the slots of some hosts only: give them for all hosts, or for none"
        )
    return tuple(hosts)


def _reachable_addresses(hosts: Sequence[Host]) -> tuple[str, ...]:
    found = [(host.name, host.address) for host in hosts]
    loopbacks = [address is not None and addresses.is_loopback(address) for _, address in found]
    for (name, address), loopback in zip(found, loopbacks, strict=True):
        if address is None:
            raise ConfigError(
                f"host {name!r} is not known here: list the address at which other hosts reach it"
            )
        # Only if all of them are this very machine can they reach each other.
        if loopback and not all(loopbacks):
            raise ConfigError(
                f"host {name!r} is {address} here, which is a loopback address on other hosts: list the "
                "address at which they reach it"
            )
    return tuple(address for _, address in found if address is not None)
