"""KVSTORE_LOG: lines of every process of a job, once each, and no unrequested lines."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pace
import pytest
from launched import Job, until
from nightly import each_once, nightly_unless

from kvstore.observe.log import LOGGERS

ROOT = Path(__file__).parents[2]
LINE = re.compile(
    rb"(?:\[(?P<mark>[^]]+)\] )?\d\d:\d\d:\d\d\.\d{3} (?P<level>[A-Z]+) (?P<logger>[\w.]+) "
    rb"(?P<who>[a-z]+(?: \d+)?): (?P<text>.+)"
)

TRAIN = """
import numpy as np
import kvstore as kv
with kv.create(os.environ["STORE"]) as store:
    store.init("w", np.zeros(1000, np.float32))
    store.set_optimizer(kv.optimizer.SGD(learning_rate=0.5))
    if "COMPRESSION" in os.environ:
        store.set_gradient_compression({"type": "2bit", "threshold": 0.25})
    for step in range(int(os.environ.get("STEPS", 3))):
        store.push("w", np.ones(1000, np.float32))
        store.pull("w", out=np.empty(1000, np.float32))
"""


FIRST_EPOCH = "store 0 is in epoch 1, with server 0, server 1, worker 0, worker 1"


def finish(process: subprocess.Popen[bytes]) -> tuple[int, bytes]:
    _, err = process.communicate(timeout=pace.seconds(100))
    return process.returncode, err


def lines(err: bytes) -> list[dict[str, str]]:
    """All lines, each of which must be one of the log."""
    found = []
    for line in err.splitlines():
        match = LINE.fullmatch(line)
        assert match, line
        found.append({name: (text or b"").decode() for name, text in match.groupdict().items()})
    return found


def texts(found: list[dict[str, str]], who: str) -> list[str]:
    return [one["text"] for one in found if one["who"] == who]


def test_shared_tells_what_changes_the_job(job: Job) -> None:
    job.environment |= {"KVSTORE_LOG": "info", "STORE": "shared", "COMPRESSION": "1"}
    code, err = finish(job.run("-n", "2", text=TRAIN))
    assert code == 0, err
    found = lines(err)
    for rank in range(2):
        told = [one for one in found if one["mark"] == str(rank)]
        assert {(one["logger"], one["who"]) for one in told} == {("kvstore.shared", f"worker {rank}")}
        created, optimizer, packed, closed = (one["text"] for one in told)
        assert created.startswith(f"store 'shared' created: worker {rank} of 2, launcher kvstore, ")
        assert re.search(r"kernels \S+, \d+ threads$", created)
        assert optimizer.startswith("optimizer of store 'shared': SGD(learning_rate=0.5")
        assert packed.startswith("gradients of store 'shared' are compressed by 2bit: {")
        assert re.fullmatch(r"store 'shared' closed after \d+\.\d s: 3 pushes, 3 pulls", closed)
    assert {one["level"] for one in found} == {"INFO"}
    assert len([text for text in texts(found, "launcher") if " started: process " in text]) == 2


def test_servers_and_scheduler_tell_theirs(job: Job) -> None:
    job.environment |= {"KVSTORE_LOG": "debug", "STORE": "dist_sync", "STEPS": "500"}
    code, err = finish(job.run("-n", "2", "-s", "2", text=TRAIN))
    assert code == 0, err
    found = lines(err)
    for rank in range(2):
        told = texts(found, f"worker {rank}")
        assert any(f"worker {rank} of 2, launcher kvstore, 2 servers" in text for text in told)
        assert any(text.startswith("data for server ") for text in told)
        assert any(text.startswith("stream opened to ") for text in told)
        assert any(text.startswith("plan made for ") for text in told)
        server_lines = texts(found, f"server {rank}")
        assert any(text.startswith("server started: scheduler at ") for text in server_lines)
        assert FIRST_EPOCH in server_lines
        assert any(text.startswith("server ended after ") for text in server_lines)
    scheduler = texts(found, "scheduler")
    assert FIRST_EPOCH in scheduler
    assert any(text.startswith("the job is over after ") for text in scheduler)


@pytest.mark.parametrize("value", nightly_unless(lambda value: value is None, [None, ""]))
def test_nothing_is_told_without_the_variable(job: Job, value: str | None) -> None:
    job.environment |= {"STORE": "dist_sync"} | ({} if value is None else {"KVSTORE_LOG": value})
    assert finish(job.run("-n", "2", "-s", "1", text=TRAIN)) == (0, b"")


def test_only_the_loggers_that_are_named(job: Job) -> None:
    job.environment |= {"KVSTORE_LOG": "Debug:kvstore.wire,kvstore.launch", "STORE": "shared"}
    code, err = finish(job.run("-n", "2", text=TRAIN))
    assert code == 0, err
    assert {one["logger"] for one in lines(err)} == {"kvstore.launch"}


@pytest.mark.parametrize(
    ("value", "words"),
    [
        ("verbose", b"'verbose' is no level; allowed are info and debug"),
        ("debug:kvstore.pz", b"'kvstore.pz' is no logger, did you mean 'kvstore.ps'?"),
        ("info:", b"'' is no logger"),
    ],
)
def test_a_wrong_value_says_what_is_allowed(job: Job, value: str, words: bytes) -> None:
    job.environment |= {"KVSTORE_LOG": value, "STORE": "local"}
    code, err = finish(job.run("-n", "1", text=TRAIN))
    assert code == 1
    assert err.startswith(b"Error: KVSTORE_LOG=")
    assert words in err
    assert err.count(b"\n") == 1


def test_a_wrong_value_is_an_error_of_create(job: Job) -> None:
    job.environment["KVSTORE_LOG"] = "verbose"
    code, err = finish(job.start("-c", "import kvstore as kv; kv.create('local')"))
    assert code == 1
    assert b"kvstore.errors.ConfigError: KVSTORE_LOG=" in err


HANDLERS = """
import io, logging, sys
import kvstore as kv
where, when = sys.argv[1:]
ours, root = logging.getLogger("kvstore"), logging.getLogger()
taken = []
class Own(logging.Handler):
    def emit(self, record):
        taken.append(record.getMessage())
