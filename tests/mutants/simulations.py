"""Run jobs of the simulator by seed, judged by their histories alone; ends with 1 at the first broken one.

python -m mutants.simulations SECONDS GROUP [SEED...]
"""

from __future__ import annotations

import itertools
import random
import re
import sys
import time

import simulator
from simulator import Broken, Faults, Job


def without_asserts() -> None:
    """Let the simulator's own checks pass; that a job hangs is still seen."""
    Job.check = lambda self, good, text: None  # type: ignore[method-assign]


def lost(draw: random.Random, noisy: Faults) -> Faults:
    """Lose a worker, which has pushed ahead or rejoins, and perhaps more."""
    if draw.random() < 0.5:
        back, tardy = draw.random() < 0.3, draw.choice((0.0, 2.0, 4.0))
        return noisy._replace(kill_worker=True, return_worker=back, ahead=True, tardy=tardy)
    back, more = draw.random() < 0.6, draw.choice((0, 0, 1, 2))
    return noisy._replace(kill_worker=True, return_worker=back, kill_more=more)


def lost_in_steps(draw: random.Random, noisy: Faults) -> Faults:
    """Lose a worker while all push in whole steps."""
    return lost(draw, noisy)._replace(return_worker=False, steps=True)


def returned(draw: random.Random, noisy: Faults) -> Faults:
    """Restart a server, whose last replies are perhaps lost."""
    return noisy._replace(kill_server=True, return_server=True, mute=draw.random() < 0.5)


def calm(draw: random.Random, noisy: Faults) -> Faults:
    """Let nothing but messages be lost, late or doubled."""
    return noisy


#: The faults of the jobs of every second seed, by the code of a mutant; other jobs get any faults.
KINDS = {
    "rounds": (lost, returned),
    "duplicates": (calm, returned),
    "fencing": (lost,),
    "snapshots": (returned,),
    "reads": (lost, lost_in_steps),
}


def faults(group: str, seed: int) -> Faults | None:
    """Draw what happens to a job; None: anything."""
    if not seed % 2:
        return None
    draw = random.Random(f"{group} {seed}")
    noisy = Faults(late=draw.choice((0.0, 0.4)), drop=draw.choice((0.0, 0.1)), double=draw.choice((0.0, 0.3)))
    return draw.choice(KINDS[group])(draw, noisy)


def told(broken: Broken) -> str:
    """Return which promise is broken: a violation's kind, or that a job does not end."""
    kind = re.match(r"at [\d.]+: ([a-z ]+): ", str(broken))
    return kind[1] if kind and kind[1] != "alive are" else "no end"


def main(seconds: float, group: str, *seeds: str) -> int:
    """Run these jobs, or as many as fit."""
    without_asserts()
    end, count = time.monotonic() + seconds, 0
    for seed in map(int, seeds) if seeds else itertools.count():
        if time.monotonic() > end:
            break
        count += 1
        try:
            simulator.simulate(seed, faults(group, seed))
        except Broken as broken:
            print(f"history of a simulated job: {told(broken)} (seed {seed})")  # noqa: T201
            return 1
        except Exception as error:
            print(f"simulated job: {error!r} (seed {seed})"[:110])  # noqa: T201
            return 1
    print(f"not caught by {count} jobs")  # noqa: T201
    return 0


if __name__ == "__main__":
    sys.exit(main(float(sys.argv[1]), *sys.argv[2:]))
