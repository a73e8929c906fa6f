"""A job with a slow worker, and one that is killed and rejoins: log, metrics, top and timeline."""

from __future__ import annotations

import contextlib
import json
import re
import sqlite3
import subprocess
from collections import Counter
from collections.abc import Callable, Iterator
from itertools import pairwise
from statistics import median

import pace
import pytest
from click.testing import CliRunner
from launched import Job, gone_after, until
from observation.prometheus import PROGRAMS, addresses, scraping, with_prometheus
from observation.trace_rules import broken, loaded

from kvstore.launch.cli import main

SLOW, KILLED = 1, 3
#: Worker 3 is killed in its 11th step; when it has rejoined, it takes part in some steps of the others.
TRAIN = """
import json
import numpy as np
import kvstore as kv
store = kv.create("dist_sync", on_peer_loss="continue")
keys = ["first", "second"]
store.init(keys, [np.zeros(300_000, np.float32)] * 2)
say("back" if RESTART else "ready")
if not RESTART:
    wait_for("go", 9)
arrays = [np.ones(300_000, np.float32) for _ in keys]
calls = []
for step in range(40):
    if RANK == 3 and step == 10:
        if not RESTART:
            os.kill(os.getpid(), signal.SIGKILL)
        break
    if RANK != 3 and step == 20:
        wait_for("back", 3)  # else they are through before it, on a busy machine
    # In the second half enough for a server to tell of, however long the wait for worker 3 was.
    time.sleep(0.03 if RANK != 1 else 0.1 if step < 20 else 0.3)
    begin = time.monotonic_ns()
    store.pushpull(keys, arrays, out=arrays)
    calls.append((begin, time.monotonic_ns()))
if RANK == 3:
    store.join()
(HERE / f"calls-{RANK}.json").write_text(json.dumps(calls))
say("trained")
wait_for("over", 9)
store.close()
"""


#: Expressions for Prometheus, and the value that each gives for a worker.
EXPRESSIONS = {
    "calls": 'kvstore_calls_total{role="worker",verb="pushpull"}',
    "waiting": 'kvstore_phase_seconds_total{role="worker",phase="waiting"}',
    "losses": 'kvstore_losses_total{role="worker"}',
}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """Run the job, look on with `kvstore top`, and scrape it if there is a Prometheus."""
    dead_after = pace.seconds(3.0)
    with gone_after(tmp_path_factory.mktemp("whole")) as made:
        made.environment |= {
            "KVSTORE_TIMELINE": "out",
            "KVSTORE_METRICS": "127.0.0.1:0",
            "KVSTORE_LOG": "info",
            "KVSTORE_DEAD_AFTER": f"{dead_after:.3f}",
        }
        with (made.folder / "log").open("wb") as log, (made.folder / "top").open("wb") as views:
            launcher = made.run("-n", "4", "-s", "2", "--restarts", "1", text=TRAIN, stderr=log)
            until(lambda: made.said("ready", *range(4)) and len(addresses(made.folder / "log")) == 7)
            command = ("-m", "kvstore", "top", "--json", "--interval", "0.1", str(launcher.pid))
            looking = made.start(*command, stdout=views, stderr=subprocess.STDOUT)
        with scraped(made) as ask:
            (made.folder / "go-9").touch()
            # The machine may be quick again by now; worker 3 is not lost before that.
            until(lambda: made.said("trained", *range(4)) or launcher.poll() is not None, dead_after)
            assert made.said("trained", *range(4)), (made.folder / "log").read_text()
            (made.folder / "metrics.json").write_text(json.dumps(ask()))
        (made.folder / "over-9").touch()
        launcher.communicate(timeout=pace.seconds(100))
        assert launcher.returncode == 0, (made.folder / "log").read_text()
        assert looking.wait(pace.seconds(60)) == 0
        yield made


@contextlib.contextmanager
def scraped(job: Job) -> Iterator[Callable[[], dict[str, dict[str, float]]]]:
    """Scrape; the returned function gives Prometheus's results at the end, by expression and rank."""
    if not all(PROGRAMS.values()):
        yield dict
        return
    with scraping(job, addresses(job.folder / "log"), "200ms") as query:

        def ask() -> dict[str, dict[str, float]]:
            until(lambda: [one["value"][1] for one in query(EXPRESSIONS["calls"] + " == 40")] == ["40"] * 3)
            return {
                name: {one["metric"]["rank"]: float(one["value"][1]) for one in query(expression)}
                for name, expression in EXPRESSIONS.items()
            }

        yield ask


@pytest.fixture(scope="module")
def base(job: Job) -> sqlite3.Connection:
    trace = job.folder / "job.json"
    result = CliRunner().invoke(main, ["timeline", str(job.folder / "out"), "-o", str(trace)])
    assert result.exit_code == 0, result.output
    return loaded(trace)


def calls(job: Job, rank: int) -> list[tuple[int, int]]:
    """Begin and end of each call, as the worker itself has seen it."""
    found: list[tuple[int, int]] = json.loads((job.folder / f"calls-{rank}.json").read_text())
    return found


def test_the_trace_keeps_the_rules_of_the_format(base: sqlite3.Connection) -> None:
    assert broken(base) == {}


def test_all_processes_are_there_but_the_one_that_was_killed(base: sqlite3.Connection, job: Job) -> None:
    names = [name for (name,) in base.execute("SELECT name FROM process ORDER BY sort_index")]
    assert names == [*(f"worker {rank}" for rank in range(4)), "server 0", "server 1", "scheduler"]
    notes = json.loads((job.folder / "job.json").read_text())["otherData"]["notes"]
    assert notes == ["worker 3 was lost and is back; there is no file of what it did before"]


