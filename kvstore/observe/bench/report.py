"""The table for people, and the same as one object for JSON."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from kvstore.observe.doctor.system_files import size

from .key_lists import KeyList
from .rounds import Way
from .settings import BenchSettings
from .workers.store import MEMCPY, OURS

_HEAD = ("peer", "median", "min-max", "GB/s", "÷ kvstore")


@dataclass(frozen=True)
class Result:
    """What was measured, and under which conditions.

    Attributes
    ----------
    settings, keys : BenchSettings, KeyList
        What the user wanted.
    machine : mapping
        As `machine.described` makes it.
    versions : mapping of str to str
        Of all libraries.
    ways : sequence of Way
        The best of each peer; the store's own is the first.
    left_out : mapping of str to str
        Peers that were not measured, and why.
    printed : sequence of str
        What the store's processes have printed.
    """

    settings: BenchSettings
    keys: KeyList
    machine: Mapping[str, Any]
    versions: Mapping[str, str]
    ways: Sequence[Way]
    left_out: Mapping[str, str] = field(default_factory=dict)
    printed: Sequence[str] = ()


def ratios(way: Way, ours: Way) -> list[float]:
    """Time of a peer ÷ time of the store, round by round."""
    return [a / b for a, b in zip(way.seconds, ours.seconds, strict=True)]


def as_object(result: Result) -> dict[str, Any]:
    """Make what --json writes; times are in seconds, sizes in bytes."""
    settings, keys, ours = result.settings, result.keys, result.ways[0]
    return {
        "machine": dict(result.machine),
        "versions": dict(result.versions),
        "store": settings.store,
        "workers": settings.workers,
        "servers": settings.servers,
        "method": settings.method,
        "compression": settings.compression,
        "optimizer": settings.optimizer,
        "keys": {"name": keys.name, "count": len(keys.keys), "bytes": keys.nbytes, "dtypes": keys.dtypes},
        "rounds": settings.rounds,
        "peers": [_peer(way, ours, keys.nbytes) for way in result.ways],
        "left_out": dict(result.left_out),
        "notes": list(_notes(result)),
    }


def _peer(way: Way, ours: Way, nbytes: int) -> dict[str, Any]:
    return {
        "peer": way.peer,
        "way": way.name,
        "median": way.median,
        "min": min(way.seconds),
        "max": max(way.seconds),
        "seconds": way.seconds,
        "bytes_per_second": nbytes / way.median,
        "ratio": statistics.median(ratios(way, ours)),
        "sums_checked": way.peer != MEMCPY,
    }


def lines(result: Result) -> Iterator[str]:
    """Lay out the table."""
    yield from _header(result)
    yield ""
    rows = [_HEAD, *(_row(way, result.ways[0], result.keys.nbytes) for way in result.ways)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        first, *others = (f"{cell:>{width}}" for cell, width in zip(row, widths, strict=True))
        yield "   ".join([f"{first.strip():<{widths[0]}}", *others])
    yield ""
    yield from (f"{name} is left out: {why}" for name, why in result.left_out.items())
    yield from _notes(result)


def time(seconds: float) -> str:
    """Write three digits with a unit."""
    unit, scale = next((u for u in (("s", 1.0), ("ms", 1e3)) if seconds * u[1] >= 0.9995), ("µs", 1e6))
    return f"{_digits(seconds * scale)} {unit}"


def _digits(number: float) -> str:
    return f"{number:#.3g}".removesuffix(".")


def _header(result: Result) -> Iterator[str]:
    settings, keys, machine = result.settings, result.keys, result.machine
    memory = f", {size(machine['memory'])}" if machine["memory"] else ""
    yield f"{machine['processor']}, {machine['cores']} cores usable{memory}, {machine['system']}"
    yield ", ".join(f"{name} {version}" for name, version in result.versions.items())
    servers = f", servers: {settings.servers}" if settings.servers else ""
    how = [settings.method]
    if settings.compression:
        how.append("compression " + "=".join(map(str, settings.compression.values())))
    if settings.optimizer:
        how.append(f"optimizer {settings.optimizer}")
    yield f"store {settings.store}, workers: {settings.workers}{servers}, {', '.join(how)}"
    amount = f"{len(keys.keys)} keys, {size(keys.nbytes)} of {' and '.join(keys.dtypes)} in each worker"
    yield f"{keys.name}: {amount}; rounds: {settings.rounds}"


def _row(way: Way, ours: Way, nbytes: int) -> tuple[str, ...]:
    name = f"{way.peer} ({way.name})" if way.name else way.peer
    spread = f"{time(min(way.seconds))} - {time(max(way.seconds))}"
    ratio = statistics.median(ratios(way, ours))
    return name, time(way.median), spread, _digits(nbytes / way.median / 1e9), f"{ratio:.2f}"


def _notes(result: Result) -> Iterator[str]:
    """Say what the figures do not show by themselves."""
    settings = result.settings
    yield "GB/s: gradients of one worker ÷ time of a call, which is that of its slowest worker"
    yield f"{MEMCPY}: one thread of each worker copies its gradients to other memory and back"
    beside = [way.peer for way in result.ways if way.peer not in (OURS, MEMCPY)]
    for what, chosen in (("compression", settings.compression), ("an update of weights", settings.optimizer)):
        if beside and chosen:
            yield f"{', '.join(beside)}: sums without {what}"
    processes, cores = settings.workers + settings.servers, result.machine["cores"]
    if processes > cores:
        yield f"{processes} workers and servers share {cores} cores: some wait while others compute"
    if not settings.kind.synchronous:
        yield f"{settings.store} does not sum: each push replaces the value, or updates the weight"
