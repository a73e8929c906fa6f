"""``python -m bench CLAIM [options]``: measure kvstore beside its rivals."""

from __future__ import annotations

import sys

from bench import claims
from bench.runner import run


def main(arguments: list[str]) -> int:
    """Measure the claim that comes first."""
    if not arguments or arguments[0] not in claims.NAMES:
        print(f"usage: python -m bench {{{','.join(claims.NAMES)}}} [options]", file=sys.stderr)
        return 0 if arguments in (["-h"], ["--help"]) else 2
    return run.main(claims.find(arguments[0]), arguments[1:])


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
