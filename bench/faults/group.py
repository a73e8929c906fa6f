"""The processes of a run: threads of one process, workers, workers with servers, or MPI ranks."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import jobs
from faults.faulty_jobs import Behind
from faults.proxy import Proxy
from servers import ServedJob, start_on

from bench import ROOT

from .cells import SERVED, Plan, Promise

BODIES = "bench.faults.workers"
_LEAVES = 5.0  # seconds
_WAITS = {"KVSTORE_TIMEOUT": "30"}  # longer than any wait of a run, also on a busy machine
#: Variables of an outer job that would change the behaviour of mpiexec.
_OF_LAUNCHERS = ("KVSTORE_", "PMI", "MPI_LOCAL", "HYDRA", "HYDI")


class SharedNursery(jobs.Nursery):
    """A nursery that several threads can use."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        super().__init__("procs_dist_faults", BODIES, *jobs.MODULES)

    def _ask(self, request: dict[str, Any], descriptors: list[int]) -> Any:
        with self._lock:
            return super()._ask(request, descriptors)


class Ended:
    """The end of a process; `hung`: it did not end, and was killed."""

    def __init__(self, code: int, said: str, hung: bool = False) -> None:
        self.code, self.said, self.hung = code, said, hung


def _end_of(worker: jobs.Worker, end: float) -> Ended:
    try:
        code = worker.finish(end)
    except AssertionError:
        return Ended(worker.code or -signal.SIGKILL, worker.errors()[-3000:], hung=True)
    return Ended(code, worker.errors()[-3000:])


class Group:
    """Worker processes of one machine; the base of the other groups."""

    def __init__(self, nursery: jobs.Nursery, plan: Plan, promised: Promise) -> None:
        self.plan, self.folder = plan, Path(plan.folder)
        self.temporary = self.folder / "tmp"
        self.temporary.mkdir(parents=True)
        self.job = self._job(nursery, promised)
        self.workers: list[jobs.Worker] = []

    def _job(self, nursery: jobs.Nursery, promised: Promise) -> jobs.Job:
        return jobs.Job(nursery, self.temporary, self.plan.workers)

    def start(self) -> None:
        """Start all workers."""
        arguments = (BODIES, "works", list(self.plan))
        self.workers = [
            self.job.start(*arguments, rank, rank=rank, **_WAITS) for rank in range(self.plan.workers)
        ]

    def signal(self, rank: int, number: int) -> None:
        """Send a signal to a worker."""
        self.workers[rank].signal(number)

    def finish(self, end: float) -> list[Ended]:
        """Wait for all workers."""
        return [_end_of(worker, end) for worker in self.workers]

    def others(self, end: float) -> dict[str, Ended]:
        """Wait for the servers and the scheduler, which end after the workers."""
        return {}

    def close(self) -> None:
        """End all processes."""
        for worker in self.workers:
            worker.close()


class Threads(Group):
    """One process, whose threads are the workers."""

    def start(self) -> None:
        self.workers = [self.job.start(BODIES, "threads", list(self.plan), rank=0)]


class Served(Group):
    """Workers with servers and a scheduler."""

    job: _ServedJob
    _behind: Behind | None = None

    def _job(self, nursery: jobs.Nursery, promised: Promise) -> _ServedJob:
        plan = self.plan
        times = {
            "KVSTORE_HEARTBEAT": f"{promised.dead_after / 10}",
            "KVSTORE_DEAD_AFTER": f"{promised.dead_after}",
            "KVSTORE_RESEND": f"{promised.dead_after / 3}",
        }
        if plan.fills_server:
            times |= {"KVSTORE_SNAPSHOT": str(self.folder / "snapshots"), "KVSTORE_SNAPSHOT_INTERVAL": "0.1"}
        if plan.fault == "scheduler killed" and plan.heals:
            times["KVSTORE_JOURNAL"] = str(self.folder / "journal")
        return _ServedJob(nursery, self.temporary, plan, times)

    def start(self) -> None:
        if self.plan.fault == "partition":
            self._behind = Behind(self.job, lambda target: Proxy(target, self.plan.seed))
        arguments = (BODIES, "works", list(self.plan))
        for rank in range(self.plan.workers):
            if self.plan.store == "hierarchy":
                made = start_on(self.job, rank % 2, rank, *arguments, rank, **_WAITS)
            else:
                made = self.job.start(*arguments, rank, rank=rank, **_WAITS)
            self.workers.append(made)

    @property
    def proxies(self) -> list[Proxy]:
        """Return the proxies between the workers and all other processes."""
        return self._behind.proxies if self._behind else []

    def restart_scheduler(self) -> None:
        """Start another scheduler, with the journal of the killed scheduler."""
        job = self.job
        job.scheduler.finish(time.monotonic() + 20)
        job.scheduler.close()
        variables = {"KVSTORE_NUM_WORKERS": str(job.size), "KVSTORE_RESTART": "1"}
        job.scheduler = job._role("scheduler", 0, **variables)
        job.scheduler.expect_some("at ")

    def others(self, end: float) -> dict[str, Ended]:
        named = {f"server {rank}": one for rank, one in enumerate(self.job.servers)}
        return {name: _end_of(one, end) for name, one in {"scheduler": self.job.scheduler, **named}.items()}

    def close(self) -> None:
        super().close()
        for one in (self.job.scheduler, *self.job.servers):
            one.close()
        if self._behind:
            self._behind.__exit__()


