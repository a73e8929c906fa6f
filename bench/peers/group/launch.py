"""The commands of a peer: those of workers, and those of helpers."""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field

from bench import ROOT
from bench.peers.group.link import free_port
from bench.peers.setting import Setting
from kvstore.observe.bench.worker_group import start_process

_SERVE = "import sys; sys.path.append(sys.argv.pop(1)); import bench.peers.local.rival_mxnet"

Command = tuple[list[str], dict[str, str]]


@dataclass
class Launch:
    """Commands of the workers, and of helpers that are started before them."""

    workers: int
    ranks: list[Command]
    helpers: list[Command] = field(default_factory=list)


def workers(
    setting: Setting, address: str, env: dict[str, str], helpers: list[Command] | None = None
) -> Launch:
    """Start each worker separately."""
    n, ranks = setting.processes, range(setting.processes)
    command = setting.command("worker", address, n)
    each = [(command, {**env, **dict(setting.env), "KVSTORE_BENCH_RANK": str(rank)}) for rank in ranks]
    return Launch(n, each, helpers or [])


def of_one_machine(setting: Setting, address: str, env: dict[str, str]) -> Launch:
    """Start each worker separately, with the rank variables of kvstore's launcher."""
    launch = workers(setting, address, env)
    for rank, (_, own) in enumerate(launch.ranks):
        own |= {f"KVSTORE_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")}
        own |= {f"KVSTORE_{name}": str(launch.workers) for name in ("SIZE", "LOCAL_SIZE")}
    return launch


def mxnet(setting: Setting, address: str, **more: str) -> Launch:
    """Start MXNet's scheduler and servers, then the workers."""
    common = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": str(setting.processes),
        "DMLC_NUM_SERVER": str(setting.servers),
        "OMP_NUM_THREADS": "1",
        **more,
        **dict(setting.env),
    }
    serve = [setting.python, "-c", _SERVE, str(ROOT)]
    roles = ["scheduler", *["server"] * setting.servers]
    helpers = [(serve, {**common, "DMLC_ROLE": role}) for role in roles]
    return workers(setting, address, {**common, "DMLC_ROLE": "worker"}, helpers)


def start(command: Command, folder: str) -> subprocess.Popen[bytes]:
    """Start one process in a session of its own; it dies with the bench, and keeps its files in `folder`."""
    return start_process(command[0], variables(command[1], folder), folder=folder)


def variables(env: dict[str, str], folder: str) -> dict[str, str]:
    """Return the variables of a process that keeps its files in `folder`."""
    return {**os.environ, "TMPDIR": folder, **env}
