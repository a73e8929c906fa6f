"""Jobs with parameter servers for the tests: scheduler, servers and workers, each a process of its own."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jobs
import pace
import paths
import tested_store

from kvstore.launch.certificates import Certificates


def patience() -> dict[str, str]:
    """Heartbeats are frequent, so that tests of deaths are quick; for these the time is set lower still."""
    return {
        "KVSTORE_HEARTBEAT": "0.2",
        "KVSTORE_DEAD_AFTER": pace.variable(4),
        "KVSTORE_RESEND": pace.variable(1),
        "KVSTORE_TIMEOUT": pace.variable(20),
    }


class ServedJob(jobs.Job):
    """A job whose workers find servers; a context like `jobs.Job`. A `secure` one has keys."""

    def __init__(
        self,
        nursery: jobs.Nursery,
        folder: Path,
        workers: int,
        servers: int,
        secure: bool = False,
        **variables: str,
    ) -> None:
        super().__init__(nursery, folder, workers)
        saved = Certificates(workers, servers).save(folder / "keys") if secure else []
        self._key_files = {path.stem: str(path) for path in saved}
        self.servers: list[jobs.Worker] = []
        self.variables = {**patience(), **variables, "KVSTORE_NUM_SERVERS": str(servers)}
        self.scheduler = self._role("scheduler", 0, KVSTORE_NUM_WORKERS=str(workers))
        self.variables["KVSTORE_SCHEDULER"] = self.scheduler.expect_some("at ")[3:]
        for rank in range(servers):
            self.start_server(rank)

    def start_server(self, rank: int, **variables: str) -> jobs.Worker:
        """Start a server, or one in the place of another."""
        made = self._role("server", rank, KVSTORE_SERVER_RANK=str(rank), **variables)
        self.servers.append(made)
        return made

    def start(self, module: str, function: str, *arguments: Any, rank: int, **variables: str) -> jobs.Worker:
        """Start a worker."""
        own = {**self.variables, **self._keys_of(f"worker-{rank}"), **variables}
        return super().start(module, function, *arguments, rank=rank, **own)

    def _keys_of(self, name: str) -> dict[str, str]:
        return {"KVSTORE_KEYS_FILE": self._key_files[name]} if self._key_files else {}

    def _role(
        self, role: str, rank: int, module: str = "servers", function: str = "", **variables: str
    ) -> jobs.Worker:
        environment = {
            **self.variables,
            "KVSTORE_ROLE": role,
            "KVSTORE_JOB": self.name,
            "TMPDIR": str(self.folder),
            **self._keys_of(role if role == "scheduler" else f"{role}-{rank}"),
            **variables,
        }
        if role == "scheduler":
            environment.setdefault("KVSTORE_SCHEDULER", "tcp://127.0.0.1:0")
        else:  # on the host with this number, with its workers: see `start_on`
            environment.setdefault("KVSTORE_HOST", _address(rank))
        request = {
            "module": module, "function": function or role, "arguments": [], "variables": environment
        }  # fmt: skip
        return jobs.Worker(self._nursery, request)

    def ended(self, timeout: float = jobs.DEADLINE) -> list[int]:
        """Exit codes of scheduler and servers, which must end by themselves."""
        end = pace.deadline(timeout)
        return [one.finish(end) for one in (self.scheduler, *self.servers)]

    def close(self) -> None:
        for one in (self.scheduler, *self.servers):
            one.close()
        super().close()


def start_on_hosts(
    job: ServedJob, hosts: Sequence[int], module: str, function: str, *arguments: Any, **variables: str
) -> list[jobs.Worker]:
    """Start one worker for each rank, on the host with this number; they sum by hosts."""
    variables = {tested_store.HOSTS: " ".join(map(str, hosts)), **variables}
    return [
        start_on(job, host, rank, module, function, *arguments, **variables)
        for rank, host in enumerate(hosts)
    ]


def start_on(
    job: ServedJob, host: int, rank: int, module: str, function: str, *arguments: Any, **variables: str
) -> jobs.Worker:
    """Start one worker, or one in the place of another."""
    settings = {"KVSTORE_HIERARCHY": "host", "KVSTORE_HOST": _address(host), **variables}
    return job.start(module, function, *arguments, rank=rank, **settings)


def _address(host: int) -> str:
    return f"127.0.0.{host + 1}"


def scheduler() -> None:
    """Be the scheduler of a job."""
    from kvstore.settings import roles
    from kvstore.stores.parameter_server import role_process

    found = roles.find()
    assert found is not None
    role_process.serve_scheduler(found, report=lambda address: jobs.tell(f"at {address}"))


def server() -> None:
    """Be a server of a job, which knows the rules of own_rules.py."""
    import own_rules  # noqa: F401

    from kvstore.settings import roles
    from kvstore.stores.parameter_server import role_process

    found = roles.find()
    assert found is not None
    role_process.serve_server(found)


@contextlib.contextmanager
def service(servers: int, **variables: str) -> Iterator[Mapping[str, str]]:
    """Start scheduler and servers for one worker, the calling process; yield the variables that it needs.

    The servers know the rules of own_rules.py.
    """
    variables = {**patience(), "KVSTORE_DEAD_AFTER": pace.variable(20), **variables}
    command = [sys.executable, "-m", "kvstore.launch"]
    path = os.pathsep.join([paths.IMPORTS, *filter(None, [os.environ.get("PYTHONPATH")])])
    job = f"tests-{os.getpid()}-{secrets.token_hex(4)}"
    environment = {**os.environ, **variables, "KVSTORE_JOB": job, "PYTHONPATH": path}
    with contextlib.ExitStack() as stack:
        first = subprocess.Popen(
            [*command, "scheduler", "-n", "1", "-s", str(servers)],
            env=environment, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        stack.callback(_end, first)
        assert first.stdout is not None
        address = first.stdout.readline().strip()
        server = [*command, "server", "--scheduler", address, "--import", "own_rules"]
        for rank in range(servers):
            stack.callback(_end, subprocess.Popen([*server, "--rank", str(rank)], env=environment))
        yield {
            "KVSTORE_SCHEDULER": address,
            "KVSTORE_JOB": job,
            "KVSTORE_NUM_WORKERS": "1",
            "KVSTORE_NUM_SERVERS": str(servers),
            "DMLC_WORKER_ID": "0",
            **variables,
        }


def _end(process: subprocess.Popen[Any]) -> None:
    process.terminate()
    process.wait(pace.seconds(10))
    if process.stdout is not None:
        process.stdout.close()
