"""What one run is: drawn from its cell and its seed."""

from __future__ import annotations

import random
from typing import NamedTuple

from .cells import MPI_TIMEOUT, Cell, Promise

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
    heals: bool  # a stop, a partition, an absence that nobody is to be told of
    patience: float  # seconds until all must have been told
    seconds: float  # for which somebody is stopped, or absent

    @property
    def victim_is_worker(self) -> bool:
        return not self.fault.startswith(("server", "scheduler", "partition")) and not self.fills_server

    @property
    def fills_server(self) -> bool:
        return self.fault == "disk full" and self.store != "shared"

    @property
    def until_told(self) -> bool:
        """Whether all who are left are to raise an error."""
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