class _ServedJob(ServedJob):
    """A job with servers that can be behind proxies, or have a full disk."""

    def __init__(self, nursery: jobs.Nursery, folder: Path, plan: Plan, times: dict[str, str]) -> None:
        self._plan = plan
        super().__init__(nursery, folder, plan.workers, plan.servers, **times)

    def _role(self, role: str, rank: int, *_: str, **variables: str) -> jobs.Worker:
        body = ""
        if self._plan.fault == "partition":
            body = {"server": "behind", "scheduler": "scheduler_behind"}[role]
        elif self._plan.fills_server and (role, rank) == ("server", self._plan.victim % self._plan.servers):
            body = "without_disk"
        return super()._role(role, rank, "procs_dist_faults" if body else "servers", body, **variables)


# ------------------------------------------------------------------------------------------------------- MPI


def mpi_python() -> str:
    """Return a Python with mpi4py and with mpiexec in its folder; empty: there is none."""
    python = os.environ.get("KVSTORE_BENCH_MPICH") or sys.executable
    return python if shutil.which("mpiexec", path=str(Path(python).parent)) else ""


class Mpi(Group):
    """Processes of mpiexec, which ends all of them if one fails."""

    def start(self) -> None:
        python = mpi_python()
        command = [
            *(str(Path(python).parent / "mpiexec"), "-n", str(self.plan.workers)),
            *(python, "-m", BODIES, json.dumps(list(self.plan))),
        ]
        kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        own = {"TMPDIR": str(self.temporary), "PYTHONPATH": path, "OPENBLAS_NUM_THREADS": "1"}
        own["KVSTORE_TIMEOUT"] = "4" if self.plan.fault == "stop above" else "20"
        with (self.folder / "output").open("wb") as output:
            self._launcher = subprocess.Popen(
                command, env={**kept, **own}, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                cwd=ROOT, start_new_session=True,
            )  # fmt: skip

    def pids(self) -> dict[int, int]:
        """Return the processes that have written their ids."""
        return {int(path.stem): int(path.read_text()) for path in self.folder.glob("*.pid")}

    def signal(self, rank: int, number: int) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pids()[rank], number)

    def finish(self, end: float) -> list[Ended]:
        hung = False
        try:
            code = self._launcher.wait(max(0.1, end - time.monotonic()))
        except subprocess.TimeoutExpired:
            hung, code = True, -signal.SIGKILL
        self.ended_at = time.monotonic()
        said = (self.folder / "output").read_text(errors="replace")[-3000:]
        return [Ended(code, said, hung or not all(map(_is_gone, self.pids().values())))]

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._launcher.pid, signal.SIGKILL)
        for pid in self.pids().values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._launcher.wait()


def _is_gone(pid: int) -> bool:
    """Wait for the end of a process after that of its launcher."""
    end = time.monotonic() + _LEAVES
    status = Path(f"/proc/{pid}/status")
    while time.monotonic() < end:
        try:
            if "\nState:\tZ" in status.read_text():
                return True
        except OSError:
            return True
        time.sleep(0.01)
    return False


def group(nursery: jobs.Nursery, plan: Plan, promised: Promise) -> Group:
    """Make the processes of a run; no worker is started yet."""
    kinds: dict[str, type[Group]] = {"local": Threads, "mpi": Mpi, **dict.fromkeys(SERVED, Served)}
    return kinds.get(plan.store, Group)(nursery, plan, promised)