def configure():
    logging.getLogger({"kvstore": "kvstore", "root": None, "below": "kvstore.local"}[where]).addHandler(Own())
    root.setLevel(logging.ERROR)
if when == "before":
    configure()
store = kv.create("local")
if when == "after":
    configure()
store.close()
assert root.level == logging.ERROR and len(root.handlers) == (where == "root")
assert ours.level == logging.INFO
assert len(taken) == (2 if when == "before" else 1), taken
assert len(ours.handlers) == (1 if where != "kvstore" or when == "before" else 2), ours.handlers
"""


@pytest.mark.parametrize(("where", "when"), each_once(["kvstore", "root", "below"], ["before", "after"]))
def test_no_line_comes_twice_beside_handlers_of_the_application(job: Job, where: str, when: str) -> None:
    job.environment["KVSTORE_LOG"] = "info"
    code, err = finish(job.start("-c", HANDLERS, where, when))
    assert code == 0, err
    told = lines(err)
    assert len(told) == (0 if when == "before" else 1)  # ours has the lines from before theirs was set


def test_all_loggers_of_the_library_can_be_named() -> None:
    sources = [path.read_text() for path in (ROOT / "kvstore").glob("**/*.py")]
    used = {name for text in sources for name in re.findall(r'getLogger\("(kvstore[\w.]*)"\)', text)}
    used |= {name for text in sources for name in re.findall(r'\blogger(?:: str)? = "(kvstore[\w.]*)"', text)}
    assert sorted(used) == sorted(LOGGERS)


LOSS = """
import numpy as np
import kvstore as kv
store = kv.create(os.environ["STORE"], on_peer_loss="continue")
store.init("w", np.zeros(1000, np.float32))
store.pushpull("w", np.ones(1000, np.float32))
say("there")
if RANK == 1:
    forever()
wait_for("gone", 9)
store.pushpull("w", np.ones(1000, np.float32))
say("done")
forever()
"""


@pytest.mark.parametrize("kind", ["shared", "dist_sync"])
def test_a_worker_that_is_killed_is_told_of(job: Job, kind: str) -> None:
    job.environment |= {"KVSTORE_LOG": "info", "STORE": kind, "KVSTORE_DEAD_AFTER": pace.variable(1.5)}
    job.environment["PROGRAM"] = job.script(LOSS)
    servers = ["-s", "1"] if kind == "dist_sync" else []
    # A launcher ends a job that has lost a worker, unless the worker is no child of its own.
    program = job.folder / "keep.sh"
    program.write_text('#!/bin/sh\n"$PYTHON" "$PROGRAM" || sleep 1000\n')
    program.chmod(0o755)
    job.environment["PYTHON"] = sys.executable
    launcher = job.run("-n", "3", *servers, "./keep.sh")
    until(lambda: job.said("there", 0, 1, 2))
    os.kill(job.pid("there", 1), signal.SIGKILL)
    (job.folder / "gone-9").touch()
    until(lambda: job.said("done", 0, 2))
    launcher.send_signal(signal.SIGTERM)
    _, err = finish(launcher)
    found = [match.groupdict() for line in err.splitlines() if (match := LINE.fullmatch(line))]
    for who in (b"worker 0", b"worker 2", *([b"server 0", b"scheduler"] if servers else [])):
        assert [one["text"] for one in found if one["who"] == who and b"worker 1" in one["text"]], err


SLOW = """
import numpy as np
import kvstore as kv
with kv.create(os.environ["STORE"]) as store:
    store.init("w", np.zeros(1000, np.float32))
    if RANK:
        wait_for("pushed", 0)
        time.sleep(2)
    store.push("w", np.ones(1000, np.float32))
    say("pushed")
    store.pull("w", out=np.empty(1000, np.float32))
