"""The page of `python -m bench scale`, from its JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bench.cases.common import MB
from bench.runner import table

Case = dict[str, Any]

ABOUT = """State machines of workers, servers and scheduler, and the native rounds of the servers, are real;
processors, links and clock are simulated. The method, and its omissions:
[bench/README.md](../README.md#a-job-of-hundreds-simulated). Settings by size:
[docs/how-to/scale.md](../../docs/how-to/scale.md).
"""
STEP = """A step is a pushpull of all keys; it lasts from the end of the previous step on the last worker to
its end on the last worker. 8 workers a host, 64 servers on hosts of their own, links of 10 Gbit/s and 50 µs.
*By host*: a host sums first, in the time that `shared` needs here, and sends once. *Busy*: the share of the
step in which the busiest link or core of its kind is busy.
"""
HEADINGS = {
    "step": "A step of 1,024 workers and 64 servers",
    "workers": "Step time over workers, 64 servers",
    "servers": "Step time over servers, 1,024 workers",
    "keys": "Step time over keys of 4 KB, 128 workers, 64 servers",
    "bytes": "Step time over bytes, 128 workers, 64 servers",
    "links": "Step time over links, 1,024 workers, 64 servers",
    "slices": "Step time over slices, by host, 1,024 workers, 64 servers",
}


def page(results: dict[str, Any]) -> str:
    """Format all tables that have rows."""
    cases = results["cases"]
    parts = ["# A job of hundreds, simulated\n", f"{results['machine']}.\n", ABOUT]
    rows = [[f"`{name}`", _small(one)] for name, one in results["costs"].items() if name != "host_workers"]
    parts += table.section("Costs", ["seconds of a core", "fitted to real jobs"], rows)
    for name, (heading, head, lay) in _SECTIONS.items():
        if there := [one for one in cases if one["group"] == name]:
            about = there[0]["about"]
            rows = [row for one in there for row in lay(one)]
            parts += table.section(heading.format(**about), head.split("|"), rows)
            parts += [STEP] if name == "step" else []
    return "\n".join(parts)


def _small(seconds: float) -> str:
    return table.time(seconds) if seconds >= 1e-6 else f"{1e9 * seconds:.3g} ns"


def _check(one: Case) -> Iterator[list[str]]:
    found, workers = one["figures"], one["about"]["real"]["workers"]
    real, made, spread = found["real"], found["simulated"], found["spread"]
    exact = all(
        abs(real[n] - made[n]) < 1e-6 * max(1.0, abs(made[n])) for n in ("sent", "received", "rounds")
    )
    error = made["seconds"] / real["seconds"] - 1
    ours, theirs = (kind["worker"] * workers + kind["server"] for kind in (made, real))
    row = [one["case"], f"{real['rounds']:g}", f"{real['sent'] / 1024:,.0f} KB", table.mark(exact)]
    row += [f"{table.time(real['seconds'])} [{table.time(spread[0])}-{table.time(spread[-1])}]"]
    row += [table.time(made["seconds"]), f"{100 * error:+.0f} %", f"{100 * (ours / theirs - 1):+.0f} %"]
    yield [*row, table.mark(abs(error) <= 0.25)]


def _exact(one: Case) -> Iterator[list[str]]:
    f = one["figures"]
    yield [one["case"], table.time(f["whole"]), table.time(f["scaled"]), f"{100 * f['error']:+.1f} %"]


def _step(one: Case) -> Iterator[list[str]]:
    f = one["figures"]
    names = ("worker link", "server link", "server core", "worker core")
    busy = [f"{100 * f['shares'][name]:.0f} %" for name in names]
    row = [one["case"], f"{f['keys']:,}", f"{f['bytes'] / MB:,.0f}", table.time(f["seconds"])]
    yield [*row, *busy, f["bound"], table.time(f["init"])]


def _training(one: Case) -> Iterator[list[str]]:
    yield [one["case"], table.time(one["figures"]["seconds"]), table.time(one["figures"]["exposed"])]


def _scheduler(one: Case) -> Iterator[list[str]]:
    for phase in ("start", "init", "barrier", "steady", "end"):
        f = one["figures"][phase]
        seconds = max(f["seconds"], 1e-9)
        rate, busy = f"{f['messages'] / seconds:,.0f}", f"{100 * f['core'] / seconds:.0f} %"
        row = [one["case"], phase, table.time(seconds), f"{f['messages']:,.0f}", rate]
        yield [*row, f"{f['bytes'] / MB:,.1f}", table.time(f["core"]), busy]


def _loss(one: Case) -> Iterator[list[str]]:
    f = one["figures"]
    became = f"{f['error']} in {f['failed']:,}" if f["failed"] else f"all {f['there']:,} continue"
    became = became if f["ended"] else "**not all ended**"
    yield [one["case"], table.time(f["seconds"]), became, f"{f['messages']:,.0f}", table.time(f["core"])]


_STEPS = "job|keys|MB|step|worker's link busy|server's link busy|server's core busy|worker's core busy"
_STEPS += "|bound by|init"
#: By group: the heading, the names of the columns, and the rows of a case.
_SECTIONS: dict[str, tuple[str, str, Callable[[Case], Iterator[list[str]]]]] = {
    "check": (
        "Checked with more workers than it was fitted to",
        "job on this machine|requests of a call|bytes of a call|both exact|real|simulated|error|"
        "error in processor seconds|within 25 %",
        _check,
    ),
    "exact": ("Parts for the whole", "model|a step of all of it|from two parts of it|error", _exact),
    "p3": (
        "A call for each key while the network computes: {workers} workers, {servers} servers",
        "job|step|of which nothing is computed",
        _training,
    ),
    "scheduler": ("The scheduler", "job|phase|seconds|messages|a second|MB|of its core|busy", _scheduler),
    "losses": (
        "Losses, 1,024 workers and 64 servers",
        "process that dies in a step|until the last survivor continues|survivors|scheduler's messages|"
        "scheduler's core",
        _loss,
    ),
    **{name: (heading, _STEPS, _step) for name, heading in HEADINGS.items()},
}
