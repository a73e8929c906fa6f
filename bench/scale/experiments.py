"""Runs a case of `bench.cases.scale`: build the job, run it, and return its figures."""

from __future__ import annotations

import gc
import resource
import time
from collections.abc import Callable
from dataclasses import asdict, replace
from functools import cache
from typing import Any

from bench.cases import scale as cases
from bench.scale import programs, real
from bench.scale.costs import Costs
from bench.scale.job import Job, Plan
from bench.scale.network import LinkKind, ethernet
from kvstore.stores.parameter_server.protocol.messages import KeySpec

Figures = dict[str, Any]
_WAKE = 20e-6  # seconds from one process of a host to another


def specs(keys: cases.KeySet) -> list[KeySpec]:
    """Return the keys as they are initialised."""
    return [KeySpec(f"layer{n}.weight", shape, keys.dtype) for n, shape in enumerate(keys.shapes)]


def run(case: Any, costs: Costs) -> Figures:
    """Return the figures of a case; `took` are the seconds of this process, `memory` its most bytes."""
    began = time.perf_counter()
    found = dict(_once(replace(case, name="", group=""), costs))
    found["took"] = time.perf_counter() - began
    found["memory"] = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
    return found


@cache
def _once(case: Any, costs: Costs) -> Figures:
    """Run a case; a case of several tables runs once."""
    found: Figures = _RUNS[type(case)](case, costs)
    gc.collect()
    return found


# ---------------------------------------------------------------------------------------------- steps


