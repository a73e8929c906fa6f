"""Violations in the history of a run, and the times when survivors raised an error, or continued."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

from histories import Event, Fault, History, events_in
from histories.checker import violations

from .cells import Plan, Promise
from .group import Ended

Finder = Callable[[list[Event], int, float], float]
_KINDS = {"local": "local", "dist_async": "async"}
#: Errors that report a loss. In MPI only a deadline ends a wait for a stopped process.
_TOLD = ("PeerLostError", "FencedError", "TimeoutError")


def events_of(plan: Plan) -> list[Event]:
    """Return all calls."""
    return [event for path in sorted(Path(plan.folder).glob("*.history")) for event in events_in(path)]


def wrong(plan: Plan, events: list[Event], faults: list[Fault], promised: Promise) -> list[str]:
    """Return the violations of the history."""
    if plan.store == "mpi":
        events = [one._replace(error="Abandoned") if one.error == "TimeoutError" else one for one in events]
    history = History(
        tuple(events), plan.workers, _KINDS.get(plan.store, "sync"), plan.keeps, plan.on_peer_loss,
        tuple(one for one in faults if one.kind != "left"), noticed=promised.seconds,
    )  # fmt: skip
    return [f"{one.kind}: {one.text}" for one in violations(history)]


def crashed(plan: Plan, ended: list[Ended]) -> list[str]:
    """Return the workers other than the victim that failed."""
    return [
        f"worker {rank} ended with {one.code}: {one.said[-600:]}"
        for rank, one in enumerate(ended)
        if plan.store != "mpi"
        and not one.hung
        and (one.code != 0 or "Traceback" in one.said)
        and not (plan.victim_is_worker and rank == plan.victim and plan.store != "local")
    ]


def told(plan: Plan, events: list[Event], faults: list[Fault], ended_at: float = math.inf) -> list[float]:
    """Return for each survivor the seconds until it raised an error, or continued; infinity: neither.

    A temporary fault is counted from its end, and only for workers that were not done by then: without rounds
    no worker waits for a stopped process. Where the launcher ends a job, its end counts for all workers.
    """
    fault = faults[0]
    start = fault.end if plan.heals and fault.end < math.inf else fault.start
    left = [slot for slot in range(plan.workers) if not (plan.victim_is_worker and slot == plan.victim)]
    if plan.heals:
        left = [slot for slot in range(plan.workers) if not _was_done(events, slot, start)]
    elif plan.store == "mpi":
        return [min(_raised(events, slot, start), ended_at) - start for slot in left]
    find = _raised if plan.until_told else _went_on(plan, events)
    return [find(events, slot, start) - start for slot in left]


def _was_done(events: list[Event], slot: int, at: float) -> bool:
    """Return whether a worker had finished all calls but `close` at this time, and could close its store."""
    own = [one for one in events if one.slot == slot]
    closed = any(one.verb == "close" and one.good for one in own)
    return closed and all(one.returned <= at for one in own if one.verb != "close")


def _raised(events: list[Event], slot: int, start: float) -> float:
    raised = [one.returned for one in events if one.slot == slot and one.error in _TOLD]
    return min((at for at in raised if at > start), default=math.inf)


def _is_beyond(read: Event, own: dict[object, int], last: dict[object, int]) -> bool:
    """Return whether a read is of rounds without a push of the lost worker."""
    return all(own.get(key, 0) > last.get(key, -1) for key in read.read)


def _went_on(plan: Plan, events: list[Event]) -> Finder:
    """Return a function that finds the first later read of a round without a push of the lost worker."""
    last: dict[object, int] = {}
    if plan.victim_is_worker and not plan.heals and plan.store in ("shared", "dist_sync", "hierarchy"):
        for one in events:
            if one.slot == plan.victim:
                last.update(one.pushed)

    def find(events: list[Event], slot: int, start: float) -> float:
        own: dict[object, int] = {}
        for one in sorted((one for one in events if one.slot == slot), key=lambda one: one.called):
            own.update(one.pushed)
            later = one.returned > start and (one.called > start or bool(last))
            if later and one.good and one.read and _is_beyond(one, own, last):
                return one.returned
        return math.inf

    return find
