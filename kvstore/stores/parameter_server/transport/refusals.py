"""The log lines of refused peers: at most one a minute for each peer."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

log = logging.getLogger("kvstore.wire")

_MINUTE = 60.0
_MOST = 1024  # peers remembered


class RefusalLog:
    """Counts refusals, and logs some of them; `clock` gives monotonic seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._last: dict[str, tuple[float, int]] = {}
        self.count = 0

    def note_refusal(self, peer: str, why: str) -> None:
        """Count a refusal; log it, unless the same peer was logged within the last minute."""
        self.count += 1
        now = self._clock()
        said, since = self._last.pop(peer, (None, 0))
        if said is not None and now - said < _MINUTE:
            self._last[peer] = (said, since + 1)
            return
        self._last[peer] = (now, 0)
        if len(self._last) > _MOST:  # remove the peer that was refused the longest time ago
            del self._last[next(iter(self._last))]
        log.warning("refused %s: %s%s", peer, why, f" ({since} more since the last line)" if since else "")
