"""Checks of the launcher, of the variables, and of MPI. Values of variables are not in the report."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Mapping

from kvstore.errors import ConfigError
from kvstore.observe.wrong_settings import wrong_settings
from kvstore.settings import launchers, roles
from kvstore.settings.definitions import IGNORED, IGNORED_ON_SERVERS, LAUNCHERS, SERVERS, STORES, WORKER
from kvstore.settings.environment import process_variables
from kvstore.settings.unknown import unknown_variables

from . import children
from .checks import CheckFinding, error, ok, warning

_DEADLINE = 20.0
_OWN = re.compile(r"(KVSTORE|DMLC|PS|MXNET_KVSTORE)_[A-Z_]+")  # and those of MXNet that kvstore reads
_BRANDS = {"Open MPI": r"open ?mpi|openrte|prte", "MPICH or Intel MPI": r"mpich|hydra|intel"}


def launcher(environment: Mapping[str, str] | None = None) -> CheckFinding:
    """Name the launcher of the variables that are set."""
    env = process_variables() if environment is None else environment
    names = [name for row in LAUNCHERS for name in row.signs if env.get(name)]
    signs = f" ({', '.join(names)} are set)" if names else ""
    try:
        found = launchers.detect_placement(env)
    except ConfigError as failure:
        cure = failure.without_values if isinstance(failure, launchers.PlacementError) else str(failure)
        return error(f"the variables of a launcher are incomplete or contradict each other{signs}", cure)
    if found.launcher == "none":
        return ok(f"none: this process is a job of its own{signs}")
    return ok(f"{found.launcher}: rank {found.rank} of {found.size}{signs}")


def parameter_server(environment: Mapping[str, str] | None = None) -> CheckFinding:
    """Check that the variables of a job with servers are complete."""
    env = process_variables() if environment is None else environment
    names = ", ".join(name for name in roles.SIGNS if env.get(name))
    try:
        found = roles.find(env)
    except ConfigError:
        return error(f"the variables of this job with servers are wrong or incomplete ({names} are set)")
    if found is None:
        return ok("this process belongs to no job with servers")
    counts = f"of a job with {found.num_workers or '?'} workers and {found.num_servers or '?'} servers"
    secured = "encrypted" if found.keys else "not encrypted"
    return ok(f"this process is a {found.role} {counts}, {secured} ({names} are set)")


def variables(environment: Mapping[str, str] | None = None) -> CheckFinding:
    """List the variables of kvstore that are set; those without effect, also misspelt ones, are a warning."""
    env = process_variables() if environment is None else environment
    unknown = unknown_variables(env)
    names = sorted(name for name in env if _OWN.match(name) or name in unknown)
    text = f"set: {', '.join(names)}" if names else "none of kvstore's is set"
    reasons = {**IGNORED, **IGNORED_ON_SERVERS}
    reasons |= {name: f"kvstore has no such variable{hint and f', {hint}'}" for name, hint in unknown.items()}
    useless = [name for name in names if name in reasons]
    if useless:
        cure = "unset or correct them: " + "; ".join(f"{name}: {reasons[name]}" for name in useless)
        return warning(f"{text}; without effect: {', '.join(useless)}", cure)
    return ok(text)


def settings(environment: Mapping[str, str] | None = None) -> CheckFinding:
    """Read the variables as stores and servers do, which raise an exception for a wrong value."""
    wrong = wrong_settings(environment)
    if not wrong:
        return ok("stores and servers can use the values of all variables")
    meanings = {name: row.meaning for row in (*STORES, *SERVERS) for name in row.names(WORKER)}
    expected = "; ".join(f"{name} ({meanings[name]})" for name in wrong)
    cure = f"unset or correct: {expected}; the error of `kvstore.create` says what is wrong"
    return error(f"values that cannot be used: {', '.join(wrong)}", cure)


def mpi() -> CheckFinding:
    """Compare the MPI library of mpi4py with the mpiexec that would start a job."""
    if importlib.util.find_spec("mpi4py") is None:
        return ok("mpi4py is not installed; only the store `mpi` needs it")
    library = children.run_program("mpi_library")
    if library.code != 0:
        cure = "install an MPI, such as `pip install mpich`, or the one that mpi4py was built for"
        return warning(f"mpi4py does not work: {library.reason}", cure)
    command = _find_mpiexec()
    if command is None:
        text = f"{library.out.strip()}, but there is no mpiexec on PATH"
        return warning(text, "put the folder of mpiexec on PATH")
    return fitting_mpi(library.out, children.run([command, "--version"], _DEADLINE).out)


def fitting_mpi(library: str, command: str) -> CheckFinding:
    """Compare the brands of the MPI library and of mpiexec, by their texts of version numbers."""
    text = f"mpi4py uses {' '.join(library.split())}"
    ours, theirs = brand(library), brand(command)
    if ours and theirs and ours != theirs:
        return warning(f"{text}, but mpiexec is that of {theirs}: each process would be a job of its own")
    return ok(f"{text}; mpiexec is that of {theirs or 'an unknown MPI'}")


def mpi_launcher() -> tuple[str, ...]:
    """Return the command that starts processes of MPI here; empty if mpi4py or mpiexec is missing.

    Open MPI needs options to start more processes than cores, and to start them as root.
    """
    command = _find_mpiexec()
    if command is None or importlib.util.find_spec("mpi4py") is None:
        return ()
    if brand(children.run([command, "--version"], _DEADLINE).out) != "Open MPI":
        return (command,)
    root = ("OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1") if os.geteuid() == 0 else ()
    return ("env", *root, command, "--oversubscribe")


def _find_mpiexec() -> str | None:
    """Find mpiexec on PATH, or else in the folder of Python, where a wheel of an MPI installs it."""
    path = process_variables().get("PATH", os.defpath)
    return shutil.which("mpiexec", path=os.pathsep.join([path, os.path.dirname(sys.executable)]))


def brand(text: str) -> str | None:
    """Return the family of MPI libraries that the first lines of a text name."""
    head = "\n".join(text.splitlines()[:3])
    return next((name for name, sign in _BRANDS.items() if re.search(sign, head, re.IGNORECASE)), None)
