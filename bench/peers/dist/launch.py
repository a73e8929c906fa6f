"""How the processes of each peer of the parameter server are started."""

from __future__ import annotations

import contextlib
from pathlib import Path

from bench.cases.dist import APART, ENTRIES
from bench.peers.dist.base import PAIR
from bench.peers.dist.hosts import ADDRESSES, LINK, Hosts
from bench.peers.group.driver import Group
from bench.peers.group.launch import Launch, mxnet, workers
from bench.peers.group.link import HOST
from bench.peers.process import Setting
from bench.runner import compiled

_HERE = Path(__file__).parent
#: C of the engines that have some of their own; what floor.c has, the workers of a server that sums have, too.
_LIMITS = {"zmq-c": ("zmq_sum.c",), "sockets-c": ("socket_sum.c", "floor.c"), "memcpy-c": ("memory_sum.c",)}
#: Seconds after which our store says for whom it waits: before the bench loses patience.
_TIMEOUT = "100"
#: malloc keeps large blocks instead of giving their pages back, to be touched anew for the next message.
_KEEP = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 26),
}


class DistGroup(Group):
    """Workers, and whatever serves them; they live through all cases of a job."""

    def column(self, variant: str) -> str:
        """Push and pull in two calls have a column of their own."""
        return self.setting.name + (APART if variant.startswith(PAIR) else "")

    def plan(self, address: str, folder: str) -> Launch:
        entry = ENTRIES[self.setting.name]
        if entry.engine == "ours":
            return _ours(self.setting, address)
        if entry.engine == "mxnet":
            return mxnet(self.setting, address, DMLC_LOCAL="1" if entry.transport == "ipc" else "0")
        return workers(self.setting, address, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **_KEEP})

    def codes(self) -> tuple[Path, Path]:
        limits, *more = _LIMITS.get(ENTRIES[self.setting.name].engine, ("floor.c",))
        built = compiled.build(_HERE / limits, *(str(_HERE / name) for name in more))
        return compiled.build(_HERE.parent / "group" / "meet.c"), built

    def beside(self) -> list[int]:
        """Return scheduler, servers, launcher: all descendants that are not workers."""
        started = [process.pid for process in (*self.processes, *self.helpers)]
        return sorted({pid for one in started for pid in _family(one)} - set(self.workers))


class HostsGroup(DistGroup):
    """The same with a worker and a server on each of two hosts."""

    hosts: Hosts

    def plan(self, address: str, folder: str) -> Launch:
        if ENTRIES[self.setting.name].engine == "ours":
            shell = Path(folder) / "shell"
            shell.write_text(self.hosts.shell())
            shell.chmod(0o700)
            where = ",".join(f"{one}:1" for one in ADDRESSES)
            return _ours(self.setting, address, "--hosts", where, "--ssh-command", str(shell), "--insecure")
        launch = workers(self.setting, address, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK, **_KEEP})
        launch.ranks = [
            ([*self.hosts.command(host), *command], {**own, HOST: ADDRESSES[host]})
            for host, (command, own) in enumerate(launch.ranks)
        ]
        return launch


def _family(pid: int) -> list[int]:
    """Return a process and all that it started, and they in turn."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _family(int(child))
    return found


def _ours(setting: Setting, address: str, *options: str) -> Launch:
    """Let the launcher start the scheduler, the servers and the workers, as a user would."""
    entry, n = ENTRIES[setting.name], setting.processes
    command = [setting.python, "-m", "kvstore.launch", "run", "-n", str(n), "-s", str(setting.servers)]
    command += ["--transport", entry.transport, *(["--secure"] if entry.secure else [])]
    env = {"KVSTORE_TIMEOUT": _TIMEOUT, **dict(setting.env)}
    worker = setting.command("group.worker", address, n)
    return Launch(n, [([*command, *options, "--", *worker], env)])
