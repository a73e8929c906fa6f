"""A process whose counters the test reads."""

from __future__ import annotations

import os

from jobs import hear, tell

from kvstore.observe.counters import CALLS, PHASES
from kvstore.observe.native import _observe as native


def page(stores: int) -> None:
    """Be looked at; leave times of the first store as the test asks for them."""
    made = [native.Counters(f"store {number}", "job", number, stores) for number in range(stores)]
    made[0].count(CALLS.index("push"))
    made[0].hold(3, 1000)
    tell(f"pid {os.getpid()}")
    hear()
    assert made[0].timed
    assert not made[-1].timed, "nobody sees it, or can ask"
    made[0].end(PHASES.index("waiting"), made[0].begin())
    assert not made[0].timed, "the time until which it was asked for is over"
    tell("timed")
    hear()
