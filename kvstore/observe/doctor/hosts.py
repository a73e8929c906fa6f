"""Other hosts: whether they are reached, their versions and clocks, and the links between them."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import shlex
import subprocess
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any

from kvstore.launch.hosts.remote_hosts import Hosts
from kvstore.launch.process import tied_to

from .far_host import DEADLINE, GREETING, facts
from .findings import Finding

_FIRST_WORD = 60.0  # seconds in which a host must answer at first
_CHECKS = 300.0  # seconds in which it must have run its checks
_SAMPLES = 10
_OFF = 0.1  # seconds that a clock may be off: logs of several hosts can still be read together
_END = 5.0
_QUOTED = 100  # characters of an answer that is not one of ours


class FarHost:
    """A host that answers questions.

    Parameters
    ----------
    name : str
        The host, as the user has named it.
    address : str
        Where other hosts reach it.
    command : sequence of str
        What runs `far_host` there.

    Raises
    ------
    OSError
        The command cannot be started, or nothing answers.
    """

    def __init__(self, name: str, address: str, command: Sequence[str]) -> None:
        self.name, self.address = name, address
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command,
            stdin=pipe,
            stdout=pipe,
            stderr=pipe,
            text=True,
            errors="replace",
            preexec_fn=tied_to(os.getpid()),
        )
        self._lines: queue.Queue[str] = queue.Queue()
        self._said: list[str] = []
        self._threads = [threading.Thread(target=one, daemon=True) for one in (self._read, self._listen)]
        for thread in self._threads:
            thread.start()
        try:
            self._be_greeted()
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, deadline: float = DEADLINE, **more: Any) -> dict[str, Any]:
        """Ask; one of the functions of `far_host`.

        Raises
        ------
        OSError
            The host has said that it failed, or nothing in time.
        """
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **more}) + "\n")
        self._process.stdin.flush()
        line = self._line(time.monotonic() + deadline)
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise OSError(f"it has answered {_quoted(line)}") from None
        if "error" in answer:
            raise OSError(answer["error"])
        return answer

    def close(self) -> None:
        """End it."""
        assert self._process.stdin is not None
        with contextlib.suppress(OSError):
            self._process.stdin.close()
        try:
            self._process.wait(_END)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        for thread in self._threads:
            thread.join(_END)
        for file in (self._process.stdout, self._process.stderr):
            assert file is not None
            file.close()

    def _be_greeted(self) -> None:
        """Read to the greeting, below what a login shell may have written."""
        first = ""
        try:
            while (line := self._line(time.monotonic() + _FIRST_WORD).strip()) != GREETING:
                first = first or line
        except OSError as error:
            raise OSError(f"{error}; it has answered {_quoted(first)}" if first else str(error)) from None

    def _line(self, until: float) -> str:
        try:
            line = self._lines.get(timeout=max(0.0, until - time.monotonic()))
        except queue.Empty:
            raise OSError("it has not answered in time") from None
        if not line:
            self._threads[-1].join(_END)  # what it said last explains it
            last = f": {self._said[-1]}" if self._said else ""
            raise OSError(f"the connection has ended with exit code {self._process.wait()}{last}")
        return line

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line)
        self._lines.put("")

    def _listen(self) -> None:
        assert self._process.stderr is not None
        self._said.extend(line.strip() for line in self._process.stderr if line.strip())


def _quoted(line: str) -> str:
    return repr(line.strip()[:_QUOTED])


def findings(hosts: Hosts) -> Iterator[Finding]:
    """Look at all hosts, then at the links from each one to the next."""
    with contextlib.ExitStack() as stack:
        reached = []
        for host, address in zip(hosts.layout.hosts, hosts.layout.addresses, strict=True):
            try:
                far = FarHost(host.name, address, _command(hosts, host.name))
            except FileNotFoundError as error:
                text = f"there is no command {error.filename!r} on this machine"
                cure = "install it, or name another one (--ssh-command, KVSTORE_SSH)"
                yield Finding(f"host {host.name}", "error", text, cure)
                continue
            except OSError as error:
                yield _unreached(host.name, error)
                continue
            stack.callback(far.close)
            reached.append(far)
            yield from _looked_at(far)
        for one, other in _links(reached):
            yield link(one, other)


def _command(hosts: Hosts, name: str) -> list[str]:
    return [*hosts.ssh, name, f"exec {shlex.quote(hosts.python)} -m {__package__}.far_host"]


def _unreached(name: str, error: OSError) -> Finding:
    cure = (
        "log in there without a password (ssh-copy-id), and install the same kvstore there, in the Python of "
        "--python"
    )
    return Finding(f"host {name}", "error", f"it could not be reached: {error}", cure)


def _looked_at(far: FarHost) -> Iterator[Finding]:
    try:
        yield versions(far)
        yield clock(far)
        for one in far.ask("doctor", _CHECKS)["findings"]:
            if one["level"] != "ok":
                yield Finding(
                    f"host {far.name}", one["level"], f"{one['subject']}: {one['text']}", one["cure"]
                )
    except OSError as error:
        yield _unreached(far.name, error)


def versions(far: FarHost) -> Finding:
    """Compare what is installed on a host with what is installed here."""
    subject, here, there = f"host {far.name}", facts()["versions"], far.ask("facts")
    found = there["versions"]
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    text = f"{text}, {there['processors']} processors"
    if found["kvstore"] != here["kvstore"]:
        text = (
            f"it has kvstore {found['kvstore']}, and this machine {here['kvstore']}: no job can run on both"
        )
        return Finding(subject, "error", text, f"pip install kvstore-train=={here['kvstore']} there")
    others = [name for name in here if found[name].split(".")[:2] != here[name].split(".")[:2]]
    if others:
        differ = ", ".join(f"{name} {here[name]}" for name in others)
        cure = "use the same versions on all hosts, or what a program does may depend on the host"
        return Finding(subject, "warning", f"{text}; this machine has {differ}", cure)
    return Finding(subject, "ok", text)


def clock(far: FarHost) -> Finding:
    """Compare the clock of a host with ours, by the answer that took the shortest time."""
    samples = []
    for _ in range(_SAMPLES):
        begin = time.time_ns()
        theirs = far.ask("clock")["ns"]
        end = time.time_ns()
        samples.append((end - begin, theirs - (begin + end) / 2))
    took, offset = (one * 1e-9 for one in min(samples))
    subject = f"clock of {far.name}"
    text = f"{offset * 1e3:+.1f} ms beside this machine's, within {took / 2 * 1e3:.1f} ms"
    if abs(offset) - took / 2 > _OFF:
        cure = "have all hosts follow one clock: sudo timedatectl set-ntp true, or chrony"
        return Finding(subject, "warning", f"{text}: logs of this job cannot be read side by side", cure)
    return Finding(subject, "ok", text)


def link(one: FarHost, other: FarHost) -> Finding:
    """Measure the way from one host to another."""
    subject = f"{one.name} to {other.name}"
    try:
        port = other.ask("listen")
        found = one.ask("connect", 3 * DEADLINE, address=other.address, **port)
    except OSError as error:
        cure = (
            "allow TCP between the hosts at all ports, or at those of KVSTORE_PORT, and list addresses at "
            "which they reach each other"
        )
        return Finding(subject, "error", f"no connection: {error}", cure)
    there, rate = found["round_trip"] * 1e6, found["bytes_per_second"] / 1e9
    return Finding(subject, "ok", f"a byte there and back {there:.0f} µs, one connection {rate:.2f} GB/s")


def _links(hosts: Sequence[FarHost]) -> list[tuple[FarHost, FarHost]]:
    """Pair each host with the next; two hosts both ways."""
    return [] if len(hosts) < 2 else [(one, hosts[at - 1]) for at, one in enumerate(hosts)]
