"""Real jobs on this machine: the processor time of their processes, and their bytes and messages."""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

_PATIENCE = 300.0  # seconds for a job


@dataclass(frozen=True)
class RealCase:
    """A job of this machine; payloads are sent over TCP."""

    #: Its processes
    workers: int
    servers: int
    sizes: tuple[int, ...]  # elements of float32 of each key
    way: str = "pushpull"  # `pushpull`, `push`, `pull`, `barrier` or `idle`
    #: The calls of each worker, all keys at once, and the calls before them
    calls: int = 50
    warm: int = 5
    sweep: int = 0  # bytes of memory that a worker changes before each call
    sleep: float = 0.0  # seconds that it sleeps before each call
    #: Of a `dist` store, or `shared`; as in `set_gradient_compression`
    mode: str = "sync"
    codec: str = ""

    @property
    def nbytes(self) -> int:
        """Bytes of all values."""
        return 4 * sum(self.sizes)


@dataclass(frozen=True)
class Found:
    """The figures of a job, for one call."""

    seconds: float  # of the clock, the median of all workers, without the time between the calls
    #: Seconds of a core: of one worker, of all servers, of the scheduler
    worker: float
    server: float
    scheduler: float
    #: Of one worker: bytes of values, and complete rounds of slices. Negative: workers differ.
    sent: float
    received: float
    rounds: float
    init: float  # seconds of the init of all keys, of the worker that took longest


def run(case: RealCase) -> Found:
    """Run a job.

    Raises
    ------
    RuntimeError
        The job has failed; the message has its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        n, s = str(case.workers), str(case.servers)
        command = [sys.executable, "-m", "kvstore.launch", "run", "-n", n]
        command += ["-s", s, "--transport", "tcp", "--"] if case.servers else ["--"]
        command += [sys.executable, "-m", "bench.scale.real_worker", json.dumps(asdict(case)), folder]
        root = Path(__file__).parents[2]
        done = subprocess.run(
            command, cwd=root, capture_output=True, text=True, timeout=_PATIENCE, check=False
        )
        if done.returncode:
            raise RuntimeError(f"{case} failed: {done.stderr[-2000:]}")
        read = [json.loads(Path(folder, f"{rank}.json").read_text()) for rank in range(case.workers)]
    return _found(case, read)


def _found(case: RealCase, read: Sequence[dict[str, Any]]) -> Found:
    others = read[0]["others"]
    return Found(
        seconds=_middle([one["wall"] - _aside(case, one) for one in read]) / case.calls,
        worker=sum(one["cpu"] for one in read) / len(read) / case.calls,
        server=sum(others.get("server", [0.0])) / case.calls,
        scheduler=sum(others.get("scheduler", [0.0])) / case.calls,
        sent=_same(read, "sent") / case.calls,
        received=_same(read, "received") / case.calls,
        rounds=_same(read, "rounds") / case.calls,
        init=max(one["init"] for one in read),
    )


def _aside(case: RealCase, one: dict[str, Any]) -> float:
    """Return a worker's seconds outside its calls: the planned sleep, as it may wake late, or the time."""
    aside: float = case.sleep * case.calls or one["between"]
    return aside


def _middle(numbers: Sequence[float]) -> float:
    return sorted(numbers)[len(numbers) // 2]


def _same(read: Sequence[dict[str, Any]], name: str) -> float:
    first: float = read[0][name]
    return first if all(one[name] == first for one in read) else -1.0
