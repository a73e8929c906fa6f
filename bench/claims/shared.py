"""Ratios of the store between processes to its rivals, measured in turns: ``python -m bench.shared``."""

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
from itertools import accumulate
from pathlib import Path
from typing import Any, NoReturn

from bench.cases import shared as shared_cases
from bench.cases.shared import SharedCase
from bench.claims import shared_table
from bench.claims.local import state
from bench.peers.group.driver import Group
from bench.peers.process import PeerError
from bench.peers.shared.launch import GroupSetting, redis_server
from bench.runner import command, compiled, machine, table
from bench.runner.rounds import Measured, Plan, measure

HERE = ("limit", "bare", "cma", "memcpy", "line", "futex", "queue", "manager")
#: Peers of environments of their own, and the variable that names the interpreter.
ELSEWHERE = {
    "openmpi": "KVSTORE_BENCH_OPENMPI",
    "mpich": "KVSTORE_BENCH_MPICH",
    "deepspeed": "KVSTORE_BENCH_DEEPSPEED",
    "gloo": "KVSTORE_BENCH_TORCH",
    "mxnet": "KVSTORE_BENCH_MXNET",
    "redis": "KVSTORE_BENCH_REDIS",
    "ray": "KVSTORE_BENCH_RAY",
}
#: Memory of a peer in arrays of each worker, where it is not two.
COPIES = {"mxnet": 5}
CHAIN_TURN = 0.3  # seconds: a tail needs many calls


def settings(processes: int) -> list[GroupSetting]:
    """Return the peers that can run here, ours first."""
    found = [GroupSetting("ours", processes)] if _exists() else []
    found += [GroupSetting(name, processes) for name in HERE]
    for name, variable in ELSEWHERE.items():
        python = os.environ.get(variable, "")
        if python and (name != "redis" or redis_server(python)):
            found.append(GroupSetting(name, processes, str(Path(python).absolute())))
    return found


def _exists() -> bool:
    return importlib.util.find_spec("kvstore.stores.shared.backend") is not None


@contextmanager
def groups(wanted: list[GroupSetting]) -> Iterator[list[Group]]:
    """Hold the peers' groups, and end them; each starts with its first case."""
    with ExitStack() as stack:
        yield [stack.enter_context(Group(setting)) for setting in wanted]


def measured(
    chosen: Sequence[SharedCase], plan: Plan, prober: machine.Prober, only: str = ""
) -> Iterator[Measured]:
    """Measure case after case, all of one number of processes together."""
    for processes in dict.fromkeys(case.processes for case in chosen):
        wanted = [s for s in settings(processes) if s.name == "ours" or re.search(only, s.name)]
        with groups(wanted) as peers:
            for case in (case for case in chosen if case.processes == processes):
                start = time.time()
                result = one(case, peers, plan, prober)
                print(f"{case.name}: {time.time() - start:.1f} s", file=sys.stderr)
                if result is not None:
                    yield result


def one(case: SharedCase, peers: list[Group], plan: Plan, prober: Any) -> Measured | None:
    """Measure one case; a peer that fails on the way is left out of it."""
    there = _fitting(case, [peer for peer in peers if peer.setting.name in ("ours", *case.peers)])
    if case.wait:
        plan = replace(plan, turn=max(plan.turn, CHAIN_TURN))
    try:
        return measure(case, there, plan, prober)
    except PeerError:
        healthy = [peer for peer in there if not peer.failure]
        return one(case, healthy, plan, prober) if healthy else None
    finally:
        for peer in there:
            peer.rest()


def _fitting(case: SharedCase, peers: list[Group]) -> list[Group]:
    """Leave out peers from the end on until all arrays fit into memory at once."""
    share = case.nbytes * case.processes * (2 if case.update else 1)
    needs = accumulate(share * COPIES.get(peer.setting.name, 2) for peer in peers)
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
    started, found = time.time(), list[Measured]()
    plan = command.plan(options)
    try:
        for result in measured(_chosen(options), plan, machine.Prober(), options.peers):
            found.append(result)
    except KeyboardInterrupt:
        print("stopped; here is what there is", file=sys.stderr)
    text = report(found, time.time() - started)
    command.publish(text, to_json(found), options.write)
    return 0


def stop(number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + number)


def _options(arguments: list[str] | None) -> argparse.Namespace:
    parser = command.parser("shared", __doc__)
    parser.add_argument("--workers", type=int, nargs="+", default=[2, 4], help="numbers of processes")
    parser.add_argument("--peers", default="", metavar="REGEX", help="peers whose name matches, beside ours")
    return command.parse(parser, arguments, _chosen)


def _chosen(options: argparse.Namespace) -> list[SharedCase]:
    cases = shared_cases.all_cases(tuple(options.workers))
    return command.pick(cases, options, lambda case: case.goals or case.tail)


def report(found: list[Measured], took: float) -> str:
    """Write the whole page."""
    rounds = len(found[0].others) if found else 0
    parts = [
        "# The store between processes of one machine, beside its rivals\n",
        f"{machine.describe()}.\n\n"
        "float32. Ratios are *time of the peer ÷ time of kvstore*: above 1, kvstore is faster. Each is the "
        f"median [lowest-highest] of {rounds} rounds in which all peers took turns; times are medians, of "
        f"the process that took longest. Measured in {took / 60:.0f} minutes; how, and what each peer does: "
        "[bench/README.md](../README.md).\n",
        state(found),
    ]
    if goals := shared_table.goals(found):
        parts += ["## Goals\n", table.markdown(shared_table.GOALS_HEAD, goals)]
    if chains := shared_table.latency(found):
        parts += ["## Round trips of 4 KB\n", table.markdown(shared_table.LATENCY_HEAD, chains)]
    parts += ["## All cases\n", shared_table.everything(found)]
    if any(m.disturbed for m in found):
        parts.append("\\* others were busy during some of these rounds.\n")
    parts += [
        "## The way of calling that was best\n",
        table.markdown(["case", "ways"], shared_table.variants(found)),
    ]
    return "\n".join(parts)


def to_json(found: list[Measured]) -> str:
    """Write one line for each case."""
    rows = "".join(f"  {json.dumps(_row(m), ensure_ascii=False)},\n" for m in found).removesuffix(",\n")
    return '{"machine": ' + json.dumps(machine.describe()) + ', "cases": [\n' + rows + "\n]}\n"


def _row(m: Measured) -> dict[str, Any]:
    case: SharedCase = m.case
    names = ("verb", "processes", "home", "pages", "update", "wait", "goals", "tail")
    row: dict[str, Any] = {"case": case.name, "bytes": case.nbytes, "keys": len(case.shapes)}
    row |= {name: getattr(case, name) for name in names}
    for name in ("seconds", "tails", "cpu"):
        row[name] = {p: [float(f"{s:.4g}") for s in times] for p, times in getattr(m, name).items()}
    row |= {"variants": m.variants, "wrong": m.wrong, "others": [round(share, 3) for share in m.others]}
    row["probes"] = [{name: round(value, 1) for name, value in asdict(p).items()} for p in m.probes]
    return row


if __name__ == "__main__":
    raise SystemExit(main())
