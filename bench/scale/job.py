"""A job: its hosts, its processes, and its virtual time."""

from __future__ import annotations

import gc
import random
from collections.abc import Callable
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from bench.scale.costs import Costs
from bench.scale.network import Clock, Host, LinkKind, ethernet
from bench.scale.processes import Process
from kvstore.settings.definitions import DEFAULTS, USUAL_SLICE_BYTES
from kvstore.stores.parameter_server.scheduler.machine import SchedulerOptions
from kvstore.stores.parameter_server.server.machine import ServerOptions
from kvstore.stores.parameter_server.worker.state_machine.options import WorkerOptions

if TYPE_CHECKING:
    from collections.abc import Iterator

    from bench.scale.server import ServerProcess
    from bench.scale.worker import Program, WorkerProcess

_TICK = 0.1  # seconds between two looks at the clock, as in the loops


@dataclass(frozen=True)
class Plan:
    """A job."""

    #: Its processes, without the scheduler
    workers: int
    servers: int
    per_host: int = 1  # workers on a host. Each server has a host of its own, and so has the scheduler.
    link: LinkKind = field(default_factory=lambda: ethernet(10))  # of each host
    mode: str = "sync"  # `sync` or `async`
    on_peer_loss: str = "raise"  # `raise` or `continue`
    #: As the options of a store
    slice_bytes: int = USUAL_SLICE_BYTES
    credit: int = DEFAULTS["credit_bytes"]
    coding: int = 0  # the kernels' number of the codec of pushes; 0 for none
    #: Processes that share the work of a worker: one worker stands for all processes of a host
    sharers: int = 1
    #: Cores of the one host with all processes; 0: each process has a host of its own with one core
    cores: int = 0
    #: The most seconds between the workers' starts, and between the ends of their computations
    jitter: float = 0.0
    tick: float = _TICK  # seconds between two looks at the clock of workers and servers
    #: The scheduler also spends the real time of its state machine: runs differ then
    timed: bool = False
    seed: int = 0
    dead_after: float = DEFAULTS["dead_after"]
    heartbeat: float = DEFAULTS["heartbeat"]


class Job:
    """A running job."""

    def __init__(self, plan: Plan, costs: Costs, program: Program) -> None:
        from bench.scale.scheduler import SchedulerProcess
        from bench.scale.server import ServerProcess
        from bench.scale.worker import WorkerProcess

        self.plan, self.costs, self.name = plan, costs, "simulated"
        self.clock = Clock()
        self.rng = random.Random(plan.seed)
        self.ended = False
        self.marks: dict[str, list[float]] = {}  # the times of the marks of programs
        self.processes: dict[str, Any] = {}
        self._left = plan.workers
        resend = min(1.0, plan.dead_after / 4)
        one = Host(self.clock, plan.link, plan.cores) if plan.cores else None
        options = SchedulerOptions(self.name, plan.workers, plan.servers, resend, plan.dead_after)
        self.scheduler = SchedulerProcess(self, one or self._host(), options)
        serving = ServerOptions(dead_after=plan.dead_after)
        self.servers: list[ServerProcess] = [
            ServerProcess(self, one or self._host(), rank, serving) for rank in range(plan.servers)
        ]
        self.hosts = [one or self._host() for _ in range(-(-plan.workers // plan.per_host))]
        wanted = {"mode": plan.mode, "on_peer_loss": plan.on_peer_loss, "slice_bytes": plan.slice_bytes}
        patience = WorkerOptions(
            plan.credit, plan.slice_bytes, control_resend=resend, dead_after=plan.dead_after, start=1e9
        )
        self.workers: list[WorkerProcess] = [
            WorkerProcess(self, self.hosts[rank // plan.per_host], rank, wanted, patience, program)
            for rank in range(plan.workers)
        ]
        self.processes |= {one.name: one for one in (*self.servers, *self.workers)}
        for worker in self.workers:
            worker.coding, worker.sharers = plan.coding, plan.sharers
        self._start()

    def _host(self) -> Host:
        return Host(self.clock, self.plan.link)

    def _start(self) -> None:
        for process in (*self.servers, *self.workers):
            self.clock.at(self.rng.random() * self.plan.jitter, process.post, process.start)
            offset = self.rng.random()
            self.clock.at(self.plan.tick * offset, self._tick, process)
            self.clock.at(self.plan.heartbeat * offset, self._beat, process)
        self.clock.at(_TICK, self._tick_scheduler)

    def _tick(self, process: Any) -> None:
        if process.alive and process.host.alive:
            process.post(process.tick)
            self.clock.at(self.clock.now + self.plan.tick, self._tick, process)

    def _tick_scheduler(self) -> None:
        self.scheduler.post(self.scheduler.tick)
        self.clock.at(self.clock.now + _TICK, self._tick_scheduler)

    def _beat(self, process: Process) -> None:
        """Answer a heartbeat: a thread in C does this independently of the process's work."""
        if process.alive and process.host.alive:
            self.scheduler.post(self.scheduler.beat, process.name)
            self.clock.at(self.clock.now + self.plan.heartbeat, self._beat, process)

    def run(self, over: Callable[[], bool] | None = None, limit: float = 3600.0) -> bool:
        """Run until all workers have ended, or until `over`; False: not within `limit` seconds."""
        with _no_garbage():
            return self.clock.run(over or (lambda: not self._left), limit)

    # --------------------------------------------------------------------------------------- for processes

    def ask_echo(self, source: Any, message: Any) -> None:
        """Send a message to the scheduler's echo, a thread in C that always answers."""
        if self.scheduler.host.alive:
            self.clock.at(source.time + 2 * self.plan.link.latency, source.post, source.echo, message)

    def worker_is_over(self, worker: WorkerProcess) -> None:
        """Record the end of a worker's program."""
        self._left -= 1
        self.mark("over")

    def mark(self, name: str, time: float | None = None) -> None:
        """Record the time of an event."""
        self.marks.setdefault(name, []).append(self.clock.now if time is None else time)

    def kill(self, *processes: Process) -> None:
        """Kill processes."""
        for process in processes:
            if process.alive:
                process.die()
                self._left -= process in self.workers and not process.over  # type: ignore[attr-defined]


@contextmanager
def _no_garbage() -> Iterator[None]:
    """Disable the garbage collector: there are millions of objects, and cycles only at the end."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
