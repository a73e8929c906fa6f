"""The counts of workers, servers and the scheduler, and the times that they take while a reader asks."""

from __future__ import annotations

import signal
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import jobs
import pace
import pytest
import tested_store
from nightly import each_once
from servers import ServedJob

from kvstore.kernels import cpu
from kvstore.observe.counters import PHASES, WAITING, WAYS
from kvstore.observe.events import ARRIVED, LOST, NOBODY, Event
from kvstore.observe.native._observe import job_id
from kvstore.observe.top.pages import counter_pages

BODIES = "procs_dist"
SYNC = {tested_store.NAME: "dist_sync", "KVSTORE_SLICE_BYTES": "131072"}
STREAM = {**SYNC, "KVSTORE_SAME_HOST_SHM": "0"}
FRAME = {**STREAM, "KVSTORE_STREAMS": "0"}
#: Values of one slice, and of several: of these the memory is shared if it may be.
SMALL, LARGE = 1000, 4 * 32768
LATE = 0.3  # seconds

Served = Callable[..., ServedJob]


class Observed(ServedJob):
    """A job whose servers record their events, and return their counts."""

    def start_server(self, rank: int, **variables: str) -> jobs.Worker:
        return super().start_server(rank, module=BODIES, function="observed_server", **variables)

    def results_of_servers(self) -> list[dict[str, Any]]:
        assert self.ended() == [0] * (1 + len(self.servers))
        return [one.result() for one in self.servers]


@pytest.fixture
def observed(nursery: jobs.Nursery, tmp_path: Path) -> Iterator[Served]:
    made: list[ServedJob] = []

    def make(workers: int, servers: int = 1, **variables: str) -> ServedJob:
        made.append(Observed(nursery, tmp_path, workers, servers, **variables))
        return made[-1]

    yield make
    for job in made:
        job.close()


def events_of(found: dict[str, Any], kind: int) -> list[Event]:
    return [event for event in (Event(*one) for one in found["events"]) if event.kind == kind]


def assert_apart(found: dict[str, Any]) -> None:
    """No two spans of a thread overlap."""
    spans: dict[int, list[Event]] = defaultdict(list)
    for event in (Event(*one) for one in found["events"]):
        if event.kind < len(PHASES):
            spans[event.thread].append(event)
    assert spans
    for several in spans.values():
        several.sort(key=lambda event: event.begin)
        for one, other in pairwise(several):
            assert one.end <= other.begin


def by_way(numbers: Sequence[int]) -> dict[str, int]:
    return {way: number for way, number in zip(WAYS, numbers, strict=True) if number}


# ----------------------------------------------------------------------------------------------------- counts


CASES = [
    (SMALL, SYNC, "stream"),
    (LARGE, SYNC, "shared"),
    (LARGE, STREAM, "stream"),
    (SMALL, FRAME, "frame"),
    (LARGE, FRAME, "frame"),
]


@pytest.mark.parametrize(("case", "servers"), each_once(CASES, [1, 2]))
def test_bytes_and_rounds_are_exact(
    observed: Served, case: tuple[int, dict[str, str], str], servers: int
) -> None:
    size, variables, way = case
    job = observed(2, servers, **variables)
    job.start_all(BODIES, "counted", size)
    workers = job.results()
    hosts = job.results_of_servers()
    values = 3 * 3 + 2 * 2 + 2  # that each worker has pushed
    for one in workers:
        before, after = one["before"], one["after"]
        sent, received = (
            by_way([b - a for a, b in zip(before[name], after[name], strict=True)])
            for name in ("sent", "received")
        )
        # The sum of two values is sent once; a pull receives as much as a pushpull.
        assert sent == {way: values * 4 * size}
        assert received == {way: (3 * 3 + 2 * (1 + 2) + 2) * 4 * size}
        assert after["rounds"] - before["rounds"] == values * one["parts"] // 2
        assert after["losses"] == 0
        assert after["ns"] == after["spans"] == [0] * len(PHASES)
        assert not any(after["waits"])
        assert after["waiting_since"] == 0
    for name, other in (("sent", "received"), ("received", "sent")):
        there = [sum(column) for column in zip(*(one["counters"][name] for one in hosts), strict=True)]
        here = [sum(column) for column in zip(*(one["after"][other] for one in workers), strict=True)]
        assert there == here
    assert sum(one["counters"]["rounds"] for one in hosts) == values * workers[0]["parts"] // 2


def test_what_a_codec_has_packed_is_counted_as_it_goes(observed: Served) -> None:
    job = observed(2, 1, **STREAM)
    job.start_all(BODIES, "counted", LARGE, True, True)
    for one in job.results():
        sent = [b - a for a, b in zip(one["before"]["sent"], one["after"]["sent"], strict=True)]
        assert by_way(sent) == {"stream": 15 * cpu.encoded_bytes(1, LARGE)}
        assert one["after"]["spans"][PHASES.index("converting")] > 0
        assert_apart(one)


