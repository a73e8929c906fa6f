"""Measures any claim: options, cases, interrupts, the page and its numbers."""

from __future__ import annotations

import argparse
import importlib
import json
import re
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate, count, groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import bench
from bench.peers.group.driver import Group
from bench.peers.setting import Setting
from bench.runner import compiled, machine
from bench.runner.rounds import Measured, Plan, measure
from kvstore.observe.bench.settings import available_memory
from kvstore.observe.bench.worker_group import PeerFailure

if TYPE_CHECKING:
    from bench.runner.claim import Claim

#: Options that several claims have; a default that depends on the claim is its attribute of that name.
OPTIONS: dict[str, dict[str, Any]] = {
    "rounds": {"type": int, "help": "number of rounds; half as many more where other processes were busy"},
    "turn": {"type": float, "help": "seconds for one turn of a variant"},
    "only": {"default": "", "metavar": "REGEX", "help": "cases with a matching name"},
    "goals": {"action": "store_true", "help": "only cases that have a goal"},
    "list": {"action": "store_true", "help": "print the names of the cases and stop"},
    "peers": {"default": "", "metavar": "REGEX", "help": "peers with a matching name; and kvstore"},
    "workers": {"type": int, "nargs": "+", "help": "only cases with these numbers of workers"},
    "write": {"default": "", "metavar": "NAME", "help": "write bench/results/NAME.md and .json, or PATH.*"},
    "draw": {"default": "", "metavar": "NAME", "help": "draw the results NAME, and stop"},
}


def main(claim: Claim, arguments: list[str] | None = None) -> int:
    """Measure, print, write."""
    options = parse(claim, arguments)
    if options.draw:
        draw(claim, options.draw)
        return 0
    signal.signal(signal.SIGTERM, _stop)
    if said := claim.instead(options):
        print(said)
        return 0
    started, found, chosen = time.time(), list[Any](), pick(claim, options)
    try:
        for result in claim.measured(chosen, options):
            found.append(result)
            write(claim, found, time.time() - started, options.write)
    except KeyboardInterrupt:
        print("stopped; the page has the results so far", file=sys.stderr)
    print(write(claim, in_order(found, chosen), time.time() - started, options.write))
    return 0


def _stop(number: int, frame: Any) -> NoReturn:
    raise SystemExit(128 + number)


def parse(claim: Claim, arguments: list[str] | None) -> argparse.Namespace:
    """Read the options; with ``--list``, print the names of the chosen cases and end."""
    about = sys.modules[type(claim).__module__].__doc__
    parser = argparse.ArgumentParser(prog=f"python -m bench {claim.name}", description=about)
    parser.set_defaults(only="", goals=False, list=False, peers="", draw="")
    for name in (*claim.common, *(["draw"] if claim.picture is not None else [])):
        default = {"default": getattr(claim, name)} if name in ("rounds", "turn", "workers") else {}
        parser.add_argument(f"--{name}", **OPTIONS[name], **default)
    claim.options(parser)
    options = parser.parse_args(arguments)
    if options.list:
        print("\n".join(case.name for case in pick(claim, options)))
        raise SystemExit
    return options


def pick(claim: Claim, options: argparse.Namespace) -> list[Any]:
    """Return the cases that ``--only`` and ``--goals`` leave."""
    wanted = [case for case in claim.cases(options) if re.search(options.only, case.name)]
    return [case for case in wanted if has_goal(case)] if options.goals else wanted


def has_goal(case: Any) -> bool:
    """Return whether a case has a goal."""
    return bool(case.goals or case.most_us or case.tail or case.share)


def in_order(found: list[Any], chosen: list[Any]) -> list[Any]:
    """Sort results that were measured job by job into the order of the tables, those of `always` first."""
    places = {case.name: place for place, case in enumerate(chosen)}
    return sorted(found, key=lambda m: places.get(m.case.name, -1))


# ------------------------------------------------------------------------------------------- results


def write(claim: Claim, found: list[Any], took: float, name: str) -> str:
    """Return the page; write it with its numbers if there is a name."""
    page = claim.page(found, took)
    if name:
        path = results(name)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.with_name(f"{path.name}.md").write_text(page)
        path.with_name(f"{path.name}.json").write_text(claim.to_json(found, took))
    return page


def results(name: str) -> Path:
    """Return the path of results without its suffix: in `bench/results`, or the given path."""
    return Path(name) if "/" in name else bench.RESULTS / name


def draw(claim: Claim, name: str) -> None:
    """Draw written results."""
    path = results(name)
    plot = importlib.import_module(f"bench.plots.{claim.name.replace('-', '_')}")
    content = json.loads(path.with_name(f"{path.name}.json").read_text())
    plot.draw(content, path.with_name(f"{path.name}{claim.picture}.png"))


# -------------------------------------------------------------------------------------------- rounds


def measured(
    claim: Claim, chosen: Sequence[Any], plan: Plan, prober: machine.Prober, only: str = ""
) -> Iterator[Measured]:
    """Measure one case after the other; the same processes measure all cases of a job."""
    numbers = count(1)
    for _, cases in groupby(sorted(chosen, key=claim.job), key=claim.job):
        together = list(cases)
        wanted = [s for s in claim.settings(together) if s.name == "ours" or re.search(only, s.name)]
        with running(claim, wanted) as peers:
            for case in together:
                start = time.time()
                result = one(claim, case, peers, plan, prober)
                print(
                    f"{next(numbers)}/{len(chosen)} {case.name}: {time.time() - start:.1f} s", file=sys.stderr
                )
                if result is not None:
                    yield result


@contextmanager
def running(claim: Claim, wanted: list[Setting]) -> Iterator[list[Group]]:
    """Keep the peers' processes, and end them; a group starts with its first case."""
    with ExitStack() as stack:
        yield [stack.enter_context(claim.process(setting)) for setting in wanted]


def one(claim: Claim, case: Any, peers: Sequence[Group], plan: Plan, prober: Any) -> Measured | None:
    """Measure one case; a group that fails is omitted from it."""
    there = _fitting(claim, case, [peer for peer in peers if claim.takes(case, peer.setting.name)])
    try:
        result = measure(case, there, claim.plan_of(case, plan), prober)
    except PeerFailure:
        healthy = [peer for peer in there if not peer.failure]
        if len(healthy) == len(there):
            raise
        return one(claim, case, healthy, plan, prober) if healthy else None
    for peer in there:
        peer.rest()
    return result


def _fitting(claim: Claim, case: Any, peers: list[Group]) -> list[Group]:
    """Omit peers, the last first, until the arrays of all others fit into memory."""
    needs = accumulate(claim.memory(case, peer.setting) for peer in peers)
    room, found = available_memory(), []
    for peer, need in zip(peers, needs, strict=True):
        if room is None or need <= room:
            found.append(peer)
        else:
            print(f"{case.name}: no memory for {peer.setting.name}", file=sys.stderr)
    return found


def needs_a_compiler() -> None:
    """Raise SystemExit if there is no C compiler."""
    if compiled.compiler() is None:
        raise SystemExit("no C compiler: set CC or install cc")
