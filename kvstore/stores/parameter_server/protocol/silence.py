"""How long the scheduler has been silent, as a worker or server sees it."""

from __future__ import annotations


class SilenceDetector:
    """Decides when to request a heartbeat of the scheduler, and when it is lost: after `dead_after` seconds.

    Silence counts only while this process receives: after a long step it knows nothing. The end of the
    patience is no proof either, because a heartbeat may have arrived that is not read yet: the detector waits
    a little longer, while the process reads all that has arrived.
    """

    def __init__(self, dead_after: float) -> None:
        self._dead_after = dead_after
        self._heard = self._stepped = self._asked = 0.0
        self._doubted: float | None = None
        #: The longest time in seconds that this process did not run since the last heartbeat.
        self.stopped = 0.0

    def note_running(self, now: float) -> None:
        """Record that this process is running."""
        pause = now - self._stepped
        if pause > self._dead_after / 2:
            longest = max(self.stopped, pause) if self._stepped else 0.0
            self.note_heartbeat(now)
            self.stopped = longest
        self._stepped = now

    def note_heartbeat(self, now: float) -> None:
        """Record a heartbeat."""
        self._heard, self._doubted, self.stopped = now, None, 0.0

    def silent_seconds(self, now: float) -> float:
        """Return the seconds since the last heartbeat."""
        return now - self._heard

    def is_long(self, now: float) -> bool:
        """Return whether half of the time until a loss has passed; then to request heartbeats everywhere."""
        return self.silent_seconds(now) > self._dead_after / 2

    def should_ask(self, now: float) -> bool:
        """Return whether to request a heartbeat; True counts as requested."""
        pause = self._dead_after / 10
        if self.silent_seconds(now) <= pause or now - self._asked <= pause:
            return False
        self._asked = now
        return True

    def is_lost(self, now: float, patience: float) -> bool:
        """Return whether no heartbeat arrived for `patience` seconds, nor since then in unread messages."""
        if self.silent_seconds(now) <= patience:
            return False
        if self._doubted is None:
            self._doubted = now
        return now - self._doubted >= self._dead_after / 5
