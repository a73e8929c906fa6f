"""Which peers can be measured here, how their processes are started, and why others are left out."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Callable

from kvstore.errors import ConfigError
from kvstore.observe.doctor import launchers

from .settings import BenchSettings
from .worker_group import GroupPlan

AUTO, NONE = "auto", "none"
_PART = 0.75  # of the time after which the command gives up
_WORKER = "kvstore.observe.bench.workers.main"
#: As torchrun has it, so that there are no more threads than cores; and the network of this machine.
_VARIABLES = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
#: Open MPI 5 and 4 bind each process to a core unless told otherwise; nobody binds those of other peers.
_UNBOUND = {
    "PRTE_MCA_hwloc_default_binding_policy": "none",
    "OMPI_MCA_hwloc_base_binding_policy": "none",
}


def store_plan(settings: BenchSettings, patience: float) -> GroupPlan:
    """Say how the workers of the store are started, and its servers.

    They wait for each other less than `patience` seconds: then they say by themselves who is missing.
    """
    variables = {"KVSTORE_TIMEOUT": f"{_PART * patience:g}"}
    return GroupPlan("kvstore", settings.workers, _run(settings.workers, settings.servers), variables)


def peer_plans(text: str, workers: int) -> tuple[list[GroupPlan], dict[str, str]]:
    """Say how peers are started.

    Parameters
    ----------
    text : str
        ``auto``, ``none``, or names that are separated by commas.
    workers : int
        How many workers each has.

    Returns
    -------
    list of GroupPlan
        Those that can be started.
    dict of str to str
        The others of ``auto``, and why not.

    Raises
    ------
    ConfigError
        A name is unknown, or one that was given cannot be started.
    """
    names = [] if text == NONE else list(_PLANS) if text == AUTO else text.split(",")
    plans, left_out = [], {}
    for name in dict.fromkeys(names):
        if name not in _PLANS:
            raise ConfigError(f"--peers: {name!r} is none of {AUTO}, {NONE}, {', '.join(_PLANS)}")
        plan = "one worker has nothing to sum with others" if workers == 1 else _PLANS[name](workers)
        if isinstance(plan, GroupPlan):
            plans.append(plan)
        elif text == AUTO:
            left_out[name] = plan
        else:
            raise ConfigError(f"--peers {name}: {plan}")
    return plans, left_out


def _gloo(workers: int) -> GroupPlan | str:
    if importlib.util.find_spec("torch") is None:
        return "torch is not installed"
    return GroupPlan("gloo", workers, _run(workers), _VARIABLES)


def _mpi(workers: int) -> GroupPlan | str:
    if importlib.util.find_spec("mpi4py") is None:
        return "mpi4py is not installed"
    found, launcher = launchers.mpi(), launchers.mpi_launcher()
    if found.level != "ok" or not launcher:
        return found.text
    command = (*launcher, "-n", str(workers), sys.executable, "-m", _WORKER)
    return GroupPlan("mpi", workers, command, {**_VARIABLES, **_UNBOUND})


def _run(workers: int, servers: int = 0) -> tuple[str, ...]:
    service = ("-s", str(servers)) if servers else ()
    launcher = (sys.executable, "-m", "kvstore", "run", "-n", str(workers), *service, "--no-prefix")
    return (*launcher, "-m", _WORKER)


_PLANS: dict[str, Callable[[int], GroupPlan | str]] = {"gloo": _gloo, "mpi": _mpi}
