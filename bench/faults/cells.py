"""The table: faults, stores, impossible cells with reasons, promises, and one run, drawn by its seed."""

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
    "stop below": "SIGSTOP of a worker for 0.3 of the time after which it is lost",
    "stop above": "SIGSTOP of a worker for 1.5 to 2.5 times the time after which it is lost, then SIGCONT",
    "exception": "a worker's `with` block ends by an exception; in `local`, a thread ends by it",
    "early exit": "a worker ends by `sys.exit(1)` or `os._exit(0)`, or closes its store and ends; in "
    "`local`, a thread returns",
    "server killed": "kill -9 of a server",
    "server stopped": "SIGSTOP of a server for 1.5 to 2.5 times the time after which it is lost",
    "scheduler killed": "kill -9 of the scheduler; in half of the runs it has a journal and is restarted",
    "partition": "TCP proxies between the workers and all other processes forward nothing: for 0.3 of the "
    "time after which a process is lost, or until the end",
    "disk full": "files of a process cannot grow (RLIMIT_FSIZE): of a server with snapshots; in `shared`, "
    "of worker 0, which makes a large key and ends with the error",
    "memory limit": "worker 0 can allocate 96 MB (RLIMIT_AS), makes a key of 256 MB and ends with the error; "
    "in `local`, a thread",
}
STORES = ("local", "shared", "dist_sync", "dist_async", "hierarchy", "mpi")
SERVED = ("dist_sync", "dist_async", "hierarchy")
#: Faults of a single process, which concern all threads of `local`.
_PROCESS = ("kill", "stop")
_ENDS = "ends all threads of the store, so that no survivor could raise an error"
_STOPS = "stops all threads of the store, which wait for no other process"
#: Seconds after which a process without heartbeat is lost: on an idle machine, and with other busy processes.
DEAD_AFTER, DEAD_AFTER_BUSY = 1.5, 5.0
SHARED_DEAD_AFTER = 5.0  # fixed
MPI_TIMEOUT = 4.0  # the only limit of a wait for a stopped process
MARGIN = 3.0  # seconds added to the promise, on an idle machine


class Cell(NamedTuple):
    """A fault in a store, with `load` busy processes on the machine."""

    store: str
    fault: str
    load: int = 0

    @property
    def name(self) -> str:
        return f"{self.store}: {self.fault}" + (f", load {self.load}" if self.load else "")


def impossible(store: str, fault: str) -> str:
    """Return the reason why a fault is impossible in a store; empty: it is possible."""
    if store == "local" and fault.startswith(_PROCESS):
        return _ENDS if fault.startswith("kill") else _STOPS
    if store not in SERVED:
        if fault.startswith(("server", "scheduler")):
            return f"there is no {fault.split()[0]}"
        if fault == "partition":
            return "all processes are on one machine, without a network between them"
        if fault == "disk full" and store != "shared":
            return "nothing is written"
    return ""


@dataclass(frozen=True)
class Promise:
    """The time within which the survivors raise an error, or continue."""

    dead_after: float
    seconds: float


def promise(cell: Cell, slowness: float) -> Promise:
    """Return the promise of a cell on a machine of this slowness."""
    dead_after = SHARED_DEAD_AFTER if cell.store == "shared" else DEAD_AFTER_BUSY if cell.load else DEAD_AFTER
    # Rounds do not need the scheduler: servers end after twice the time, and workers miss them after a third.
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
    """One run. The workers receive it as a list."""

    store: str
    fault: str
    seed: int
    folder: str
    workers: int
    servers: int
    keeps: str
    on_peer_loss: str
    phase: str  # the operation of the workers during the fault
    at: int  # the round of the workers
    after: float  # seconds from that round to the fault
    victim: int  # worker, or server
    how: str  # a fault that the worker causes itself; empty: the bench causes it
    heals: bool  # a stop, a partition or an absence for which no worker raises an error
    patience: float  # seconds within which all survivors must have raised an error
    seconds: float  # seconds for which a process is stopped, or absent

    @property
    def victim_is_worker(self) -> bool:
        return not self.fault.startswith(("server", "scheduler", "partition")) and not self.fills_server

    @property
    def fills_server(self) -> bool:
        return self.fault == "disk full" and self.store != "shared"

    @property
    def until_told(self) -> bool:
        """Return whether all survivors must raise an error."""
        if self.store == "local" or self.heals or self.how == "leave" or self.fills_server:
            return False
        return self.on_peer_loss == "raise" or not self.victim_is_worker


def drawn(cell: Cell, seed: int, folder: str, promised: Promise) -> Plan:
    """Draw a run, which depends only on the cell and the seed."""
    draw = random.Random(f"{cell.name} {seed}")
    workers, servers = draw.choice([2, 3]), draw.choice([1, 2])
    keeps = draw.choice(["all", "last"]) if cell.store != "mpi" else "last"
    loss = draw.choice(["raise", "continue"]) if cell.store not in ("mpi", "local") else "raise"
    how = draw.choice(_OWN.get(cell.fault, [""]))
    served = cell.store not in ("local", "shared", "mpi")
    if cell.store == "local":
        workers, how = 4, how.replace("sys.exit", "leave").replace("os._exit", "leave")
    if cell.store == "mpi" and how == "leave":
        how = "sys.exit"  # sums contain all ranks, to the end
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
