"""Jobs of the simulator in which the points are on, with and without a fault, all by one seed."""

from __future__ import annotations

import random
from collections.abc import Callable

from simulator import Faults, Job

KINDS: dict[str, Callable[[random.Random], Faults]] = {
    "calm": lambda draw: Faults(bad=draw.random() < 0.5),
    "worker": lambda draw: Faults(kill_worker=True, kill_more=draw.choice((0, 0, 1))),
    "worker back": lambda draw: Faults(
        kill_worker=True, return_worker=True, kill_more=draw.choice((0, 0, 1, 2)), bad=draw.random() < 0.2
    ),
    "server back": lambda draw: Faults(kill_server=True, return_server=True),
    "both back": lambda draw: Faults(
        kill_worker=True, return_worker=True, kill_server=True, return_server=True
    ),
    "scheduler back": lambda draw: Faults(kill_scheduler=True, return_scheduler=True),
    "cut": lambda draw: Faults(cut=draw.choice((0.3, 1.0, 4.0, 9.0))),
    "stop": lambda draw: Faults(stop=draw.choice((0.3, 1.0, 4.0, 9.0))),
    "busy": lambda draw: Faults(busy=draw.choice((1.0, 4.0, 9.0))),
}


def faults(kind: str, seed: int) -> Faults:
    """Draw what happens to a job besides its points."""
    draw = random.Random(f"{kind} {seed}")
    made = KINDS[kind](draw)
    return made._replace(
        points=True,
        late=draw.choice((0.0, 0.1, 0.4)),
        drop=draw.choice((0.0, 0.0, 0.05, 0.1)),
        double=draw.choice((0.0, 0.1, 0.3)),
    )


def run(kind: str, seed: int) -> Job:
    """Run the job of a kind and a seed; `Broken` describes the fault."""
    job = Job(seed, faults(kind, seed))
    job.run()
    return job
