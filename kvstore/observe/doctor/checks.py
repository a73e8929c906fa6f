"""A check of `kvstore doctor`: one row of the table, its outcome, and how it is run."""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, TypeAlias

Level: TypeAlias = Literal["ok", "warning", "error"]

#: Seconds after which a check without an outcome is abandoned.
DEADLINE = 60.0

_REPORT = "report this as a bug of kvstore, with all lines of this command"


@dataclass(frozen=True)
class Finding:
    """One line of the report.

    `level` is "ok"; "warning" if something is slower than it could be, or fails in some cases; "error" if it
    does not work. `cure` says what to do, with a command if there is one; it is empty if nothing is to do.
    """

    subject: str
    level: Level
    text: str
    cure: str = ""


def ok(text: str) -> Finding:
    """Return the outcome of a check that found no fault; `Check.run` adds its subject."""
    return Finding("", "ok", text)


def warning(text: str, cure: str = "") -> Finding:
    """Return the outcome of a check that found a fault with which kvstore still works."""
    return Finding("", "warning", text, cure)


def error(text: str, cure: str = "") -> Finding:
    """Return the outcome of a check that found a fault with which something does not work."""
    return Finding("", "error", text, cure)


class Check(NamedTuple):
    """A row of the table: the name of the check, the function that runs it, and what to do after a fault."""

    subject: str
    function: Callable[[], Finding]
    cure: str = ""
    deadline: float = DEADLINE

    def finding(self, outcome: Finding) -> Finding:
        """Return the line of the report for an outcome of this check."""
        cure = outcome.cure or ("" if outcome.level == "ok" else self.cure)
        return replace(outcome, subject=self.subject, cure=cure)

    def run(self) -> Finding:
        """Run the check in a thread; an exception, or no outcome within the deadline, is an error."""
        found: list[Finding] = []

        def find() -> None:
            try:
                found.append(self.finding(self.function()))
            except Exception as failure:
                found.append(self._failed(failure))

        thread = threading.Thread(target=find, daemon=True)
        thread.start()
        thread.join(self.deadline)
        if not found:
            text = f"this check has not answered within {self.deadline:g} s"
            return Finding(self.subject, "error", text, _REPORT)
        return found[0]

    def _failed(self, failure: Exception) -> Finding:
        if isinstance(failure, PermissionError) and failure.filename == sys.executable:
            text = f"not done: this user may not execute {sys.executable}"
            return Finding(self.subject, "error", text, "use a Python that this user may execute")
        text = f"this check failed: {type(failure).__name__}: {failure}"
        return Finding(self.subject, "error", text, _REPORT)
