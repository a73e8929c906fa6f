"""One run: from its cell and seed to its outcome."""

from __future__ import annotations

import math
import os
import shutil
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

import jobs
import pace
from histories import Fault

from . import judge
from .cells import Cell, promise
from .group import Ended, Group, group
from .plan import Plan, drawn
from .strike import MissedError, strike

_ENDS = 30.0  # seconds in which a job that knows what happened ends
#: What a run's folder may have at its end, beside histories.
_OURS = ("at.*", "*.history", "struck", "tmp", "snapshots", "journal", "*.pid", "*.end", "output")


class Outcome(NamedTuple):
    """What came of one run."""

    seed: int
    wrong: tuple[str, ...] = ()
    hangs: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    seconds: tuple[float, ...] = ()  # of each who is left, until it was told
    missed: str = ""


def run(nursery: jobs.Nursery, cell: Cell, seed: int, keep: bool = False) -> Outcome:
    """Run a job, let the fault come, and judge; with `keep` the folder of a bad run stays."""
    folder = Path(tempfile.mkdtemp(prefix="faults-"))
    promised = promise(cell, pace.slowness())
    plan = drawn(cell, seed, str(folder), promised)
    found = Outcome(seed, missed="not run")
    try:
        made = group(nursery, plan, promised)
        try:
            found = _run(made, plan, cell)
        finally:
            made.close()
    finally:
        if not (keep and (found.wrong or found.hangs or found.leftovers or found.missed)):
            shutil.rmtree(folder, ignore_errors=True)
    return found


def _run(made: Group, plan: Plan, cell: Cell) -> Outcome:
    made.start()
    try:
        faults = strike(made, plan)
    except MissedError as error:
        ended = made.finish(time.monotonic())
        return Outcome(plan.seed, missed=f"{error}: {[(one.code, one.said[-500:]) for one in ended]}")
    ended = made.finish(time.monotonic() + plan.patience + pace.seconds(_ENDS))
    others = made.others(time.monotonic() + pace.seconds(_ENDS))
    return _judged(made, plan, cell, faults, ended, others)


def _judged(
    made: Group, plan: Plan, cell: Cell, faults: list[Fault], ended: list[Ended], others: dict[str, Ended]
) -> Outcome:
    events = judge.events_of(plan)
    ended_at = getattr(made, "ended_at", math.inf)
    promised = promise(cell, pace.slowness())
    all_faults = faults
    if plan.store == "mpi" and not plan.heals:  # the launcher ends all
        slots = {one.slot for one in events}
        all_faults = [*faults, *(Fault("killed", slot=slot, start=faults[0].start) for slot in slots)]
    seconds = judge.told(plan, events, faults, ended_at)
    late = [f"told after {one:.2f} s" for one in seconds if one > promised.seconds]
    hung = [f"worker {rank} did not end: {one.said[-600:]}" for rank, one in enumerate(ended) if one.hung]
    return Outcome(
        plan.seed,
        (*judge.wrong(plan, events, all_faults, promised), *judge.crashed(plan, ended)),
        (*late, *hung),
        tuple(leftovers(plan, others)),
        tuple(one for one in seconds if one < math.inf),
    )


def leftovers(plan: Plan, others: dict[str, Ended]) -> list[str]:
    """Return processes that did not end by themselves, and files that nobody has deleted."""
    folder = Path(plan.folder)
    there = [path.name for path in folder.iterdir() if not any(path.match(one) for one in _OURS)]
    there += [f"{path}" for path in (folder / "tmp").iterdir()]
    there += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.lower().startswith("kv")]
    return [*there, *(f"{name} did not end" for name, one in others.items() if one.hung)]
