"""The checks of ``kvstore doctor --hosts``: versions and clocks of other hosts, and links between them."""

from __future__ import annotations

import contextlib
import json
import os
import select
import shlex
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from kvstore.launch.hosts.remote_hosts import Hosts
from kvstore.launch.process import tied_to

from .checks import Finding
from .far_host import DEADLINE, GREETING, facts

_GREETED = 60.0  # seconds within which a host must have sent its greeting
_CHECKS = 300.0  # seconds within which it must have run its checks
_SAMPLES = 10
_OFF = 0.1  # seconds of a difference of clocks with which logs of several hosts can still be read together
_END = 5.0
_QUOTED = 100  # characters of an answer of another program

_UNREACHED = (
    "log in there without a password (ssh-copy-id), and install the same kvstore there, in the Python of "
    "--python"
)
_NO_LINK = (
    "allow TCP between the hosts at all ports, or at those of KVSTORE_PORT, and list addresses at which they "
    "reach each other"
)


class FarHost:
    """A host that answers requests; other hosts reach it at `address`. `errors` is a file for its stderr.

    OSError is raised if `command`, which runs `far_host` there, cannot be started, or does not answer.
    """

    def __init__(self, name: str, address: str, command: Sequence[str], errors: BinaryIO) -> None:
        self.name, self.address, self._errors = name, address, errors
        self._received = b""
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(
            command, stdin=pipe, stdout=pipe, stderr=errors, bufsize=0, preexec_fn=tied_to(os.getpid())
        )
        try:
            self._read_greeting()
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, deadline: float = DEADLINE, **more: Any) -> dict[str, Any]:
        """Call a function of `far_host`; OSError if it fails or does not answer within the deadline."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps({"do": what, **more}).encode() + b"\n")
        line = self._line(deadline)
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise OSError(f"it has answered {_quoted(line)}") from None
        if "error" in answer:
            raise OSError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process on the host."""
        with self._process:
            assert self._process.stdin is not None
            self._process.stdin.close()
            try:
                self._process.wait(_END)
            except subprocess.TimeoutExpired:
                self._process.kill()

    def _read_greeting(self) -> None:
        """Read the greeting and the lines before it, which a login shell has written."""
        first = ""
        try:
            while (line := self._line(_GREETED).strip()) != GREETING:
                first = first or line
        except OSError as error:
            raise OSError(f"{error}; it has answered {_quoted(first)}" if first else str(error)) from None

    def _line(self, deadline: float) -> str:
        """Read one line."""
        out, until = self._process.stdout, time.monotonic() + deadline
        assert out is not None
        while b"\n" not in self._received:
            if not select.select([out], [], [], max(0.0, until - time.monotonic()))[0]:
                raise OSError("it has not answered in time")
            data = out.read(1 << 16)
            if not data:
                raise OSError(self._end())
            self._received += data
        line, _, self._received = self._received.partition(b"\n")
        return line.decode(errors="replace")

    def _end(self) -> str:
        """Describe the end of the connection by the last line that the command has written to stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2].strip()
        code = self._process.returncode
        return f"the connection has ended with exit code {code}" + (f": {last}" if last else "")


def _quoted(line: str) -> str:
    return repr(line.strip()[:_QUOTED])


def findings(hosts: Hosts) -> Iterator[Finding]:
    """Check all hosts, then the links from each host to the next."""
    with contextlib.ExitStack() as stack:
        reached: list[FarHost] = []
        for host, address in zip(hosts.layout.hosts, hosts.layout.addresses, strict=True):
            far_host = f"exec {shlex.quote(hosts.python)} -m {__package__}.far_host"
            command, errors = [*hosts.ssh, host.name, far_host], stack.enter_context(tempfile.TemporaryFile())
            try:
                far = FarHost(host.name, address, command, errors)
                stack.callback(far.close)
                reached.append(far)
                yield from _checked(far)
            except FileNotFoundError as error:
                text = f"there is no command {error.filename!r} on this machine"
                cure = "install it, or name another one (--ssh-command, KVSTORE_SSH)"
                yield Finding(f"host {host.name}", "error", text, cure)
            except OSError as error:
                yield Finding(f"host {host.name}", "error", f"it could not be reached: {error}", _UNREACHED)
        pairs = [(one, reached[at - 1]) for at, one in enumerate(reached)]
        yield from (link(one, other) for one, other in pairs if one is not other)


def _checked(far: FarHost) -> Iterator[Finding]:
    yield versions(far)
    yield clock(far)
    for one in far.ask("doctor", _CHECKS)["findings"]:
        if one["level"] != "ok":
            yield Finding(f"host {far.name}", one["level"], f"{one['subject']}: {one['text']}", one["cure"])


def versions(far: FarHost) -> Finding:
    """Compare the versions on a host with those on this machine."""
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
        cure = "use the same versions on all hosts: results may depend on the version"
        return Finding(subject, "warning", f"{text}; this machine has {differ}", cure)
    return Finding(subject, "ok", text)


def clock(far: FarHost) -> Finding:
    """Compare the clock of a host with that of this machine, by the shortest of several round trips."""
    samples = []
    for _ in range(_SAMPLES):
        begin = time.time_ns()
        theirs = far.ask("clock")["ns"]
        end = time.time_ns()
        samples.append((end - begin, theirs - (begin + end) / 2))
    duration, offset = (one * 1e-9 for one in min(samples))
    subject = f"clock of {far.name}"
    text = f"{offset * 1e3:+.1f} ms from this machine's, within {duration / 2 * 1e3:.1f} ms"
    if abs(offset) - duration / 2 > _OFF:
        cure = "have all hosts follow one clock: sudo timedatectl set-ntp true, or chrony"
        return Finding(subject, "warning", f"{text}: logs of this job cannot be read side by side", cure)
    return Finding(subject, "ok", text)


def link(one: FarHost, other: FarHost) -> Finding:
    """Measure the link from one host to another."""
    subject = f"{one.name} to {other.name}"
    try:
        found = one.ask("connect", 3 * DEADLINE, address=other.address, **other.ask("listen"))
    except OSError as error:
        return Finding(subject, "error", f"no connection: {error}", _NO_LINK)
    there, rate = found["round_trip"] * 1e6, found["bytes_per_second"] / 1e9
    return Finding(subject, "ok", f"a byte there and back {there:.0f} µs, one connection {rate:.2f} GB/s")
