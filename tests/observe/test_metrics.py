"""KVSTORE_METRICS: each process of a job shows its counters, as Prometheus wants them."""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import subprocess
import urllib.error
import urllib.parse
import urllib.request
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pace
import pytest
from launched import Job, gone_after, until
from observation.prometheus import Query, addresses, program, scraping, with_prometheus
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parsed_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parsed_text

from kvstore.observe import metrics

#: It trains for a moment, and then waits for the file `go-9`.
TRAIN = """
import numpy as np
import kvstore as kv
with kv.create(os.environ["STORE"]) as store:
    store.init("w", np.zeros(1000, np.float32))
    for step in range(3):
        store.push("w", np.ones(1000, np.float32))
        store.pull("w", out=np.empty(1000, np.float32))
    say("trained")
    wait_for("go", 9)
"""
ALONE = 'import kvstore as kv\nstore = kv.create("local")\n'

DASHBOARD = Path(__file__).parents[2] / "docs/observability/grafana.json"


def run(job: Job, *arguments: str, text: str = TRAIN) -> tuple[subprocess.Popen[bytes], Path]:
    """Start a job with its log in a file."""
    path = job.folder / "stderr"
    job.environment["KVSTORE_LOG"] = "info:kvstore.metrics"
    with path.open("wb") as file:
        return job.run(*arguments, text=text, stderr=file), path


def end(job: Job, process: subprocess.Popen[bytes]) -> None:
    (job.folder / "go-9").touch()
    process.communicate(timeout=pace.seconds(100))
    assert process.returncode == 0


def alone(job: Job, text: str) -> tuple[int, bytes, bytes]:
    """Run a program on its own to its end."""
    process = job.start("-c", text)
    out, err = process.communicate(timeout=pace.seconds(100))
    return process.returncode, out, err


def scraped(address: str) -> list[Metric]:
    request = urllib.request.Request(address, headers={"Accept": "application/openmetrics-text"})
    with urllib.request.urlopen(request, timeout=pace.seconds(30)) as answer:
        return list(parsed_openmetrics(answer.read().decode()))


def value(found: list[Metric], name: str, **labels: str) -> float:
    """Return the only sample with these labels."""
    samples = [one for family in found for one in family.samples if one.name == name]
    (sample,) = [one for one in samples if labels.items() <= one.labels.items()]
    return float(sample.value)


def roles(found: list[Metric]) -> set[tuple[str, str]]:
    """Role and rank that samples have."""
    return {
        (one.labels["role"], one.labels["rank"])
        for family in found
        for one in family.samples
        if "role" in one.labels
    }


@pytest.mark.parametrize(("kind", "servers"), [("shared", 0), ("dist_sync", 1)])
def test_each_process_of_a_job_answers_at_a_port_of_its_own(job: Job, kind: str, servers: int) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        first = taken.getsockname()[1]
        job.environment |= {"STORE": kind, "KVSTORE_METRICS": f":{first}"}
        process, log = run(job, "-n", "2", "-s", str(servers))
        processes = 2 + (servers + 1 if servers else 0)  # with a scheduler
        until(lambda: job.said("trained", 0, 1) and len(addresses(log)) == processes)
        found = [scraped(one) for one in addresses(log)]
    ports = {int(one.split(":")[2].partition("/")[0]) for one in addresses(log)}
    assert first not in ports
    assert all(first < port < first + 256 for port in ports)
    workers = {rank: page for page in found for role, rank in roles(page) if role == "worker"}
    assert set(workers) == {"0", "1"}
    for rank, page in workers.items():
        mine = {"role": "worker", "rank": rank, "store": kind, "number": "0"}
        assert value(page, "kvstore_calls_total", verb="push", **mine) == 3
        assert value(page, "kvstore_calls_total", verb="pushpull", **mine) == 0
        assert value(page, "kvstore_wait_seconds_bucket", le="+Inf", **mine) == value(
            page, "kvstore_wait_seconds_count", **mine
        )
        assert value(page, "kvstore_waiting_seconds", **mine) >= 0
    assert all(value(page, "kvstore_build_info") == 1 for page in found)
    jobs = {one.labels.get("kvstore_job") for page in found for family in page for one in family.samples}
    assert len(jobs - {None}) == 1
    end(job, process)


