"""KVSTORE_LOG: every process of a job writes its log to stderr.

Loggers are those of the standard library; the root logger and the handlers of the application stay as they
are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import Protocol

from ..errors import ConfigError, nearest
from ..settings.environment import text_of
from ..settings.launchers import detect

#: All loggers of the library, each with those below it.
LOGGERS = (
    "kvstore",
    "kvstore.byteps",
    "kvstore.config",
    "kvstore.device",
    "kvstore.dist",
    "kvstore.engine",
    "kvstore.horovod",
    "kvstore.launch",
    "kvstore.local",
    "kvstore.metrics",
    "kvstore.mpi",
    "kvstore.mxnet",
    "kvstore.nccl",
    "kvstore.ps",
    "kvstore.ps.config",
    "kvstore.roles",
    "kvstore.server",
    "kvstore.shared",
    "kvstore.wire",
)
#: Seconds of a wait for other processes that is logged as slow when it has ended.
SLOW = 1.0

_LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}
_started = threading.Event()
_process = ""  # its name
_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(who)s: %(message)s"


class LogStream(Protocol):
    """A stream that receives lines."""

    def write(self, text: str, /) -> object:
        """Write a line."""

    def flush(self) -> object:
        """Write buffered lines."""


class _Formatter(logging.Formatter):
    """Adds the name of the process."""

    def format(self, record: logging.LogRecord) -> str:
        record.who = _process
        return super().format(record)


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether no handler of the application writes a record: no line is written twice."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        for handler in logger.handlers:
            others = not isinstance(handler.formatter, _Formatter) and _writes(handler)
            if others and record.levelno >= handler.level:
                return False
        logger = logger.parent if logger.propagate else None
    return True


def start(who: str = "", stream: LogStream | None = None) -> None:
    """Configure the loggers at the first call of a process, if the variable is set.

    Parameters
    ----------
    who : str
        Name of this process, as `introduce` takes it.
    stream : LogStream, optional
        The stream that receives the lines; None for stderr.

    Raises
    ------
    ConfigError
        The variable has another form than ``LEVEL[:LOGGER,...]``.
    """
    if not _started.is_set():
        _configure(stream)
        _started.set()
    if who or not _process:
        introduce(who or _launched_as())


def _configure(stream: LogStream | None) -> None:
    text = text_of("log").strip()
    if not text:
        return
    level, names = parsed(text)
    for name in names:
        logging.getLogger(name).setLevel(level)
    ours = logging.getLogger("kvstore")
    if not any(_writes(one) for one in ours.handlers):
        handler = logging.StreamHandler(stream)
        handler.addFilter(_is_ours)
        handler.setFormatter(_Formatter(_FORMAT, "%H:%M:%S"))
        ours.addHandler(handler)


def introduce(who: str) -> None:
    """Name this process in its lines from now on: ``worker 2``."""
    global _process
    _process = who


def name_of_process() -> str:
    """Return the name of this process."""
    return _process or f"process {os.getpid()}"


def _launched_as() -> str:
    """Name this process by its launcher, until its store knows its rank."""
    with contextlib.suppress(ConfigError):
        place = detect()
        if place.launcher != "none":
            return f"worker {place.rank}"
    return f"process {os.getpid()}"


def parsed(text: str) -> tuple[int, list[str]]:
    """Return level and loggers of a value of KVSTORE_LOG.

    Raises
    ------
    ConfigError
        It has another form.
    """
    word, colon, rest = text.partition(":")
    names = [name.strip() for name in rest.split(",")] if colon else ["kvstore"]
    if word.strip().lower() not in _LEVELS:
        raise ConfigError(
            f"KVSTORE_LOG={text!r}: {word!r} is no level; allowed are info and debug, also with loggers, as "
            "in debug:kvstore.ps,kvstore.shared"
        )
    for name in names:
        if name not in LOGGERS:
            raise ConfigError(
                f"KVSTORE_LOG={text!r}: {name!r} is no logger{nearest(name, LOGGERS)}; allowed are "
                f"{', '.join(LOGGERS)}"
            )
    return _LEVELS[word.strip().lower()], names


def _writes(handler: logging.Handler) -> bool:
    return not isinstance(handler, logging.NullHandler)
