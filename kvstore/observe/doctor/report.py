"""The report: all checks in their order, as lines or JSON, without secrets."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from kvstore.settings.environment import process_variables

from .checks import Finding
from .table import CHECKS, SPEEDS, tests

_WIDTH = 23  # characters of the longest subject
_SHORTEST = 6  # characters of a hidden value: shorter ones are in every text
_SHOWN = ("KVSTORE_ROLE", "DMLC_ROLE")  # their values are words of this report


def findings(with_tests: bool = True, speeds: bool = False) -> Iterator[Finding]:
    """Run the checks in turn, and yield each finding at once: checks, self-tests, speeds."""
    usable = True
    for check in CHECKS:
        found = redacted(check.run())
        usable = usable and (found.subject, found.level) != ("settings", "error")
        yield found
    if not usable and (with_tests or speeds):
        yield Finding("self-tests", "warning", "not run: settings are wrong", "correct the settings first")
        return
    for check in (*(tests() if with_tests else ()), *(SPEEDS if speeds else ())):
        yield redacted(check.run())


def redacted(
    found: Finding, environment: Mapping[str, str] | None = None, home: str | None = None
) -> Finding:
    """Replace the home directory and values of kvstore's variables, which an error may have repeated."""
    env = process_variables() if environment is None else environment
    home = os.path.expanduser("~") if home is None else home
    hidden = {
        value: f"${name}"
        for name, value in env.items()
        if name.startswith(("KVSTORE_", "DMLC_")) and name not in _SHOWN and len(value) >= _SHORTEST
    }

    def clean(text: str) -> str:
        for value in sorted(hidden, key=len, reverse=True):
            text = text.replace(value, hidden[value])
        at_home = rf"{re.escape(home.rstrip('/'))}(?![\w.-])"
        return " ".join((re.sub(at_home, "~", text) if home.strip("/") else text).split())

    return replace(found, text=clean(found.text), cure=clean(found.cure))


def line(found: Finding) -> str:
    """Return the line of a finding; its level is first."""
    cure = f". Cure: {found.cure}" if found.cure else ""
    return f"{found.level:<7}  {found.subject:<{_WIDTH}}  {found.text}{cure}"


def last_line(found: Sequence[Finding]) -> str:
    """Count errors and warnings, and say what the report is for."""
    errors, warnings = (sum(one.level == level for one in found) for level in ("error", "warning"))
    counts = f"{errors} error{'s' * (errors != 1)}, {warnings} warning{'s' * (warnings != 1)}"
    return (
        f"{counts}. To report a bug, paste all of these lines into the issue: "
        "they have no keys, no values of variables, and no addresses but those of --hosts"
    )


def as_objects(found: Sequence[Finding]) -> list[dict[str, str]]:
    """Return the findings as --json prints them."""
    return [asdict(one) for one in found]


def is_sound(found: Sequence[Finding]) -> bool:
    """Whether no finding is an error."""
    return all(one.level != "error" for one in found)
