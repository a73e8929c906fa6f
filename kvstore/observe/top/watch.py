"""Views of the jobs of this machine, and the changes between two views.

A view is the object that ``kvstore top --json`` prints: `jobs`, with a row for each store of a process;
`news`, the ends of processes and losses since the first view; and `unreadable`, the processes with another
version of kvstore.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, NamedTuple

from kvstore.errors import ConfigError
from kvstore.observe.counters import PHASES, WAITING
from kvstore.observe.native._observe import job_id
from kvstore.observe.processes import ORDER, ProcessFacts, command, facts, name_of, process_name, role_of

from .pages import CounterPage, counter_pages

Row = dict[str, Any]

_NEWS = 5  # that are kept
_LEAST_AHEAD = 5.0  # seconds for which times are taken from a view on
_PER_SECOND = {"calls": "calls", "rounds": "rounds", "sent_bytes": "sent", "received_bytes": "received"}


class ProcessSnapshot(NamedTuple):
    """A process at one moment, in ns of the monotonic clock."""

    at: int
    facts: ProcessFacts
    stores: dict[int, dict[str, Any]]  # by place


class JobWatch:
    """Makes views of one job, or of all, every `interval` seconds.

    `job` is its name, the beginning of the hash of its name, or the number of one of its processes or of
    their parent.
    """

    def __init__(self, job: str | None, interval: float) -> None:
        self._job = job
        self._ahead = max(_LEAST_AHEAD, 3 * interval)
        self._snapshots: dict[int, ProcessSnapshot] = {}
        self._rows: dict[tuple[int, int], Row] = {}
        self._news: list[str] = []
        self._found = False

    def next_view(self) -> dict[str, Any]:
        """Read the counters of all processes, and return a view.

        Raises
        ------
        ConfigError
            It is the first view, and there is no such job.
        """
        before, self._snapshots, pages = self._snapshots, {}, counter_pages()
        found = [row for page in pages for row in self._rows_of_page(page, before.get(page.process))]
        shown = [row for row in found if self._is_wanted(row)]
        if not shown and not self._found:
            raise ConfigError(self._no_job_text(found))
        self._found = True
        in_view = {row["process"] for row in shown}
        for page in pages:
            if page.process in in_view:  # other jobs of the user take no times
                page.ask_for_times(self._ahead)
        self._add_news({(row["process"], row["number"]): row for row in shown})
        unreadable = [page.process for page in pages if page.stores is None]
        return {"jobs": list(_group_by_job(shown)), "news": self._news, "unreadable": unreadable}

    def _rows_of_page(self, page: CounterPage, before: ProcessSnapshot | None) -> list[Row]:
        process = facts(page.process)
        if process is None:
            return []
        after = ProcessSnapshot(page.at, process, {one["place"]: one for one in page.stores or ()})
        self._snapshots[page.process] = after
        return store_rows(page.process, before, after)

    def _is_wanted(self, row: Row) -> bool:
        wanted, job = self._job, row["job"]
        if wanted is None or (job and (job.startswith(wanted) or job == job_id(wanted))):
            return True
        return wanted in (str(row["process"]), str(row["parent"]))

    def _no_job_text(self, found: Sequence[Row]) -> str:
        if self._job is None:
            return "no process of this user has a store of kvstore on this machine"
        names = sorted({row["job"] or str(row["parent"]) for row in found})
        return f"there is no job {self._job!r} on this machine; there are: {', '.join(names) or 'none'}"

    def _add_news(self, shown: dict[tuple[int, int], Row]) -> None:
        """Add the changes since the last view to the news."""
        processes = {process for process, _ in shown}
        gone = {row["process"]: row for row in self._rows.values() if row["process"] not in processes}
        news = [f"{_process_text(row)} is gone" for row in gone.values()]
        for place, row in shown.items():
            more = row["losses"] - self._rows.get(place, row)["losses"]
            if more > 0:
                news.append(f"{_process_text(row)} has lost {more} of the others")
        clock = time.strftime("%H:%M:%S")
        self._news = [*self._news, *(f"{clock} {one}" for one in news)][-_NEWS:]
        self._rows = shown


def _process_text(row: Row) -> str:
    return f"{process_name(row['role'], row['rank'])} (process {row['process']})"


def _group_by_job(shown: Sequence[Row]) -> Iterator[dict[str, Any]]:
    """Group the processes of each job: workers, then servers, then the scheduler.

    `job` is the hash of its name; it is empty if the job has none, and then its processes have one parent.
    `command` is the command line of the first worker.
    """

    def job(row: Row) -> tuple[str, int]:
        return row["job"], 0 if row["job"] else row["parent"]

    def order(row: Row) -> tuple[Any, ...]:
        return *job(row), ORDER[row["role"]], row["rank"], row["process"], row["number"]

    for (name, _), of_job in groupby(sorted(shown, key=order), key=job):
        stores = list(of_job)
        yield {"job": name, "command": command(stores[0]["process"]), "stores": stores}


def store_rows(process: int, before: ProcessSnapshot | None, after: ProcessSnapshot) -> list[Row]:
    """Make one row for each store that a process has.

    Rates are None in the first view; `cpu` is 1 for one core. `phases` are parts of the time, added up over
    threads.
    """
    about = after.facts
    return [
        {
            "process": process, "parent": about.parent, "job": one["job"], "role": role_of(one["store"]),
            "rank": one["rank"], "size": one["size"], "store": one["store"], "number": place,
            "keys": one["keys"], "values_bytes": one["nbytes"], "losses": one["losses"],
            "memory_bytes": about.memory, "shared_memory_bytes": about.shared_memory,
            "waiting": _present_wait(one, after.at), **_store_rates(place, before, after),
            "stopped": about.stopped,
        }
        for place, one in sorted(after.stores.items())
    ]  # fmt: skip


def _store_rates(place: int, before: ProcessSnapshot | None, after: ProcessSnapshot) -> dict[str, Any]:
    """Return the rates since the snapshot before; None at the first snapshot of a process or of a store."""
    rates: dict[str, Any] = dict.fromkeys(["cpu", *(f"{name}_per_second" for name in _PER_SECOND), "phases"])
    if before is None or after.at <= before.at or after.facts.started != before.facts.started:
        return rates
    seconds = (after.at - before.at) * 1e-9
    rates["cpu"] = (after.facts.cpu - before.facts.cpu) / seconds
    then, now = before.stores.get(place), after.stores[place]
    if then is None or sum(now["calls"]) < sum(then["calls"]) or now["store"] != then["store"]:
        return rates  # another store has this place
    for name, field in _PER_SECOND.items():
        grown = _growth(*(one[field] if name != "rounds" else [one[field]] for one in (then, now)))
        rates[f"{name}_per_second"] = sum(grown) / seconds
    spent = _growth(_phase_ns(then, before.at), _phase_ns(now, after.at))
    rates["phases"] = {phase: ns * 1e-9 / seconds for phase, ns in zip(PHASES, spent, strict=True)}
    return rates


def _phase_ns(one: dict[str, Any], at: int) -> list[int]:
    """Return the ns of each phase, with the wait that lasts."""
    since = one["waiting_since"]
    spent: list[int] = list(one["ns"])
    spent[WAITING] += max(0, at - since) if since else 0
    return spent


def _growth(before: Sequence[int], after: Sequence[int]) -> list[int]:
    return [max(0, now - then) for then, now in zip(before, after, strict=True)]


def _present_wait(one: dict[str, Any], at: int) -> dict[str, Any] | None:
    """Describe a wait that lasts: the process it is for, its length until now, and its round."""
    if not one["waiting_since"]:
        return None
    seconds = max(0, at - one["waiting_since"]) * 1e-9
    return {"whom": name_of(one["whom"]) or "others", "seconds": seconds, "round": one["round"]}
