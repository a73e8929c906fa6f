"""How patient a worker is."""

from __future__ import annotations

from dataclasses import dataclass

from .....settings.definitions import DEFAULTS


@dataclass(frozen=True)
class WorkerOptions:
    """How patient a worker is."""

    #: Bytes that may be on the way to one server.
    credit: int = DEFAULTS["credit_bytes"]
    #: Requests are put together up to so many bytes.
    batch_bytes: int = 1 << 20
    #: Seconds after which a request without an answer is asked for again.
    resend: float = DEFAULTS["resend"]
    #: The same for what goes to the scheduler.
    control_resend: float = 1.0
    #: Seconds without a word of the scheduler, while something waits, after which it is lost.
    dead_after: float = DEFAULTS["dead_after"]
    #: The same before its first word: it may be started after this process. 0: as `dead_after`.
    start: float = 0.0
    #: Seconds that the scheduler may be away, as it has said to another store.
    absence: float = 0.0
    #: Whether `ECHO` can be reached before the scheduler has said where: another store knows it.
    echoes: bool = False
    #: Whether answers count against the credit, too: only where none waits for other workers.
    counts_answers: bool = False

    @property
    def report(self) -> int:
        """Bytes of requests after which a server is to tell that it has them, if no answer tells it."""
        return max(1, min(1 << 20, self.credit // 2))