"""


@pytest.mark.parametrize("kind", ["shared", "dist_sync"])
def test_the_last_worker_of_a_slow_round(job: Job, kind: str) -> None:
    job.environment |= {"KVSTORE_LOG": "info", "STORE": kind}
    servers = ["-s", "1"] if kind == "dist_sync" else []
    code, err = finish(job.run("-n", "2", *servers, text=SLOW))
    assert code == 0, err
    slow = [text for text in texts(lines(err), "worker 0") if " was slow: worker 1 came last, " in text]
    assert slow
    assert re.search("round 1 of key 'w'|key 'w', round 1", slow[0])


STRAGGLER = """
import numpy as np
import kvstore as kv
late, rounds = float(os.environ["LATE"]), int(os.environ["ROUNDS"])
with kv.create("dist_sync") as store:
    store.init("w3", np.zeros(1000, np.float32))
    out = np.empty(1000, np.float32)
    for step in range(rounds):
        time.sleep(late if RANK == 1 else 0)
        store.push("w3", np.ones(1000, np.float32))
        store.pull("w3", out=out)
"""
LAST = re.compile(
    r"worker (?P<rank>\d) came last by more than 10 ms in (?P<late>\d+) of (?P<rounds>\d+) rounds "
    r"of the last [\d.]+ s: by (?P<median>[\d.]+) (?P<unit>m?s) in the median, \S+ m?s at most \(key 'w3'\); "
    r"the others waited \S+ s for it"
)


def straggling(job: Job, seconds: float, rounds: int) -> bytes:
    """Run a job of three workers, one of which is late in each round; return its log."""
    job.environment |= {"LATE": str(seconds), "ROUNDS": str(rounds)}
    code, err = finish(job.run("-n", "3", "-s", "1", text=STRAGGLER))
    assert code == 0, err
    return err


def test_a_server_tells_of_the_worker_that_comes_last_in_most_rounds(job: Job) -> None:
    job.environment["KVSTORE_LOG"] = "info"
    seconds = min(0.9, pace.seconds(0.06))  # the others are late, too, where processors are busy
    rounds = 1 + round(4 / seconds)
    told = texts(lines(straggling(job, seconds, rounds)), "server 0")
    found = [match for match in map(LAST.fullmatch, told) if match]
    assert found, told
    assert {match["rank"] for match in found} == {"1"}
    assert max(int(match["late"]) for match in found) > rounds / 2 / len(found)
    for match in found:
        assert float(match["median"]) / (1 if match["unit"] == "s" else 1000) > seconds / 2


def test_a_server_reports_no_straggler_where_all_arrive_at_the_same_time(job: Job) -> None:
    job.environment["KVSTORE_LOG"] = "info"
    assert b" came last by " not in straggling(job, 0.0, 40)


def test_a_straggler_is_no_warning(job: Job) -> None:
    job.environment.pop("KVSTORE_LOG", None)
    assert straggling(job, 0.3, 9) == b""


RESTARTED = """
import numpy as np
import kvstore as kv
with kv.create("dist_sync") as store:
    store.init("w", np.zeros(1000, np.float32))
    say("there")
    while not (HERE / "stop-9").exists():
        store.pushpull("w", np.ones(1000, np.float32))
"""


def test_snapshots_and_a_server_that_is_back(job: Job) -> None:
    job.environment |= {"KVSTORE_LOG": "info", "KVSTORE_DEAD_AFTER": pace.variable(2)}
    options = ["--snapshot", "snapshots", "--snapshot-interval", "0.2", "--server-restarts", "1"]
    path = job.folder / "stderr"
    with path.open("wb") as file:
        launcher = job.run("-n", "1", "-s", "1", *options, text=RESTARTED, stderr=file)
    until(lambda: job.said("there", 0) and b"snapshot written to " in path.read_bytes())
    found = re.search(rb"server 0 started: process (\d+)", path.read_bytes())
    assert found
    os.kill(int(found[1]), signal.SIGKILL)
    until(lambda: re.search(rb"worker 0: server 0 is back; epoch", path.read_bytes()))
    (job.folder / "stop-9").touch()
    assert finish(launcher)[0] == 0
    assert b"server 0: snapshot read from " in path.read_bytes()
