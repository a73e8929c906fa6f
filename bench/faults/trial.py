"""One run: from its cell and seed to its outcome."""

from __future__ import annotations

import math
import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import jobs
import pace
from histories import Fault

from . import judge
from .cells import Cell, Plan, drawn, promise
from .group import Ended, Group, Served, group

_PATIENCE = 60.0


class MissedError(Exception):
    """The job did not reach the instant of its fault."""


def strike(group: Group, plan: Plan) -> list[Fault]:
    """Wait for the instant, cause the fault, and return it."""
    folder = Path(plan.folder)
    _until(folder / f"at.{plan.victim if plan.victim_is_worker else 0}", group)
    if plan.how:
        _until(folder / "struck", group)
        start = float((folder / "struck").read_text())
        return [Fault("left" if plan.how == "leave" else "killed", slot=plan.victim, start=start)]
    time.sleep(plan.after)
    start = time.monotonic()
    name = plan.fault.split()[0] if plan.victim_is_worker else plan.fault
    return _STRIKES[name](group, plan, start)


def _until(path: Path, group: Group) -> None:
    end = time.monotonic() + _PATIENCE
    while not path.exists():
        if time.monotonic() > end:
            raise MissedError(f"no file {path.name}")
        time.sleep(0.001)


def _said(plan: Plan) -> None:
    """Let the workers continue: the fault has happened."""
    (Path(plan.folder) / "struck").touch()


def _victim(group: Group, plan: Plan) -> tuple[str, Callable[[int], None]]:
    """Return the victim's role, and the function that sends it a signal."""
    if plan.victim_is_worker:
        return "worker", lambda number: group.signal(plan.victim, number)
    assert isinstance(group, Served)
    if plan.fault.startswith("scheduler"):
        return "scheduler", group.job.scheduler.signal
    return "server", group.job.servers[plan.victim].signal


def _kill(group: Group, plan: Plan, start: float) -> list[Fault]:
    role, send = _victim(group, plan)
    send(signal.SIGKILL)
    if role == "scheduler" and plan.heals:
        assert isinstance(group, Served)
        time.sleep(plan.seconds)
        group.restart_scheduler()
        _said(plan)
        return [Fault("paused", role, 0, start, time.monotonic())]
    _said(plan)
    return [Fault("killed", role, 0 if role == "scheduler" else plan.victim, start)]


def _stop(group: Group, plan: Plan, start: float) -> list[Fault]:
    role, send = _victim(group, plan)
    send(signal.SIGSTOP)
    if not plan.heals:
        _said(plan)
    time.sleep(plan.seconds)
    send(signal.SIGCONT)
    if plan.heals:
        _said(plan)
    return [Fault("paused" if plan.heals else "stopped", role, plan.victim, start, time.monotonic())]


def _part(group: Served, plan: Plan, start: float) -> list[Fault]:
    for proxy in group.proxies:
        proxy.stop()
    if plan.heals:
        time.sleep(plan.seconds)
        for proxy in group.proxies:
            proxy.go_on()
    _said(plan)
    times = (start, time.monotonic()) if plan.heals else (start,)
    return [Fault("paused" if plan.heals else "killed", "scheduler", 0, *times)]


def _fill_disk(group: Served, plan: Plan, start: float) -> list[Fault]:
    slot = plan.victim % plan.servers
    victim = group.job.servers[slot]
    victim.say("fill")
    victim.expect("full")
    _said(plan)
    return [Fault("paused", "server", slot, start, time.monotonic())]


_STRIKES: dict[str, Callable[[Any, Plan, float], list[Fault]]] = {
    **dict.fromkeys(("kill", "server killed", "scheduler killed"), _kill),
    **dict.fromkeys(("stop", "server stopped"), _stop),
    "partition": _part,
    "disk full": _fill_disk,
}


_ENDS = 30.0  # seconds until a job has ended after its errors
#: Files that a run's folder can have at its end.
_OURS = ("at.*", "*.history", "struck", "tmp", "snapshots", "journal", "*.pid", "*.end", "output")


class Outcome(NamedTuple):
    """The outcome of one run."""

    seed: int
    wrong: tuple[str, ...] = ()
    hangs: tuple[str, ...] = ()
    leftovers: tuple[str, ...] = ()
    seconds: tuple[float, ...] = ()  # of each survivor, until it raised an error
    missed: str = ""


def run(nursery: jobs.Nursery, cell: Cell, seed: int, keep: bool = False) -> Outcome:
    """Run a job, cause its fault, and judge it; with `keep` the folder of a bad run is kept."""
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
    late = [f"error after {one:.2f} s" for one in seconds if one > promised.seconds]
    hung = [f"worker {rank} did not end: {one.said[-600:]}" for rank, one in enumerate(ended) if one.hung]
    return Outcome(
        plan.seed,
        (*judge.wrong(plan, events, all_faults, promised), *judge.crashed(plan, ended)),
        (*late, *hung),
        tuple(leftovers(plan, others)),
        tuple(one for one in seconds if one < math.inf),
    )


def leftovers(plan: Plan, others: dict[str, Ended]) -> list[str]:
    """Return processes that did not end, and files that were not deleted."""
    folder = Path(plan.folder)
    there = [path.name for path in folder.iterdir() if not any(path.match(one) for one in _OURS)]
    there += [f"{path}" for path in (folder / "tmp").iterdir()]
    there += [f"/dev/shm/{name}" for name in os.listdir("/dev/shm") if name.lower().startswith("kv")]
    return [*there, *(f"{name} did not end" for name, one in others.items() if one.hung)]
