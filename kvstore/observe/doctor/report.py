"""The report: all checks in their order, as lines or JSON, without secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence

from kvstore.settings.environment import process_variables

from .checks import CheckFinding
from .table import CHECKS, SPEEDS, self_test_checks

_WIDTH = 23  # characters of the longest subject
_SHORTEST = 6  # characters of a hidden value: shorter ones are in every text
_SHOWN = ("KVSTORE_ROLE", "DMLC_ROLE")  # their values are words of this report


def run_checks(with_tests: bool = True, speeds: bool = False) -> Iterator[CheckFinding]:
    """Run the checks in turn, and yield each finding at once: checks, self-tests, speeds."""
    usable = True
    for check in CHECKS:
        found = without_secrets(check.run())
        usable = usable and (found.subject, found.level) != ("settings", "error")
        yield found
    if usable:
        checks = (*(self_test_checks() if with_tests else ()), *(SPEEDS if speeds else ()))
        yield from (without_secrets(check.run()) for check in checks)
    elif with_tests or speeds:
        text, cure = "not run: settings are wrong", "correct the settings first"
        yield CheckFinding("self-tests", "warning", text, cure)


def without_secrets(
    found: CheckFinding, environment: Mapping[str, str] | None = None, home: str | None = None
) -> CheckFinding:
    """Replace the home directory and values of kvstore's variables, which an error may have repeated."""
    env = process_variables() if environment is None else environment
    home = (os.path.expanduser("~") if home is None else home).rstrip("/")
    hidden = {
        value: f"${name}"
        for name, value in env.items()
        if name.startswith(("KVSTORE_", "DMLC_")) and name not in _SHOWN and len(value) >= _SHORTEST
    }

    def cleaned(text: str) -> str:
        for value in sorted(hidden, key=len, reverse=True):
            text = text.replace(value, hidden[value])
        return " ".join((re.sub(rf"{re.escape(home)}(?![\w.-])", "~", text) if home else text).split())

    return found._replace(text=cleaned(found.text), cure=cleaned(found.cure))


def finding_line(found: CheckFinding) -> str:
    """Return the line of a finding; its level is first."""
    cure = f". Cure: {found.cure}" if found.cure else ""
    return f"{found.level:<7}  {found.subject:<{_WIDTH}}  {found.text}{cure}"


def last_line(found: Sequence[CheckFinding]) -> str:
    """Count errors and warnings, and say what the report is for."""
    errors, warnings = (sum(one.level == level for one in found) for level in ("error", "warning"))
    counts = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    return (
        f"{counts}. To report a bug, paste all of these lines into the issue: "
        "they have no keys, no values of variables, and no addresses but those of --hosts"
    )
