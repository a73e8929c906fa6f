"""How the cost of a call to the parameter server grows with its keys, and how many requests a server answers.

Jobs of 2 workers and 1 server init keys of 1 KB in one call, and pushpull all of them in one call.
The tables have each time and its ratio to the time with the fewest keys: 1 if the cost is linear. Jobs of 8
workers and 1 server pushpull keys of 4 KB; a request is one key of one worker.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import re
import statistics
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from bench.cases.common import KB
from bench.cases.dist import EACH, ENTRIES, INIT, DistCase
from bench.peers.dist.base import PUSHPULL
from bench.peers.dist.launch import DistGroup
from bench.peers.group.driver import Group
from bench.peers.setting import Setting
from bench.runner import machine, rivals, run, table
from bench.runner.claim import Claim
from kvstore.observe.bench.worker_group import PeerFailure

COUNTS = (2_000, 5_000, 10_000, 20_000, 50_000, 100_000)
WAYS = (INIT, PUSHPULL, EACH)
#: Rounds of a peer, and its greatest number of keys: MXNet sends each key separately, which is slow.
ROUNDS = {"ours": 5, "mxnet": 2}
MOST = {"mxnet": 20_000}
#: Goals: the most seconds of a call with this number of keys, and the least requests a second.
GOAL_KEYS, GOAL_SECONDS, GOAL_REQUESTS = 20_000, {INIT: 1.5, PUSHPULL: 0.1}, 150_000
_BURNER = "import os\nparent = os.getppid()\nwhile os.getppid() == parent:\n    sum(range(1_000_000))"

#: By peer and way of calling.
Times = dict[str, dict[str, list[float]]]


@dataclass
class Measured:
    """Seconds of a job's calls, and processor seconds of each call, while `busy` other processes computed."""

    case: DistCase
    busy: int = 0
    seconds: Times = field(default_factory=dict)
    cpu: Times = field(default_factory=dict)


class DistKeys(Claim):
    name, title = "dist-keys", "Cost of a key"
    common = ("only", "list", "peers", "write")
    picture = ""
    process = DistGroup

    def options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument(
            "--busy", type=int, default=0, help="other processes that compute during the measurement"
        )
        parser.add_argument("--counts", default=",".join(map(str, COUNTS)))

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        return [*(keys(int(count)) for count in options.counts.split(",")), requests(256)]

    def settings(self, cases: Sequence[DistCase]) -> list[Setting]:
        (case,) = cases
        return rivals.settings("dist", case.peers, processes=case.workers, servers=case.servers)

    def measured(self, chosen: list[Any], options: argparse.Namespace) -> Iterator[Measured]:
        run.needs_a_compiler()
        with contextlib.ExitStack() as stack:
            for _ in range(options.busy):
                one = subprocess.Popen([sys.executable, "-ISc", _BURNER], start_new_session=True)
                stack.callback(one.wait)
                stack.callback(one.kill)
            for case in chosen:
                wanted = [
                    s for s in self.settings([case]) if s.name == "ours" or re.search(options.peers, s.name)
                ]
                with run.running(self, wanted) as peers:
                    yield measure(case, peers, options.busy)

    def page(self, found: list[Measured], took: float) -> str:
        return page_of(_results(found)) if found else ""

    def to_json(self, found: list[Measured], took: float) -> str:
        return json.dumps(_results(found), indent=1) + "\n"


