"""Steps and buckets of a trainer or a hook, and waits for operations, for a timeline."""

from __future__ import annotations

from ..counters import CALLS
from ..events import BUCKET, CALL, STEP
from ..native._observe import Counters, now


class Marks:
    """Records what a trainer or a hook does with one store; nothing, while nobody takes times.

    A step is recorded as the time in which it waits for gradients or weights, after the backward pass: from
    the end of one to the end of the next is a step of the training.

    Parameters
    ----------
    counters : Counters or None
        Those of the store; None if it has none.
    """

    def __init__(self, counters: Counters | None) -> None:
        self._counters = counters
        self._steps = 0

    def begin(self) -> int:
        """Return when something begins; 0 if it is not recorded."""
        return 0 if self._counters is None else self._counters.begin()

    def step(self, begin: int) -> None:
        """Record that a step has what it has waited for since `begin`."""
        if begin and self._counters is not None:
            self._steps += 1
            self._counters.record(STEP, begin, now(), 0, self._steps)

    def wait(self, begin: int) -> None:
        """Record that the caller has waited since `begin` for what the store does in the background."""
        if begin and self._counters is not None:
            self._counters.record(CALL, begin, now(), len(CALLS))

    def bucket(self, begin: int, end: int, nbytes: int) -> None:
        """Record that gradients were on their way between two times, for the next step."""
        if begin and end and self._counters is not None:
            self._counters.record(BUCKET, begin, end, 0, self._steps + 1, nbytes)


#: Of what has no counters.
NO_MARKS = Marks(None)
