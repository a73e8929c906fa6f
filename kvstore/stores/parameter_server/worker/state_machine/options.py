"""The options of a worker's state machine."""

from __future__ import annotations

from dataclasses import dataclass

from .....settings.definitions import DEFAULTS


@dataclass(frozen=True)
class WorkerOptions:
    """The options of a worker's state machine."""

    #: Bytes that may be in flight to one server.
    credit: int = DEFAULTS["credit_bytes"]
    #: Requests are joined to batches up to this number of bytes.
    batch_bytes: int = 1 << 20
    #: Seconds after which a request without a reply is repeated as a probe.
    resend: float = DEFAULTS["resend"]
    #: The same for messages to the scheduler.
    control_resend: float = 1.0
    #: Seconds without a message of the scheduler, while an operation waits, after which it is lost.
    dead_after: float = DEFAULTS["dead_after"]
    #: The same before its first message: it may be started after this process. 0: as `dead_after`.
    start: float = 0.0
    #: Seconds that the scheduler may be absent, as another store has learned.
    absence: float = 0.0
    #: Whether the address of `ECHO` is known from another store.
    echoes: bool = False
    #: Whether replies count against the credit, too: only where no reply waits for other workers.
    counts_answers: bool = False

    @property
    def report_bytes(self) -> int:
        """Bytes of requests after which a server acknowledges their arrival, if no reply does."""
        return max(1, min(1 << 20, self.credit // 2))
