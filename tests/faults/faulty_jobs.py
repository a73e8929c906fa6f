"""Jobs with servers that are disturbed, and what tests ask of them.

Most of the time of a case is waiting, so several run side by side.
"""

from __future__ import annotations

import random
import signal
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jobs
import pace
from servers import ServedJob

from kvstore.launch.certificates import Certificates

BODIES = "procs_dist_faults"
AT_ONCE = 4
IN_TIME = 6  # times the silence that counts as a loss, until all processes know: the machine may be busy
LONGEST = 5  # times what an idle machine needs, if the machine is busy when a job starts
UNTIL_TOLD = 30  # seconds: a lost scheduler is reported after some 3.4 * LONGEST * 1.5, perhaps of idleness


def silence(idle: float) -> str:
    """Return the seconds of silence that count as a loss: on a busy machine living processes are silent, too.

    But not so long that the deadlines of the tests are over if the machine is idle again by then.
    """
    return f"{min(pace.seconds(idle), LONGEST * idle):.3f}"


def times() -> dict[str, str]:
    """Make deaths be noticed soon, where a test does not say otherwise."""
    return {
        "KVSTORE_HEARTBEAT": "0.1",
        "KVSTORE_DEAD_AFTER": silence(1.5),
        "KVSTORE_RESEND": "0.5",
    }


Case = tuple[Any, ...]


class SharedNursery(jobs.Nursery):
    """One that several threads of a test may ask."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        super().__init__(BODIES, *jobs.MODULES)

    def _ask(self, request: dict[str, Any], descriptors: list[int]) -> Any:
        with self._lock:
            return super()._ask(request, descriptors)


class Faults:
    """Makes jobs, each in a folder of its own, and runs cases."""

    def __init__(self, nursery: SharedNursery, folder: Path) -> None:
        self.nursery, self.folder = nursery, folder
        #: Variables of all jobs.
        self.variables: dict[str, str] = {}
        self._count = 0
        self._lock = threading.Lock()

    def job(
        self,
        workers: int,
        servers: int,
        server: str = "",
        scheduler: str = "",
        keys: dict[str, str] | None = None,
        **variables: str,
    ) -> FaultyJob:
        """Start scheduler and servers of a job, perhaps with bodies of their own; for `with`."""
        with self._lock:
            self._count += 1
            folder = self.folder / str(self._count)
        folder.mkdir()
        bodies = {"server": server, "scheduler": scheduler}
        variables = {**times(), **self.variables, **variables}
        # The measured slowness changes from moment to moment: a loss is reported before a timeout.
        enough = max(pace.seconds(15), 2 * float(variables["KVSTORE_DEAD_AFTER"]))
        variables.setdefault("KVSTORE_TIMEOUT", f"{enough:.3f}")
        return FaultyJob(self.nursery, folder, (workers, servers), bodies, keys or {}, variables)

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


class FaultyJob(ServedJob):
    """A job that is disturbed."""

    def __init__(
        self,
        nursery: SharedNursery,
        folder: Path,
        size: tuple[int, int],
        bodies: dict[str, str],
        keys: dict[str, str],
        variables: dict[str, str],
    ) -> None:
        self._bodies, self._keys, self.nursery = bodies, keys, nursery
        self._others: list[jobs.Worker] = []
        super().__init__(nursery, folder, *size, **variables)

    def _role(self, role: str, rank: int, *_: str, **variables: str) -> jobs.Worker:
        """As elsewhere, but for those that run another body, or have keys."""
        if self._keys:
            name = role if role == "scheduler" else f"{role}-{rank}"
            variables["KVSTORE_KEYS_FILE"] = self._keys[name]
        if role != "scheduler":  # which returns to ports that are of no server
            variables["KVSTORE_PORTS"] = ""
        module = BODIES if self._bodies[role] else "servers"
        return super()._role(role, rank, module, self._bodies[role], **variables)

    def role(self, role: str, **variables: str) -> jobs.Worker:
        """Start one process more."""
        made = self._role(role, 0, **variables)
        self._others.append(made)
        return made

    def close(self) -> None:
        for one in self._others:
            one.close()
        super().close()

    def __enter__(self) -> FaultyJob:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: object) -> None:
        if isinstance(error, AssertionError):
            error.args = (f"{error}\n{self.told()}",)
        self.close()

    @property
    def dead_after(self) -> float:
        """Seconds of silence that count as a loss."""
        return float(self.variables["KVSTORE_DEAD_AFTER"])

    @property
    def in_time(self) -> float:
        """Return the seconds until all processes know of a loss."""
        return pace.seconds(IN_TIME * self.dead_after)

    def told(self) -> str:
        """Everything that the processes have written to stderr."""
        named = [("scheduler", self.scheduler)]
        named += [(f"server {i}", one) for i, one in enumerate(self.servers)]
        named += [(f"worker {i}", one) for i, one in enumerate(self.workers)]
        return "\n".join(f"[{name}] {one.code} {one.lines} {one.errors()[-2000:]}" for name, one in named)


def finish(*workers: jobs.Worker, timeout: float = UNTIL_TOLD) -> list[Any]:
    """Results of workers, which must end well."""
    end = pace.deadline(timeout)
    for worker in workers:
        worker.finish(end)
    return [worker.result() for worker in workers]


def say(worker: jobs.Worker, line: str) -> None:
    """Send a line to a worker that must be there."""
    try:
        worker.say(line)
    except BrokenPipeError:
        raise AssertionError(f"the worker is gone: {worker.errors()}") from None


def ready(*workers: jobs.Worker, line: str = "ready") -> None:
    for worker in workers:
        worker.expect(line, UNTIL_TOLD)


def kill(one: jobs.Worker) -> float:
    """Kill it; return when."""
    one.signal(signal.SIGKILL)
    return time.monotonic()


def check_lost(made: FaultyJob, found: list[dict[str, Any]], killed: float, role: str, rank: int) -> None:
    for one in found:
        assert (one["role"], one["rank"]) == (role, rank), one
        assert one["noticed"] - killed < made.in_time, one["noticed"] - killed
        assert role in one["text"], one
    assert len({str(one.get("values")) for one in found}) == 1, found


def stood_still(text: str) -> bool:
    """Whether a process got the error that it had not run itself, which is true on a busy machine only."""
    return "stood still" in text and pace.slowness() > 1


class Behind:
    """The servers of a job behind proxies, and the scheduler, as its workers see it."""

    def __init__(self, made: ServedJob, workers: Callable[[str], Any]) -> None:
        self.proxies = [workers(made.variables["KVSTORE_SCHEDULER"])]
        made.variables["KVSTORE_SCHEDULER"] = self.proxies[0].address
        echo = workers(made.scheduler.expect_some("echo at ")[8:])
        self.proxies.append(echo)
        made.scheduler.say(echo.address)
        for server in made.servers:
            for what in ("at ", "streams at "):
                proxy = workers(server.expect_some(what).removeprefix(what))
                self.proxies.append(proxy)
                server.say(proxy.address)

    def __enter__(self) -> Behind:
        return self

    def __exit__(self, *_: object) -> None:
        for proxy in self.proxies:
            proxy.close()


def keys_of_a_job(folder: Path, workers: int) -> dict[str, str]:
    """Make the keys of a job with one server; return each process's file."""
    return {path.stem: str(path) for path in Certificates(workers, 1).save(folder)}
