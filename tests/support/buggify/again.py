"""Run jobs of the simulator again, judged by their histories alone: python -m buggify.again KIND SEED...

Ends with 1 if one of them is broken, or hangs.
"""

from __future__ import annotations

import sys

from simulator import Broken, Job

from buggify import simulated


def told(kind: str, seed: int) -> str:
    """Return the findings of a run with a seed; an empty result is a good run."""
    try:
        simulated.run(kind, seed)
    except Broken as broken:
        return f"seed {seed}: {broken}"
    return ""


def main(kind: str, *seeds: str) -> int:
    """Print the findings."""
    Job.check = lambda self, good, text: None  # type: ignore[method-assign]
    found = [text for seed in seeds if (text := told(kind, int(seed)))]
    print("\n".join(found))  # noqa: T201
    return int(bool(found))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
