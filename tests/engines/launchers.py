"""Engines of collective operations as the tests start them: which are there, and a job on one of them."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pace

HERE = Path(__file__).parent
_YOUNG = 2.0  # seconds
_OF_LAUNCHERS = ("KVSTORE_", "PMI", "MPI_LOCAL", "OMPI_", "HOROVOD_", "HYDRA", "HYDI")


@dataclass(frozen=True)
class Engine:
    """An engine, and how its jobs are started.

    Attributes
    ----------
    title : str
        For people; several engines may be of the same name.
    name : str
        As in `kvstore.create`.
    python : str
        Where the engine is installed; empty if it is not there.
    missing : str
        Why not.
    launcher : sequence of str
        Before the number of processes, a Python and a script.
    patient : sequence of str
        The same, for jobs in which a process dies; it lets the others continue, if there is such a command.
    ends_jobs : bool
        Whether the engine ends all processes if one dies.
    """

    title: str
    name: str
    python: str
    missing: str = ""
    launcher: Sequence[str] = ()
    patient: Sequence[str] = ()
    variables: Mapping[str, str] = field(default_factory=dict)
    ends_jobs: bool = False

    def __str__(self) -> str:
        return self.title


def _mpi(title: str, variable: str) -> Engine:
    """MPI of an environment that a variable names, or of this one."""
    python = os.environ.get(variable, "") if variable else sys.executable
    starter = Path(python).parent / "mpiexec"
    missing = ""
    if not python:
        missing = f"{variable} names no Python with mpi4py and {title}"
    elif not variable and importlib.util.find_spec("mpi4py") is None:
        missing = "there is no mpi4py: pip install '.[test]'"
    elif not starter.exists():
        missing = f"there is no {starter}"
    extra, variables = [], {}
    if title == "openmpi":
        extra = ["--oversubscribe"]
        variables = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    launcher = (str(starter), *extra, "-n")
    return Engine(title, "mpi", python, missing, launcher, launcher, variables, ends_jobs=True)


def _gloo() -> Engine:
    python = os.environ.get("KVSTORE_TEST_TORCH", "")
    missing = "" if python else "KVSTORE_TEST_TORCH names no Python with PyTorch"
    start = (sys.executable, str(HERE / "start.py"))
    return Engine("gloo", "gloo", python, missing, start, start)


def _horovod() -> Engine:
    python = os.environ.get("KVSTORE_TEST_HOROVOD", "")
    missing = "" if python else "KVSTORE_TEST_HOROVOD names no Python with Horovod: build_horovod.py torch"
    run = (python, "-m", "horovod.runner.launch", "--gloo", "-np")
    return Engine("horovod", "horovod", python, missing, run, (python, str(HERE / "horovod_start.py")))


def horovod_core(folder: str) -> Engine:
    """Horovod without a framework, as build_horovod.py has built it into a folder."""
    missing = "" if folder else "KVSTORE_TEST_HOROVOD_CORE names no folder: build_horovod.py core"
    before = os.environ.get("PYTHONPATH")
    path = os.pathsep.join([str(Path(folder) / "site"), *([before] if before else [])])
    variables = {"KVSTORE_TEST_HOROVOD_CORE": folder, "PYTHONPATH": path}
    start = (sys.executable, str(HERE / "horovod_start.py"))
    return Engine("horovod-core", "horovod", sys.executable, missing, start, start, variables)


def _fake_nccl() -> Engine:
    """The store and nccl4py on the stand-ins for NCCL and CUDA: no NCCL is run."""
    absent = [name for name in ("nccl", "cuda", "numba") if importlib.util.find_spec(name) is None]
    missing = f"there is no {absent[0]}: pip install '.[test]'" if absent else ""
    start = (sys.executable, str(HERE / "start.py"))
    return Engine("fake-nccl", "nccl", sys.executable, missing, start, start, {"KVSTORE_TEST_FAKE_NCCL": "1"})


def _fake_byteps() -> Engine:
    """The store on a stand-in for BytePS, with servers of our own: no BytePS is run."""
    start = (sys.executable, "-m", "kvstore.launch", "run", "-s", "1", "-n")
    return Engine(
        "fake-byteps", "byteps", sys.executable, "", start, start, {"KVSTORE_TEST_FAKE_BYTEPS": "1"}
    )


ENGINES = (
    _mpi("mpich", ""),
    _mpi("openmpi", "KVSTORE_TEST_OPENMPI"),
    _gloo(),
    _horovod(),
    horovod_core(os.environ.get("KVSTORE_TEST_HOROVOD_CORE", "")),
    _fake_nccl(),
    _fake_byteps(),
)


@dataclass
class Ended:
    """The remains of a job: exit code of the launcher, its output, the results of each process."""

    code: int
    output: str
    told: dict[int, Any]
    seconds: float
    pids: list[int]


def run(
    engine: Engine,
    size: int,
    folder: Path,
    script: str,
    *arguments: str,
    patient: bool = False,
    timeout: float = 90,
    variables: Mapping[str, str] | None = None,
) -> Ended:
    """Run a script of this folder in so many processes, to its end; none of them stays, also after errors.

    A size of 0 is one process without a launcher.
    """
    command = [engine.python, str(HERE / script), engine.name, str(folder), *arguments]
    if size:
        command = [*(engine.patient if patient else engine.launcher), str(size), *command]
    start_time = time.monotonic()
    with (folder / "output").open("wb") as output:
        process = subprocess.Popen(
            command,
            env={**_environment(engine, folder), **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=folder,
            start_new_session=True,
        )
        try:
            code = process.wait(pace.seconds(timeout))
        except subprocess.TimeoutExpired:
            code = -1
        seconds = time.monotonic() - start_time
        pids = [int(path.read_text()) for path in folder.glob("*.pid")]
        left = [pid for pid in pids if not _ends(pid)]
        _kill(process, left)
        _sweep()
    text = (folder / "output").read_text(errors="replace")
    assert code != -1, f"the job did not end in {timeout} s:\n{text}"
    assert not left, f"processes {left} stayed after the job's end:\n{text}"
    told = {int(path.stem): json.loads(path.read_text()) for path in folder.glob("[0-9]*.json")}
    return Ended(code, text, told, seconds, pids)


def _environment(engine: Engine, folder: Path) -> dict[str, str]:
    kept = {name: value for name, value in os.environ.items() if not name.startswith(_OF_LAUNCHERS)}
    small = {"OPENBLAS_NUM_THREADS": "1", "OMP_NUM_THREADS": "1", "KVSTORE_NUM_THREADS": "1"}
    return {**kept, **small, "GLOO_FILE": str(folder / "gloo"), **engine.variables}


def _ends(pid: int, patience: float = 5.0) -> bool:
    end = pace.deadline(patience)
    while time.monotonic() < end:
        if not Path(f"/proc/{pid}").exists() or "\nState:\tZ" in Path(f"/proc/{pid}/status").read_text():
            return True
        time.sleep(0.02)
    return False


def _sweep() -> None:
    """Take away what an MPI leaves in shared memory when its job is killed, unless a living job has it."""
    memory = Path("/dev/shm")
    left = {str(path) for pattern in ("mpich_shm_*", "sm_segment.*") for path in memory.glob(pattern)}
    for maps in Path("/proc").glob("[0-9]*/maps") if left else ():
        with contextlib.suppress(OSError):
            text = maps.read_text()
            left = {name for name in left if name not in text}
    for name in left:
        with contextlib.suppress(OSError):
            if time.time() - os.stat(name).st_mtime > _YOUNG:  # its job may be about to open it
                os.unlink(name)


def _kill(process: subprocess.Popen[bytes], pids: list[int]) -> None:
    """End the rest of the job: the launcher's group, and processes that have groups of their own."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    for pid in pids:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    process.wait()
