"""Jobs of several processes for the tests: started quickly, with a deadline, and without remains.

One process imports everything once and forks the workers of all jobs (`Nursery`), each of which runs one
function of a module of tests/bodies as if it were a program of its own. Its result goes to stdout as the last
line, as JSON.
"""

from __future__ import annotations

import atexit
import contextlib
import gc
import importlib
import json
import os
import secrets
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pace
import paths
from buggify import interposed

DEADLINE = 60.0  # seconds of an idle machine, as all deadlines here
_RESULT = "result "
#: What most workers and servers import. None of it looks at the environment before a store is made.
MODULES = (
    "numpy.testing",
    "kvstore.stores.shared.backend",
    "kvstore.stores.parameter_server.worker.backend",
    "kvstore.stores.parameter_server.role_process",
    "kvstore.stores.local.backend",
    "procs_dist",
    "procs_shared",
    "servers",
)
#: No threads that spin for work, and memory of arrays is not given back and cleared again for each of them.
_QUICK = {"OPENBLAS_NUM_THREADS": "1"} | dict.fromkeys(
    ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_"), str(256 << 20)
)
_LASTING = (type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType, str, int, float)
_WORDS = {"typing", "types", "__future__", "collections.abc"}  # modules of what says types
_imported: set[str] = set()  # before the first fork, and what these modules hold
_held: list[tuple[types.ModuleType, str]] = []
_returned: list[bool] = []  # in a worker whose function has returned


