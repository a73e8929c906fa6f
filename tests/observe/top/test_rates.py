"""Rates from two looks, and rows that fit."""

from __future__ import annotations

import os
import signal
import subprocess
from typing import Any

from kvstore.observe.native._observe import NOBODY
from kvstore.observe.processes import ProcessFacts, command, facts
from kvstore.observe.top.table import job_heading, table_columns, view_lines
from kvstore.observe.top.watch import ProcessSnapshot, Row, store_rows

SECOND = 10**9


def numbers(**changes: Any) -> dict[str, Any]:
    """Counters of a store that has done nothing."""
    zeros = {"calls": [0] * 6, "sent": [0] * 4, "received": [0] * 4, "ns": [0] * 5, "spans": [0] * 5}
    place = {"place": 0, "store": "shared", "job": "abc", "rank": 1, "size": 4, "keys": 3, "nbytes": 100}
    wait = {"waiting_since": 0, "slice": 0, "round": 0, "whom": NOBODY}
    return {**zeros, **place, **wait, "rounds": 0, "losses": 0, "waits": [0] * 128, **changes}


def look(seconds: float, cpu: float = 0.0, **changes: Any) -> ProcessSnapshot:
    one = numbers(**changes)
    process = ProcessFacts(7, 1, cpu, 1000, 100)
    return ProcessSnapshot(int(seconds * SECOND), process, {one["place"]: one})


def row(before: ProcessSnapshot | None, after: ProcessSnapshot) -> Row:
    (found,) = store_rows(4711, before, after)
    return found


def texts_of(found: Row) -> dict[str, str]:
    """Return the cells of a row in a terminal of 80 columns."""
    return {column.title: column.cell(found) for column in table_columns(80)}


def test_what_is_counted_is_divided_by_the_time_between_the_looks() -> None:
    before = look(10, 3.0, rounds=5, sent=[1, 0, 0, 0], ns=[SECOND, 0, 0, 0, 0])
    after = look(
        12, 7.0, rounds=25, calls=[0, 4, 4, 0, 0, 0], sent=[1, 0, 400, 0], received=[0, 2, 0, 0],
        ns=[2 * SECOND, 0, SECOND // 2, 0, 0],
    )  # fmt: skip
    found = row(before, after)
    assert (found["rounds_per_second"], found["calls_per_second"], found["cpu"]) == (10, 4, 2)
    assert (found["sent_bytes_per_second"], found["received_bytes_per_second"]) == (200, 1)
    phases = found["phases"]
    assert (phases["waiting"], phases["summing"], phases["moving"]) == (0.5, 0.25, 0)


def test_a_wait_that_lasts_counts_as_waiting() -> None:
    before = look(10, waiting_since=9 * SECOND, ns=[SECOND, 0, 0, 0, 0])
    for after in (
        look(12, waiting_since=9 * SECOND, ns=[SECOND, 0, 0, 0, 0]),
        look(12, waiting_since=int(11.5 * SECOND), ns=[int(3.5 * SECOND), 0, 0, 0, 0]),
    ):
        assert row(before, after)["phases"]["waiting"] == 1


def test_there_are_no_rates_at_the_first_look_or_of_another_store_in_the_same_place() -> None:
    assert row(None, look(12))["cpu"] is None
    for before in (look(10, calls=[9] * 6), look(10, store="local")):
        found = row(before, look(12, cpu=1.0))
        assert (found["cpu"], found["calls_per_second"], found["phases"]) == (0.5, None, None)


def test_a_wait_says_for_whom_and_how_long() -> None:
    for whom, name in ((3, "worker 3"), (-1, "server 0"), (-3, "server 2"), (NOBODY, "others")):
        found = row(None, look(12, waiting_since=10 * SECOND, whom=whom, round=8))
        assert found["waiting"] == {"whom": name, "seconds": 2.0, "round": 8}
    assert row(None, look(12))["waiting"] is None


def test_a_process_that_stands_still_waits_for_none() -> None:
    with subprocess.Popen(["sleep", "600"]) as process:
        process.send_signal(signal.SIGSTOP)
        os.waitpid(process.pid, os.WUNTRACED)
        now = facts(process.pid)
        process.kill()
    assert now is not None and now.stopped
    found = row(None, look(12, waiting_since=10 * SECOND)._replace(facts=now))
    assert texts_of(found)["WAITS FOR"] == "stopped"


def large() -> Row:
    """A row of values with as many digits as there can be."""
    found = row(look(10), look(12, rank=1023, place=31, waiting_since=SECOND // 1000, whom=-1024))
    names = ("rounds", "calls", "sent_bytes", "received_bytes")
    rates: dict[str, Any] = {f"{name}_per_second": 123456.7 for name in names}
    phases = dict.fromkeys(found["phases"] or {}, 63.9)
    sizes = {"process": 4194303, "memory_bytes": 999 * 10**9, "losses": 1023}
    return {**found, "cpu": 128.0, "phases": phases, **sizes, **rates}


def test_lines_are_no_longer_than_the_terminal_is_wide() -> None:
    command = "python train.py " + "--option " * 40
    job = {"job": "abc", "command": command, "stores": [large(), row(None, look(12))]}
    view = {"jobs": [job], "news": ["12:00:00 worker 1 (process 4711) is gone"], "unreadable": [1234]}
    for width in (40, 80, 120, 200):
        found = [text for text, _ in view_lines(view, width)]
        assert max(map(len, found)) <= width
    assert any("worker 1023 #31" in text for text, _ in view_lines(view, 80))
    assert list(view_lines(view, 80))[-1][0] == "of another version of kvstore, and not shown: process 1234"


def test_rows_have_units_and_few_digits() -> None:
    found = row(look(10), look(12, sent=[3_000_000, 0, 0, 0], received=[24_690_000, 0, 0, 0], rounds=13))
    texts = texts_of(found)
    assert (texts["ROUNDS/S"], texts["SENT/S"], texts["RECV/S"]) == ("6.5", "1.5M", "12M")
    assert (texts["MEMORY"], texts["CPU"], texts["WAIT"], texts["WAITS FOR"]) == ("1.0k", "0%", "0%", "-")


def test_a_heading_counts_processes_and_not_stores() -> None:
    one = row(None, look(12))
    server = {**one, "role": "server", "store": "server", "process": 9}
    stores = [one, {**one, "number": 1, "store": "local"}, server]
    job = {"job": "abc", "command": "python train.py", "stores": stores}
    assert job_heading(job) == "job abc: 1 worker, 1 server, local, shared: python train.py"
    assert job_heading({"job": "", "command": "", "stores": [one]}) == "children of 1: 1 worker, shared"


def test_a_process_that_is_not_there_has_no_facts() -> None:
    assert facts(0) is None
    assert command(0) == ""