@pytest.mark.parametrize("kind", ["lost", "back"])
def test_a_loss_is_an_instant_of_all_notified_processes(base: sqlite3.Connection, kind: str) -> None:
    query = "SELECT DISTINCT process.name FROM event JOIN process USING (pid) WHERE cat = ? AND whom = ?"
    told = {name for (name,) in base.execute(query, (kind, f"worker {KILLED}"))}
    assert {"worker 0", "worker 1", "worker 2", "scheduler"} <= told


def test_clocks_of_all_processes_agree_within_a_millisecond(base: sqlite3.Connection) -> None:
    """A part arrives at a server after the call that pushes it has begun, and before the call ends."""
    query = """
    SELECT arrived.ts - call.ts AS after, call.ts + call.dur - arrived.ts AS before
    FROM event arrived JOIN process ON process.name = arrived.whom
    LEFT JOIN event call ON call.pid = process.pid AND call.cat = 'call' AND call.name = 'pushpull'
        AND arrived.ts BETWEEN call.ts - 1000000 AND call.ts + call.dur + 1000000
    WHERE arrived.cat = 'arrived' AND arrived.whom != 'worker 3'
    """
    found = base.execute(query).fetchall()
    assert len(found) >= 3 * 40 * 2
    assert None not in {one for row in found for one in row}


@pytest.mark.parametrize("rank", range(3))
def test_phases_add_up_to_the_steps(base: sqlite3.Connection, job: Job, rank: int) -> None:
    """A step is the time outside of calls, as the worker has measured it, and the phases of its call."""
    query = """
    SELECT sum(phase.dur) FROM event call JOIN process USING (pid)
    JOIN event phase ON phase.pid = call.pid AND phase.tid = call.tid AND phase.cat != 'call'
        AND phase.ts >= call.ts AND phase.ts < call.ts + call.dur
    WHERE process.name = ? AND call.name = 'pushpull' GROUP BY call.at ORDER BY call.ts
    """
    phases = [ns for (ns,) in base.execute(query, (f"worker {rank}",))]
    seen = calls(job, rank)
    assert len(phases) == len(seen) == 40
    ratios = [
        (inside + after[0] - before[1]) / (after[0] - before[0])
        for inside, (before, after) in zip(phases, pairwise(seen), strict=False)
    ]
    assert median(ratios) == pytest.approx(1, abs=0.02)


def test_the_report_names_the_slow_worker(base: sqlite3.Connection, job: Job) -> None:
    result = CliRunner().invoke(main, ["timeline", str(job.folder / "out"), "--json"])
    found = json.loads(result.stdout)
    assert found["last"][0]["rank"] == SLOW
    assert found["last"][0]["rounds"] > found["last"][0]["of"] / 2
    shares = {worker["rank"]: worker["shares"] for worker in found["workers"]}
    assert max(shares, key=lambda rank: shares[rank]["computing"]) == SLOW
    assert min(shares, key=lambda rank: shares[rank]["waiting"]) == SLOW
    assert all(sum(one.values()) == pytest.approx(1) for one in shares.values())
    assert {key["key"] for key in found["keys"]} <= {"first", "second", "(several keys)"}
    text = CliRunner().invoke(main, ["timeline", str(job.folder / "out")]).stdout
    assert f"Worker {SLOW} came last in " in text


def test_the_log_tells_what_changed_the_job(job: Job) -> None:
    log = (job.folder / "log").read_text()
    for rank in range(4):
        assert re.search(rf"worker {rank}: store 'dist_sync' created: worker {rank} of 4, .*2 servers", log)
    for process in ("scheduler", "server 0", "server 1", "worker 0", "worker 1", "worker 2"):
        assert f"{process}: worker {KILLED} is lost; epoch" in log
        assert f"{process}: worker {KILLED} is back; epoch" in log
    slow = rf"INFO kvstore.ps server [01]: worker {SLOW} came last by more than 10 ms in \d+ of \d+ rounds"
    assert len(re.findall(slow, log)) >= 2
    assert not re.search(r"server [01]: worker [023] came last", log)
    assert re.search(rf"worker {SLOW}: store 'dist_sync' closed after .*: 40 pushes, 40 pulls", log)


def test_top_tells_for_whom_servers_wait(job: Job) -> None:
    views = [json.loads(line) for line in (job.folder / "top").read_text().splitlines()]
    rows = [row for view in views for one in view["jobs"] for row in one["stores"]]
    assert {(row["role"], row["rank"]) for row in rows} == {
        *(("worker", rank) for rank in range(4)),
        ("server", 0),
        ("server", 1),
        ("scheduler", 0),
    }
    whom = Counter(row["waiting"]["whom"] for row in rows if row["role"] == "server" and row["waiting"])
    assert whom[f"worker {SLOW}"] == max(whom[f"worker {rank}"] for rank in (0, SLOW, 2)) > 0
    news = {one for view in views for one in view["news"]}
    assert any(f"worker {KILLED}" in one for one in news), news


@with_prometheus
def test_prometheus_shows_the_waiting_workers(job: Job) -> None:
    found = json.loads((job.folder / "metrics.json").read_text())
    waiting = {rank: found["waiting"][str(rank)] for rank in range(3)}
    assert min(waiting, key=lambda rank: waiting[rank]) == SLOW
    assert all(found["losses"][str(rank)] == 1 for rank in range(3))
