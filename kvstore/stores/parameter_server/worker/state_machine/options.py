"""How patient a worker is."""

from __future__ import annotations

from dataclasses import dataclass

from .....settings.definitions import DEFAULTS


@dataclass(frozen=True)
class WorkerOptions:
    """How patient a worker is.

    Attributes
    ----------
    credit : int
        Bytes that may be on the way to one server.
    batch_bytes : int
        Requests are put together up to so many bytes.
    resend : float
        Seconds after which a request without an answer is asked for again.
    control_resend : float
        The same for what goes to the scheduler.
    dead_after : float
        Seconds without a word of the scheduler, while something waits, after which it is lost.
    start : float
        The same before its first word: it may be started after this process. 0: as `dead_after`.
    echoes : bool
        Whether `ECHO` can be reached before the scheduler has said where: another store knows it.
    """

    credit: int = DEFAULTS["credit_bytes"]
    batch_bytes: int = 1 << 20
    resend: float = DEFAULTS["resend"]
    control_resend: float = 1.0
    dead_after: float = DEFAULTS["dead_after"]
    start: float = 0.0
    echoes: bool = False
