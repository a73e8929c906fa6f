"""Processes of this machine: started with their keys and pipes, kept an eye on, let go."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from kvstore.settings import addresses
from kvstore.settings.environment import process_variables
from kvstore.settings.keys import Keys
from kvstore.settings.torch_variables import MasterPort

from .certificates import written
from .child_process import ChildProcess, ProcessRole
from .orphan_reaper import OrphanReaper
from .output import Writes
from .output_relay import OutputRelay
from .process import HostLoss

_MOST = 1 << 10  # bytes of an address


class _Report:
    """The pipe on which a scheduler tells where it is; `theirs` is for it to inherit."""

    def __init__(self) -> None:
        self.ours, self.theirs = os.pipe()
        os.set_blocking(self.ours, False)
        self._text = b""
        self._open = {self.ours, self.theirs}

    def read(self) -> str | None:
        """Take what is there; the address once it is complete. An empty text: none will come."""
        try:
            data = os.read(self.ours, _MOST)
        except BlockingIOError:
            return None
        self._text += data
        line, newline, _ = self._text.partition(b"\n")
        if newline:
            return line.decode(errors="replace")
        return None if data and len(self._text) < _MOST else ""

    def close(self, *ends: int) -> None:
        """Close these ends, or both, where they are open."""
        for descriptor in self._open & set(ends or (self.ours, self.theirs)):
            self._open.remove(descriptor)
            os.close(descriptor)


class LocalHost:
    """Starts processes on this machine.

    Parameters
    ----------
    relay : OutputRelay
        Passes their output on.
    reaper : OrphanReaper
        Kills them if this process is killed.
    prefix : bool
        Mark each line of output with the process it comes from.
    """

    #: Whether processes can be started.
    ready = True

    def __init__(self, relay: OutputRelay, reaper: OrphanReaper, prefix: bool) -> None:
        self._relay, self._reaper, self._prefix = relay, reaper, prefix
        self._reports: set[_Report] = set()
        self._master: MasterPort | None = None

    @property
    def variables(self) -> Mapping[str, str]:
        """What processes find in their environment, unless told otherwise."""
        return process_variables()

    def local(self, rank: int) -> tuple[int, int] | None:
        """Say that all workers are on this machine."""
        return None

    def host(self, rank: int) -> int:
        """Return 0: all workers are on this machine."""
        return 0

    @property
    def master(self) -> tuple[str, int]:
        """Address of worker 0, and a port there that nothing else uses."""
        return addresses.loopback(), self.master_port()

    def master_port(self, ports: str | None = None) -> int:
        """Return a free port, which is held until `close`; `ports` is the value of KVSTORE_PORTS."""
        if self._master is None:
            self._master = MasterPort(ports)
        return self._master.number

    def look(self) -> HostLoss | None:
        """Say that nothing between the processes and us can break."""
        return None

    def start(
        self,
        part: ProcessRole,
        command: Sequence[str],
        environment: Mapping[str, str],
        keys: Keys | None = None,
        told: Callable[[str], None] | None = None,
        sinks: tuple[Writes, Writes] | None = None,
    ) -> ChildProcess:
        """Start a process; `told` is called with the address that it tells, empty where none will come.

        Its lines go to `sinks`, or else to our stdout and stderr.

        Raises
        ------
        ConfigError
            The program cannot be started.
        """
        chosen, descriptors = dict(environment), []
        with contextlib.ExitStack() as stack:
            if told is not None:
                report = self._reported(told)
                descriptors.append(report.theirs)
                command = [*command, "--report-fd", str(report.theirs)]
                stack.callback(report.close, report.theirs)  # it has inherited that
            if keys is not None:
                descriptors.append(written(keys))
                stack.callback(os.close, descriptors[-1])
                chosen["KVSTORE_KEYS_FD"] = str(descriptors[-1])
            mark = part.mark if self._prefix else b""
            child = ChildProcess(
                part, command, chosen, sinks or (self._relay.out, self._relay.err), mark, descriptors
            )
        self._reaper.add(child.group)
        self._relay.add(child.out)
        self._relay.add(child.err)
        return child

    def forget(self, child: Any) -> None:
        """Pass on what is left of the output of a process that is gone."""
        self._reaper.forget(child.group)
        self._relay.drop(child.out)
        self._relay.drop(child.err)

    def close(self) -> None:
        """Close the pipes of those that have told nothing, and let go of the ports."""
        for report in list(self._reports):
            self._close(report)
        if self._master is not None:
            self._master.close()

    def _reported(self, told: Callable[[str], None]) -> _Report:
        report = _Report()

        def look() -> None:
            if (address := report.read()) is not None:
                self._close(report)
                told(address)

        self._reports.add(report)
        self._relay.watch(report.ours, look)
        return report

    def _close(self, report: _Report) -> None:
        self._reports.discard(report)
        self._relay.forget(report.ours)
        report.close()
