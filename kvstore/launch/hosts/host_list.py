"""Hosts of a job: what --hosts and a host file say, how many workers each takes, where each is reached."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from kvstore.errors import ConfigError
from kvstore.settings import addresses

from ..child_process import ProcessRole

_MOST = 1 << 16  # slots of a host
#: A name never begins with a dash: ssh would take it for an option.
_NAME = r"(?:[A-Za-z0-9_][^\s@:,\[\]]*@)?(?:\[[0-9a-fA-F:.]+\]|[A-Za-z0-9_][^\s@:,\[\]]*)"
_ENTRY = re.compile(rf"({_NAME})(?::([0-9]{{1,6}}))?")
_SLOTS = re.compile(r"(slots|max_slots|max-slots)=([0-9]{1,6})")


@dataclass(frozen=True)
class Host:
    """One host of a list.

    Attributes
    ----------
    name : str
        As ssh takes it: a name or an address, with or without ``user@``.
    slots : int or None
        How many workers it takes; None where the list says that of no host.
    """

    name: str
    slots: int | None = None

    @property
    def address(self) -> str | None:
        """Address, as a number, by which this machine knows it."""
        return addresses.resolved(self.name.rpartition("@")[2])


def of_list(text: str) -> tuple[Host, ...]:
    """Read what --hosts says: ``a:4,b:4`` or ``a,b``.

    Raises
    ------
    ConfigError
        An entry is no host, a host comes twice, or some have slots and some have none.
    """
    return _checked("--hosts", [_entry(word.strip()) for word in text.split(",")])


def of_file(path: str) -> tuple[Host, ...]:
    """Read a host file as Open MPI and MXNet have it: a host a line, ``slots=4`` behind it or not.

    Raises
    ------
    ConfigError
        It cannot be read, or a line is none of these.
    """
    try:
        lines = Path(path).read_text().splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the host file {path} cannot be read: {error}") from error
    return _checked(path, list(_hosts(path, lines)))


def shares(hosts: Sequence[Host], workers: int) -> list[int]:
    """Say how many workers each host gets: its slots, the first hosts first; without slots as many each.

    Raises
    ------
    ConfigError
        There are more workers than slots.
    """
    if hosts[0].slots is None:
        least, more = divmod(workers, len(hosts))
        return [least + (index < more) for index in range(len(hosts))]
    found, left = [], workers
    for host in hosts:
        found.append(min(host.slots or 0, left))
        left -= found[-1]
    if left:
        raise ConfigError(
            f"{workers} workers do not fit on hosts with {workers - left} slots: give the hosts more slots, "
            "or omit the slots to distribute the workers evenly"
        )
    return found


class Layout:
    """Which process of a job runs on which host: ranks are contiguous, servers take turns.

    Parameters
    ----------
    hosts : sequence of Host
        Those that get no worker are left out.
    workers, servers : int
        How many there are.

    Raises
    ------
    ConfigError
        The workers do not fit, a host is not known here, or other hosts could not reach it.
    """

    def __init__(self, hosts: Sequence[Host], workers: int, servers: int) -> None:
        counts = shares(hosts, workers)
        chosen = [(host, count) for host, count in zip(hosts, counts, strict=True) if count]
        self.hosts = tuple(host for host, _ in chosen)
        #: Address of each host, as a number.
        self.addresses = _reached(self.hosts)
        #: Of each worker its host, and its number among how many there.
        self._places = [(index, rank, n) for index, (_, n) in enumerate(chosen) for rank in range(n)]

    def host(self, part: ProcessRole) -> int:
        """Index of the host on which a process runs. The scheduler has the first."""
        if part.role == "worker":
            return self._places[part.rank][0]
        return part.rank % len(self.hosts)

    def local(self, rank: int) -> tuple[int, int]:
        """Rank and number of a worker among those of its host."""
        return self._places[rank][1:]

    def address(self, part: ProcessRole) -> str:
        """Address of the host on which a process runs."""
        return self.addresses[self.host(part)]


def _entry(word: str) -> Host:
    match = _ENTRY.fullmatch(word)
    if match is None:
        raise ConfigError(f"{word!r} in --hosts is not a host: write names or addresses, as in a:4,b:4")
    return Host(_bare(match[1]), None if match[2] is None else _count(word, match[2]))


def _hosts(path: str, lines: Sequence[str]) -> Iterator[Host]:
    for number, line in enumerate(lines, 1):
        name, *settings = line.partition("#")[0].split() or [""]
        if not name:
            continue
        where = f"line {number} of {path}"
        if re.fullmatch(rf"{_NAME}:[0-9]+", name):
            raise ConfigError(
                f"{where} says {name!r}, which could be a port or a number of slots: write slots=4 for "
                f"slots; "
                "put a port of ssh into ~/.ssh/config or --ssh-command"
            )
        if not re.fullmatch(_NAME, name):
            raise ConfigError(f"{where} begins with {name!r}, which is not a host")
        yield Host(_bare(name), _slots(where, settings))


def _slots(where: str, settings: Sequence[str]) -> int | None:
    """Slots of a line; max_slots says what nobody here exceeds anyway."""
    found = None
    for setting in settings:
        match = _SLOTS.fullmatch(setting)
        if match is None:
            raise ConfigError(f"{where} says {setting!r}; known is slots=4")
        if match[1] == "slots":
            found = _count(where, match[2])
    return found


def _count(where: str, text: str) -> int:
    if not 1 <= int(text) <= _MOST:
        raise ConfigError(f"{where}: the number of slots must be from 1 to {_MOST}")
    return int(text)


def _bare(name: str) -> str:
    """Take the brackets of an IPv6 address away: ssh does not want them."""
    return name.replace("[", "").replace("]", "")


def _checked(source: str, hosts: list[Host]) -> tuple[Host, ...]:
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


def _reached(hosts: Sequence[Host]) -> tuple[str, ...]:
    found = [host.address for host in hosts]
    loopbacks = [number is not None and addresses.is_loopback(number) for number in found]
    for host, number, loopback in zip(hosts, found, loopbacks, strict=True):
        if number is None:
            raise ConfigError(
                f"host {host.name!r} is not known here: list the address at which other hosts reach it"
            )
        # Hosts that are all this very machine reach each other; some do not.
        if loopback and not all(loopbacks):
            raise ConfigError(
                f"host {host.name!r} is {number} here, which is a loopback address on other hosts: list the "
                "address at which they reach it"
            )
    return tuple(number for number in found if number is not None)
