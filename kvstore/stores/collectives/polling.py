"""Waiting for engines that tell nobody when they are done: they are asked again and again."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from ...waiting import WaitClock

_NAP = 100e-6  # seconds between two looks; Horovod itself looks for work once in a millisecond


def poll(complete: Callable[[], bool], clock: WaitClock, log: logging.Logger, rank: int, what: str) -> bool:
    """Return whether `complete` said yes before the clock was over; log, once, that it lasts."""
    while True:
        waited = clock.read()
        if complete():
            return True
        if clock.over:
            return False
        if clock.tells():
            log.warning("worker %d has waited %.0f s for %s; all workers must call it", rank, waited, what)
        time.sleep(_NAP)