class Nursery:
    """The process that forks workers. It has no threads, no store, and no settings of its own.

    `modules` are imported once, so that no worker has to: of many that start at once it is most of the work.
    """

    def __init__(self, *modules: str, python: str = sys.executable, preload: Path | None = None) -> None:
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        code = (
            "import importlib, sys; sys.path[:0] = sys.argv[1].split(':'); import jobs; jobs.end_quickly(); "
            "list(map(importlib.import_module, sys.argv[3:])); jobs.nurse(int(sys.argv[2]))"
        )
        command = [python, "-c", code, paths.IMPORTS, str(theirs.fileno()), *modules]
        variables = {name: value for name, value in os.environ.items() if not name.startswith("KVSTORE_")}
        variables |= _QUICK | ({"LD_PRELOAD": str(preload)} if preload else {})
        self._process = subprocess.Popen(
            command,
            pass_fds=[theirs.fileno()],
            env=variables,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
        theirs.close()

    def fork(self, request: dict[str, Any], descriptors: list[int]) -> int:
        """Start a worker with these as stdin, stdout and stderr; return its process id."""
        return int(self._ask(request, descriptors))

    def reap(self, pid: int) -> int:
        """Exit code of a worker that has ended: negative for a signal."""
        return int(self._ask({"reap": pid}, []))

    def _ask(self, request: dict[str, Any], descriptors: list[int]) -> Any:
        socket.send_fds(self._socket, [json.dumps(request).encode()], descriptors)
        return json.loads(self._socket.recv(1000))

    def close(self) -> None:
        self._socket.close()
        assert self._process.wait(20) == 0


def nurse(descriptor: int) -> None:
    """Fork the requested workers until the other end is closed; each child leaves this function and runs."""
    import ml_dtypes  # noqa: F401
    import numpy  # noqa: F401

    _imported.update(sys.modules)
    _held.extend(_holdings(_imported))
    gc.collect()
    gc.freeze()  # the end of a worker looked at all of this again, which was most of a small worker's time
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in the terminal is for pytest
    alive: set[int] = set()
    with socket.socket(fileno=descriptor) as asked:
        while True:
            text, descriptors, _, _ = socket.recv_fds(asked, 100_000, 3)
            if not text:
                for pid in alive:  # of tests that were killed
                    os.kill(pid, signal.SIGKILL)
                return
            request = json.loads(text)
            if "reap" in request:
                answer = os.waitstatus_to_exitcode(os.waitpid(request["reap"], 0)[1])
                alive.discard(request["reap"])
            else:
                answer = os.fork()
                if answer == 0:
                    break
                alive.add(answer)
            for one in descriptors:
                os.close(one)
            asked.send(json.dumps(answer).encode())
    run_worker(request, descriptors)


def end_quickly() -> None:
    """Be quick at the end of each worker, but leave nothing out that the library could notice.

    To release all modules, NumPy included, took most of the time of a small worker. After a function that
    has returned, Python releases the data of the library's and the tests' modules as it always does;
    functions, classes and other modules stay. Any other end is Python's own.
    """

    def end() -> None:
        if _returned:
            for module, name in [*_held, *_holdings(set(sys.modules) - _imported)]:
                setattr(module, name, None)
            gc.collect()
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(0)

    atexit.register(end)  # the first to be registered is the last to be called


def _holdings(names: set[str]) -> list[tuple[types.ModuleType, str]]:
    """The data of the library's and the tests' modules of these names, but for functions and the like."""
    rooms = {"kvstore", *(path.stem for path in paths.TESTS.glob("*/*.py"))} - {__name__}
    ours = [sys.modules[name] for name in names if name.partition(".")[0] in rooms]
    return [
        (module, name)
        for module in ours
        for name, value in vars(module).items()
        if not (name.startswith("__") or isinstance(value, _LASTING) or type(value).__module__ in _WORDS)
    ]


def run_worker(request: dict[str, Any], descriptors: list[int]) -> None:
    for place, descriptor in enumerate(descriptors):
        os.dup2(descriptor, place)
        os.close(descriptor)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.update(request["variables"])
    function = getattr(importlib.import_module(request["module"]), request["function"])
    interposed.begin_here()
    tell(_RESULT + json.dumps(function(*request["arguments"])))
    _returned.append(True)


def tell(line: str) -> None:
    """In a worker: a line that the test sees at once."""
    os.write(1, (line + "\n").encode())


def waits_in(call: Callable[..., Any], *arguments: Any) -> None:
    """In a worker: report to the test a call that must wait, and that it has ended."""
    waiting = threading.Thread(target=call, args=arguments)
    waiting.start()
    waiting.join(0.3)
    assert waiting.is_alive(), f"{call} did not wait"
    tell("waits")
    waiting.join(20)
    assert not waiting.is_alive()


def hear(timeout: float = DEADLINE) -> str:
    """In a worker: wait for a line of the test."""
    ready, _, _ = select.select([0], [], [], pace.seconds(timeout))
    if not ready:
        raise TimeoutError("the test said nothing")
    return os.read(0, 1000).decode().strip()


class Worker:
    """One process of a job, as the test sees it."""

    def __init__(self, nursery: Nursery, request: dict[str, Any]) -> None:
        self._nursery = nursery
        self.code: int | None = None
        self.lines: list[str] = []
        self._rest = b""
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed in `close`
        their_in, self._in = os.pipe()
        self._out, their_out = os.pipe()
        self.pid = nursery.fork(request, [their_in, their_out, self._errors.fileno()])
        self._ended = os.pidfd_open(self.pid)
        os.close(their_in)
        os.close(their_out)

    def say(self, line: str) -> None:
        """Send a line to the worker."""
        os.write(self._in, (line + "\n").encode())

    def expect(self, line: str, timeout: float = DEADLINE) -> float:
        """Wait until the worker has said a line; return when that was noticed (CLOCK_MONOTONIC)."""
        end = pace.deadline(timeout)
        while line not in self.lines:
            if not self._read(end):
                raise AssertionError(f"the worker never said {line!r}: {self.lines}\n{self.errors()}")
        return time.monotonic()

    def expect_some(self, start: str | tuple[str, ...], timeout: float = DEADLINE) -> str:
        """Wait until the worker has said a line that begins so, or one of these ways; return the line."""
        end = pace.deadline(timeout)
        while not (found := [line for line in self.lines if line.startswith(start)]):
            if not self._read(end):
                raise AssertionError(f"the worker never said {start!r}: {self.lines}\n{self.errors()}")
        return found[0]

    def signal(self, number: int) -> None:
        """Send a signal."""
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self._ended, number)

    def has_ended(self) -> bool:
        """Whether the worker's process has ended."""
        return bool(select.select([self._ended], [], [], 0.0)[0])

    def finish(self, end: float) -> int:
        """Wait for the worker's end, and kill it at the deadline; return its exit code."""
        if self.code is None:
            while self._read(end):
                pass
            late = not select.select([self._ended], [], [], max(0.0, end - time.monotonic()))[0]
            if late:
                self.signal(signal.SIGKILL)
            self.code = self._nursery.reap(self.pid)
            if late:
                raise AssertionError(f"a worker hung, and was killed; it said {self.lines}\n{self.errors()}")
        return self.code

    def result(self) -> Any:
        """The result of the worker's function."""
        assert self.code == 0, f"exit code {self.code}\n{self.errors()}"
        assert self.lines
        assert self.lines[-1].startswith(_RESULT), self.lines
        return json.loads(self.lines[-1][len(_RESULT) :])

    def errors(self) -> str:
        """The text that the worker has written to stderr."""
        return os.pread(self._errors.fileno(), 1_000_000, 0).decode(errors="replace")

    def _read(self, end: float) -> bool:
        """Read some output; return False at its end, or at the deadline."""
        if not select.select([self._out], [], [], max(0.0, end - time.monotonic()))[0]:
            return False
        text = os.read(self._out, 1_000_000)
        *lines, self._rest = (self._rest + text).split(b"\n")
        self.lines += [line.decode() for line in lines]
        return bool(text)

    def close(self) -> None:
        """End the worker, if it has not ended, and give everything back. A second call does nothing."""
        if self._errors.closed:
            return
        if self.code is None:
            self.signal(signal.SIGKILL)
            self.code = self._nursery.reap(self.pid)
        for descriptor in (self._in, self._out, self._ended):
            os.close(descriptor)
        self._errors.close()


