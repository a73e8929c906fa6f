"""A check of `kvstore doctor`: one row of the table, its outcome, and how it is run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

Level: TypeAlias = Literal["ok", "warning", "error"]

#: Seconds after which a check without an outcome is abandoned.
DEADLINE = 60.0

_REPORT = "report this as a bug of kvstore, with all lines of this command"


class CheckFinding(NamedTuple):
    """One line of the report.

    `level` is "ok"; "warning" if something is slower than it could be, or fails in some cases; "error" if it
    does not work. `cure` says what to do, with a command if there is one; it is empty if nothing is to do.
    """

    subject: str
    level: Level
    text: str
    cure: str = ""


# The outcome of a check; `DoctorCheck.run` adds its subject.


def ok(text: str) -> CheckFinding:
    """Return the outcome without a fault."""
    return CheckFinding("", "ok", text)


def warning(text: str, cure: str = "") -> CheckFinding:
    """Return the outcome with a fault with which kvstore still works."""
    return CheckFinding("", "warning", text, cure)


def error(text: str, cure: str = "") -> CheckFinding:
    """Return the outcome with a fault with which something does not work."""
    return CheckFinding("", "error", text, cure)


class DoctorCheck(NamedTuple):
    """A row of the table: the name of the check, the function that runs it, and what to do after a fault."""

    subject: str
    function: Callable[[], CheckFinding]
    cure: str = ""
    deadline: float = DEADLINE

    def run(self) -> CheckFinding:
        """Run the check in a thread; an exception, or no outcome within the deadline, is an error."""
        found: list[CheckFinding] = []
        thread = threading.Thread(target=lambda: found.append(self._function_outcome()), daemon=True)
        thread.start()
        thread.join(self.deadline)
        late = error(f"this check has not answered within {self.deadline:g} s", _REPORT)
        outcome = found[0] if found else late
        cure = outcome.cure or ("" if outcome.level == "ok" else self.cure)
        return outcome._replace(subject=self.subject, cure=cure)

    def _function_outcome(self) -> CheckFinding:
        try:
            return self.function()
        except Exception as failure:
            if isinstance(failure, PermissionError) and failure.filename == sys.executable:
                text = f"not done: this user may not execute {sys.executable}"
                return error(text, "use a Python that this user may execute")
            return error(f"this check failed: {type(failure).__name__}: {failure}", _REPORT)
