"""Hosts on one machine: namespaces for the network, the processes, the name and /dev/shm.

Two hosts are connected by a pair of veth devices without a limit; any number by links of a given speed. Links
without a delay are veth devices to a bridge in its own namespace, with tc's token bucket at both ends. A
delay and losses need netem, which some kernels lack: instead each host has a tun device with a token bucket,
and a process relays between them (`relay.c`). Abstract unix sockets, loopback and process ids of the hosts
differ, so kvstore treats them as machines. Files and processors are the same. Needs unshare, nsenter, ip and
tc, and a kernel that permits namespaces to users.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shlex
import subprocess
import sys
import time
from pathlib import Path
from types import TracebackType

from bench import ROOT
from bench.cases.hosts import Link
from bench.peers.worker import die_with_parent
from bench.runner import compiled

ADDRESSES = tuple(f"10.77.0.{number}" for number in range(1, 17))
LINK = "kvlink"  # the name of the interface of each host
_SETTLE = "hostname kvhost{} && mount -t tmpfs tmpfs /dev/shm && exec sleep infinity"
_HOLD = ("unshare", "--net", "--pid", "--uts", "--fork", "--mount-proc", "--kill-child", "sh", "-c")
_OWN = ("unshare", "--user", "--map-root-user")
_PATIENCE = 10.0  # seconds
_ETHERNET = 1500 / 1538  # bytes of IP in a full frame, of the bytes of the frame on the wire
_BURST = 128 * 1024  # bytes that tc passes at once: two of the kernel's largest pieces
#: Buffers of a connection: enough for the bytes in flight on the longest links.
_BUFFERS = "4096 262144 67108864"
_RELAY = "import sys; sys.path.append(sys.argv.pop(1)); from bench.peers.dist.hosts import main; main()"


class Hosts:
    """The hosts, as a context manager.

    Raises
    ------
    OSError
        They cannot be created here; the message has the commands.
    """

    def __init__(self, count: int = 2, link: Link | None = None, seed: int = 1) -> None:
        self._holders: list[subprocess.Popen[bytes]] = []
        self._relay: subprocess.Popen[bytes] | None = None
        self._count, self._link, self._seed = count, link, seed
        self.first: list[int] = []

    def __enter__(self) -> Hosts:
        try:
            self._hold([*_OWN, *_HOLD, _SETTLE.format(0)])
            for host in range(1, self._count):
                self._hold([*self._within(0, "-U"), *_HOLD, _SETTLE.format(host)])
            self._connect()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def command(self, host: int) -> list[str]:
        """Return the prefix of a command on a host."""
        return self._within(host, "-U", "-m", "-n", "-p", "-u")

    def in_network(self, host: int) -> list[str]:
        """Return the prefix of a command in a host's network, which reaches the other hosts by `shell`."""
        return self._within(host, "-U", "-n")

    def shell(self, within: bool = False) -> str:
        """Return a program for ``--ssh-command``; its last arguments are host and command.

        `within`: it already runs in the hosts' user namespace.
        """
        kinds = ("-m", "-n", "-p", "-u") if within else ("-U", "-m", "-n", "-p", "-u")
        cases = "".join(
            f'{address}) shift; exec {shlex.join(self._within(host, *kinds))} sh -c "$*" ;;\n'
            for host, address in enumerate(self.addresses)
        )
        return f'#!/bin/sh\nwhile [ $# -gt 0 ]; do case "$1" in\n{cases}esac; shift; done\nexit 1\n'

    @property
    def addresses(self) -> tuple[str, ...]:
        return ADDRESSES[: self._count]

    def sent(self) -> list[int]:
        """Return the bytes that each host has sent over its interface so far."""
        return [_sent(pid) for pid in self.first[: self._count]]

    def received(self) -> list[int]:
        """Return the bytes that each host has received over its interface so far."""
        return [_sent(pid, 1) for pid in self.first[: self._count]]

    def relay_cpu(self) -> float:
        """Return the processor seconds of the relay so far; 0 without a relay."""
        return time.clock_gettime((~self._relay.pid << 3) | 2) if self._relay else 0.0

    def close(self) -> None:
        """End all hosts and their processes."""
        if self._relay is not None:
            with self._relay as relay:
                relay.kill()
            self._relay = None
        for holder in reversed(self._holders):
            with holder:  # also closes its pipe
                holder.kill()
        self._holders, self.first = [], []

    def _hold(self, command: list[str]) -> None:
        """Start the first process of a host; the host exists as long as this process."""
        holder = subprocess.Popen(command, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE)
        self._holders.append(holder)
        end = time.monotonic() + _PATIENCE
        while not (found := _sleeper(holder.pid)):
            if holder.poll() is not None or time.monotonic() > end:
                holder.kill()
                said = holder.communicate()[1].decode(errors="replace").strip()
                raise OSError(f"no namespaces: {shlex.join(command)}: {said}")
            time.sleep(0.01)
        self.first.append(found)

    def _within(self, host: int, *namespaces: str) -> list[str]:
        return ["nsenter", "-t", str(self.first[host]), *namespaces, "--preserve-credentials", "--"]

    def _join(self) -> None:
        peer = ("peer", "name", LINK, "netns", str(self.first[1]))
        self._do(0, "ip", "link", "add", LINK, "type", "veth", *peer)
        self._set_up()

    def _connect(self) -> None:
        if self._link is None:
            self._join()
            return
        for host in range(self._count):
            for kind in ("rmem", "wmem"):
                self._do(host, "sysctl", "-q", "-w", f"net.ipv4.tcp_{kind}={_BUFFERS}")
        (self._relayed if self._link.relayed else self._bridged)(self._link)

    def _relayed(self, link: Link) -> None:
        for host in range(self._count):
            self._do(host, "ip", "tuntap", "add", "dev", LINK, "mode", "tun", "vnet_hdr")
        self._start_relay(link)
        self._set_up()
        for host in range(self._count):
            self._limit(host, LINK, link)

    def _bridged(self, link: Link) -> None:
        self._hold([*self._within(0, "-U"), *_HOLD, _SETTLE.format("switch")])
        switch = self._count
        self._do(switch, "ip", "link", "add", "switch", "type", "bridge")
        self._do(switch, "ip", "link", "set", "switch", "up")
        for host in range(self._count):
            port, peer = f"port{host}", ("peer", "name", LINK, "netns", str(self.first[host]))
            self._do(switch, "ip", "link", "add", port, "type", "veth", *peer)
            self._do(switch, "ip", "link", "set", port, "master", "switch", "up")
        self._set_up()
        for host in range(self._count):
            self._limit(host, LINK, link)
            self._limit(switch, f"port{host}", link)

    def _limit(self, host: int, device: str, link: Link) -> None:
        """Limit a device to the speed of its link; only the IP part of full frames counts here."""
        bits = str(round(1e9 * link.gbit * _ETHERNET))
        bucket = ("tbf", "rate", bits, "burst", str(_BURST), "limit", "16mb")
        self._do(host, "tc", "qdisc", "add", "dev", device, "root", *bucket)

    def _start_relay(self, link: Link) -> None:
        code = compiled.build(Path(__file__).parent / "relay.c", "-lm")
        figures = (1e9 * link.gbit, link.delay_ms / 1000, link.loss, self._seed)
        start = [sys.executable, "-c", _RELAY, str(ROOT), str(code), LINK, *map(str, (*figures, *self.first))]
        self._relay = subprocess.Popen(
            [*self._within(0, "-U"), *start],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        )
        assert self._relay.stdout is not None
        ready, _, _ = select.select([self._relay.stdout], [], [], _PATIENCE)
        if not ready or not self._relay.stdout.read(1):
            self._relay.kill()
            said = self._relay.communicate()[1].decode(errors="replace").strip()
            raise OSError(f"no relay between hosts: {said}")

    def _set_up(self) -> None:
        for host, address in enumerate(self.addresses):
            self._do(host, "ip", "link", "set", "lo", "up")
            self._do(host, "ip", "address", "add", f"{address}/24", "dev", LINK)
            self._do(host, "ip", "link", "set", LINK, "up")

    def _do(self, host: int, *words: str) -> None:
        command = [*self._within(host, "-U", "-n"), *words]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        if done.returncode:
            raise OSError(f"no link: {shlex.join(command)}: {done.stderr.strip()}")


