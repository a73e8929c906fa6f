"""Processes of this host: `kvstore run` starts them here, and so does its agent on another host."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable

from kvstore.settings import addresses
from kvstore.settings.torch_variables import MasterPort

from .certificates import write_to_memory
from .child_process import ChildProcess, ProcessSpec, SupervisedProcess
from .orphan_reaper import OrphanReaper
from .output import Write
from .output_relay import OutputRelay

_MOST = 1 << 10  # bytes of an address


class _AddressPipe:
    """The pipe on which a scheduler reports its address; it inherits `writer`."""

    def __init__(self, relay: OutputRelay, report: Callable[[str], None]) -> None:
        self._reader, self.writer = os.pipe()
        self._relay, self._report = relay, report
        self._text = b""
        self._open = True
        relay.watch(self._reader, self._read)

    def _read(self) -> None:
        data = os.read(self._reader, _MOST)
        self._text += data
        line, newline, _ = self._text.partition(b"\n")
        if newline or not data or len(self._text) >= _MOST:
            self.close()
            self._report(line.decode(errors="replace") if newline else "")

    def close(self) -> None:
        """Close the reading end, if it is open."""
        if self._open:
            self._open = False
            self._relay.forget(self._reader)
            os.close(self._reader)


class LocalHost:
    """Starts processes on this host; `prefix`: their lines of output begin with their names.

    The reaper kills them if this process is killed.
    """

    #: Whether processes can be started; whether they run on other hosts.
    ready, remote = True, False

    def __init__(self, relay: OutputRelay, reaper: OrphanReaper, prefix: bool) -> None:
        self._relay, self._reaper, self._prefix = relay, reaper, prefix
        self._pipes: list[_AddressPipe] = []
        self._master: MasterPort | None = None

    @property
    def master(self) -> tuple[str, int]:
        """Address of worker 0, and a reserved port there."""
        return addresses.loopback_address(), self.master_port()

    def master_port(self, ports: str | None = None) -> int:
        """Return a free port, reserved until `close`; `ports` is the value of KVSTORE_PORTS."""
        self._master = self._master or MasterPort(ports)
        return self._master.number

    def look(self) -> None:
        """Return None: there is no connection that could be lost."""

    def start(self, spec: ProcessSpec, writes: tuple[Write, Write] | None = None) -> ChildProcess:
        """Start a process; `writes` get the lines of its output, instead of stdout and stderr.

        ConfigError is raised if the program cannot be started.
        """
        command, variables, descriptors = [*spec.command], {**spec.environment}, []
        writes = writes or (self._relay.out.write, self._relay.err.write)
        with contextlib.ExitStack() as stack:
            if spec.on_address is not None:
                self._pipes.append(_AddressPipe(self._relay, spec.on_address))
                descriptors.append(self._pipes[-1].writer)
                command += ["--report-fd", str(descriptors[-1])]
                stack.callback(os.close, descriptors[-1])  # the process has inherited it
            if spec.keys is not None:
                descriptors.append(write_to_memory(spec.keys))
                stack.callback(os.close, descriptors[-1])
                variables["KVSTORE_KEYS_FD"] = str(descriptors[-1])
            mark = spec.part.mark if self._prefix else b""
            child = ChildProcess(spec.part, command, variables, writes, mark, descriptors)
        self._reaper.add(child.group)
        self._relay.add(child.out)
        self._relay.add(child.err)
        return child

    def forget(self, process: SupervisedProcess) -> None:
        """Write the rest of the output of a process that is gone."""
        if isinstance(process, ChildProcess):
            self._reaper.forget(process.group)
            self._relay.drop(process.out)
            self._relay.drop(process.err)

    def close(self) -> None:
        """Close open pipes, and release the reserved port."""
        for pipe in self._pipes:
            pipe.close()
        if self._master is not None:
            self._master.close()
