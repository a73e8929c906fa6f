"""Start the processes of a job with torchrun's variables, and let each end as it does; torchrun ends all.

    python tests/engines/start.py 2 COMMAND ...

Exit code: that of the last process that failed.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Mapping


def run(size: int, command: list[str], variables: Callable[[int], Mapping[str, str]]) -> int:
    """Start a process for each rank, wait for all, and return the exit code."""
    started = [subprocess.Popen(command, env={**os.environ, **variables(rank)}) for rank in range(size)]
    failed = [code for code in [process.wait() for process in started] if code]
    return failed[-1] % 256 if failed else 0


def main() -> int:
    size = int(sys.argv[1])

    def variables(rank: int) -> dict[str, str]:
        place = {"RANK": rank, "WORLD_SIZE": size, "LOCAL_RANK": rank, "LOCAL_WORLD_SIZE": size}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}  # names the job; they meet at a file
        return {name: str(value) for name, value in {**place, **meeting}.items()}

    return run(size, sys.argv[2:], variables)


if __name__ == "__main__":
    sys.exit(main())
