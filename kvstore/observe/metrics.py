"""Metrics of this process for Prometheus, where KVSTORE_METRICS asks for them.

`start` reads the variable, when a process makes its first store or begins to serve. With a port a thread
answers scrapes; with a path a thread writes a file for the textfile collector of node_exporter.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import importlib
import logging
import os
import re
import threading
from typing import TYPE_CHECKING, Protocol

from ..errors import ConfigError, MissingBackendError, StateFileError
from ..files import replacing
from ..settings.addresses import loopback
from ..settings.variables import text_of
from .counters import role_of
from .native._observe import read_own, take_times

if TYPE_CHECKING:
    import socket

    from prometheus_client import CollectorRegistry

log = logging.getLogger("kvstore.metrics")

_PORTS = 256  # that are tried
_EVERY = 5.0  # seconds between two files
_ADDRESS = re.compile(r"(\[[^\]/]+\]|[^:/\[\]]*):([0-9]{1,5})")


class _Exporter(Protocol):
    """What shows the metrics of this process."""

    def update(self) -> None:
        """Show what there is now, if it does not do so anyway."""

    def forget(self) -> None:
        """Let go of what belongs to the parent, in a process that was forked."""


class _State:
    """What this process has made of the variable."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.started = False
        self.exporter: _Exporter | None = None


_state = _State()


def start() -> None:
    """Do what KVSTORE_METRICS says, at the first call of a process.

    Where no port is free, or nothing can be listened at, the log says so, and the process goes on.

    Raises
    ------
    ConfigError
        The variable is neither ``[HOST]:PORT``, nor a path; or it is one file for several processes.
    MissingBackendError
        prometheus_client is not installed.
    """
    if _state.started:
        return
    with _state.lock:
        text = text_of("metrics").strip()
        if text and not _state.started:
            _state.exporter = _exporter(text)
        if _state.exporter is not None:
            take_times()
        _state.started = True


def update() -> None:
    """Have the file, if there is one, show the present numbers."""
    if _state.exporter is not None:
        _state.exporter.update()


def _forget() -> None:
    """Be a process without metrics after a fork, until it makes a store."""
    global _state
    before, _state = _state, _State()
    if before.exporter is not None:
        before.exporter.forget()
        take_times(0)


os.register_at_fork(after_in_child=_forget)


def check(text: str) -> tuple[str, int] | str:
    """Return where a value of KVSTORE_METRICS wants the metrics: host and first port, or a path.

    Raises
    ------
    ConfigError, MissingBackendError
        As `start` does.
    """
    where = _place(text)
    try:
        importlib.import_module(".openmetrics", __package__)
    except ModuleNotFoundError as missing:
        raise MissingBackendError(
            f"KVSTORE_METRICS needs the module {missing.name!r}; install it: "
            "pip install 'kvstore-train[metrics]'"
        ) from missing
    return where


def _exporter(text: str) -> _Exporter | None:
    where = check(text)
    from . import openmetrics

    made = openmetrics.registry()
    return _FileExporter(made, where) if isinstance(where, str) else _http_exporter(made, *where)


def _place(text: str) -> tuple[str, int] | str:
    """Return host and first port, or a path."""
    match = _ADDRESS.fullmatch(text)
    if match and int(match[2]) < 65536:
        return match[1].strip("[]") or loopback(), int(match[2])
    path = os.path.expanduser(text)
    if path.endswith(".prom") and _has_others():
        raise ConfigError(
            f"KVSTORE_METRICS={text!r} is one file, and this job has several processes: name a folder"
        )
    if path.endswith(".prom") or os.path.isdir(path):
        return path
    raise ConfigError(
        f"KVSTORE_METRICS={text!r} is no [HOST]:PORT such as :9400, no folder that is there, and no file "
        "whose name ends with .prom"
    )


def _has_others() -> bool:
    """Whether the job of this process has other processes."""
    from ..settings import launchers, roles

    return launchers.detect().size > 1 or bool(roles.signs())


def _http_exporter(registry: CollectorRegistry, host: str, port: int) -> _Exporter | None:
    """Listen at the first port that is free, as the processes of a job on one machine do."""
    from .openmetrics import start_http_server

    last = min(port + _PORTS, 65536) if port else 1
    for number in range(port, last):
        try:
            server, _ = start_http_server(number, host, registry)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                continue
            log.error("this process has no metrics: cannot listen at %s, port %d: %s", host, number, error)
            return None
        shown = f"[{host}]" if ":" in host else host
        log.info("metrics of this process are at http://%s:%d/metrics", shown, server.server_port)
        return _HttpExporter(server.socket)
    log.error("this process has no metrics: no port of %s from %d to %d is free", host, port, last - 1)
    return None


class _HttpExporter:
    """Answers scrapes, in a thread that ends with the process."""

    def __init__(self, listener: socket.socket) -> None:
        self._listener = listener

    def update(self) -> None:
        """Do nothing: each scrape reads the counters."""

    def forget(self) -> None:
        """Close the port in this process, which has no thread that would answer."""
        self._listener.close()


class _FileExporter:
    """Writes a file again and again, in a thread that ends with the process, and then removes it."""

    def __init__(self, registry: CollectorRegistry, path: str) -> None:
        self._registry, self._path = registry, os.path.abspath(path)
        self._lock = threading.Lock()
        #: In a folder it is named after the first store.
        self._file = "" if os.path.isdir(path) else self._path
        self._over = threading.Event()
        self._failed = False
        atexit.register(self._close)
        threading.Thread(target=self._run, name="kvstore-metrics", daemon=True).start()

    def update(self) -> None:
        """Replace the file, if there is a store."""
        with self._lock:
            if self._over.is_set() or not self._named():
                return
            try:
                self._write()
                self._failed = False
            except StateFileError as error:
                if not self._failed:  # once, not each time
                    log.error("metrics: %s", error)
                self._failed = True

    def forget(self) -> None:
        """Leave the file to the parent."""
        atexit.unregister(self._close)

    def _run(self) -> None:
        while not self._over.wait(_EVERY):
            self.update()

    def _named(self) -> bool:
        stores = read_own()
        if stores and not self._file:
            name = f"kvstore-{role_of(stores[0])}-{stores[0]['rank']}-{os.getpid()}.prom"
            self._file = os.path.join(self._path, name)
        return bool(self._file)

    def _write(self) -> None:
        from .openmetrics import generate_latest

        with replacing(self._file) as beside:
            beside.write_bytes(generate_latest(self._registry))

    def _close(self) -> None:
        self._over.set()
        with self._lock, contextlib.suppress(OSError):
            if self._file:
                os.unlink(self._file)
