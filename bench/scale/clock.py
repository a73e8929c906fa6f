"""Virtual time: what happens when."""

from __future__ import annotations

import heapq
from collections.abc import Callable
from typing import Any


class Clock:
    """Events in the order of their times; those of one time in the order in which they were made."""

    def __init__(self) -> None:
        self.now = 0.0
        self._events: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    @property
    def count(self) -> int:
        """How many events there have been."""
        return self._count

    def at(self, when: float, call: Callable[..., None], *arguments: Any) -> None:
        """Call at some time; at once, if that is over."""
        self._count += 1
        heapq.heappush(self._events, (max(when, self.now), self._count, call, arguments))

    def run(self, over: Callable[[], bool], limit: float) -> bool:
        """Let time pass until it is `over`; False: not within `limit` seconds, or nothing is left to do."""
        events, pop = self._events, heapq.heappop
        while not over():
            if not events or events[0][0] > limit:
                return False
            self.now, _, call, arguments = pop(events)
            call(*arguments)
        return True
