"""Jobs with servers whose processes are killed, stopped, cut off, starved and interrupted.

Nobody may hang, no value may be wrong, and nothing may be left behind. Most of the time of a case is waiting,
so several run side by side.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jobs
import pytest
from servers import ServedJob

BODIES = "procs_dist_faults"
DEAD_AFTER = 1.0
IN_TIME = 6 * DEAD_AFTER  # seconds until everybody knows: the machine may be busy
TIMES = {
    "KVSTORE_HEARTBEAT": "0.1",
    "KVSTORE_DEAD_AFTER": str(DEAD_AFTER),
    "KVSTORE_RESEND": "0.5",
    "KVSTORE_TIMEOUT": "15",
}
AT_ONCE = 3

MODULES = (
    BODIES,
    "servers",
    "kvstore.backends.dist",
    "kvstore.backends.dist_roles",
    "kvstore.backends.local",
)

Case = tuple[Any, ...]


class SharedNursery(jobs.Nursery):
    """One that several threads of a test may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        super().__init__(*MODULES)

    def _ask(self, request: dict[str, Any], descriptors: list[int]) -> Any:
        with self._lock:
            return super()._ask(request, descriptors)


@pytest.fixture(scope="module")
def shared_nursery() -> Iterator[SharedNursery]:
    made = SharedNursery()
    yield made
    made.close()


class Faults:
    """Makes jobs, each in a folder of its own, and runs cases."""

    def __init__(self, nursery: SharedNursery, folder: Path) -> None:
        self.nursery, self.folder = nursery, folder
        self._count = 0
        self._lock = threading.Lock()

    def job(self, workers: int, servers: int, **variables: str) -> ServedJob:
        """Start scheduler and servers of a job; it is closed by `with`."""
        with self._lock:
            self._count += 1
            folder = self.folder / str(self._count)
        folder.mkdir()
        return _Closing(self.nursery, folder, workers, servers, **{**TIMES, **variables})

    def run(self, body: Callable[..., None], cases: Sequence[Case], seed: int) -> None:
        """Run cases side by side, each with moments drawn from the seed and its name; say which failed."""

        def one(case: Case) -> str:
            try:
                body(self, random.Random(f"{seed} {case}"), *case)
            except Exception as error:
                return f"--- {body.__name__}{case}, seed {seed}: {type(error).__name__}: {error}"
            return ""

        with ThreadPoolExecutor(AT_ONCE) as pool:
            failed = [text for text in pool.map(one, cases) if text]
        assert not failed, "\n".join(failed)


class _Closing(ServedJob):
    def __enter__(self) -> _Closing:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, AssertionError):
            error.args = (f"{error}\n{self.told()}",)
        self.close()

    def told(self) -> str:
        """Everything that the processes have written to stderr."""
        named = [("scheduler", self.scheduler)]
        named += [(f"server {i}", one) for i, one in enumerate(self.servers)]
        named += [(f"worker {i}", one) for i, one in enumerate(self.workers)]
        return "\n".join(f"[{name}] {one.code} {one.lines} {one.errors()[-2000:]}" for name, one in named)


@pytest.fixture
def faults(shared_nursery: SharedNursery, tmp_path: Path) -> Faults:
    return Faults(shared_nursery, tmp_path)


def finish(*workers: jobs.Worker, timeout: float = 20) -> list[Any]:
    """Results of workers, which must end well."""
    end = time.monotonic() + timeout
    for worker in workers:
        worker.finish(end)
    return [worker.result() for worker in workers]


def ready(*workers: jobs.Worker, line: str = "ready") -> None:
    for worker in workers:
        worker.expect(line, 20)


# ------------------------------------------------------------------------------------------------- kill -9

PHASES = ["init", "push", "pushpull", "pull", "barrier", "settings", "close"]


def kill(one: jobs.Worker) -> float:
    """Kill it; return when."""
    one.signal(signal.SIGKILL)
    return time.monotonic()


def check_lost(found: list[dict[str, Any]], killed: float, role: str, rank: int) -> None:
    for one in found:
        assert (one["role"], one["rank"]) == (role, rank), one
        assert one["noticed"] - killed < IN_TIME, one["noticed"] - killed
        assert role in one["text"]
    assert len({str(one.get("values")) for one in found}) == 1, found


def kill_a_worker(faults: Faults, draw: random.Random, phase: str) -> None:
    with faults.job(draw.choice([2, 3]), draw.choice([1, 2])) as made:
        workers = made.start_all(BODIES, "until_lost", phase, str(made.folder))
        ready(*workers)
        rank = draw.randrange(made.size)
        victim = workers.pop(rank)
        time.sleep(draw.random() * 0.1)
        killed = kill(victim)
        check_lost(finish(*workers), killed, "worker", rank)
        assert victim.finish(time.monotonic() + 5) == -signal.SIGKILL, victim.errors()
        assert made.ended(10) == [0] * (1 + len(made.servers))


@pytest.mark.parametrize("seed", [0])
def test_a_killed_worker(faults: Faults, seed: int) -> None:
    faults.run(kill_a_worker, [(phase,) for phase in PHASES], seed)


def kill_a_server(faults: Faults, draw: random.Random, phase: str) -> None:
    with faults.job(2, 2) as made:
        workers = made.start_all(BODIES, "until_lost", phase, str(made.folder))
        ready(*workers)
        rank = draw.randrange(2)
        time.sleep(draw.random() * 0.1)
        killed = kill(made.servers[rank])
        check_lost(finish(*workers), killed, "server", rank)
        codes = made.ended(10)
        assert codes.pop(1 + rank) == -signal.SIGKILL
        assert codes == [0, 0]


@pytest.mark.parametrize("seed", [0])
def test_a_killed_server(faults: Faults, seed: int) -> None:
    faults.run(kill_a_server, [(phase,) for phase in PHASES], seed)


def kill_the_scheduler(faults: Faults, draw: random.Random, phase: str) -> None:
    with faults.job(2, 2) as made:
        workers = made.start_all(BODIES, "until_lost", phase, str(made.folder))
        ready(*workers)
        time.sleep(draw.random() * 0.1)
        killed = kill(made.scheduler)
        found = finish(*workers)
        check_lost(found, killed, "scheduler", 0)
        assert made.ended(10) == [-signal.SIGKILL, 1, 1]
        for server in made.servers:
            assert "PeerLostError: scheduler is lost" in server.errors()


@pytest.mark.parametrize("seed", [0])
def test_a_killed_scheduler(faults: Faults, seed: int) -> None:
    faults.run(kill_the_scheduler, [(phase,) for phase in PHASES], seed)
