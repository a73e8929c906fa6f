"""Views of the jobs of this machine, and the changes between two views."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby

from kvstore.errors import ConfigError
from kvstore.observe.native._observe import job_id, now
from kvstore.observe.processes import ORDER, command, facts

from .pages import CounterPage, counter_pages
from .rates import Snapshot, StoreRow, rows

_NEWS = 5  # that are kept
_LEAST_AHEAD = 5.0  # seconds for which times are taken from a view on


@dataclass(frozen=True)
class JobView:
    """The processes of one job on this machine."""

    job: str  # the hash of its name; empty if it has none, and then its processes have one parent
    command: str  # command line of the first worker
    stores: Sequence[StoreRow]


@dataclass(frozen=True)
class MachineView:
    """The jobs of this machine at one moment."""

    jobs: Sequence[JobView]
    news: Sequence[str]  # ends of processes and losses since the first view, the newest last
    unreadable: Sequence[int]  # processes with another version of kvstore


class Watch:
    """Makes views of one job, or of all, every `interval` seconds.

    `job` is its name, the beginning of the hash of its name, or the number of one of its processes or of
    their parent.
    """

    def __init__(self, job: str | None, interval: float) -> None:
        self._job = job
        self._ahead = max(_LEAST_AHEAD, 3 * interval)
        self._snapshots: dict[int, Snapshot] = {}
        self._rows: dict[tuple[int, int], StoreRow] = {}
        self._news: list[str] = []
        self._found = False

    def view(self) -> MachineView:
        """Read the counters of all processes, and return a view.

        Raises
        ------
        ConfigError
            It is the first view, and there is no such job.
        """
        before, self._snapshots, pages = self._snapshots, {}, counter_pages()
        found = [row for page in pages for row in self._read(page, before.get(page.process))]
        shown = [row for row in found if self._is_wanted(row)]
        if not shown and not self._found:
            raise ConfigError(self._nothing(found))
        self._found = True
        in_view = {row.process for row in shown}
        for page in pages:
            if page.process in in_view:  # other jobs of the user take no times
                page.ask_for_times(self._ahead)
        self._compare({(row.process, row.number): row for row in shown})
        unreadable = [page.process for page in pages if not page.is_readable]
        return MachineView(list(_jobs(shown)), list(self._news), unreadable)

    def _read(self, page: CounterPage, before: Snapshot | None) -> list[StoreRow]:
        process, stores = facts(page.process), page.stores()
        if process is None:
            return []
        after = self._snapshots[page.process] = Snapshot(
            now(), process, {one["place"]: one for one in stores}
        )
        return rows(page.process, before, after)

    def _is_wanted(self, row: StoreRow) -> bool:
        wanted = self._job
        if wanted is None or (row.job and (row.job.startswith(wanted) or row.job == job_id(wanted))):
            return True
        return wanted in (str(row.process), str(row.parent))

    def _nothing(self, found: Sequence[StoreRow]) -> str:
        if self._job is None:
            return "no process of this user has a store of kvstore on this machine"
        names = sorted({row.job or str(row.parent) for row in found})
        return f"there is no job {self._job!r} on this machine; there are: {', '.join(names) or 'none'}"

    def _compare(self, shown: dict[tuple[int, int], StoreRow]) -> None:
        """Add the changes since the last view to the news."""
        processes = {process for process, _ in shown}
        gone = {row.process: row for row in self._rows.values() if row.process not in processes}
        news = [f"{row.name} (process {row.process}) is gone" for row in gone.values()]
        for place, row in shown.items():
            more = row.losses - self._rows[place].losses if place in self._rows else 0
            if more > 0:
                news.append(f"{row.name} (process {row.process}) has lost {more} of the others")
        clock = time.strftime("%H:%M:%S")
        self._news = [*self._news, *(f"{clock} {one}" for one in news)][-_NEWS:]
        self._rows = shown


def _jobs(shown: Sequence[StoreRow]) -> Iterator[JobView]:
    """Group the processes of each job: workers, then servers, then the scheduler."""

    def job(row: StoreRow) -> tuple[str, int]:
        return row.job, 0 if row.job else row.parent

    ordered = sorted(shown, key=lambda row: (*job(row), ORDER[row.role], row.rank, row.process, row.number))
    for (name, _), of_job in groupby(ordered, key=job):
        members = list(of_job)
        yield JobView(name, command(members[0].process), members)
