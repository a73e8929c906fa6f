"""KVSTORE_METRICS: metrics of this process for Prometheus.

With a port, a thread answers scrapes; with a path, a thread writes a file for the textfile collector of
node_exporter.
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
from typing import TYPE_CHECKING

from ..atomic_files import atomic_replacement
from ..errors import ConfigError, MissingBackendError, StateFileError
from ..settings.addresses import loopback_address
from ..settings.environment import text_of
from .native._observe import read_own, take_times
from .processes import role_of

if TYPE_CHECKING:
    import socket

    from prometheus_client import CollectorRegistry

log = logging.getLogger("kvstore.metrics")

_PORTS = 256  # that are tried
_EVERY = 5.0  # seconds between two files
_ADDRESS = re.compile(r"(\[[^\]/]+\]|[^:/\[\]]*):([0-9]{1,5})")


_lock = threading.Lock()
_started = False
_listener: socket.socket | None = None  # of the thread that answers scrapes
_file: _MetricsFile | None = None


def start() -> None:
    """Export metrics if the variable is set: before the first store of a process, or before it serves.

    If no port is free, or the address cannot be used, the log says so, and the process continues.

    Raises
    ------
    ConfigError
        The variable is neither ``[HOST]:PORT``, nor a path; or it is one file for several processes.
    MissingBackendError
        prometheus_client is not installed.
    """
    global _started
    if _started:
        return
    with _lock:
        text = text_of("metrics").strip()
        if text and not _started:
            _start_export(check(text))
        _started = True


def update() -> None:
    """Write the file, if there is one, with the present numbers."""
    if _file is not None:
        _file.write()


def _after_fork() -> None:
    """Have no metrics in a child until it makes a store: threads and file are the parent's."""
    global _lock, _started, _listener, _file
    if _listener is not None:
        _listener.close()
    if _file is not None:
        atexit.unregister(_file.close)
    if _listener is not None or _file is not None:
        take_times(0)
    _lock, _started, _listener, _file = threading.Lock(), False, None, None


os.register_at_fork(after_in_child=_after_fork)


def check(text: str) -> tuple[str, int] | str:
    """Return the host and first port, or the path, of a value of KVSTORE_METRICS.

    Raises
    ------
    ConfigError, MissingBackendError
        As `start` does.
    """
    where = _parsed_place(text)
    try:
        importlib.import_module(".openmetrics", __package__)
    except ModuleNotFoundError as missing:
        raise MissingBackendError(
            f"KVSTORE_METRICS needs the module {missing.name!r}; install it: "
            "pip install 'kvstore-train[metrics]'"
        ) from missing
    return where


def _start_export(where: tuple[str, int] | str) -> None:
    global _listener, _file
    from . import openmetrics

    registry = openmetrics.metrics_registry()
    if isinstance(where, str):
        _file = _MetricsFile(registry, where)
    else:
        _listener = _listening_socket(registry, *where)
    if _listener is not None or _file is not None:
        take_times()


def _parsed_place(text: str) -> tuple[str, int] | str:
    """Return host and first port, or a path."""
    match = _ADDRESS.fullmatch(text)
    if match and int(match[2]) < 65536:
        return match[1].strip("[]") or loopback_address(), int(match[2])
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

    return launchers.detect_placement().size > 1 or bool(roles.signs())


def _listening_socket(registry: CollectorRegistry, host: str, port: int) -> socket.socket | None:
    """Answer scrapes at the first free port: each process of a job on one machine has another one."""
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
        return server.socket
    log.error("this process has no metrics: no port of %s from %d to %d is free", host, port, last - 1)
    return None


class _MetricsFile:
    """The file that a thread writes repeatedly, and that is removed at the end of the process."""

    def __init__(self, registry: CollectorRegistry, path: str) -> None:
        self._registry, self._path = registry, os.path.abspath(path)
        self._lock = threading.Lock()
        self._file = "" if os.path.isdir(path) else self._path  # in a folder, the first store gives its name
        self._over = threading.Event()
        self._failed = False
        atexit.register(self.close)
        threading.Thread(target=self._write_repeatedly, name="kvstore-metrics", daemon=True).start()

    def write(self) -> None:
        """Replace the file, if there is a store."""
        from .openmetrics import generate_latest

        with self._lock:
            self._file = self._file or self._file_name()
            if self._over.is_set() or not self._file:
                return
            try:
                with atomic_replacement(self._file) as unfinished:
                    unfinished.write_bytes(generate_latest(self._registry))
                self._failed = False
            except StateFileError as error:
                if not self._failed:  # once, not each time
                    log.error("metrics: %s", error)
                self._failed = True

    def _write_repeatedly(self) -> None:
        while not self._over.wait(_EVERY):
            self.write()

    def _file_name(self) -> str:
        for store in read_own():
            name = f"kvstore-{role_of(store['store'])}-{store['rank']}-{os.getpid()}.prom"
            return os.path.join(self._path, name)
        return ""

    def close(self) -> None:
        """Remove the file."""
        self._over.set()
        with self._lock, contextlib.suppress(OSError):
            if self._file:
                os.unlink(self._file)