def _sleeper(pid: int) -> int:
    """Wait for the descendant that runs `sleep`, and return its id: then its namespaces are complete."""
    with contextlib.suppress(OSError, IndexError, ValueError):
        if Path(f"/proc/{pid}/comm").read_text() == "sleep\n":
            return pid
        return _sleeper(int(Path(f"/proc/{pid}/task/{pid}/children").read_text().split()[0]))
    return 0


def _sent(pid: int, received: int = 0) -> int:
    """Read the counter of a process's network."""
    for line in Path(f"/proc/{pid}/net/dev").read_text().splitlines():
        name, _, counts = line.partition(":")
        if name.strip() == LINK:
            return int(counts.split()[0 if received else 8])
    raise OSError(f"no interface {LINK}")


def main() -> None:
    """Relay until the parent ends.

    Arguments: code, interface, bits a second, delay, loss, seed, and the first process of each host.
    """
    die_with_parent()
    code, name, bits, delay, loss, seed, *pids = sys.argv[1:]
    run = ctypes.CDLL(code).relay_run
    numbers = (ctypes.c_int * len(pids))(*map(int, pids))
    figures = (ctypes.c_double(float(figure)) for figure in (bits, delay, loss))
    error = run(numbers, len(pids), name.encode(), *figures, ctypes.c_uint64(int(seed)), 1)
    raise SystemExit(f"no relay between hosts: {os.strerror(error)}")
