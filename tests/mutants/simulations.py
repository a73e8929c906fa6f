"""Run jobs of the simulator by seed, judged by their histories alone; ends with 1 at the first broken one."""

from __future__ import annotations

import random
import sys
import time

import simulator
from simulator import Broken, Faults, Job


def without_asserts() -> None:
    """Let the simulator's own checks pass; that a job hangs is still seen."""
    Job.check = lambda self, good, text: None  # type: ignore[method-assign]


def faults(group: str, seed: int) -> Faults | None:
    """Draw what happens to a job; of every second, what touches the group of the mutant."""
    draw = random.Random(f"{group} {seed}")
    noisy = Faults(late=draw.choice((0.0, 0.4)), drop=draw.choice((0.0, 0.1)), double=draw.choice((0.0, 0.3)))
    kinds = {
        "fencing": noisy._replace(
            kill_worker=True, return_worker=draw.random() < 0.6, kill_more=draw.choice((0, 0, 1, 2))
        ),
        "duplicates": noisy._replace(kill_server=draw.random() < 0.5, return_server=True),
        "snapshots": noisy._replace(kill_server=True, return_server=True),
    }
    return kinds.get(group) if seed % 2 else None


def main(seconds: float, group: str) -> int:
    """Run as many jobs as fit."""
    without_asserts()
    end, seed = time.monotonic() + seconds, 0
    while time.monotonic() < end:
        try:
            simulator.simulate(seed, faults(group, seed))
        except Broken as broken:
            print(f"history, seed {seed}: {str(broken)[:90]}")  # noqa: T201
            return 1
        except Exception as error:
            print(f"error, seed {seed}: {error!r}"[:110])  # noqa: T201
            return 1
        seed += 1
    print(f"not caught by {seed} jobs")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), sys.argv[2]))
