"""Starts the processes of each peer of the parameter server."""

from __future__ import annotations

import contextlib
from pathlib import Path

from bench.cases.dist import APART, ENTRIES, Entry
from bench.peers.dist.base import PAIR
from bench.peers.dist.hosts import ADDRESSES, LINK, Hosts
from bench.peers.group.driver import Group
from bench.peers.group.launch import Command, Launch, mxnet, workers
from bench.peers.group.link import HOST
from bench.peers.setting import Setting
from bench.runner import compiled, machine

_HERE = Path(__file__).parent
#: The C files of engines; the workers of a server that sums also use floor.c.
_LIMITS = {
    "zmq-c": ("zmq_sum.c",),
    "sockets-c": ("socket_sum.c", "floor.c"),
    "rows-c": ("row_update.c",),
    "memcpy-c": ("memory_sum.c",),
    "cross-sum": ("crossing_sum.c", "floor.c"),
}
#: Seconds after which kvstore logs a wait: before the timeout of the bench.
_TIMEOUT = "100"
#: malloc keeps large blocks, so that their pages are not returned and faulted again for each message.
_KEEP = {
    "MALLOC_MMAP_THRESHOLD_": str(1 << 30),
    "MALLOC_TRIM_THRESHOLD_": str(1 << 30),
    "MALLOC_TOP_PAD_": str(1 << 26),
}
#: TCP between hosts, shared memory within one.
_OPEN_MPI = (
    *("--allow-run-as-root", "--oversubscribe", "--bind-to", "none", "--map-by", "slot"),
    *("--prtemca", "plm_ssh_agent", "{shell}", "--prtemca", "prte_if_include", "{link}"),
    *("--mca", "mpi_yield_when_idle", "{idle}"),
    *("--mca", "pml", "ob1", "--mca", "btl", "self,sm,tcp", "--mca", "btl_tcp_if_include", "{link}"),
)
_MPICH = ("-launcher", "ssh", "-launcher-exec", "{shell}", "-iface", "{link}")
#: MPICH's engine identifies hosts by the kernel, which is the same for all hosts: it must use only TCP.
_UCX = {"UCX_TLS": "tcp,self", "UCX_NET_DEVICES": LINK}
#: It reads the interfaces from /sys, which belongs to the network namespace of its mount.
_OWN_SYS = ("unshare", "--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh")
_WHERE = {"openmpi": "--host", "mpich": "-hosts"}


