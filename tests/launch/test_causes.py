"""The cause of a job's end, with real workers, servers and schedulers: the process with its own error."""

from __future__ import annotations

import os
import random
import re
import signal

import pace
import pytest
from launched import Job, until
from nightly import each_once

from kvstore.launch.causes import has_failed_after
from kvstore.launch.child_process import ProcessRole

DEADLINE = 280.0

FAIL = """
import atexit
import numpy as np
LATE, SLOW, OWN, LAST = (eval(sys.argv[1])[name][RANK] for name in ("late", "slow", "own", "last"))
if LAST:
    atexit.register(time.sleep, SLOW)  # after the others were told
import kvstore as kv
if not LAST:
    atexit.register(time.sleep, SLOW)  # before
store = kv.create(sys.argv[2])
store.init("w", np.zeros(3, np.float32))
store.pushpull("w", np.ones(3, np.float32))
time.sleep(LATE)
if OWN:
    raise RuntimeError(f"the very error of {RANK}")
while True:
    store.pushpull("w", np.ones(3, np.float32))
"""


def check(job: Job, seed: int) -> None:
    """Have some workers raise, and all of them end as slowly as their interpreters like."""
    draw = random.Random(seed)
    size = draw.choice((2, 2, 3))
    culprit = draw.choice((None, draw.randrange(size)))
    own = [culprit in (None, rank) for rank in range(size)]
    chosen = {
        "late": [draw.choice((0.0, draw.uniform(0, 0.3))) for _ in range(size)],
        "slow": [draw.choice((0.0, draw.uniform(0, 4))) for _ in range(size)],
        "own": own,
        "last": [draw.random() < 0.7 for _ in range(size)],
    }
    store, servers = ("dist_sync", ["-s", "1"]) if draw.random() < 0.75 else ("shared", [])
    process = job.run("-n", str(size), *servers, job.script(FAIL), repr(chosen), store)
    _, err = process.communicate(timeout=DEADLINE)
    found = re.search(rb"\nkvstore run: rank (\d) failed with exit code 1 after .*?\n(.*)", err, re.DOTALL)
    assert found is not None, (chosen, store, err)
    rank, tail = int(found[1]), found[2]
    assert own[rank], (chosen, store, err)
    assert b"RuntimeError: the very error of %d\n" % rank in tail, (chosen, store, err)
    assert process.returncode == 1


@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(1))
def test_a_worker_s_own_error_comes_first(job: Job, seed: int) -> None:
    check(job, seed)


@pytest.mark.nightly
@pytest.mark.timeout(300)
@pytest.mark.parametrize("seed", range(200))
def test_a_worker_s_own_error_comes_first_however_slowly_it_ends(job: Job, seed: int) -> None:
    check(job, seed)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("store", "own"), each_once(["dist_sync", "shared"], [[True, True], [True, False]]))
def test_workers_that_take_seconds_to_end(job: Job, store: str, own: list[bool]) -> None:
    chosen = {"late": [0.0, 0.3], "slow": [3.0, 0.0 if own[1] else 1.0], "own": own, "last": [True, True]}
    servers = ["-s", "1"] if store == "dist_sync" else []
    process = job.run("-n", "2", *servers, job.script(FAIL), repr(chosen), store)
    _, err = process.communicate(timeout=DEADLINE)
    assert re.search(rb"kvstore run: rank \d failed with exit code 1", err), err
    assert re.search(rb"\n(RuntimeError: the very error of \d)\n", err[err.index(b"kvstore run: ") :]), err
    assert process.returncode == 1


STOPPED = """
import numpy as np
import kvstore as kv
store = kv.create("shared")
store.init("w", np.zeros(3, np.float32))
store.barrier()
say("ready")
while True:
    store.pushpull("w", np.ones(3, np.float32))
"""


def test_a_stopped_worker_is_not_waited_for(job: Job) -> None:
    job.environment["KVSTORE_DEAD_AFTER"] = pace.variable(1.5)
    process = job.run("-n", "2", text=STOPPED)
    until(lambda: job.said("ready", 0, 1))
    os.kill(job.pid("ready", 1), signal.SIGSTOP)
    _, err = process.communicate(timeout=pace.seconds(100))  # the deadline would be 300 s
    assert b"kvstore run: rank 0 failed with exit code 1" in err
    assert b"worker 1 of 2 died or stopped" in err
    assert process.returncode == 1


