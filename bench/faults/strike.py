"""Does the fault of a run at its instant, unless a worker does it to itself."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from histories import Fault

from .group import Group, Served
from .plan import Plan

_PATIENCE = 60.0


class MissedError(Exception):
    """The job did not come to the instant of its fault."""


def strike(group: Group, plan: Plan) -> list[Fault]:
    """Wait for the instant, do it, and return what it was."""
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
            raise MissedError(f"there was no {path.name}")
        time.sleep(0.001)


def _said(plan: Plan) -> None:
    """Let the workers go further: it has come."""
    (Path(plan.folder) / "struck").touch()


def _kill_worker(group: Group, plan: Plan, start: float) -> list[Fault]:
    group.signal(plan.victim, signal.SIGKILL)
    _said(plan)
    return [Fault("killed", slot=plan.victim, start=start)]


def _stop_worker(group: Group, plan: Plan, start: float) -> list[Fault]:
    group.signal(plan.victim, signal.SIGSTOP)
    if not plan.heals:
        _said(plan)
    time.sleep(plan.seconds)
    group.signal(plan.victim, signal.SIGCONT)
    if plan.heals:
        _said(plan)
    kind = "paused" if plan.heals else "stopped"
    return [Fault(kind, slot=plan.victim, start=start, end=time.monotonic())]


def _kill_server(group: Served, plan: Plan, start: float) -> list[Fault]:
    group.job.servers[plan.victim].signal(signal.SIGKILL)
    _said(plan)
    return [Fault("killed", "server", plan.victim, start)]


def _stop_server(group: Served, plan: Plan, start: float) -> list[Fault]:
    group.job.servers[plan.victim].signal(signal.SIGSTOP)
    _said(plan)
    time.sleep(plan.seconds)
    group.job.servers[plan.victim].signal(signal.SIGCONT)
    return [Fault("stopped", "server", plan.victim, start, time.monotonic())]


def _kill_scheduler(group: Served, plan: Plan, start: float) -> list[Fault]:
    group.job.scheduler.signal(signal.SIGKILL)
    if not plan.heals:
        _said(plan)
        return [Fault("killed", "scheduler", 0, start)]
    time.sleep(plan.seconds)
    group.restart_scheduler()
    _said(plan)
    return [Fault("paused", "scheduler", 0, start, time.monotonic())]


def _part(group: Served, plan: Plan, start: float) -> list[Fault]:
    for proxy in group.proxies:
        proxy.stop()
    if not plan.heals:
        _said(plan)
        return [Fault("killed", "scheduler", 0, start)]
    time.sleep(plan.seconds)
    for proxy in group.proxies:
        proxy.go_on()
    _said(plan)
    return [Fault("paused", "scheduler", 0, start, time.monotonic())]


def _fill_disk(group: Served, plan: Plan, start: float) -> list[Fault]:
    victim = group.job.servers[plan.victim % plan.servers]
    victim.say("fill")
    victim.expect("full")
    _said(plan)
    return [Fault("paused", "server", plan.victim % plan.servers, start, time.monotonic())]


_STRIKES: dict[str, Callable[[Any, Plan, float], list[Fault]]] = {
    "kill": _kill_worker,
    "stop": _stop_worker,
    "server killed": _kill_server,
    "server stopped": _stop_server,
    "scheduler killed": _kill_scheduler,
    "partition": _part,
    "disk full": _fill_disk,
}