class DistGroup(Group):
    """Workers and their servers, for all cases of a job."""

    @property
    def entry(self) -> Entry:
        return ENTRIES[self.setting.name]

    def column(self, variant: str) -> str:
        """Return the column of a variant; push and pull in two calls have their own."""
        return super().column(variant) + (APART if variant.startswith(PAIR) else "")

    def plan(self, address: str, folder: str) -> Launch:
        entry = self.entry
        if entry.engine == "ours":
            return _ours(self.setting, entry, self._worker(address))
        if entry.engine == "mxnet":
            return mxnet(self.setting, address, DMLC_LOCAL="1" if entry.transport == "ipc" else "0")
        return workers(self.setting, address, {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", **_KEEP})

    def _worker(self, address: str) -> list[str]:
        return self.setting.command("worker", address, self.setting.processes)

    def codes(self) -> tuple[Path, Path]:
        limits, *more = _LIMITS.get(self.entry.engine, ("floor.c",))
        built = compiled.build(_HERE / limits, *(str(_HERE / name) for name in more))
        return compiled.build(_HERE.parent / "group" / "meet.c"), built

    def beside(self) -> list[int]:
        """Return scheduler, servers and launcher: all descendants other than workers."""
        started = [process.pid for process in (*self.processes, *self.helpers)]
        return sorted({pid for one in started for pid in _family(one)} - set(self.workers))


class HostsGroup(DistGroup):
    """The same on several hosts, with equal numbers of workers, and a server each."""

    hosts: Hosts

    def plan(self, address: str, folder: str) -> Launch:
        engine = self.entry.engine
        if engine == "ours":
            return self._ours(self._worker(address), folder)
        if engine == "mpi":
            return self._mpi(address, folder)
        if engine == "mxnet":
            return self._mxnet(address)
        env = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": LINK, **_KEEP}
        return self._spread(workers(self.setting, address, env))

    def run(self, variant: str, repeats: int) -> list[float]:
        before = self.hosts.sent(), self.hosts.received()
        times = super().run(variant, repeats)
        after = self.hosts.sent(), self.hosts.received()
        both = (now - then for way in zip(after, before, strict=True) for now, then in zip(*way, strict=True))
        self.moved = max(both) / repeats
        return times

    @property
    def _each(self) -> int:
        """Return the number of workers of a host."""
        return self.setting.processes // len(self.hosts.addresses)

    def _there(self, command: Command, host: int) -> Command:
        """Return a command that runs on a host."""
        words, env = command
        return [*self.hosts.command(host), *words], {**env, HOST: ADDRESSES[host]}

    def _spread(self, launch: Launch) -> Launch:
        """Place the workers on the hosts, equal numbers on each."""
        launch.ranks = [self._there(rank, number // self._each) for number, rank in enumerate(launch.ranks)]
        return launch

    def _shell(self, folder: str, within: bool = False) -> str:
        shell = Path(folder) / "shell"
        shell.write_text(self.hosts.shell(within))
        shell.chmod(0o700)
        return str(shell)

    def _ours(self, worker: list[str], folder: str, *options: str) -> Launch:
        where = ",".join(f"{one}:{self._each}" for one in self.hosts.addresses)
        shell = self._shell(folder)
        there = ("--hosts", where, "--ssh-command", shell, "--insecure")
        return _ours(self.setting, self.entry, worker, *there, *options)

    def _mxnet(self, address: str) -> Launch:
        launch = mxnet(self.setting, address, DMLC_PS_ROOT_URI=ADDRESSES[0], DMLC_INTERFACE=LINK)
        for host, (_, env) in zip((0, *range(len(self.hosts.addresses))), launch.helpers, strict=True):
            env["DMLC_NODE_HOST"] = ADDRESSES[host]
        for number, (_, env) in enumerate(launch.ranks):
            env["DMLC_NODE_HOST"] = ADDRESSES[number // self._each]
        scheduler, *servers = launch.helpers
        launch.helpers = [self._there(scheduler, 0)]
        launch.helpers += [self._there(server, host) for host, server in enumerate(servers)]
        return self._spread(launch)

    def _mpi(self, address: str, folder: str) -> Launch:
        """Start ``mpiexec`` in the network of the first host, with a program in place of ssh."""
        n, each, hosts = self.setting.processes, self._each, self.hosts.addresses
        program, shell = str(Path(self.setting.python).parent / "mpiexec"), self._shell(folder, within=True)
        idle = int(n > len(machine.cpus()))  # a spinning worker keeps a core from the other workers
        options = _OPEN_MPI if self.setting.name == "openmpi" else _MPICH
        words = [word.format(shell=shell, link=LINK, idle=idle) for word in options]
        where = ",".join(f"{host}:{each}" for host in hosts)
        worker = [*_OWN_SYS, *self._worker(address)]
        command = [*self.hosts.in_network(0), program, *words, "-n", str(n), _WHERE[self.setting.name], where]
        return Launch(n, [([*command, *worker], {"OMP_NUM_THREADS": "1", **_UCX})])


def _family(pid: int) -> list[int]:
    """Return a process and all its descendants."""
    found = [pid]
    with contextlib.suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            for child in (task / "children").read_text().split():
                found += _family(int(child))
    return found


def _ours(setting: Setting, entry: Entry, worker: list[str], *options: str) -> Launch:
    """Start scheduler, servers and workers by the launcher, as a user would."""
    n = setting.processes
    command = [setting.python, "-m", "kvstore.launch", "run", "-n", str(n), "-s", str(setting.servers)]
    command += ["--transport", entry.transport, *(["--secure"] if entry.secure else [])]
    env = {"KVSTORE_TIMEOUT": _TIMEOUT, **dict(setting.env)}
    return Launch(n, [([*command, *options, "--", *worker], env)])
