"""Ratios of the parameter server to its rivals, measured in turns: ``python -m bench.dist``."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, replace
from itertools import accumulate, groupby
from pathlib import Path
from typing import Any

from bench.cases import dist as dist_cases
from bench.cases.dist import ENTRIES, DistCase
from bench.claims import dist_table
from bench.claims.local import state
from bench.claims.shared import stop
from bench.peers.dist.group import DistGroup
from bench.peers.dist.launch import DistSetting
from bench.peers.process import PeerError
from bench.runner import command, compiled, machine, table
from bench.runner import profile as dist_profile
from bench.runner.rounds import Measured, Plan, measure

#: Peers of environments of their own, and the variable that names the interpreter.
ELSEWHERE = {"mxnet": "KVSTORE_BENCH_MXNET", "gloo": "KVSTORE_BENCH_TORCH"}
#: What our own entries need.
OURS = (
    "kvstore.stores.parameter_server.worker.backend",
    "kvstore.stores.parameter_server.server.loop",
    "kvstore.stores.parameter_server.server.machine",
    "kvstore.stores.parameter_server.scheduler.machine",
)
#: Memory of a peer in arrays of each worker, its servers included.
COPIES = {"ours": 6, "mxnet": 8}

#: A call of many megabytes takes long: two of them are a turn, after one to warm up.
FULL = Plan(rounds=5, spare=2, least=2, field=1)
QUICK = replace(FULL, rounds=3, spare=0, turn=0.02)


def settings(workers: int, servers: int) -> list[DistSetting]:
    """Return the entries that can run here, ours first."""
    found = []
    for name, entry in ENTRIES.items():
        python = interpreter(entry.engine)
        if python and not (entry.engine == "ours" and not exists()):
            found.append(DistSetting(name, workers, python, servers=servers))
    return found


def interpreter(engine: str) -> str:
    """Return the interpreter that runs an engine; nothing where no variable names one."""
    if engine not in ELSEWHERE:
        return sys.executable
    python = os.environ.get(ELSEWHERE[engine], "")
    return str(Path(python).absolute()) if python else ""


def exists() -> bool:
    """Whether this kvstore has a parameter server."""
    try:
        return all(importlib.util.find_spec(module) is not None for module in OURS)
    except ModuleNotFoundError:  # of the package around it
        return False


@contextmanager
def groups(entries: list[DistSetting]) -> Iterator[list[DistGroup]]:
    """Hold the groups of one job, and end them; each starts with its first case."""
    with ExitStack() as stack:
        yield [stack.enter_context(DistGroup(setting)) for setting in entries]


def measured(
    chosen: Sequence[DistCase], plan: Plan, prober: machine.Prober, only: str = ""
) -> Iterator[Measured]:
    """Measure case after case; those of one job are done by the same processes."""
    for _, cases in groupby(sorted(chosen, key=lambda case: case.job), key=lambda case: case.job):
        together = list(cases)
        with groups(wanted(together, only)) as peers:
            for case in together:
                start = time.time()
                result = one(case, peers, plan, prober)
                print(f"{case.name}: {time.time() - start:.1f} s", file=sys.stderr)
                if result is not None:
                    yield result


def wanted(cases: list[DistCase], only: str = "") -> list[DistSetting]:
    """Return the entries that take part in any of these cases, which are of one job."""
    names = {peer for case in cases for peer in case.peers}
    there = settings(cases[0].workers, cases[0].servers)
    return [s for s in there if s.name in names and (s.name == "ours" or re.search(only, s.name))]


def one(case: DistCase, peers: list[DistGroup], plan: Plan, prober: Any) -> Measured | None:
    """Measure one case; a peer that fails on the way is left out of it."""
    there = _fitting(case, [peer for peer in peers if peer.setting.name in case.peers])
    try:
        result = measure(case, there, plan, prober)
    except PeerError:
        healthy = [peer for peer in there if not peer.failure]
        return one(case, healthy, plan, prober) if healthy else None
    for peer in there:
        peer.rest()
    return result


def _fitting(case: DistCase, peers: list[DistGroup]) -> list[DistGroup]:
    """Leave out peers from the end on until all arrays fit into memory at once."""
    share = case.nbytes * case.workers
    needs = accumulate(share * COPIES.get(peer.setting.entry.engine, 4) for peer in peers)
    room, found = machine.available(), []
    for peer, need in zip(peers, needs, strict=True):
        if need <= room:
            found.append(peer)
        else:
            print(f"{case.name}: no memory for {peer.setting.name}", file=sys.stderr)
    return found


def main(arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    options = _options(arguments)
    if compiled.compiler() is None:
        raise SystemExit("no C compiler: set CC or install cc")
    signal.signal(signal.SIGTERM, stop)
    if options.profile:
        print(profiled(options))
        return 0
    started, found = time.time(), list[Measured]()
    plan = QUICK if options.quick else _plan(options)
    try:
        for result in measured(_chosen(options), plan, machine.Prober(), options.peers):
            found.append(result)
    except KeyboardInterrupt:
        print("stopped; here is what there is", file=sys.stderr)
    found = in_order(found)
    command.publish(report(found, time.time() - started), to_json(found), options.write)
    return 0


def _plan(options: argparse.Namespace) -> Plan:
    asked = command.plan(options)
    return replace(FULL, rounds=asked.rounds, spare=asked.spare, turn=asked.turn)


def profiled(options: argparse.Namespace) -> str:
    """Say where the time of the first case whose name matches goes, with one entry."""
    name, entry = options.profile, options.peers or "ours"
    case = next((case for case in dist_cases.all_cases() if re.search(name, case.name)), None)
    if case is None:
        raise SystemExit(f"no case matches {name!r}; --list prints them")
    known = {setting.name: setting for setting in settings(case.workers, case.servers)}
    if entry not in known:
        raise SystemExit(f"{entry!r} cannot run here; there are: {', '.join(known)}")
    return dist_profile.profile(case, known[entry], options.way, options.calls)


def in_order(found: list[Measured]) -> list[Measured]:
    """Sort what was measured job by job as the tables have it."""
    names = [case.name for case in dist_cases.all_cases()]
    return sorted(found, key=lambda m: names.index(m.case.name) if m.case.name in names else len(names))


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.parser("dist", __doc__)
    parser.set_defaults(rounds=FULL.rounds)
    parser.add_argument("--case", dest="only", metavar="REGEX", help="the same as --only")
    parser.add_argument("--quick", action="store_true", help="three short rounds, to have a look")
    parser.add_argument(
        "--peers",
        default="",
        metavar="REGEX",
        help="peers whose name matches, beside ours; with --profile the one to look at",
    )
    parser.add_argument("--profile", default="", metavar="REGEX", help="say where the time of a case goes")
    parser.add_argument("--calls", action="store_true", help="with --profile: count calls, by cProfile")
    parser.add_argument("--way", default="", help="with --profile: how the way of calling begins")
    return command.parse(parser, arguments, _chosen)


def _chosen(options: argparse.Namespace) -> list[DistCase]:
    return command.pick(dist_cases.all_cases(), options, lambda case: case.goals)


def report(found: list[Measured], took: float) -> str:
    """Write the whole page."""
    rounds = len(found[0].others) if found else 0
    parts = [
        "# The parameter server, beside its rivals\n",
        f"{machine.describe()}.\n\n"
        "float32; scheduler, servers and workers on one machine. Ratios are *time of the peer ÷ time of "
        "kvstore*: above 1, kvstore is faster. Each is the median [lowest-highest] of "
        f"{rounds} rounds in which all peers took turns; times are medians of a push and a pull of all keys, "
        f"of the worker that took longest. Measured in {took / 60:.0f} minutes; how, and what each peer "
        "does: [bench/README.md](../README.md).\n",
        state(found),
    ]
    if goals := dist_table.goals(found):
        parts += ["## Goals\n", table.markdown(dist_table.GOALS_HEAD, goals)]
    parts += ["## All cases\n", dist_table.everything(found)]
    if any(m.disturbed for m in found):
        parts.append("\\* others were busy during some of these rounds.\n")
    parts += [
        "## The way of calling that was best\n",
        table.markdown(["case", "ways"], dist_table.variants(found)),
    ]
    return "\n".join(parts)


def to_json(found: list[Measured]) -> str:
    """Write one line for each case."""
    rows = "".join(f"  {json.dumps(_row(m), ensure_ascii=False)},\n" for m in found).removesuffix(",\n")
    return '{"machine": ' + json.dumps(machine.describe()) + ', "cases": [\n' + rows + "\n]}\n"


def from_json(results: dict[str, Any]) -> list[Measured]:
    """Read what was measured of the cases that there still are."""
    known = {case.name: case for case in dist_cases.all_cases()}
    rows = [row for row in results["cases"] if row["case"] in known]
    return [Measured(known[row["case"]], row["seconds"], row["variants"], [], row["others"]) for row in rows]


def _row(m: Measured) -> dict[str, Any]:
    case: DistCase = m.case
    row: dict[str, Any] = {"case": case.name, "bytes": case.nbytes, "keys": len(case.shapes)}
    row |= {name: getattr(case, name) for name in ("workers", "servers", "mode", "update", "rows")}
    row["goals"] = [asdict(goal) for goal in case.goals]
    for name in ("seconds", "cpu"):
        row[name] = {p: [float(f"{s:.4g}") for s in times] for p, times in getattr(m, name).items()}
    row |= {"variants": m.variants, "wrong": m.wrong, "others": [round(share, 3) for share in m.others]}
    row["probes"] = [{name: round(value, 1) for name, value in asdict(p).items()} for p in m.probes]
    return row


if __name__ == "__main__":
    raise SystemExit(main())
