"""The whole course of `kvstore bench`: check, start, meet, check the sums, measure."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from collections.abc import Callable
from contextlib import AbstractContextManager

from kvstore.errors import KVStoreError

from . import machine, memory, plans
from .key_lists import KeyList
from .report import Result
from .rounds import Way, measure
from .settings import BenchSettings
from .supervisor import Supervisor
from .worker_group import GroupPlan, PeerFailure, WorkerGroup
from .workers.store import MEMCPY, OURS

#: Makes a context for so many turns; it gives what is to be called with how many are over.
Progress = Callable[[int], AbstractContextManager[Callable[[int], object]]]

_LEAST = 90.0  # seconds that workers have for an answer,
_ORDERLY = 10.0  # seconds in which workers that have done all take leave of each other
_RATE = 20e6  # and one more for so many bytes of gradients: they are made, pushed and checked


class WrongSum(KVStoreError):
    """A peer's sum is not that of NumPy."""


def bench(settings: BenchSettings, keys: KeyList, peers: str, progress: Progress) -> Result:
    """Measure a store beside its peers. Call it from the main thread.

    Parameters
    ----------
    settings : BenchSettings
        Store, processes, and what a call does.
    keys : KeyList
        Keys of each call.
    peers : str
        ``auto``, ``none``, or names that are separated by commas.
    progress : callable
        Shows how far it has come.

    Raises
    ------
    ConfigError
        There is not enough memory, or a peer that `peers` names cannot be started.
    PeerFailure
        The workers of the store failed, or those of a peer that `peers` names, or that has begun.
    WrongSum
        A sum is wrong.
    Interrupted
        A signal came.
    """
    found, left_out = plans.peer_plans(peers, settings.workers)
    memory.check(settings, keys, [plan.name for plan in found])
    patience = _LEAST + keys.nbytes * settings.workers / _RATE
    with Supervisor() as supervisor, contextlib.ExitStack() as stack:
        wanted = [plans.store_plan(settings, patience), *found]
        own, *others = (_started(supervisor, plan, settings, stack) for plan in wanted)
        ways = ready(own, keys, patience)
        for group in others:
            ways += _ready_or_left_out(group, keys, patience, left_out if peers == plans.AUTO else None)
        with progress(len(ways) * (settings.rounds + 1)) as advance:
            best = measure(ways, settings.rounds, patience, advance)
        for group in (own, *others):
            group.end(_ORDERLY)
    measured = [group for group in (own, *others) if group.name not in left_out]
    versions = {name: version for group in measured for name, version in group.versions.items()}
    return Result(settings, keys, machine.described(), versions, best, left_out, tuple(own.lines))


def _started(
    supervisor: Supervisor, plan: GroupPlan, settings: BenchSettings, stack: contextlib.ExitStack
) -> WorkerGroup:
    group = WorkerGroup(supervisor, plan, json.dumps(dataclasses.asdict(settings)))
    stack.callback(group.end)
    return group


def ready(group: WorkerGroup, keys: KeyList, patience: float) -> list[Way]:
    """Have the workers of a group meet, and check their sums."""
    group.meet(patience)
    order = {"do": "prepare", "keys": [dataclasses.astuple(key) for key in keys.keys]}
    answers = group.ask(order, patience)
    for rank, answer in enumerate(answers):
        if answer["wrong"]:
            raise WrongSum(
                f"{group.name}, rank {rank}: {answer['wrong']} is not what NumPy has; nothing is timed"
            )
    names = answers[0]["ways"]
    own = (OURS, MEMCPY)  # peers by themselves; other names are ways of one
    return [
        Way(name if name in own else group.name, "" if name in own else name, group, name) for name in names
    ]


def _ready_or_left_out(
    group: WorkerGroup, keys: KeyList, patience: float, left_out: dict[str, str] | None
) -> list[Way]:
    """Have a peer ready; one that fails before it is measured is left out, if that is wanted."""
    try:
        return ready(group, keys, patience)
    except PeerFailure as failure:
        if left_out is None:
            raise
        left_out[group.name] = str(failure)
        group.end()
        return []
