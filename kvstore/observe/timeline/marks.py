"""Steps and buckets of a trainer or a hook, and waits for operations, for a timeline."""

from __future__ import annotations

from ..counters import CALLS
from ..events import BUCKET, CALL, STEP
from ..native._observe import Counters, now


class Marks:
    """Records steps and buckets of a trainer or a hook of one store, while times are taken.

    A step is recorded as the time in which it waits for gradients or weights, after the backward pass: from
    the end of one to the end of the next is a step of the training. `counters` are those of the store.
    """

    def __init__(self, counters: Counters | None) -> None:
        self._counters = counters
        self._steps = 0

    def begin(self) -> int:
        """Return the present time; 0 if times are not taken."""
        return 0 if self._counters is None else self._counters.begin()

    def step(self, begin: int) -> None:
        """Record the end of a step, which has waited since `begin`."""
        if begin and self._counters is not None:
            self._steps += 1
            self._counters.record(STEP, begin, now(), 0, self._steps)

    def wait(self, begin: int) -> None:
        """Record that the caller has waited since `begin` for an operation in the background."""
        if begin and self._counters is not None:
            self._counters.record(CALL, begin, now(), len(CALLS))

    def bucket(self, begin: int, end: int, nbytes: int) -> None:
        """Record that gradients of the next step were sent and summed between two times."""
        if begin and end and self._counters is not None:
            self._counters.record(BUCKET, begin, end, 0, self._steps + 1, nbytes)


#: For a store without counters.
NO_MARKS = Marks(None)
