"""The checks of ``kvstore doctor --hosts``: versions and clocks of other hosts, and links between them."""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import subprocess
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from typing import Any, BinaryIO

from kvstore.launch.hosts.remote_hosts import Hosts
from kvstore.launch.process import tied_to

from .checks import CheckFinding, error, ok, warning
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
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors,
            text=True, errors="replace", preexec_fn=tied_to(os.getpid()),
        )  # fmt: skip
        try:
            self._read_greeting()
        except BaseException:
            self.close()
            raise

    def ask(self, what: str, deadline: float = DEADLINE, **more: Any) -> dict[str, Any]:
        """Call a function of `far_host`; OSError if it fails or does not answer within the deadline."""
        assert self._process.stdin is not None
        print(json.dumps({"do": what, **more}), file=self._process.stdin, flush=True)
        line = self._read_line(deadline)
        try:
            answer: dict[str, Any] = json.loads(line)
        except ValueError:
            raise OSError(f"it has answered {_quoted_line(line)}") from None
        if "error" in answer:
            raise OSError(answer["error"])
        return answer

    def close(self) -> None:
        """End the process on the host."""
        with contextlib.suppress(BrokenPipeError), self._process:
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
            while (line := self._read_line(_GREETED).strip()) != GREETING:
                first = first or line
        except OSError as failure:
            raise OSError(
                f"{failure}; it has answered {_quoted_line(first)}" if first else str(failure)
            ) from None

    def _read_line(self, deadline: float) -> str:
        """Read one line; a process that does not write it within the deadline is killed."""
        assert self._process.stdout is not None
        timer, until = threading.Timer(deadline, self._process.kill), time.monotonic() + deadline
        timer.start()
        line = self._process.stdout.readline()
        timer.cancel()
        if not line:
            raise OSError("it has not answered in time" if time.monotonic() > until else self._end_text())
        return line

    def _end_text(self) -> str:
        """Describe the end of the connection by the last line that the command has written to stderr."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END)
        self._errors.seek(0)
        last = self._errors.read().decode(errors="replace").strip().rpartition("\n")[2].strip()
        code = self._process.returncode
        return f"the connection has ended with exit code {code}" + (f": {last}" if last else "")


def _quoted_line(line: str) -> str:
    return repr(line.strip()[:_QUOTED])


def check_hosts(hosts: Hosts) -> Iterator[CheckFinding]:
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
                yield from _check_host(far)
            except FileNotFoundError as missing:
                text = f"there is no command {missing.filename!r} on this machine"
                cure = "install it, or name another one (--ssh-command, KVSTORE_SSH)"
                yield CheckFinding(f"host {host.name}", "error", text, cure)
            except OSError as failure:
                text = f"it could not be reached: {failure}"
                yield CheckFinding(f"host {host.name}", "error", text, _UNREACHED)
        pairs = [(one, reached[at - 1]) for at, one in enumerate(reached)]
        yield from (check_link(one, other) for one, other in pairs if one is not other)


def _check_host(far: FarHost) -> Iterator[CheckFinding]:
    subject = f"host {far.name}"
    yield compare_versions(far)._replace(subject=subject)
    yield compare_clock(far)._replace(subject=f"clock of {far.name}")
    for one in far.ask("doctor", _CHECKS)["findings"]:
        if one["level"] != "ok":
            yield CheckFinding(subject, one["level"], f"{one['subject']}: {one['text']}", one["cure"])


def compare_versions(far: FarHost) -> CheckFinding:
    """Compare the versions on a host with those on this machine."""
    here, there = facts()["versions"], far.ask("facts")
    found = there["versions"]
    if found["kvstore"] != here["kvstore"]:
        text = f"it has kvstore {found['kvstore']}, and this machine {here['kvstore']}"
        cure = f"pip install kvstore-train=={here['kvstore']} there"
        return error(f"{text}: no job can run on both", cure)
    text = ", ".join(f"{name} {version}" for name, version in found.items())
    text = f"{text}, {there['processors']} processors"
    others = [name for name in here if found[name].split(".")[:2] != here[name].split(".")[:2]]
    if others:
        differ = ", ".join(f"{name} {here[name]}" for name in others)
        cure = "use the same versions on all hosts: results may depend on the version"
        return warning(f"{text}; this machine has {differ}", cure)
    return ok(text)


def compare_clock(far: FarHost) -> CheckFinding:
    """Compare the clock of a host with that of this machine, by the shortest of several round trips."""
    samples = []
    for _ in range(_SAMPLES):
        begin = time.time_ns()
        theirs = far.ask("clock")["ns"]
        end = time.time_ns()
        samples.append((end - begin, theirs - (begin + end) / 2))
    duration, offset = (one * 1e-9 for one in min(samples))
    text = f"{offset * 1e3:+.1f} ms from this machine's, within {duration / 2 * 1e3:.1f} ms"
    if abs(offset) - duration / 2 > _OFF:
        cure = "have all hosts follow one clock: sudo timedatectl set-ntp true, or chrony"
        return warning(f"{text}: logs of this job cannot be read side by side", cure)
    return ok(text)


def check_link(one: FarHost, other: FarHost) -> CheckFinding:
    """Measure the link from one host to another."""
    subject = f"{one.name} to {other.name}"
    try:
        found = one.ask("connect", 3 * DEADLINE, address=other.address, **other.ask("listen"))
    except OSError as failure:
        return CheckFinding(subject, "error", f"no connection: {failure}", _NO_LINK)
    there, rate = found["round_trip"] * 1e6, found["bytes_per_second"] / 1e9
    return CheckFinding(
        subject, "ok", f"a byte there and back {there:.0f} µs, one connection {rate:.2f} GB/s"
    )
