"""A profile of the processes of a case: ``python -m bench dist --profile CASE``.

Each process of one entry samples its own Python threads a thousand times a second, or with ``--calls``
counts and times the calls of its main thread. The kernel's figures of all threads, those of ZeroMQ included,
show how long they ran, and how long they waited for a core. Sampling makes calls slower.
"""

from __future__ import annotations

import contextlib
import json
import os
import statistics
import tempfile
import time as clock
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

from bench import ROOT
from bench.cases.dist import ENTRIES, DistCase
from bench.peers.dist import sampler
from bench.peers.dist.launch import DistGroup
from bench.peers.setting import Setting
from bench.runner.table import markdown, time

SECONDS = 3.0  # of profiled calls
SHOWN = 25
HEADS = {
    "lines": ["share of the time"],
    "functions": ["share of the time"],
    "function": ["calls", "itself", "with its callees"],
}
_TICKS = os.sysconf("SC_CLK_TCK")
_CUSTOM = f"import sys; sys.path.append({str(ROOT)!r}); from bench.peers.dist.sampler import start; start()"


class Thread(NamedTuple):
    """The kernel's counters of a thread, in seconds, and its name."""

    name: str
    ran: float
    waited: float
    user: float
    system: float

    def since(self, before: Thread | None) -> Thread:
        """Return the increase; a new thread started at zero."""
        return Thread(self.name, *(b - a for a, b in zip((before or _ZERO)[1:], self[1:], strict=True)))


_ZERO = Thread("", 0.0, 0.0, 0.0, 0.0)


def profile(case: DistCase, setting: Setting, way: str = "", calls: bool = False) -> str:
    """Run a case with one entry, and return the profile of its processes, by lines or by calls."""
    with tempfile.TemporaryDirectory(prefix="kvstore-bench-") as name:
        folder = Path(name)
        (folder / "sitecustomize.py").write_text(_CUSTOM)
        (folder / "control").write_bytes(bytes([sampler.IDLE]))
        path = os.pathsep.join(filter(None, (name, os.environ.get("PYTHONPATH", ""))))
        env = (("PYTHONPATH", path), (sampler.FOLDER, name), (sampler.CALLS, "1" if calls else ""))
        with DistGroup(replace(setting, env=env)) as group:
            return _profiled(case, group, folder, way)


def _profiled(case: DistCase, group: DistGroup, folder: Path, way: str) -> str:
    group.start_prepare(case)
    reply = group.finish_prepare()
    if isinstance(reply, str):
        raise SystemExit(reply)
    variant = next((v for v in reply[0] if v.startswith(way)), reply[0][0])
    plain = statistics.median(group.run(variant, 3))
    repeats = max(3, int(SECONDS / plain))
    before = {pid: _threads(pid) for pid in group.pids}
    _order(folder, sampler.SAMPLING)
    times = group.run(variant, repeats)
    _order(folder, sampler.TELLING)
    after = {pid: _threads(pid) for pid in group.pids}
    found = _told(folder)
    head = f"# {case.name}: {ENTRIES[group.setting.name].label}, {variant}\n\n"
    head += f"{repeats} calls, median {time(statistics.median(times))} while profiled.\n"
    parts = [head]
    for pid in group.pids:
        told = found.get(pid, {"thread": 0, "tables": {}})
        threads = {tid: thread for tid, thread in after[pid].items() if tid != told["thread"]}
        gained = [thread.since(before[pid].get(tid)) for tid, thread in threads.items()]
        parts.append(_process(_role(pid), gained, told["tables"], repeats))
    return "\n".join(parts)


def _order(folder: Path, state: int) -> None:
    with open(folder / "control", "r+b") as control:
        control.write(bytes([state]))


def _told(folder: Path) -> dict[int, dict[str, Any]]:
    clock.sleep(1.0)  # a process answers after its current call
    return {int(path.stem): json.loads(path.read_text()) for path in folder.glob("*.json")}


def _threads(pid: int) -> dict[int, Thread]:
    found = {}
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            ran, waited, _ = (task / "schedstat").read_text().split()
            fields = (task / "stat").read_text().rpartition(")")[2].split()
            user, system = (int(field) / _TICKS for field in fields[11:13])
            name = (task / "comm").read_text().strip()
            found[int(task.name)] = Thread(name, int(ran) / 1e9, int(waited) / 1e9, user, system)
    return found


def _role(pid: int) -> str:
    with contextlib.suppress(OSError):
        words = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").split("\0")
        names = {"run": "launcher", "scheduler": "scheduler", "server": "server", str(ROOT): "worker"}
        return next((f"{role} ({pid})" for word, role in names.items() if word in words[1:6]), f"({pid})")
    return str(pid)


def _process(role: str, threads: list[Thread], tables: dict[str, list[list[str]]], calls: int) -> str:
    rows = []
    for thread in sorted(threads, key=lambda thread: -thread.ran):
        each = [time(seconds / calls) for seconds in (thread.ran, thread.waited)]
        if thread.ran / calls > 1e-6:
            kernel = thread.system / (thread.user + thread.system or 1.0)
            rows.append([thread.name, *each, f"{100 * kernel:.0f} %"])
    head = ["thread", "ran for a call", "waited for a core", "in the kernel"]
    text = f"## {role}\n\n" + (markdown(head, rows) if rows else "did nothing\n")
    for title, cells in tables.items() if rows else ():
        text += f"\n{markdown([title, *HEADS[title]], cells[:SHOWN])}"
    return text
