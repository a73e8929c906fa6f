"""The common part of all stores of one worker process: its name, its heartbeats, its end."""

from __future__ import annotations

import atexit
import itertools
import os
import secrets
import sys
import threading
from collections import defaultdict
from typing import TYPE_CHECKING, Any

from .... import engine
from ....errors import ConfigError, KVStoreError
from ....settings import launchers, roles
from ....settings.environment import process_variables
from ....settings.parameter_server import ps_config
from ....settings.roles import Roles
from ....source_tree import package_version
from ..protocol import messages as m
from ..transport.heartbeat_echoes import HeartbeatResponder
from .state_machine.options import WorkerOptions

if TYPE_CHECKING:
    from .client import WorkerClient
    from .driver import MachineDriver

_MOST_BATCH = 1 << 29  # bytes of payloads: a message of a stream has at most 1 GB, with heads and records


class WorkerProcess:
    """The worker process of one job."""

    def __init__(self, found: Roles) -> None:
        self.roles, self.pid = found, os.getpid()
        self.name = f"worker/{found.rank}/{self.pid}/{secrets.token_hex(8)}"
        self.config = ps_config()
        self._incarnation = secrets.randbits(63)
        self._ordinals: dict[str, itertools.count[int]] = defaultdict(itertools.count)
        self._open: list[WorkerClient] = []
        self._last: WorkerClient | None = None  # closed, but its sockets are open for `ProcessEndNotice`
        self._heartbeats: HeartbeatResponder | None = None
        #: The address of the scheduler's echo, once a store knows it.
        self.echo = ""
        #: Seconds that the scheduler may be absent, as in its `HelloReply`.
        self.absence = 0.0
        #: The failure of the first store that finds the scheduler lost.
        self.without_scheduler: m.Failure | None = None

    def make_hello(self, group: str, options: dict[str, Any], host: str) -> m.HelloRequest:
        """Return the hello of the next store of a group; with a host, where hosts push."""
        return m.HelloRequest(
            "worker",
            self.roles.rank,
            self._incarnation,
            self.name,
            self.roles.job,
            m.PROTOCOL,
            group=group,
            ordinal=next(self._ordinals[group]),
            options=options,
            host=host,
            version=package_version(),
        )

    def worker_options(self, credit: int, slice_bytes: int, synchronous: bool) -> WorkerOptions:
        """Return the options of a worker's machine."""
        config = self.config
        control_resend = min(1.0, config.dead_after / 4)
        # Before this process has met the scheduler, only the store's own deadline counts, which is shorter.
        start = threading.TIMEOUT_MAX if self._heartbeats is None else config.dead_after
        echoes = bool(self.echo)
        return WorkerOptions(
            credit, min(slice_bytes, _MOST_BATCH), config.resend, control_resend, config.dead_after, start,
            self.absence, echoes, not synchronous,
        )  # fmt: skip

    def local_place(self, rank: int, size: int) -> tuple[int, int]:
        """Return rank and size on this machine, as far as the launcher gives them."""
        found = launchers.detect_placement({**process_variables(), "KVSTORE_JOB": self.roles.job or "job"})
        return (rank, size) if found.launcher == "none" else (found.local_rank, found.local_size)

    def start_heartbeats(self, met: m.HelloReply) -> None:
        """Echo heartbeats of the scheduler, which knows this process now."""
        self.echo, self.absence = met.echo, met.absence
        if self._heartbeats is None:
            self._heartbeats = HeartbeatResponder(met.pulse, self.name, self.roles.keys, self.roles.job)

    def check_fork(self) -> None:
        """Raise in a fork of this process, which has the same rank and so no place in the job."""
        if self._heartbeats is not None and self.roles.rank >= 0:
            raise KVStoreError(
                f"this process is a fork of worker {self.roles.rank} (process {self.pid}), and a rank is for "
                "one process: create stores in that process only, or start more workers with `kvstore run -n`"
            )

    def add_store(self, client: WorkerClient) -> None:
        """Add a store that is a member of the job."""
        self._open.append(client)

    def serve_other_stores(self, waiting: MachineDriver) -> None:
        """Handle messages of all stores, except of the store with the waiting caller."""
        for client in list(self._open):
            if client.driver is not waiting:
                client.driver.glance()

    def remove_store(self, client: WorkerClient) -> bool:
        """Remove a store that is closed; True: its sockets stay open for `ProcessEndNotice`."""
        if client in self._open:
            self._open.remove(client)
        if client.has_failed:
            return False
        if self._last is not None:
            self._last.close_sockets()
        self._last = client
        return True

    def leave_all(self, failed: bool) -> None:
        """Leave all stores; as a lost process if it has failed, so that the other processes notice."""
        for client in list(self._open):
            client.close(lost=failed)
        if self._last is not None:
            self._last.send_bye(lost=failed)
        heartbeats, self._heartbeats = self._heartbeats, None
        if heartbeats is not None:
            heartbeats.close()


def worker_roles() -> Roles:
    """Return the role of this process; ConfigError unless it is a worker of a job with servers."""
    found = roles.find()
    if found is None:
        raise ConfigError(
            "a store on servers needs servers, and no variable says where they are: start the program with "
            "`kvstore run -n 2 -s 1 -- python train.py`"
        )
    if found.role != "worker":
        raise ConfigError(f"this process is a {found.role}; only workers have stores")
    return found


def this_process(found: Roles) -> WorkerProcess:
    """Return the `WorkerProcess` of this process in its job."""
    key = (found.job, found.scheduler)
    known = _processes.get(key)
    if known is not None and known.pid == os.getppid():
        known.check_fork()
    if known is None or known.pid != os.getpid():
        known = _processes[key] = WorkerProcess(found)
    return known


_processes: dict[tuple[str, str], WorkerProcess] = {}


def _leave_at_exit() -> None:
    engine.wait_for_all_stores()
    failed = getattr(sys, "last_exc", None) is not None or getattr(sys, "last_value", None) is not None
    for process in list(_processes.values()):
        if process.pid == os.getpid():
            process.leave_all(failed)


atexit.register(_leave_at_exit)
