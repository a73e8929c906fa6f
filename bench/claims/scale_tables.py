"""The page of `python -m bench scale`, from its JSON."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from bench.cases.common import MB
from bench.runner import table

Case = dict[str, Any]

ABOUT = """State machines of workers, servers and scheduler, and the native rounds of the servers, are real;
processors, links and clock are simulated. How, and what is left out:
[bench/README.md](../README.md#a-job-of-hundreds-simulated). What to set when:
[docs/how-to/scale.md](../../docs/how-to/scale.md).
"""
STEP = """A step is a pushpull of all keys, from when the last worker has all of the one before to when it has
all. 8 workers a host, 64 servers on hosts of their own, links of 10 Gbit/s and 50 µs. *By host*: a host sums
first, which takes what `shared` takes here, and sends once. *Busy*: the part of the step that the busiest of
its kind is.
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
    """Write all tables of which there is anything."""
    cases = results["cases"]
    parts = ["# A job of hundreds, simulated\n", f"{results['machine']}.\n", ABOUT]
    parts += _costs(results["costs"])
    for name, lay in _SECTIONS:
        there = [one for one in cases if one["group"] == name]
        if there:
            parts += lay(there)
    for name, heading in HEADINGS.items():
        parts += _steps(name, heading, [one for one in cases if one["group"] == name])
    return "\n".join(parts)


# ---------------------------------------------------------------------------------- costs and checks


def _costs(costs: dict[str, float]) -> Iterator[str]:
    rows = [[f"`{name}`", _small(one)] for name, one in costs.items() if name != "host_workers"]
    yield from table.section("What things cost", ["seconds of a core", "fitted to real jobs"], rows)


def _small(seconds: float) -> str:
    if seconds >= 1e-6:
        return table.time(seconds)
    return f"{1e9 * seconds:.3g} ns"


def _checks(cases: list[Case]) -> Iterator[str]:
    rows = []
    for one in cases:
        real, made = one["figures"]["real"], one["figures"]["simulated"]
        exact = all(_is_same(real[name], made[name]) for name in ("sent", "received", "rounds"))
        error = made["seconds"] / real["seconds"] - 1
        core = (made["worker"] * one["about"]["real"]["workers"] + made["server"]) / (
            real["worker"] * one["about"]["real"]["workers"] + real["server"]
        ) - 1
        row = [one["case"], f"{real['rounds']:g}", f"{real['sent'] / 1024:,.0f} KB", table.mark(exact)]
        spread = one["figures"]["spread"]
        row += [f"{table.time(real['seconds'])} [{table.time(spread[0])}-{table.time(spread[-1])}]"]
        row += [table.time(made["seconds"]), f"{100 * error:+.0f} %"]
        rows.append([*row, f"{100 * core:+.0f} %", table.mark(abs(error) <= 0.25)])
    head = ["job on this machine", "requests of a call", "bytes of a call", "both exact", "real", "simulated"]
    head += ["error", "error in processor seconds", "within 25 %"]
    yield from table.section("Checked with more workers than it was fitted to", head, rows)


def _is_same(real: float, made: float) -> bool:
    return abs(real - made) < 1e-6 * max(1.0, abs(made))


def _exact(cases: list[Case]) -> Iterator[str]:
    rows = []
    for one in cases:
        f = one["figures"]
        row = [one["case"], table.time(f["whole"]), table.time(f["scaled"]), f"{100 * f['error']:+.1f} %"]
        rows.append(row)
    head = ["model", "a step of all of it", "from two parts of it", "error"]
    yield from table.section("Parts for the whole", head, rows)


# ---------------------------------------------------------------------------------------------- steps


def _steps(group: str, heading: str, cases: list[Case]) -> Iterator[str]:
    if not cases:
        return
    rows = [_step(one) for one in cases]
    head = ["job", "keys", "MB", "step", "worker's link busy", "server's link busy", "server's core busy"]
    head += ["worker's core busy", "bound by", "init"]
    yield from table.section(heading, head, rows)
    if group == "step":
        yield STEP


def _step(one: Case) -> list[str]:
    f = one["figures"]
    shares = f["shares"]
    names = ("worker link", "server link", "server core", "worker core")
    busy = [f"{100 * shares[name]:.0f} %" for name in names]
    row = [one["case"], f"{f['keys']:,}", f"{f['bytes'] / MB:,.0f}", table.time(f["seconds"])]
    return [*row, *busy, f["bound"], table.time(f["init"])]


def _training(cases: list[Case]) -> Iterator[str]:
    rows = [
        [one["case"], table.time(one["figures"]["seconds"]), table.time(one["figures"]["exposed"])]
        for one in cases
    ]
    about = cases[0]["about"]
    job = f"{about['workers']} workers, {about['servers']} servers"
    heading = f"A call for each key while the network computes: {job}"
    yield from table.section(heading, ["job", "step", "of which nothing is computed"], rows)


# -------------------------------------------------------------------------------------------- control


def _scheduler(cases: list[Case]) -> Iterator[str]:
    rows = []
    for one in cases:
        for phase in ("start", "init", "barrier", "steady", "end"):
            f = one["figures"][phase]
            seconds = max(f["seconds"], 1e-9)
            row = [
                one["case"],
                phase,
                table.time(seconds),
                f"{f['messages']:,.0f}",
                f"{f['messages'] / seconds:,.0f}",
            ]
            row += [f"{f['bytes'] / MB:,.1f}", table.time(f["core"]), f"{100 * f['core'] / seconds:.0f} %"]
            rows.append(row)
    head = ["job", "phase", "seconds", "messages", "a second", "MB", "of its core", "busy"]
    yield from table.section("The scheduler", head, rows)


def _losses(cases: list[Case]) -> Iterator[str]:
    rows = []
    for one in cases:
        f = one["figures"]
        core, messages = table.time(f["core"]), f"{f['messages']:,.0f}"
        became = f"{f['error']} in {f['failed']:,}" if f["failed"] else f"all {f['there']:,} go on"
        became = became if f["ended"] else "**not all ended**"
        rows.append([one["case"], table.time(f["seconds"]), became, messages, core])
    head = [
        "who dies in a step",
        "until the last of the others has gone on",
        "they",
        "scheduler's messages",
        "its core",
    ]
    yield from table.section("Losses, 1,024 workers and 64 servers", head, rows)


_SECTIONS: tuple[tuple[str, Callable[[list[Case]], Iterator[str]]], ...] = (
    ("check", _checks),
    ("exact", _exact),
    ("p3", _training),
    ("scheduler", _scheduler),
    ("losses", _losses),
)
