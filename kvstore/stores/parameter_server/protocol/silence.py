"""How long the scheduler has been silent, as one of the others hears it."""

from __future__ import annotations


class SilenceDetector:
    """Says when to ask the scheduler for a sign of life, and when it is lost: after `dead_after` seconds.

    Silence counts only while this process listens: after a long step nothing is known. And the end of one's
    patience is no proof, for a sign may have come that is not read yet: it is waited a little longer, during
    which everything that has come is read.
    """

    def __init__(self, dead_after: float) -> None:
        self._dead_after = dead_after
        self._heard = self._stepped = self._asked = 0.0
        self._doubted: float | None = None
        #: Seconds that this process did not run, the longest since the last sign.
        self.stopped = 0.0

    def step(self, now: float) -> None:
        """Note that this process is running."""
        pause = now - self._stepped
        if pause > self._dead_after / 2:
            longest = max(self.stopped, pause) if self._stepped else 0.0
            self.hear(now)
            self.stopped = longest
        self._stepped = now

    def hear(self, now: float) -> None:
        """Note a sign of life."""
        self._heard, self._doubted, self.stopped = now, None, 0.0

    def silent(self, now: float) -> float:
        """Seconds since the last sign."""
        return now - self._heard

    def is_long(self, now: float) -> bool:
        """Whether half of the time that means a loss has passed; then all are to be asked who may know."""
        return self.silent(now) > self._dead_after / 2

    def asks(self, now: float) -> bool:
        """Whether to ask for a sign; True counts as asked."""
        pause = self._dead_after / 10
        if self.silent(now) <= pause or now - self._asked <= pause:
            return False
        self._asked = now
        return True

    def lost(self, now: float, patience: float) -> bool:
        """Whether there has been no sign for so many seconds, nor in what has come since then."""
        if self.silent(now) <= patience:
            return False
        if self._doubted is None:
            self._doubted = now
        return now - self._doubted >= self._dead_after / 5