def test_pushes_that_count_as_they_come(observed: Served) -> None:
    job = observed(2, 1, **{**SYNC, tested_store.NAME: "dist_async"})
    job.start_all(BODIES, "counted", SMALL)
    job.results()
    (server,) = job.results_of_servers()
    assert server["counters"]["rounds"] == 2 * 15


def test_times_of_a_worker_have_all_that_it_does(observed: Served) -> None:
    job = observed(1, 1, **FRAME)
    job.start_all(BODIES, "counted", LARGE, True)
    (one,) = job.results()
    (server,) = job.results_of_servers()
    for found, counters in ((one, one["after"]), (server, server["counters"])):
        assert_apart(found)
        assert all(counters["ns"][PHASES.index(phase)] for phase in ("waiting", "moving", "summing"))
        assert sum(counters["waits"]) == counters["spans"][WAITING]
    assert counters["job"] == job_id(job.name)
    names = dict(server["names"])
    assert sorted(names.values())[:4] == [f"a (part {n} of 4)" for n in range(1, 5)]


# ----------------------------------------------------------------------------------------------------- waits


@pytest.mark.parametrize(("case", "servers"), each_once(CASES[:4], [1, 2]))
def test_waits_for_a_slow_worker_and_their_length(
    observed: Served, case: tuple[int, dict[str, str], str], servers: int
) -> None:
    size, variables, _ = case
    job = observed(3, servers, **variables)
    workers = job.start_all(BODIES, "waits", size)
    workers[2].expect("is late")
    time.sleep(LATE)
    workers[2].say("go")
    found = job.results()
    late = (LATE - 0.05) * 1e9
    for one in found:
        assert_apart(one)
    for one in found[:2]:
        assert one["counters"]["ns"][WAITING] >= late
        long = [event for event in events_of(one, WAITING) if event.end - event.begin >= late]
        assert any(event.round == 5 and -servers <= event.whom < 0 for event in long), long
    for server in job.results_of_servers():
        assert_apart(server)
        names = dict(server["names"])
        rounds: dict[tuple[int, int], dict[int, int]] = defaultdict(dict)
        for event in events_of(server, ARRIVED):
            rounds[event.slice, event.round][event.whom] = event.begin
            assert event.slice in names
        assert sorted(rounds) == [(slice_, round_) for slice_ in sorted(names) for round_ in range(1, 6)]
        for (_, round_), times in rounds.items():
            assert sorted(times) == [0, 1, 2]
            if round_ == 5:
                assert times[2] - max(times[0], times[1]) >= late
        if names and variables is not FRAME:
            long = [event for event in events_of(server, WAITING) if event.end - event.begin >= late]
            assert (2, 5) in [(event.whom, event.round) for event in long]


@pytest.mark.parametrize("variables", [SYNC, STREAM, FRAME], ids=["shared", "stream", "frame"])
def test_others_see_for_whom_a_process_waits(served: Served, variables: dict[str, str]) -> None:
    job = served(2, 1, **variables)
    workers = job.start_all(BODIES, "waits", LARGE)
    workers[1].expect("is late")
    found = {one.process: one for one in counter_pages()}
    worker, server = found[workers[0].pid], found[job.servers[0].pid]
    worker.ask_for_times(100)
    seen = _waiting(worker.process)
    assert (seen["store"], seen["rank"], seen["round"], seen["whom"]) == ("dist_sync", 0, 5, -1)
    (counters,) = server.stores
    assert (counters["store"], counters["rank"], counters["size"]) == ("server", 0, 1)
    assert (counters["keys"], counters["nbytes"]) == (1, 4 * LARGE)
    assert [one["job"] for one in (seen, counters)] == [job_id(job.name)] * 2
    if variables is not FRAME:
        server.ask_for_times(100)
        seen = _waiting(server.process)
        assert (seen["round"], seen["whom"]) == (5, 1)
    workers[1].say("go")
    job.results()


def _waiting(process: int) -> dict[str, Any]:
    end = pace.deadline(20)
    while time.monotonic() < end:
        stores = next(page.stores for page in counter_pages() if page.process == process)
        for one in stores:
            if one["waiting_since"] and one["whom"] != NOBODY:
                return one
        time.sleep(0.01)
    raise AssertionError(stores)


# ----------------------------------------------------------------------------------------------------- losses


def test_a_loss_is_counted_by_all_and_recorded(observed: Served) -> None:
    job = observed(2, 1, **SYNC, KVSTORE_DEAD_AFTER=pace.variable(1.5))
    workers = job.start_all(BODIES, "survives")
    workers[1].expect("trains")
    workers[1].signal(signal.SIGKILL)
    assert workers[0].finish(pace.deadline(jobs.DEADLINE)) == 0, workers[0].errors()
    server = job.results_of_servers()[0]
    worker = workers[0].result()
    assert worker["losses"] == server["counters"]["losses"] == 1
    for found in (worker, server):
        (lost,) = events_of(found, LOST)
        assert (lost.whom, lost.begin) == (1, lost.end)