def test_times_are_taken_where_metrics_are_asked_for(job: Job) -> None:
    job.environment |= {"KVSTORE_METRICS": "127.0.0.1:0"}
    text = ALONE + "assert store._counters.timed\nassert kv.create('local')._counters.timed"
    assert alone(job, text) == (0, b"", b"")
    del job.environment["KVSTORE_METRICS"]
    assert alone(job, f"{ALONE}assert not store._counters.timed") == (0, b"", b"")


def test_stores_of_one_process_have_series_of_their_own(job: Job) -> None:
    job.environment |= {"KVSTORE_METRICS": "[::1]:0" if has_ipv6() else ":0"}
    text = f'{ALONE}other = kv.create("local")\nsay("trained")\nwait_for("go", 9)'
    process, log = run(job, "-n", "1", text=text)
    until(lambda: job.said("trained", 0))
    (address,) = addresses(log)
    found = [one for family in scraped(address) for one in family.samples]
    assert Counter((one.name, *sorted(one.labels.items())) for one in found).most_common(1)[0][1] == 1
    assert {one.labels.get("number") for one in found} == {"0", "1", None}
    end(job, process)


def has_ipv6() -> bool:
    with socket.socket(socket.AF_INET6) as tried, contextlib.suppress(OSError):
        tried.bind(("::1", 0))
        return True
    return False


def files(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


def test_a_folder_has_a_file_of_each_process_while_it_runs(job: Job) -> None:
    folder = job.folder / "metrics"
    folder.mkdir()
    job.environment |= {"STORE": "shared", "KVSTORE_METRICS": "metrics"}  # closing writes it at once
    process, _ = run(job, "-n", "2", text=f"{TRAIN}say('closed'); wait_for('over', 9)")
    (job.folder / "go-9").touch()
    until(lambda: job.said("closed", 0, 1))
    assert files(folder) == [f"kvstore-worker-{rank}-{job.pid('closed', rank)}.prom" for rank in range(2)]
    for rank, name in enumerate(files(folder)):
        found = list(parsed_text((folder / name).read_text()))
        assert value(found, "kvstore_calls_total", verb="pull", role="worker", rank=str(rank)) == 3
        assert (folder / name).stat().st_mode & 0o777 == 0o666 & ~umask()
    (job.folder / "over-9").touch()
    end(job, process)
    assert files(folder) == []


def umask() -> int:
    return int(re.findall(r"^Umask:\s+([0-7]+)$", Path("/proc/self/status").read_text(), re.MULTILINE)[0], 8)


def test_a_file_is_replaced_while_the_process_runs_and_gone_at_its_end(job: Job) -> None:
    path = job.folder / "one.prom"
    job.environment |= {"KVSTORE_METRICS": str(path)}
    text = f"""
import time
from pathlib import Path
from kvstore.observe import metrics
metrics._EVERY = 0.01
{ALONE}
while not Path("one.prom").exists():
    time.sleep(0.01)
first = Path("one.prom").stat().st_ino
while Path("one.prom").stat().st_ino == first:
    time.sleep(0.01)
"""
    assert alone(job, text) == (0, b"", b"")
    assert [name for name in files(job.folder) if "prom" in name] == []


@pytest.mark.parametrize("text", ["9400", ":70000", "nowhere"])
def test_a_wrong_value_says_what_is_allowed(job: Job, text: str) -> None:
    job.environment["KVSTORE_METRICS"] = text
    code, _, err = alone(job, ALONE)
    assert code == 1
    assert f"ConfigError: KVSTORE_METRICS={text!r} is no [HOST]:PORT such as :9400".encode() in err


def test_one_file_for_several_processes_is_refused(job: Job) -> None:
    job.environment |= {"STORE": "shared", "KVSTORE_METRICS": "all.prom"}
    process = job.run("-n", "2", text=TRAIN)
    _, err = process.communicate(timeout=pace.seconds(60))
    assert process.returncode == 1
    assert b"KVSTORE_METRICS='all.prom' is one file, and this job has several processes" in err


def test_a_file_may_be_in_the_home_of_the_user(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    assert metrics.check("~/one.prom") == str(tmp_path / "one.prom")
    assert metrics.check("~") == str(tmp_path)


def test_without_prometheus_client_the_error_says_how_to_get_it(job: Job) -> None:
    job.environment["KVSTORE_METRICS"] = ":0"
    code, _, err = alone(job, f"import sys; sys.modules['prometheus_client'] = None\n{ALONE}")
    assert code == 1
    assert b"MissingBackendError: KVSTORE_METRICS needs the module 'prometheus_client'" in err
    assert b"pip install 'kvstore-train[metrics]'" in err


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("127.0.0.1:{port}", b"this process has no metrics: no port of 127.0.0.1 from "),
        ("192.0.2.1:{port}", b"this process has no metrics: cannot listen at 192.0.2.1, port "),
    ],
)
def test_where_nothing_can_be_listened_at_the_process_goes_on(job: Job, setting: str, words: bytes) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        job.environment["KVSTORE_METRICS"] = setting.format(port=taken.getsockname()[1])
        text = f"from kvstore.observe import metrics\nmetrics._PORTS = 1\n{ALONE}print(1)"
        code, out, err = alone(job, text)
    assert (code, out) == (0, b"1\n")
    assert words in err


