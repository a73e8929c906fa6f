"""The rates of the stores of a process between two snapshots of their counters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from kvstore.observe.counters import PHASES, WAITING
from kvstore.observe.processes import ProcessFacts, name_of, process_name, role_of


class Snapshot(NamedTuple):
    """A process at one moment, in ns of the monotonic clock."""

    at: int
    facts: ProcessFacts
    stores: dict[int, dict[str, Any]]  # by place


@dataclass(frozen=True)
class PresentWait:
    """A wait that lasts: the process it is for, its length until now, and its round."""

    whom: str
    seconds: float
    round: int


@dataclass(frozen=True)
class StoreRow:
    """One store of a process.

    Rates are None in the first view; `cpu` is 1 for one core. `phases` are parts of the time, added up over
    threads.
    """

    process: int
    parent: int
    job: str
    role: str
    rank: int
    size: int
    store: str
    number: int
    keys: int
    values_bytes: int
    losses: int
    memory_bytes: int
    shared_memory_bytes: int
    waiting: PresentWait | None
    cpu: float | None = None
    calls_per_second: float | None = None
    rounds_per_second: float | None = None
    sent_bytes_per_second: float | None = None
    received_bytes_per_second: float | None = None
    phases: dict[str, float] | None = None
    stopped: bool = False

    @property
    def name(self) -> str:
        """Role and rank."""
        return process_name(self.role, self.rank)


def rows(process: int, before: Snapshot | None, after: Snapshot) -> list[StoreRow]:
    """Make one row for each store that a process has."""
    return [_row(process, place, before, after) for place in sorted(after.stores)]


def _row(process: int, place: int, before: Snapshot | None, after: Snapshot) -> StoreRow:
    one, facts = after.stores[place], after.facts
    return StoreRow(
        process, facts.parent, one["job"], role_of(one["store"]), one["rank"], one["size"], one["store"],
        place, one["keys"], one["nbytes"], one["losses"], facts.memory, facts.shared_memory,
        _waiting(one, after.at), **_rates(place, before, after), stopped=facts.stopped,
    )  # fmt: skip


def _rates(place: int, before: Snapshot | None, after: Snapshot) -> dict[str, Any]:
    """Return the rates since the snapshot before; none at the first snapshot of a store."""
    if before is None or after.at <= before.at or after.facts.started != before.facts.started:
        return {}
    seconds = (after.at - before.at) * 1e-9
    cpu = {"cpu": (after.facts.cpu - before.facts.cpu) / seconds}
    then, now = before.stores.get(place), after.stores[place]
    if then is None or sum(now["calls"]) < sum(then["calls"]) or now["store"] != then["store"]:
        return cpu  # another store has this place
    grown = _differences(_spent(then, before.at), _spent(now, after.at))
    return cpu | {
        "calls_per_second": sum(_differences(then["calls"], now["calls"])) / seconds,
        "rounds_per_second": max(0, now["rounds"] - then["rounds"]) / seconds,
        "sent_bytes_per_second": sum(_differences(then["sent"], now["sent"])) / seconds,
        "received_bytes_per_second": sum(_differences(then["received"], now["received"])) / seconds,
        "phases": {phase: ns * 1e-9 / seconds for phase, ns in zip(PHASES, grown, strict=True)},
    }


def _spent(one: dict[str, Any], at: int) -> list[int]:
    """Return the ns of each phase, with the wait that lasts."""
    since = one["waiting_since"]
    spent: list[int] = list(one["ns"])
    spent[WAITING] += max(0, at - since) if since else 0
    return spent


def _differences(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [max(0, now - then) for then, now in zip(before, after, strict=True)]


def _waiting(one: dict[str, Any], at: int) -> PresentWait | None:
    if not one["waiting_since"]:
        return None
    seconds = max(0, at - one["waiting_since"]) * 1e-9
    return PresentWait(name_of(one["whom"]) or "others", seconds, one["round"])
