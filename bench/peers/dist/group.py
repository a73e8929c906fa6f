"""The bench's side of a peer of the parameter server."""

from __future__ import annotations

import contextlib
from pathlib import Path

from bench.runner import compiled
from bench.cases.dist import APART
from bench.peers.group.driver import Group
from bench.peers.shared.launch import Launch

from bench.peers.dist import launch
from bench.peers.dist.base import PAIR
from bench.peers.dist.launch import DistSetting


class DistGroup(Group):
    """Workers, and whatever serves them; they live through all cases of a job."""

    setting: DistSetting

    def __enter__(self) -> DistGroup:
        return self

    def column(self, variant: str) -> str:
        """Push and pull in two calls have a column of their own."""
        return self.setting.name + (APART if variant.startswith(PAIR) else "")

    def _plan(self, address: str) -> Launch:
        return launch.plan(self.setting, address)

    def _codes(self) -> tuple[str, str]:
        here = Path(__file__).parent
        return str(compiled.build(here.parent / "group" / "meet.c")), str(compiled.build(here / "floor.c"))

    def _fresh(self) -> bool:
        return False

    def _beside(self) -> list[int]:
        """Return scheduler, servers, launcher: all descendants that are not workers."""
        started = [process.pid for process in (*self._processes, *self._helpers)]
        return sorted({pid for one in started for pid in _family(one)} - set(self._pids))


def _family(pid: int) -> list[int]:
    """Return a process and all that it started, and they in turn."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _family(int(child))
    return found
