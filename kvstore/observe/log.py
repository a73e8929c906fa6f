"""KVSTORE_LOG: every process of a job writes its log to stderr.

Loggers are those of the standard library; the root logger and the handlers of the application stay as they
are.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING

from ..errors import ConfigError, nearest
from ..settings.environment import text_of
from ..settings.launchers import detect_placement

if TYPE_CHECKING:
    from _typeshed import SupportsWrite

_BELOW = (
    *("byteps", "config", "device", "dist", "engine", "horovod", "launch", "local", "metrics", "mpi"),
    *("mxnet", "nccl", "ps", "ps.config", "roles", "server", "shared", "wire"),
)
#: All loggers of the library, each with those below it.
LOGGERS = ("kvstore", *(f"kvstore.{name}" for name in _BELOW))
#: Seconds of a wait for other processes that is logged as slow when it has ended.
SLOW = 1.0

_LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}
_started = threading.Event()
_process = ""  # its name
_handler: logging.Handler | None = None
_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(processName)s: %(message)s"


def _is_ours(record: logging.LogRecord) -> bool:
    """Whether no handler of the application writes a record; then the record gets the name of the process."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        for handler in logger.handlers:
            if handler is not _handler and _writes_lines(handler) and record.levelno >= handler.level:
                return False
        logger = logger.parent if logger.propagate else None
    record.processName = _process
    return True


def start(name: str = "", stream: SupportsWrite[str] | None = None) -> None:
    """Configure the loggers at the first call of a process, if the variable is set.

    Parameters
    ----------
    name : str
        Name of this process, as for `introduce`.
    stream : optional
        The stream to which lines are written; None for stderr.

    Raises
    ------
    ConfigError
        The variable has another form than ``LEVEL[:LOGGER,...]``.
    """
    if not _started.is_set():
        _configure_loggers(stream)
        _started.set()
    if name or not _process:
        introduce(name or _name_by_launcher())


def _configure_loggers(stream: SupportsWrite[str] | None) -> None:
    global _handler
    text = text_of("log").strip()
    if not text:
        return
    level, names = parsed(text)
    for name in names:
        logging.getLogger(name).setLevel(level)
    ours = logging.getLogger("kvstore")
    if not any(_writes_lines(one) for one in ours.handlers):
        _handler = logging.StreamHandler(stream)
        _handler.addFilter(_is_ours)
        _handler.setFormatter(logging.Formatter(_FORMAT, "%H:%M:%S"))
        ours.addHandler(_handler)


def introduce(name: str) -> None:
    """Name this process in its lines from now on: ``worker 2``."""
    global _process
    _process = name


def name_of_process() -> str:
    """Return the name of this process."""
    return _process or f"process {os.getpid()}"


def _name_by_launcher() -> str:
    """Name this process by its launcher, until its store knows its rank."""
    with contextlib.suppress(ConfigError):
        place = detect_placement()
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


def _writes_lines(handler: logging.Handler) -> bool:
    return not isinstance(handler, logging.NullHandler)
