"""What a check has found, and how a check is called so that it cannot break the command."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, TypeAlias

Level: TypeAlias = Literal["ok", "warning", "error"]

#: Seconds after which a check that has not answered is given up.
DEADLINE = 60.0

_REPORT = "report this as a bug of kvstore, with all lines of this command"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    Attributes
    ----------
    subject : str
        What was looked at.
    level : str
        ``"ok"``; ``"warning"`` for what is slower than it could be or fails in some cases; ``"error"`` for
        what does not work.
    text : str
        What was found, and what follows from it.
    cure : str
        What to do, with a command where there is one; empty if there is nothing to do.
    """

    subject: str
    level: Level
    text: str
    cure: str = ""


Check: TypeAlias = Callable[[], "Finding | list[Finding]"]


def subject_of(check: Check) -> str:
    """Name what a check is about."""
    return check.__name__.replace("_", " ")


def checked(check: Check, deadline: float = DEADLINE) -> list[Finding]:
    """Call a check; an exception, or no answer within `deadline` seconds, becomes an error in the list."""
    found: list[Finding] = []

    def run() -> None:
        try:
            answer = check()
            found.extend([answer] if isinstance(answer, Finding) else answer)
        except Exception as error:
            found.append(failed(subject_of(check), error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(deadline)
    if thread.is_alive():
        text = f"this check has not answered within {deadline:g} s"
        return [Finding(subject_of(check), "error", text, _REPORT)]
    return found


def failed(subject: str, error: BaseException) -> Finding:
    """Make the finding for a check that raised an exception."""
    if isinstance(error, PermissionError) and error.filename == sys.executable:
        text = f"not done: this user may not execute {sys.executable}"
        return Finding(subject, "error", text, "use a Python that this user may execute")
    return Finding(subject, "error", f"this check failed: {type(error).__name__}: {error}", _REPORT)
