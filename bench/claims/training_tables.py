"""The page of training steps: goals, a table for each case, losses."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

from bench.cases.training import CURVES, EXCHANGE, WAYS, TrainingCase
from bench.runner import table
from bench.runner.rounds import Measured
from kvstore.observe.bench.rounds import round_ratios

OURS = ("hook", "optimizer", "store")
HEAD = ["way", "step", "DDP, gloo ÷ it", "no exchange ÷ it"]
HEAD += ["exchange by itself", "hidden", "processor seconds"]
MOVED = "bytes on the busiest link ÷ the model's"
GOALS = ["case", "what", "best way", "found", "limit", "goal", "holds"]
LOSSES = ["way", "loss of the last steps", "loss on the test set", "time of a training"]
#: Goals: shares of the speed without an exchange, and ratios to DDP with gloo.
ONE_HOST, LINKS, PACKED, PACKED_GBIT = 0.95, 1.0, 3.0, 1.0


def about(mpi: bool) -> str:
    """Return the explanation of the figures, below the heading."""
    missing = "" if mpi else " DDP over MPI is missing: this torch was built without it, as all wheels are."
    return (
        "Two workers of one thread each; float32, SGD with momentum. A time is that of the worker that took "
        "longer. Times are medians of the rounds, ratios medians [lowest-highest] of rounds in which all "
        "ways took turns. *Exchange by itself*: the same gradients in the same pieces, without a pass "
        "through the model. *Hidden*: 1 - (step - step without exchange) ÷ exchange by itself, so 100 % "
        "where the step is as fast as without; updates in the store are a part of their exchange, and save "
        "the worker's own. "
        f"The method and the ways: [bench/README.md](../README.md).{missing}"
    )


def sections(steps: list[Measured], learnt: list[Any]) -> Iterator[str]:
    """Format the tables."""
    rows = [row for m in steps for row in goals(m)]
    rows += [_goal_of_losses(one.case.name, one.runs) for one in learnt]
    yield from table.section("Goals", GOALS, rows)
    yield "![steps compared with a step without exchange, and losses](training.png)\n"
    yield from ("## All cases\n", *(_case(m) for m in steps))
    yield from table.disturbed(steps)
    for one in learnt:
        yield from table.section(_heading(one.case), LOSSES, [_losses(one.runs, way) for way in CURVES])


# ----------------------------------------------------------------------------------------------- figures


def beside(m: Measured, peer: str, way: str) -> list[float]:
    """Return the time of a peer ÷ that of a way, by round."""
    return round_ratios(m.seconds[peer], m.seconds[way])


def hidden(m: Measured, way: str) -> list[float]:
    """Return the share of the exchange that does not lengthen a step, by round."""
    times = zip(m.seconds[way], m.seconds["alone"], m.seconds[way + EXCHANGE], strict=True)
    return [1 - (step - alone) / exchange for step, alone, exchange in times]


def best(m: Measured) -> str:
    """Return the fastest exact way of kvstore."""
    return min(OURS, key=m.median)


# ------------------------------------------------------------------------------------------------- tables


def goals(m: Measured) -> Iterator[list[str]]:
    """Yield one row for each goal of a case."""
    case, way = m.case, best(m)
    if case.hosts == 1:
        found, gloo = beside(m, "alone", way), beside(m, "alone", "gloo")
        if statistics.median(gloo) < ONE_HOST:
            limit = table.spread(beside(m, "alone", "bare"))
            yield _goal(case, "no exchange ÷ it", way, found, limit, ONE_HOST)
        return
    yield _goal(case, "DDP, gloo ÷ it", way, beside(m, "gloo", way), "", LINKS)
    if case.gbit == PACKED_GBIT:
        saved = statistics.median(round_ratios(m.moved["gloo"], m.moved["packed"]))
        alone = statistics.median(beside(m, "gloo", "alone"))
        limit = f"{alone:.2f}, no exchange" if alone < saved else f"{saved:.2f}, the bytes"
        yield _goal(case, "DDP, gloo ÷ it", "packed", beside(m, "gloo", "packed"), limit, PACKED)


def _goal(case: TrainingCase, what: str, way: str, found: list[float], limit: str, goal: float) -> list[str]:
    holds = table.mark(statistics.median(found) >= goal)
    return [case.name, what, WAYS[way], table.spread(found), limit, f"≥ {goal:g}", holds]


def _case(m: Measured) -> str:
    case: TrainingCase = m.case
    rows = [_row(m, way) for way in case.ways if way in m.seconds]
    size = f"{case.nbytes / 1e6:.3g} MB"
    if case.hosts == 1:
        told, head = f"The gradients of a worker are {size}.", HEAD
    else:
        told, head = f"The wire needs {table.time(case.needed)} for {size}.", [*HEAD, MOVED]
    return f"**{table.named(m)}** {told}\n\n{table.markdown(head, rows)}"


def _row(m: Measured, way: str) -> list[str]:
    row = [WAYS[way], table.time(m.median(way))]
    row += [table.spread(beside(m, peer, way)) for peer in ("gloo", "alone")]
    exchange = way + EXCHANGE
    if exchange in m.seconds:
        row += [table.time(m.median(exchange)), f"{100 * statistics.median(hidden(m, way)):.0f} %"]
    else:
        row += ["", ""]
    row.append(table.time(statistics.median(m.cpu[way])))
    moved = [f"{statistics.median(m.moved[way]) / m.case.nbytes:.3f}"] if m.case.hosts > 1 else []
    return [*row, *moved]


# ------------------------------------------------------------------------------------------------- losses


def ends(runs: list[dict[str, Any]], way: str, figure: str = "test") -> list[float]:
    """Return the last figures of a way, by seed."""
    of_way = [run[figure] for run in runs if run["way"] == way]
    return [one[-1] if isinstance(one, list) else one for one in of_way]


def _heading(case: Any) -> str:
    return f"Losses over {case.steps:,} steps, {case.seeds} seeds, between two hosts at {case.gbit:g} Gbit/s"


def _losses(runs: list[dict[str, Any]], way: str) -> list[str]:
    seconds = ends(runs, way, "seconds")
    times = f"{statistics.mean(seconds):.1f} [{min(seconds):.1f}-{max(seconds):.1f}] s"
    return [WAYS[way], _spread(ends(runs, way, "loss")), _spread(ends(runs, way)), times]


def _spread(values: list[float]) -> str:
    return f"{statistics.mean(values):.3f} [{min(values):.3f}-{max(values):.3f}]"


def _goal_of_losses(name: str, runs: list[dict[str, Any]]) -> list[str]:
    """Return the row that compares the mean loss with 2bit with the highest loss without."""
    packed, plain = ends(runs, "packed"), ends(runs, "gloo")
    holds = table.mark(statistics.mean(packed) <= max(plain))
    goal = f"≤ {max(plain):.3f}, the highest without"
    return [name, "loss on the test set", WAYS["packed"], _spread(packed), "", goal, holds]
