"""What the command lines of the benches have in common: which cases, how long, and where the results go."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from typing import Any

from bench import RESULTS
from bench.runner.rounds import Plan


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Make the parser of ``python -m bench.NAME``, with the options that every bench in rounds has."""
    made = argparse.ArgumentParser(prog=f"python -m bench.{name}", description=description)
    made.add_argument("--rounds", type=int, default=7)
    made.add_argument("--turn", type=float, default=Plan.turn, help="seconds for one turn of a variant")
    made.add_argument("--only", default="", metavar="REGEX", help="cases whose name matches")
    made.add_argument("--goals", action="store_true", help="only cases that have a goal")
    made.add_argument("--list", action="store_true", help="print the names of the cases and stop")
    made.add_argument("--write", default="", metavar="NAME", help="write bench/results/NAME.md and .json")
    return made


def parse(
    made: argparse.ArgumentParser,
    arguments: list[str] | None,
    chosen: Callable[[argparse.Namespace], Iterable[Any]],
) -> argparse.Namespace:
    """Read the options; with ``--list``, print the names of the chosen cases and end."""
    options = made.parse_args(arguments)
    if options.list:
        print("\n".join(case.name for case in chosen(options)))
        raise SystemExit
    return options


def pick(cases: Iterable[Any], options: argparse.Namespace, has_goal: Callable[[Any], object]) -> list[Any]:
    """Return the cases that ``--only`` and ``--goals`` leave."""
    wanted = [case for case in cases if re.search(options.only, case.name)]
    return [case for case in wanted if has_goal(case)] if options.goals else wanted


def plan(options: argparse.Namespace) -> Plan:
    """Return the plan of a full run; half as many rounds more where others were busy."""
    return Plan(options.rounds, options.rounds // 2, turn=options.turn)


def publish(text: str, json: str, name: str) -> None:
    """Print a page, and write it with its numbers if it has a name."""
    print(text)
    if name:
        RESULTS.mkdir(exist_ok=True)
        (RESULTS / f"{name}.md").write_text(text)
        (RESULTS / f"{name}.json").write_text(json)