HANG = """
import numpy as np
import kvstore as kv
import atexit
def forever_deaf():
    say("hangs")
    while True:
        time.sleep(1)
if RANK == 0:
    atexit.register(forever_deaf)
store = kv.create("shared")
store.init("w", np.zeros(3, np.float32))
store.barrier()
if RANK == 0:
    sys.excepthook = lambda *_: None
    raise RuntimeError
while True:
    store.pushpull("w", np.ones(3, np.float32))
"""


def test_a_worker_that_never_ends_is_waited_for_no_longer_than_the_deadline(job: Job) -> None:
    job.environment["KVSTORE_TIMEOUT"] = pace.variable(2)
    process = job.run("-n", "2", text=HANG)
    until(lambda: job.said("hangs", 0))
    _, err = process.communicate(timeout=pace.seconds(100))
    assert b"kvstore run: rank 1 failed with exit code 1" in err
    assert process.returncode == 1


WORKERS = [ProcessRole("worker", rank) for rank in range(3)]


@pytest.mark.parametrize(
    ("part", "words", "missed"),
    [
        (ProcessRole("server", 0), b"Error: all workers are lost", WORKERS),
        (ProcessRole("scheduler", 0), b"Error: all workers are lost", WORKERS),
        (ProcessRole("server", 0), b"Error: cannot listen", []),
        (
            WORKERS[1],
            b"kvstore.errors.PeerLostError: worker 0 is lost: it has failed; values can",
            WORKERS[:1],
        ),
        (WORKERS[1], b"PeerLostError: worker 0 of 3 died or stopped; noticed by worker 1.", WORKERS[:1]),
        (WORKERS[1], b"PeerLostError: worker 0 is lost: no heartbeat of it has arrived for 5.0 s", []),
        (WORKERS[1], b"PeerLostError: server 0 is lost: it has failed", [ProcessRole("server", 0)]),
        (WORKERS[1], b"RuntimeError: worker 0 is lost: it has failed", []),
    ],
)
def test_last_words_name_whom_they_miss(part: ProcessRole, words: bytes, missed: list[ProcessRole]) -> None:
    others = [*WORKERS, ProcessRole("server", 0), ProcessRole("server", 1), ProcessRole("scheduler", 0)]
    assert [one for one in others if has_failed_after(part, [b"Traceback", words, b""], one)] == missed


SPAWNED = """
import atexit, time
import numpy as np
import kvstore as kv

def fn():
    store = kv.create("shared")
    store.init("w", np.zeros(3, np.float32))
    if store.rank == 0:
        atexit.register(time.sleep, 2)
        with store:
            raise RuntimeError("the very error of 0")
    while True:
        store.pushpull("w", np.ones(3, np.float32))

if __name__ == "__main__":
    kv.spawn(fn, 2)
"""


def test_a_worker_of_spawn_that_takes_seconds_to_end(job: Job) -> None:
    (job.folder / "main.py").write_text(SPAWNED)
    _, err = job.start("main.py").communicate(timeout=pace.seconds(100))
    assert b"WorkerError: rank 0 failed with exit code 1" in err, err
    assert b"the very error of 0" in err


TOGETHER = """
import atexit, socket
def outlive_the_scheduler():
    host, port = os.environ["DMLC_PS_ROOT_URI"], int(os.environ["DMLC_PS_ROOT_PORT"])
    while True:
        try:
            socket.create_connection((host, port)).close()
        except OSError:
            return
        time.sleep(0.05)
atexit.register(outlive_the_scheduler)
import numpy as np
import kvstore as kv
store = kv.create("dist_sync")
store.init("w", np.zeros(3, np.float32))
store.barrier()
raise RuntimeError(f"the very error of {RANK}")
"""


def test_no_process_is_restarted_for_servers_that_have_left(job: Job) -> None:
    process = job.run("-n", "2", "-s", "1", "--restarts", "3", text=TOGETHER)
    _, err = process.communicate(timeout=pace.seconds(100))
    assert b"[server 0] Error: all workers are lost" in err, err
    assert b"starting it again" not in err
    assert re.search(rb"\nkvstore run: rank \d failed with exit code 1", err), err
    assert process.returncode == 1
