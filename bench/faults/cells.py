"""The table: faults, stores, impossible cells and why, what is promised, and one run, drawn by its seed."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import NamedTuple

FAULTS = {
    "kill in push": "kill -9 of a worker that pushes",
    "kill between": "kill -9 of a worker between push and pull",
    "kill in init": "kill -9 of a worker in `init`",
    "kill in barrier": "kill -9 of a worker in `barrier`",
    "kill in pushpull": "kill -9 of a worker in `pushpull`",
    "stop below": "a worker stands still (SIGSTOP) for 0.3 of the time after which it is lost",
    "stop above": "a worker stands still for 1.5 to 2.5 times as long, and wakes up",
    "exception": "an exception leaves a worker's `with` block; in `local`, it ends a thread",
    "early exit": "a worker ends by `sys.exit(1)` or `os._exit(0)`, or closes its store and leaves; in "
    "`local`, a thread returns",
    "server killed": "kill -9 of a server",
    "server stopped": "a server stands still for 1.5 to 2.5 times the time after which it is lost",
    "scheduler killed": "kill -9 of the scheduler; of every second one that has a journal another comes back",
    "partition": "proxies between all workers and the scheduler and servers pass nothing: for 0.3 of the "
    "time after which one is lost, or for good",
    "disk full": "files of a process cannot grow (RLIMIT_FSIZE): of a server with snapshots; in `shared`, "
    "of worker 0, which makes a large key and ends by the error",
    "memory limit": "worker 0 may have 96 MB more (RLIMIT_AS), makes a key of 256 MB and ends by the error; "
    "in `local`, a thread does",
}
STORES = ("local", "shared", "dist_sync", "dist_async", "hierarchy", "mpi")
SERVED = ("dist_sync", "dist_async", "hierarchy")
#: Faults of a single process, which ends the threads of `local` all at once.
_PROCESS = ("kill", "stop")
_ENDS = "ends all threads of the store, and nobody is left who could be told"
_STOPS = "stops all threads of the store, and nobody waits for another process"
#: Seconds after which a process without a sign of life is lost: in the table, and beside busy processes.
DEAD_AFTER, DEAD_AFTER_BUSY = 1.5, 5.0
SHARED_DEAD_AFTER = 5.0  # fixed
MPI_TIMEOUT = 4.0  # nothing else ends a wait for a process that stands still
MARGIN = 3.0  # seconds beyond the promise, on an idle machine


class Cell(NamedTuple):
    """A fault in a store, beside so many busy processes."""

    store: str
    fault: str
    load: int = 0

    @property
    def name(self) -> str:
        return f"{self.store}: {self.fault}" + (f", load {self.load}" if self.load else "")


def impossible(store: str, fault: str) -> str:
    """Say why a fault cannot be in a store; empty: it can."""
    if store == "local" and fault.startswith(_PROCESS):
        return _ENDS if fault.startswith("kill") else _STOPS
    if store not in SERVED:
        if fault.startswith(("server", "scheduler")):
            return f"there is no {fault.split()[0]}"
        if fault == "partition":
            return "the processes are of one machine, without a network between them"
        if fault == "disk full" and store != "shared":
            return "nothing is written"
    return ""


@dataclass(frozen=True)
class Promise:
    """The time within which the survivors raise an error, or continue."""

    dead_after: float
    seconds: float


def promise(cell: Cell, slowness: float) -> Promise:
    """Return what holds for a cell on a machine that is so slow."""
    dead_after = SHARED_DEAD_AFTER if cell.store == "shared" else DEAD_AFTER_BUSY if cell.load else DEAD_AFTER
    # Rounds do not need the scheduler: servers end after twice the time, and then workers miss these.
    times = 3.0 if cell.fault == "scheduler killed" else 1.0
    longest = max(times * dead_after, MPI_TIMEOUT if cell.store == "mpi" else 0.0)
    return Promise(dead_after, longest + MARGIN * slowness)


_PHASES = {
    "kill in push": "push",
    "kill between": "between",
    "kill in init": "init",
    "kill in barrier": "barrier",
    "kill in pushpull": "pushpull",
}
_OWN = {
    "exception": ["exception"],
    "early exit": ["sys.exit", "os._exit", "leave"],
    "memory limit": ["memory"],
    "disk full": ["disk"],
}
_LOST_FOR_ALL = ("server killed", "server stopped")


class Plan(NamedTuple):
    """One run. It travels to the workers as a list."""

    store: str
    fault: str
    seed: int
    folder: str
    workers: int
    servers: int
    keeps: str
    on_peer_loss: str
    phase: str  # what the workers do when it happens
    at: int  # in which of their rounds
    after: float  # seconds later
    victim: int  # worker, or server
    how: str  # what a worker does to itself; empty: it is done to it
    heals: bool  # a stop, a partition or an absence for which no worker raises an error
    patience: float  # seconds within which all survivors must have raised an error
    seconds: float  # for which a process is stopped, or absent

    @property
    def victim_is_worker(self) -> bool:
        return not self.fault.startswith(("server", "scheduler", "partition")) and not self.fills_server

    @property
    def fills_server(self) -> bool:
        return self.fault == "disk full" and self.store != "shared"

    @property
    def until_told(self) -> bool:
        """Whether all survivors must raise an error."""
        if self.store == "local" or self.heals or self.how == "leave" or self.fills_server:
            return False
        return self.on_peer_loss == "raise" or not self.victim_is_worker


def drawn(cell: Cell, seed: int, folder: str, promised: Promise) -> Plan:
    """Draw a run: the same one for the same cell and seed."""
    draw = random.Random(f"{cell.name} {seed}")
    workers, servers = draw.choice([2, 3]), draw.choice([1, 2])
    keeps = draw.choice(["all", "last"]) if cell.store != "mpi" else "last"
    loss = draw.choice(["raise", "continue"]) if cell.store not in ("mpi", "local") else "raise"
    how = draw.choice(_OWN.get(cell.fault, [""]))
    served = cell.store not in ("local", "shared", "mpi")
    if cell.store == "local":
        workers, how = 4, how.replace("sys.exit", "leave").replace("os._exit", "leave")
    if cell.store == "mpi" and how == "leave":
        how = "sys.exit"  # sums have all ranks, to the end
    if cell.fault == "disk full" and served:
        how = ""
    role = servers if cell.fault.startswith("server") else workers
    victim = 0 if how in ("memory", "disk") else draw.randrange(role)
    mends = cell.fault in ("partition", "scheduler killed") and draw.random() < 0.5
    heals = cell.fault == "stop below" or mends
    times = 0.3 if heals else 1.5 + draw.random()
    seconds = max(0.3, times * promised.dead_after)
    if cell.store == "mpi" and not heals:
        seconds = MPI_TIMEOUT + 1.0
    phase = _PHASES.get(cell.fault, "mixed")
    return Plan(
        cell.store, cell.fault, seed, folder, workers, servers, keeps, loss, phase,
        draw.randint(4, 14), draw.random() * 0.02, victim, how, heals, promised.seconds, seconds,
    )  # fmt: skip
