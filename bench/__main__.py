"""``python -m bench CLAIM [options]``: measure kvstore and its rivals."""

from __future__ import annotations

import importlib
import sys

from bench import claims
from bench.runner import run

#: Programs that measure no speed and have their own options.
PROGRAMS = {"faults": "bench.faults.command", "soak": "bench.faults.soak"}


def main(arguments: list[str]) -> int:
    """Measure the claim, or run the program, that the first argument names."""
    names = (*claims.NAMES, *PROGRAMS)
    if not arguments or arguments[0] not in names:
        print(f"usage: python -m bench {{{','.join(names)}}} [options]", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    if arguments[0] in PROGRAMS:
        return int(importlib.import_module(PROGRAMS[arguments[0]]).main(arguments[1:]))
    return run.main(claims.find(arguments[0]), arguments[1:])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
