"""Which launcher has started this process, and the MPI that is here. No values of variables are told."""

from __future__ import annotations

import importlib.util
import os
import re
import shutil
import sys
from collections.abc import Iterable, Mapping

from kvstore.errors import ConfigError
from kvstore.launch.wrong_settings import wrong_settings
from kvstore.settings import launchers, roles
from kvstore.settings.definitions import IGNORED, IGNORED_ON_SERVERS, LAUNCHERS, SERVERS, STORES, WORKER
from kvstore.settings.unknown import unknown_variables
from kvstore.settings.variables import process_variables

from . import children
from .findings import Finding

#: Subject of the lines about values that are wrong: with them no store can be tested.
SETTINGS = "settings"

_DEADLINE = 20.0
_OWN = re.compile(r"(KVSTORE|DMLC|PS|MXNET_KVSTORE)_[A-Z_]+")  # and those of MXNet that kvstore reads
_BRANDS = {"Open MPI": r"open ?mpi|openrte|prte", "MPICH or Intel MPI": r"mpich|hydra|intel"}
_WRONG_MPI = (
    "start with the mpiexec of the MPI that mpi4py was built for, or "
    "`pip install --force-reinstall --no-binary mpi4py mpi4py` to build it for this mpiexec"
)


def launcher(environment: Mapping[str, str] | None = None) -> Finding:
    """Name the launcher whose variables are set."""
    env = process_variables() if environment is None else environment
    names = [name for row in LAUNCHERS for name in row.signs if env.get(name)]
    told = f" ({', '.join(names)} are set)" if names else ""
    try:
        found = launchers.detect(env)
    except ConfigError:
        text = f"the variables of a launcher are incomplete or contradict each other{told}"
        return Finding("launcher", "error", text, "run `kvstore env`, which says which, with their values")
    if found.launcher == "none":
        return Finding("launcher", "ok", f"none: this process is a job of its own{told}")
    return Finding("launcher", "ok", f"{found.launcher}: rank {found.rank} of {found.size}{told}")


def parameter_server(environment: Mapping[str, str] | None = None) -> Finding:
    """Look whether the variables of a job with servers are complete."""
    env = process_variables() if environment is None else environment
    names = [name for name in roles.SIGNS if env.get(name)]
    try:
        found = roles.find(env)
    except ConfigError:
        text = f"the variables of this job with servers are wrong or incomplete ({', '.join(names)} are set)"
        return Finding("parameter server", "error", text, "run `kvstore env`, which says what is wrong")
    if found is None:
        return Finding("parameter server", "ok", "this process belongs to no job with servers")
    secure = "encrypted" if found.keys else "not encrypted"
    text = f"this process is a {found.role}, {secure} ({', '.join(names)} are set)"
    return Finding("parameter server", "ok", text)


def variables(environment: Mapping[str, str] | None = None) -> Finding:
    """List the variables of kvstore that are set, and warn of those without effect, also misspelt ones."""
    env = process_variables() if environment is None else environment
    unknown = unknown_variables(env)
    names = sorted(name for name in env if _OWN.match(name) or name in unknown)
    text = f"set: {', '.join(names)}" if names else "none of kvstore's is set"
    reasons = {**IGNORED, **IGNORED_ON_SERVERS}
    reasons |= {name: f"kvstore has no such variable{hint and f', {hint}'}" for name, hint in unknown.items()}
    useless = [name for name in names if name in reasons]
    if useless:
        cure = "unset or correct them: " + "; ".join(f"{name}: {reasons[name]}" for name in useless)
        return Finding("variables", "warning", f"{text}; without effect: {', '.join(useless)}", cure)
    return Finding("variables", "ok", text)


def settings(environment: Mapping[str, str] | None = None) -> list[Finding]:
    """Read the variables as stores and servers do, which raise for a wrong value."""
    meanings = {name: row.meaning for row in (*STORES, *SERVERS) for name in row.names(WORKER)}
    wrong = [
        Finding(
            SETTINGS,
            "error",
            f"the value of {name} cannot be used",
            f"unset or correct it ({meanings[name]}); `kvstore env` says what is wrong",
        )
        for name in wrong_settings(environment)
    ]
    return wrong or [Finding(SETTINGS, "ok", "stores and servers can use the values of all variables")]


def mpi() -> Finding:
    """Compare the MPI library of mpi4py with the mpiexec that would start a job."""
    if importlib.util.find_spec("mpi4py") is None:
        return Finding("MPI", "ok", "mpi4py is not installed; only the store `mpi` needs it")
    library = children.run([*children.JOB, "mpi-library"], _DEADLINE)
    if library.code != 0:
        cure = "install an MPI, such as `pip install mpich`, or the one that mpi4py was built for"
        return Finding("MPI", "warning", f"mpi4py does not work: {library.reason}", cure)
    command = _mpiexec()
    if command is None:
        cure = "put the folder of mpiexec on PATH"
        return Finding("MPI", "warning", f"{library.out.strip()}, but there is no mpiexec on PATH", cure)
    return fitting_mpi(library.out, children.run([command, "--version"], _DEADLINE).out)


def mpi_launcher() -> tuple[str, ...]:
    """Return what starts processes of MPI on this machine; empty where mpi4py or mpiexec is missing.

    Open MPI wants to be told that there may be more processes than cores, and that root is meant.
    """
    command = _mpiexec()
    if command is None or importlib.util.find_spec("mpi4py") is None:
        return ()
    if brand(children.run([command, "--version"], _DEADLINE).out) != "Open MPI":
        return (command,)
    root = ("OMPI_ALLOW_RUN_AS_ROOT=1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1") if os.geteuid() == 0 else ()
    return ("env", *root, command, "--oversubscribe")


def _mpiexec() -> str | None:
    """Find mpiexec as a shell does, or else beside Python, where a wheel of an MPI puts it."""
    path = process_variables().get("PATH", os.defpath)
    return shutil.which("mpiexec", path=os.pathsep.join([path, os.path.dirname(sys.executable)]))


def fitting_mpi(library: str, command: str) -> Finding:
    """Judge what the MPI library and mpiexec say of themselves."""
    text = f"mpi4py uses {' '.join(library.split())}"
    ours, theirs = brand(library), brand(command)
    if ours and theirs and ours != theirs:
        text += f", but mpiexec is that of {theirs}: each process would be a job of its own"
        return Finding("MPI", "warning", text, _WRONG_MPI)
    return Finding("MPI", "ok", f"{text}; mpiexec is that of {theirs or 'an unknown MPI'}")


def brand(text: str) -> str | None:
    """Name the family of MPI libraries that a text of version numbers is of."""
    return next((name for name, sign in _BRANDS.items() if _has(sign, text.splitlines())), None)


def _has(sign: str, lines: Iterable[str]) -> bool:
    """Whether one of the first lines, which name the program, has the sign."""
    return any(re.search(sign, line, re.IGNORECASE) for line in list(lines)[:3])