def step(case: cases.StepCase, costs: Costs) -> Figures:
    """Measure the time of a step, and the load of processes and links in it."""
    if case.parts:
        return _extrapolated(case, costs)
    keys = cases.key_set(case.keys)
    job = Job(_plan(case), costs, programs.steps(specs(keys), case.steps))
    if case.slow > 1:
        job.workers[-1].slow = case.slow
        job.hosts[-1].out.rate /= case.slow
        job.hosts[-1].into.rate /= case.slow
    last, n = case.steps - 1, len(job.workers)
    job.run(lambda: len(job.marks.get(f"end {last - 1}" if last else "begin 0", ())) == n)
    before, begin = _use(job), job.clock.now
    job.run(lambda: len(job.marks.get(f"end {last}", ())) == n)
    ends = sorted(job.marks[f"end {last}"])
    end = ends[-1]
    inside = costs.host_sum * keys.nbytes if case.by_host else 0.0
    use = {name: now - before[name] for name, now in _use(job).items()}
    took = end - begin
    return {
        "seconds": took + inside, "inside": inside, "median": ends[len(ends) // 2] - begin + inside,
        "init": max(job.marks["ready"]) - max(job.marks["welcome"]), "bytes": keys.nbytes,
        "keys": len(keys.shapes), **_shares(case, use, took, costs), "use": use,
    }  # fmt: skip


def _plan(case: cases.StepCase) -> Plan:
    parties = -(-case.workers // case.per_host) if case.by_host else case.workers
    return Plan(
        parties, case.servers, 1 if case.by_host else case.per_host, ethernet(case.gbits), case.mode,
        slice_bytes=case.slice_bytes, credit=case.credit, coding=cases.TWO_BIT if case.codec else 0,
        sharers=case.per_host if case.by_host else 1, tick=0.5,
    )  # fmt: skip


def _use(job: Job) -> dict[str, float]:
    """Return bytes and seconds so far, each of the busiest process or host."""
    return {
        "host out": max(host.out.nbytes for host in job.hosts),
        "host in": max(host.into.nbytes for host in job.hosts),
        "server in": max(one.host.into.nbytes for one in job.servers),
        "server out": max(one.host.out.nbytes for one in job.servers),
        "server seconds": max(one.seconds for one in job.servers),
        "worker seconds": max(one.seconds for one in job.workers),
        "scheduler seconds": job.scheduler.seconds,
        "requests": sum(one.requests for one in job.servers),
        "rounds": sum(one.rounds for one in job.servers),
        "values": sum(one.values_in for one in job.servers),
        "scheduler messages": job.scheduler.sent + job.scheduler.received,
    }


def _shares(case: Any, use: dict[str, float], took: float, costs: Costs) -> Figures:
    """Return the share of the step in which each was busy; `bound` is the busiest."""
    rate = ethernet(case.gbits).rate
    sharers = case.per_host if case.by_host else 1
    shares = {
        "worker link": max(use["host out"], use["host in"]) / rate / took,
        "server link": max(use["server in"], use["server out"]) / rate / took,
        "server core": use["server seconds"] / took,
        "worker core": use["worker seconds"] / sharers / took,
    }
    return {"shares": shares, "bound": max(shares, key=lambda name: shares[name])}


def _extrapolated(case: cases.StepCase, costs: Costs) -> Figures:
    """Extrapolate the step of all keys, linearly in the bytes, from the steps of two parts."""
    few, many = (step(replace(case, keys=keys, parts=()), costs) for keys in case.parts)
    whole = cases.key_set(case.keys)
    times = (whole.nbytes - many["bytes"]) / (many["bytes"] - few["bytes"])
    names = ("seconds", "inside", "median", "init")
    grown = {name: many[name] + times * (many[name] - few[name]) for name in names}
    return {**many, **grown, "bytes": whole.nbytes, "keys": len(whole.shapes)}


def exact(case: cases.ExactCase, costs: Costs) -> Figures:
    """Compare the extrapolation from two parts of a model with the whole model."""
    one = cases.StepCase(case.name, "", case.keys, case.workers, case.servers, 1, steps=1)
    whole = step(one, costs)["seconds"]
    scaled = _extrapolated(replace(one, parts=case.parts), costs)["seconds"]
    return {"whole": whole, "scaled": scaled, "error": scaled / whole - 1}


def training(case: cases.TrainingCase, costs: Costs) -> Figures:
    """Measure the time of a step whose passes compute concurrently."""
    keys, link = cases.key_set(case.keys), ethernet(case.gbits)
    sizes = {"slice_bytes": case.slice_bytes, "credit": case.credit}
    program = programs.training(specs(keys), 3, case.forward, case.backward, case.priority)
    job = Job(Plan(case.workers, case.servers, link=link, **sizes), costs, program)
    job.run()
    took, compute = max(job.marks["end 2"]) - max(job.marks["end 1"]), case.forward + case.backward
    return {"seconds": took, "compute": compute, "exposed": took - compute}


# -------------------------------------------------------------------------------------------- control


def control(case: cases.ControlCase, costs: Costs) -> Figures:
    """Measure the scheduler in each phase of a job: messages, bytes, seconds of its core."""
    program = programs.control(specs(cases.key_set(case.keys)), idle=2.0)
    job = Job(Plan(case.workers, case.servers, 8, ethernet(10), jitter=0.05, timed=True), costs, program)
    found: Figures = {}
    phases = {"start": "welcome", "init": "ready", "barrier": "passed", "": "settled", "steady": "closes"}
    before = _control_use(job)
    for phase, mark in {**phases, "end": "over"}.items():
        job.run(lambda mark=mark: len(job.marks.get(mark, ())) == case.workers)  # type: ignore[misc]
        now = _control_use(job)
        found[phase] = {name: now[name] - before[name] for name in now}
        before = now
    return {**found, "kinds": dict(job.scheduler.kinds)}


def _control_use(job: Job) -> dict[str, float]:
    scheduler = job.scheduler
    return {
        "seconds": job.clock.now,
        "messages": sum(scheduler.kinds.values()),
        "bytes": scheduler.host.into.nbytes + scheduler.host.out.nbytes,
        "core": scheduler.seconds,
        "machine": scheduler.took,
    }


# --------------------------------------------------------------------------------------------- losses


def loss(case: cases.LossCase, costs: Costs) -> Figures:
    """Measure how long a loss delays the survivors, and its cost to the scheduler."""
    keys = cases.key_set("64x1048576")
    plan = Plan(case.workers, case.servers, 8, ethernet(10), on_peer_loss=case.on_peer_loss, timed=True)
    job = Job(plan, costs, programs.steps(specs(keys), 2))
    job.run(lambda: len(job.marks.get("begin 1", ())) >= case.workers // 2)
    died, before = job.clock.now, _control_use(job)
    _kill(job, case.who)
    there = [one for one in job.workers if one.alive]
    ended = job.run(lambda: all(one.over for one in there), 120.0)
    after = _control_use(job)
    failed = [one for one in there if one.failure is not None]
    return {
        "seconds": job.clock.now - died, "ended": ended, "there": len(there), "failed": len(failed),
        "error": failed[0].failure.error if failed else "", "core": after["core"] - before["core"],  # type: ignore[union-attr]
        "messages": after["messages"] - before["messages"],
    }  # fmt: skip


def _kill(job: Job, who: str) -> None:
    if who == "server":
        job.servers[-1].host.die()
        job.kill(job.servers[-1])
    elif who == "host":
        job.hosts[-1].die()
        job.kill(*(one for one in job.workers if one.host is job.hosts[-1]))
    else:
        job.kill(job.workers[-1])


# --------------------------------------------------------------------------------------------- checks


def check(case: cases.CheckCase, costs: Costs) -> Figures:
    """Run a real job on this machine several times, and simulate the same job."""
    found = sorted((real.run(case.real) for _ in range(case.runs)), key=lambda one: one.seconds)
    spread = [one.seconds for one in found]
    middle = asdict(found[len(found) // 2])
    return {"real": middle, "spread": spread, "simulated": simulated(case.real, costs)}


def simulated(case: real.RealCase, costs: Costs) -> Figures:
    """Simulate a job whose processes share the cores of this machine."""
    keys = [KeySpec(n, (size,), "float32") for n, size in enumerate(case.sizes)]
    calls = min(case.calls, 6) + 1
    link = LinkKind(float("inf"), 0.0, _WAKE)
    plan = Plan(case.workers, case.servers, case.workers, link, case.mode, cores=2)
    job = Job(plan, costs, programs.steps(keys, calls, case.sleep))
    job.run(lambda: len(job.marks.get("end 0", ())) == case.workers)
    before = _core(job)
    job.run()
    steps = [sorted(job.marks[f"end {number}"]) for number in range(calls)]
    middle = sorted(last - first for first, last in zip(steps[0], steps[-1], strict=True))[case.workers // 2]
    core = {name: (now - before[name]) / (calls - 1) for name, now in _core(job).items()}
    return {"seconds": middle / (calls - 1) - case.sleep, **core, **_counted(job, calls)}


def _core(job: Job) -> dict[str, float]:
    worker = sum(one.seconds for one in job.workers) / len(job.workers)
    return {"worker": worker, "server": sum(one.seconds for one in job.servers)}


def _counted(job: Job, calls: int) -> dict[str, float]:
    """Count requests and bytes of a call, of all workers but the initializer."""
    names = {"sent": "values_out", "received": "values_in", "rounds": "requests"}
    others = job.workers[1:]
    sums = {name: sum(getattr(one, of) for one in others) for name, of in names.items()}
    return {name: total / (calls * len(others)) for name, total in sums.items()}


_RUNS: dict[type, Callable[[Any, Costs], Figures]] = {
    cases.StepCase: step,
    cases.ExactCase: exact,
    cases.TrainingCase: training,
    cases.ControlCase: control,
    cases.LossCase: loss,
    cases.CheckCase: check,
}
