"""How the processes of each peer of the parameter server are started."""

from __future__ import annotations

import socket
from dataclasses import dataclass, field

from bench.cases.dist import ENTRIES, Entry
from bench.peers.shared.launch import ROOT, Command, GroupSetting, Launch

_START = "import sys; sys.path.append(sys.argv.pop(1)); from bench.peers.dist.worker import main; main()"
_SERVE = "import sys; sys.path.append(sys.argv.pop(1)); import bench.peers.local.rival_mxnet"
#: Seconds after which our store says for whom it waits: before the bench loses patience.
_TIMEOUT = "100"
#: malloc keeps large blocks instead of giving their pages back, to be touched anew for the next message.
_KEEP = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


@dataclass(frozen=True)
class DistSetting(GroupSetting):
    """An entry of the tables, and the job that it does; `processes` are the workers."""

    servers: int = 1
    env: tuple[tuple[str, str], ...] = field(default=())

    @property
    def entry(self) -> Entry:
        return ENTRIES[self.name]


def plan(setting: DistSetting, address: str) -> Launch:
    """Say what to start."""
    if setting.entry.engine == "ours":
        return _ours(setting, address)
    if setting.entry.engine == "mxnet":
        return _mxnet(setting, address)
    env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **_KEEP, **dict(setting.env)}
    return _workers(setting, address, env)


def _command(setting: DistSetting, address: str) -> list[str]:
    return [setting.python, "-c", _START, str(ROOT), setting.name, address, str(setting.processes)]


def _workers(setting: DistSetting, address: str, env: dict[str, str], *helpers: Command) -> Launch:
    n, command = setting.processes, _command(setting, address)
    ranks = [(command, {**env, "KVSTORE_BENCH_RANK": str(rank)}) for rank in range(n)]
    return Launch(n, ranks, list(helpers))


def _ours(setting: DistSetting, address: str) -> Launch:
    """Let the launcher start the scheduler, the servers and the workers, as a user would."""
    entry, n = setting.entry, setting.processes
    command = [setting.python, "-m", "kvstore.launch", "run", "-n", str(n), "-s", str(setting.servers)]
    command += ["--transport", entry.transport, *(["--secure"] if entry.secure else []), "--"]
    env = {"KVSTORE_TIMEOUT": _TIMEOUT, **dict(setting.env)}
    return Launch(n, [([*command, *_command(setting, address)], env)])


def _mxnet(setting: DistSetting, address: str) -> Launch:
    common = {
        "DMLC_PS_ROOT_URI": "127.0.0.1",
        "DMLC_PS_ROOT_PORT": str(_free_port()),
        "DMLC_NODE_HOST": "127.0.0.1",
        "DMLC_NUM_WORKER": str(setting.processes),
        "DMLC_NUM_SERVER": str(setting.servers),
        "DMLC_LOCAL": "1" if setting.entry.transport == "ipc" else "0",
        "OMP_NUM_THREADS": "1",
        **dict(setting.env),
    }
    serve = [setting.python, "-c", _SERVE, str(ROOT)]
    roles = ["scheduler", *["server"] * setting.servers]
    helpers = [(serve, {**common, "DMLC_ROLE": role}) for role in roles]
    return _workers(setting, address, {**common, "DMLC_ROLE": "worker"}, *helpers)


def _free_port() -> int:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        return int(listener.getsockname()[1])