class Job:
    """The processes of a job of one machine; a context, at whose end none of them is left."""

    def __init__(self, nursery: Nursery, folder: Path, size: int, name: str = "") -> None:
        self.size, self.folder = size, folder
        self.name = name or secrets.token_hex(8)
        self.workers: list[Worker] = []  # by the order of their start
        self._nursery = nursery
        self._before = names_in_memory()

    def start(self, module: str, function: str, *arguments: Any, rank: int, **variables: str) -> Worker:
        """Start one process."""
        place = {
            "RANK": rank,
            "SIZE": self.size,
            "LOCAL_RANK": rank,
            "LOCAL_SIZE": self.size,
            "JOB": self.name,
            "TIMEOUT": pace.variable(20),
        }
        environment = {f"KVSTORE_{name}": str(value) for name, value in place.items()}
        request = {
            "module": module,
            "function": function,
            "arguments": arguments,
            "variables": {
                "TMPDIR": str(self.folder),
                "KVSTORE_TIMEOUT": pace.variable(20),
                **environment,
                **variables,
            },
        }
        worker = Worker(self._nursery, request)
        self.workers.append(worker)
        return worker

    def start_all(self, module: str, function: str, *arguments: Any, **variables: str) -> list[Worker]:
        """Start one process for each rank."""
        return [self.start(module, function, *arguments, rank=r, **variables) for r in range(self.size)]

    def finish(self, timeout: float = DEADLINE) -> list[int]:
        """Exit codes of all processes, which must end in time."""
        end = pace.deadline(timeout)
        return [worker.finish(end) for worker in self.workers]

    def results(self, timeout: float = DEADLINE) -> list[Any]:
        """Results of all processes, which must end well."""
        self.finish(timeout)
        for worker in sorted(self.workers, key=lambda one: "PeerLostError" in one.errors()):
            worker.result()  # first of all the cause, and then those that have only noticed it
        return [worker.result() for worker in self.workers]

    def close(self) -> None:
        """End the remaining processes; then nothing of the job may be left."""
        for worker in self.workers:
            worker.close()
        left = names_in_memory() - self._before
        assert not left, left
        assert not list(self.folder.glob("*kvstore*"))


def names_in_memory() -> set[str]:
    """Names in /dev/shm that the library could have made; those of MPI end in random letters."""
    return {name for name in os.listdir("/dev/shm") if name.lower().removeprefix("sem.").startswith("kv")}


def sockets_of(name: str) -> list[str]:
    """Abstract sockets of a store, by the name of its meeting."""
    lines = Path("/proc/net/unix").read_text().splitlines()
    return [line for line in lines if f"@kvstore/{name}" in line]


@contextlib.contextmanager
def nursery(preload: Path | None = None) -> Iterator[Nursery]:
    made = Nursery(*MODULES, preload=preload)
    try:
        yield made
    finally:
        made.close()
