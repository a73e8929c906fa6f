"""The start of a peer: its interpreter, its variables and the number of its processes."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from bench import ROOT

_START = "import sys; sys.path.append(sys.argv.pop(1)); from bench.peers.{} import main; main()"


@dataclass(frozen=True)
class Setting:
    """How to start a peer; `label` distinguishes its settings."""

    name: str
    claim: str = "local"
    python: str = sys.executable
    label: str = ""
    env: tuple[tuple[str, str], ...] = ()
    processes: int = 1  # workers
    servers: int = 1
    column: str = ""  # in the tables, if it differs from the name

    def command(self, module: str, *arguments: object) -> list[str]:
        """Return the command that runs the `main` of a module of `bench.peers` with this peer."""
        start = [self.python, "-c", _START.format(module), str(ROOT), self.claim, self.name]
        return [*start, *map(str, arguments)]
