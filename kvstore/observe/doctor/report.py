"""All checks in their order, and the report: lines for people, or JSON. No secrets are in it."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, replace

from kvstore.settings.variables import process_variables

from . import gpus, installation, launchers, machine, network, permissions, self_tests, speed
from .findings import Check, Finding, checked, failed

CHECKS: tuple[Check, ...] = (
    installation.python,
    installation.package,
    installation.compiled_modules,
    installation.instruction_set,
    installation.compiler,
    installation.dependencies,
    installation.extras,
    installation.frameworks,
    machine.processors,
    machine.memory,
    machine.memfd,
    machine.shared_regions,
    machine.shared_memory_folder,
    machine.huge_pages,
    permissions.locked_memory,
    permissions.open_files,
    permissions.address_space,
    permissions.ptrace,
    launchers.launcher,
    launchers.parameter_server,
    launchers.variables,
    launchers.settings,
    launchers.mpi,
    gpus.cuda,
    gpus.cuda_kernels,
    gpus.nccl,
    network.interfaces,
    network.host_name,
    network.ports,
    network.encryption,
    network.keys_file,
)

_WIDTH = 23  # characters of the longest subject
_SHORTEST = 6  # characters of a value that is hidden: shorter ones are in every text
_SHOWN = ("KVSTORE_ROLE", "DMLC_ROLE")  # their values are words of this report


def findings(tests: bool = True, speeds: bool = False) -> Iterator[Finding]:
    """Run the checks one after the other, and say what each has found as soon as it has.

    Parameters
    ----------
    tests : bool
        Run the self-tests, in processes of their own.
    speeds : bool
        Measure speeds, after everything else.
    """
    usable = True
    for check in CHECKS:
        for found in checked(check):
            usable = usable and (found.subject, found.level) != (launchers.SETTINGS, "error")
            yield redacted(found)
    if not usable and (tests or speeds):
        yield Finding("self-tests", "warning", "not run: settings are wrong", "correct the settings first")
        return
    for found in itertools.chain(_tested() if tests else (), _measured() if speeds else ()):
        yield redacted(found)


def _tested() -> Iterator[Finding]:
    """Run the self-tests; each has a deadline of its own."""
    try:
        yield self_tests.reads_between_processes()
        for test in self_tests.store_tests():
            yield self_tests.outcome(test)
    except Exception as error:
        yield failed("self-tests", error)


def _measured() -> Iterator[Finding]:
    try:
        yield from speed.copies()
        yield speed.round_trip()
    except Exception as error:
        yield failed("speeds", error)


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
    """Lay a finding out for people, in one line; `level` comes first."""
    cure = f". Cure: {found.cure}" if found.cure else ""
    return f"{found.level:<7}  {found.subject:<{_WIDTH}}  {found.text}{cure}"


def last_line(found: Sequence[Finding]) -> str:
    """Count errors and warnings, and say what the report is for."""
    errors, warnings = (
        _counted(sum(one.level == level for one in found), level) for level in ("error", "warning")
    )
    return (
        f"{errors}, {warnings}. To report a bug, paste all of these lines into the issue: "
        "they have no keys, no values of variables, and no addresses but those of --hosts"
    )


def as_objects(found: Sequence[Finding]) -> list[dict[str, str]]:
    """Make what --json prints."""
    return [asdict(one) for one in found]


def is_sound(found: Sequence[Finding]) -> bool:
    """Whether nothing is an error."""
    return all(one.level != "error" for one in found)


def _counted(number: int, word: str) -> str:
    return f"{number} {word}" if number == 1 else f"{number} {word}s"
