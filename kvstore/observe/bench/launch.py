"""How the processes of each peer are started here, and why a peer is left out."""

from __future__ import annotations

import importlib.util
import sys

from kvstore.errors import ConfigError
from kvstore.observe.doctor import launchers

from .report import OURS
from .settings import BenchSettings

Command = tuple[list[str], dict[str, str]]  # with the variables that it needs

AUTO, NONE = "auto", "none"
_WORKER = ("-m", "kvstore.observe.bench.worker")
_LIBRARIES = {"gloo": "torch", "mpi": "mpi4py"}
#: A thread for each core, the network of this machine, and no core of its own for a process of Open MPI.
_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "PRTE_MCA_hwloc_default_binding_policy": "none",  # Open MPI 5
    "OMPI_MCA_hwloc_base_binding_policy": "none",  # Open MPI 4
}


def commands(peers: str, settings: BenchSettings) -> tuple[dict[str, Command], dict[str, str]]:
    """Return the command for the workers of the store and of each peer, and why peers of ``auto`` have none.

    Raises
    ------
    ConfigError
        A name in `peers` is unknown, or has no command.
    """
    run = [sys.executable, "-m", "kvstore", "run", "-n", str(settings.workers), "--no-prefix"]
    servers = ["-s", str(settings.servers)] if settings.servers else []
    found: dict[str, Command] = {OURS: ([*run, *servers, *_WORKER], {})}
    left_out = {}
    names = {NONE: [], AUTO: list(_LIBRARIES)}.get(peers, peers.split(","))
    for name in dict.fromkeys(names):
        if name not in _LIBRARIES:
            raise ConfigError(f"--peers: {name!r} is none of {AUTO}, {NONE}, {', '.join(_LIBRARIES)}")
        why, launcher = _why_not(name, settings.workers), run
        if name == "mpi" and not why:
            launcher = [*launchers.mpi_launcher(), "-n", str(settings.workers), sys.executable]
        if not why:
            found[name] = ([*launcher, *_WORKER], _VARIABLES)
        elif peers == AUTO:
            left_out[name] = why
        else:
            raise ConfigError(f"--peers {name}: {why}")
    return found, left_out


def _why_not(name: str, workers: int) -> str:
    """Say why a peer cannot be measured; empty if it can."""
    if workers == 1:
        return "one worker has nothing to sum with others"
    if importlib.util.find_spec(_LIBRARIES[name]) is None:
        return f"{_LIBRARIES[name]} is not installed"
    mpi = launchers.mpi() if name == "mpi" else None
    return mpi.text if mpi and (mpi.level != "ok" or not launchers.mpi_launcher()) else ""