def keys(count: int) -> DistCase:
    """Make the case of one call with `count` keys."""
    peers = tuple(peer for peer in ROUNDS if count <= MOST.get(peer, count))
    return DistCase(f"{count:,} keys", ((KB // 4,),) * count, peers=peers, also=(INIT,))


def requests(count: int, workers: int = 8) -> DistCase:
    """Make the case of requests: each worker has `count` keys."""
    name = f"requests, {workers} workers, {count} keys of 4 KB"
    return DistCase(name, ((KB,),) * count, workers, peers=tuple(ROUNDS), also=(EACH,))


def measure(case: DistCase, peers: Sequence[Group], busy: int = 0) -> Measured:
    """Measure the peers in turn; a peer that fails is omitted."""
    found = Measured(case, busy)
    ready = []
    for peer in peers:
        peer.start_prepare(case)
        if not isinstance(reply := peer.finish_prepare(), str):
            ready.append((peer, reply[0]))
    for number in range(max(ROUNDS.values())):
        for peer, ways in ready:
            if number < ROUNDS[peer.setting.name]:
                _turn(found, peer, [way for way in WAYS if way in ways])
    return found


def _turn(found: Measured, peer: Group, ways: list[str]) -> None:
    """Call in each way: init once, the other ways after a call that fills the caches."""
    name = peer.setting.name
    try:
        for way in ways if not peer.failure else ():
            seconds = peer.run(way, 1 if way == INIT else 2)[-1]
            found.seconds.setdefault(name, {}).setdefault(way, []).append(seconds)
            found.cpu.setdefault(name, {}).setdefault(way, []).append(peer.cpu)
    except PeerFailure:
        found.seconds.pop(name, None)  # its messages are on standard error


# ------------------------------------------------------------------------------------------------- pages


def _results(found: list[Measured]) -> dict[str, Any]:
    counted, asked = [], []
    for m in found:
        if EACH in m.case.also:
            row = {"case": m.case.name, "workers": m.case.workers, "keys": len(m.case.shapes)}
            asked.append({**row, "seconds": m.seconds, "cpu": m.cpu})
        elif "ours" in m.seconds:
            others = {peer: ways for peer, ways in m.seconds.items() if peer != "ours"}
            counted.append({"keys": len(m.case.shapes), **m.seconds["ours"], "others": others})
    return {"machine": machine.describe(), "busy": found[0].busy, "cases": counted, "requests": asked}


def page_of(results: dict[str, Any]) -> str:
    """Write the tables."""
    beside = f", with {results['busy']} other busy processes" if results["busy"] else ""
    about = (
        f"dist_sync, 1 server{beside}, on {results['machine']}. Medians; of the worker that took longest. "
        "*Peer ÷ kvstore* is of the medians: MXNet has fewer rounds, which take turns with ours.\n"
    )
    parts = ["# The cost of a key\n", about]
    parts += table.section("Goals", ["what", "kvstore", "goal", "holds"], goals(results))
    head = ["keys in one call", "init, a key", "÷ the first row", "MXNet ÷ kvstore"]
    head += ["pushpull, a key", "÷ the first row", "spread", "MXNet ÷ kvstore"]
    parts += table.section("Keys of 1 KB, 2 workers", head, _keys(results["cases"]))
    head = ["case", "peer", "way", "requests a second", "processor seconds of one"]
    parts += table.section("Requests", head, _requests(results["requests"]))
    return "\n".join(parts)


def goals(results: dict[str, Any]) -> list[list[str]]:
    """Return one row for each goal with a measurement."""
    rows = []
    for case in results["cases"]:
        for way, most in GOAL_SECONDS.items() if case["keys"] == GOAL_KEYS else ():
            seconds = statistics.median(case[way])
            what = f"{way} of {GOAL_KEYS:,} keys of 1 KB in one call"
            rows.append([what, table.time(seconds), f"≤ {table.time(most)}", table.mark(seconds <= most)])
    for case in results["requests"]:
        if "ours" in case["seconds"]:
            rate = _rate(case, case["seconds"]["ours"][PUSHPULL])
            holds = table.mark(rate >= GOAL_REQUESTS)
            rows.append([f"{case['case']} in one call", f"{rate:,.0f}/s", f"≥ {GOAL_REQUESTS:,}/s", holds])
    return rows


def _keys(cases: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for case in cases:
        row = [f"{case['keys']:,}"]
        for way in (INIT, PUSHPULL):
            each, least = (statistics.median(one[way]) / one["keys"] for one in (case, cases[0]))
            row += [f"{1e6 * each:.2f} µs", f"{each / least:.2f}"]
            if way == PUSHPULL:
                times = [1e6 * one / case["keys"] for one in case[way]]
                row.append(f"{min(times):.2f}-{max(times):.2f} µs")
            row.append(_beside(case, way))
        rows.append(row)
    return rows


def _beside(case: dict[str, Any], way: str) -> str:
    """Return the time of MXNet's fastest way ÷ kvstore's time; for pushpull MXNet has two ways."""
    ways = case["others"].get("mxnet", {})
    alike = [statistics.median(times) for name, times in ways.items() if name.startswith(way)]
    return f"{min(alike) / statistics.median(case[way]):.2f}" if alike else ""


def _requests(cases: list[dict[str, Any]]) -> list[list[str]]:
    rows = []
    for case in cases:
        for peer, ways in case["seconds"].items():
            for way, seconds in ways.items():
                used = statistics.median(case["cpu"][peer][way]) / (case["workers"] * case["keys"])
                one = [f"{_rate(case, seconds):,.0f}", table.time(used)]
                rows.append([case["case"], ENTRIES[peer].label, way, *one])
    return rows


def _rate(case: dict[str, Any], seconds: list[float]) -> float:
    return float(case["workers"] * case["keys"] / statistics.median(seconds))


CLAIM = DistKeys()
