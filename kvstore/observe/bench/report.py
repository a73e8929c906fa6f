"""The table and the picture, both made of the object that --json writes."""

from __future__ import annotations

import importlib
import os
import platform
import re
import statistics
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from kvstore.atomic_files import atomic_replacement
from kvstore.errors import MissingBackendError
from kvstore.observe.doctor.system_files import ROOT, kilobytes, size, text
from kvstore.observe.text_table import table_lines
from kvstore.store_kinds import STORES

from .key_lists import BenchKey
from .rounds import PeerWay, round_ratios
from .settings import BenchSettings

#: Names of the rows that are measured in the workers of the store.
OURS, MEMCPY = "kvstore", "memcpy"


def report_object(
    settings: BenchSettings,
    name: str,
    keys: Sequence[BenchKey],
    ways: Sequence[PeerWay],
    versions: Mapping[str, str],
    left_out: Mapping[str, str],
) -> dict[str, Any]:
    """Make what --json writes, in seconds and bytes, of the best way of each peer; the store's is first."""
    model = re.search(r"^model name\s*: (.+)$", text(ROOT / "proc/cpuinfo") or "", re.MULTILINE)
    nbytes = sum(key.nbytes for key in keys)
    types = list(dict.fromkeys(key.dtype for key in keys))
    found = {
        "machine": {
            "processor": model[1] if model else platform.machine(),
            "cores": len(os.sched_getaffinity(0)),
            "memory": kilobytes(ROOT / "proc/meminfo", "MemTotal"),
            "system": f"{platform.system()} {platform.release().partition('-')[0]}",
        },
        "versions": versions,
        **settings._asdict(),
        "keys": {"name": name, "count": len(keys), "bytes": nbytes, "dtypes": types},
        "peers": [_peer_object(way, ways[0], nbytes) for way in ways],
        "left_out": left_out,
    }
    return {**found, "notes": list(_result_notes(found))}


def _peer_object(way: PeerWay, ours: PeerWay, nbytes: int) -> dict[str, Any]:
    return {
        "peer": way.peer,
        "way": way.name,
        "median": way.median,
        "min": min(way.seconds),
        "max": max(way.seconds),
        "seconds": way.seconds,
        "bytes_per_second": nbytes / way.median,
        "ratio": statistics.median(round_ratios(way.seconds, ours.seconds)),
        "sums_checked": way.peer != MEMCPY,
    }


def _result_notes(found: Mapping[str, Any]) -> Iterator[str]:
    """Say what the figures do not show by themselves."""
    yield "GB/s: gradients of one worker ÷ time of a call, which is that of its slowest worker"
    yield f"{MEMCPY}: one thread of each worker copies its gradients to other memory and back"
    others = ", ".join(row["peer"] for row in found["peers"] if row["peer"] not in (OURS, MEMCPY))
    for what, option in (("compression", "compression"), ("an update of weights", "optimizer")):
        if others and found[option]:
            yield f"{others}: sums without {what}"
    processes, cores = found["workers"] + found["servers"], found["machine"]["cores"]
    if processes > cores:
        yield f"{processes} workers and servers share {cores} cores: some wait while others compute"
    if not STORES[found["store"]].synchronous:
        yield f"{found['store']} does not sum: each push replaces the value, or updates the weight"


def report_lines(found: Mapping[str, Any]) -> Iterator[str]:
    """Lay out the table."""
    where, keys = found["machine"], found["keys"]
    memory = f", {size(where['memory'])}" if where["memory"] else ""
    yield f"{where['processor']}, {where['cores']} cores usable{memory}, {where['system']}"
    yield ", ".join(f"{name} {version}" for name, version in found["versions"].items())
    codec = "=".join(map(str, (found["compression"] or {}).values()))
    parts = [f"store {found['store']}", f"workers: {found['workers']}", found["method"]]
    parts[2:2] = [f"servers: {found['servers']}"] if found["servers"] else []
    parts += [f"compression {codec}"] if codec else []
    yield ", ".join(parts + ([f"optimizer {found['optimizer']}"] if found["optimizer"] else []))
    amount = f"{keys['count']} keys, {size(keys['bytes'])} of {' and '.join(keys['dtypes'])}"
    yield f"{keys['name']}: {amount} in each worker; rounds: {found['rounds']}"
    yield ""
    titles = ("peer", "median", "min-max", "GB/s", "÷ kvstore")
    yield from table_lines(titles, *map(_table_row, found["peers"]), between="   ")
    yield ""
    yield from (f"{name} is left out: {why}" for name, why in found["left_out"].items())
    yield from found["notes"]


def _table_row(row: Mapping[str, Any]) -> tuple[str, ...]:
    spread = f"{time_text(row['min'])} - {time_text(row['max'])}"
    rate = f"{row['bytes_per_second'] / 1e9:#.3g}".removesuffix(".")
    return _peer_name(row, " "), time_text(row["median"]), spread, rate, f"{row['ratio']:.2f}"


def _peer_name(row: Mapping[str, Any], between: str) -> str:
    return f"{row['peer']}{between}({row['way']})" if row["way"] else str(row["peer"])


def time_text(seconds: float) -> str:
    """Write three digits with a unit."""
    unit, scale = next((u for u in (("s", 1.0), ("ms", 1e3)) if seconds * u[1] >= 0.9995), ("µs", 1e6))
    return f"{f'{seconds * scale:#.3g}'.removesuffix('.')} {unit}"


def new_figure(**options: Any) -> Any:
    """Make a figure of matplotlib, which needs no screen; or raise MissingBackendError."""
    try:
        return importlib.import_module("matplotlib.figure").Figure(**options)
    except ImportError as error:
        raise MissingBackendError(f"--plot needs matplotlib: pip install matplotlib ({error})") from error


def draw_report(found: Mapping[str, Any], path: str) -> None:
    """Draw a dot for each round and a line at the median, a row for each peer; the name says the format."""
    peers = found["peers"]
    figure = new_figure(figsize=(8, 1.5 + 0.5 * len(peers)), layout="constrained")
    axes = figure.subplots()
    for at, row in enumerate(peers):
        axes.plot([1e3 * s for s in row["seconds"]], [at] * found["rounds"], "o", alpha=0.5, color=f"C{at}")
        axes.plot([1e3 * row["median"]] * 2, [at - 0.3, at + 0.3], color=f"C{at}", linewidth=2)
    axes.set(yticks=range(len(peers)), yticklabels=[_peer_name(row, "\n") for row in peers])
    axes.invert_yaxis()
    axes.set_xlim(left=0)
    axes.set_xlabel("ms for one call with all keys")
    title = f"{found['keys']['name']}, store {found['store']}, workers: {found['workers']}"
    figure.suptitle(title, fontsize="medium")
    with atomic_replacement(path) as temporary:
        figure.savefig(temporary, dpi=120, format=os.path.splitext(path)[1][1:].lower() or "png")
