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
_Writes = tuple[Write, Write]


class LocalHost:
    """Starts processes on this host; `prefix`: their lines of output begin with their names.

    `writes` get the lines, instead of stdout and stderr. The reaper kills the processes if this process is
    killed.
    """

    #: Whether processes can be started; whether they run on other hosts.
    ready, remote = True, False

    def __init__(
        self, relay: OutputRelay, reaper: OrphanReaper, prefix: bool, writes: _Writes | None = None
    ) -> None:
        self._relay, self._reaper, self.prefix = relay, reaper, prefix
        self._writes = writes or (relay.out.write, relay.err.write)
        self._address_pipes: set[int] = set()
        self._master: MasterPort | None = None

    @property
    def master(self) -> tuple[str, int]:
        """Address of worker 0, and a reserved port there."""
        return addresses.loopback_address(), self.master_port()

    def master_port(self, ports: str | None = None) -> int:
        """Return a free port, reserved until `close`; `ports` is the value of KVSTORE_PORTS."""
        self._master = self._master or MasterPort(ports)
        return self._master.number

    def check_connections(self) -> None:
        """Return None: there is no connection that could be lost."""

    def start_process(self, spec: ProcessSpec) -> ChildProcess:
        """Start a process; ConfigError is raised if the program cannot be started."""
        command, variables, descriptors = [*spec.command], {**spec.environment}, []
        with contextlib.ExitStack() as stack:
            if spec.on_address is not None:
                descriptors.append(self._open_address_pipe(spec.on_address))
                command += ["--report-fd", str(descriptors[-1])]
                stack.callback(os.close, descriptors[-1])  # the process has inherited it
            if spec.keys is not None:
                descriptors.append(write_to_memory(spec.keys))
                stack.callback(os.close, descriptors[-1])
                variables["KVSTORE_KEYS_FD"] = str(descriptors[-1])
            mark = spec.part.output_prefix if self.prefix else b""
            child = ChildProcess(spec.part, command, variables, self._writes, mark, descriptors)
        self._reaper.add_group(child.group)
        self._relay.add_stream(child.out)
        self._relay.add_stream(child.err)
        return child

    def forget_process(self, process: SupervisedProcess) -> None:
        """Write the rest of the output of a process that is gone."""
        if isinstance(process, ChildProcess):
            self._reaper.forget_group(process.group)
            self._relay.drop_stream(process.out)
            self._relay.drop_stream(process.err)

    def close(self) -> None:
        """Close open pipes, and release the reserved port."""
        for pipe in list(self._address_pipes):
            self._close_address_pipe(pipe)
        if self._master is not None:
            self._master.close()

    def _open_address_pipe(self, report: Callable[[str], None]) -> int:
        """Return the writing end of a pipe; `report` gets the line that a scheduler writes to it."""
        reader, writer = os.pipe()
        text = bytearray()

        def read() -> None:
            text.extend(data := os.read(reader, _MOST))
            line, newline, _ = text.partition(b"\n")
            if newline or not data or len(text) >= _MOST:
                self._close_address_pipe(reader)
                report(line.decode(errors="replace") if newline else "")

        self._address_pipes.add(reader)
        self._relay.watch_descriptor(reader, read)
        return writer

    def _close_address_pipe(self, reader: int) -> None:
        self._address_pipes.remove(reader)
        self._relay.stop_watching(reader)
        os.close(reader)