def test_a_file_that_cannot_be_written_is_told_of_once(job: Job) -> None:
    job.environment["KVSTORE_METRICS"] = "missing/one.prom"
    code, _, err = alone(job, f"{ALONE}store.close()\nkv.create('local').close()")
    assert code == 0
    assert err.count(b"one.prom cannot be written: there is no folder") == 1


FORK = f"""
import os, signal
{ALONE}
child = os.fork()
if child:
    print(child, flush=True)
else:
    assert not store._counters.timed
    signal.pause()
"""


def test_a_child_that_is_forked_has_no_metrics(job: Job) -> None:
    job.environment |= {"KVSTORE_METRICS": ":0", "KVSTORE_LOG": "info:kvstore.metrics"}
    with (job.folder / "out").open("wb") as out, (job.folder / "err").open("wb") as err:
        parent = job.start("-c", FORK, stdout=out, stderr=err)
    assert parent.wait(pace.seconds(60)) == 0
    child = int((job.folder / "out").read_text())
    assert child in job.alive()
    (address,) = addresses(job.folder / "err")
    with pytest.raises(urllib.error.URLError, match="refused"):
        urllib.request.urlopen(address, timeout=pace.seconds(30))
    os.kill(child, signal.SIGKILL)


@pytest.fixture(scope="module")
def job_with_metrics(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Job]:
    """One job for all that looks at it from outside."""
    with gone_after(tmp_path_factory.mktemp("metrics")) as job:
        job.environment |= {"STORE": "dist_sync", "KVSTORE_METRICS": ":0"}
        process, _ = run(job, "-n", "2", "-s", "1")
        until(lambda: job.said("trained", 0, 1))
        yield job
        end(job, process)


@pytest.fixture(scope="module")
def query(job_with_metrics: Job) -> Iterator[Query]:
    """Scrape the job each second, and answer expressions."""
    with scraping(job_with_metrics, addresses(job_with_metrics.folder / "stderr"), "1s") as ask:
        yield ask


@with_prometheus
def test_prometheus_finds_the_calls_of_each_worker(query: Query) -> None:
    pushes = 'kvstore_calls_total{verb="push",role="worker"}'
    until(lambda: len(query(pushes)) == 2)
    found = query(pushes)
    assert {one["metric"]["rank"]: one["value"][1] for one in found} == {"0": "3", "1": "3"}
    assert {one["metric"]["job"] for one in found} == {"kvstore"}
    assert len({one["metric"]["kvstore_job"] for one in found}) == 1
    assert query("count(up == 0)") == []


@with_prometheus
def test_prometheus_understands_the_expressions_of_the_dashboard(query: Query) -> None:
    until(lambda: len(query("kvstore_calls_total")))
    panels = json.loads(DASHBOARD.read_text())["panels"]
    for expression in (target["expr"] for panel in panels for target in panel.get("targets", [])):
        query(expression.replace("$__rate_interval", "5s").replace("$kvstore_job", ".*"))


@with_prometheus
def test_promtool_finds_nothing_wrong(job_with_metrics: Job) -> None:
    for address in addresses(job_with_metrics.folder / "stderr"):
        with urllib.request.urlopen(address, timeout=pace.seconds(30)) as answer:
            page = answer.read()
        done = subprocess.run(
            [program("promtool"), "check", "metrics"], input=page, capture_output=True, check=False
        )
        assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
