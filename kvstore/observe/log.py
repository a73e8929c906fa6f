"""The log of a job: KVSTORE_LOG asks for it, and every process of the job writes its lines to stderr.

`start` reads the variable, when a process makes its first store or begins to serve. Loggers are those of the
standard library; nothing here touches the root logger or a handler of the application.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from typing import TYPE_CHECKING, Protocol

from ..errors import ConfigError, nearest
from ..settings.launchers import detect
from ..settings.variables import text_of

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
#: Seconds after which a wait for other processes is told of as slow, once it has ended.
SLOW = 1.0

_LEVELS = {"info": logging.INFO, "debug": logging.DEBUG}
_started = threading.Event()
_FORMAT = "%(asctime)s.%(msecs)03d %(levelname)s %(name)s %(who)s: %(message)s"


class LogStream(Protocol):
    """Where lines go."""

    def write(self, text: str, /) -> object:
        """Take a line."""

    def flush(self) -> object:
        """Keep nothing back."""


class _Formatter(logging.Formatter):
    """Adds which process of the job it is."""

    who = ""

    def format(self, record: logging.LogRecord) -> str:
        record.who = _Formatter.who
        return super().format(record)


if TYPE_CHECKING:
    _Lines = logging.StreamHandler[LogStream]
else:
    _Lines = logging.StreamHandler  # Python 3.10 cannot subscript it


class _Handler(_Lines):
    """Writes what no handler of the application takes: no line comes twice, whoever was configured first."""

    def filter(self, record: logging.LogRecord) -> bool:
        return not _is_taken(record, self) and bool(super().filter(record))


def start(who: str = "", stream: LogStream | None = None) -> None:
    """Do what KVSTORE_LOG says, at the first call of a process.

    Parameters
    ----------
    who : str
        Name of this process, as `introduce` takes it.
    stream : LogStream, optional
        Where lines go; stderr where None.

    Raises
    ------
    ConfigError
        The variable has another form than ``LEVEL[:LOGGER,...]``.
    """
    if not _started.is_set():
        _configure(stream)
        _started.set()
    if who or not _Formatter.who:
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
        handler = _Handler(stream)
        handler.setFormatter(_Formatter(_FORMAT, "%H:%M:%S"))
        ours.addHandler(handler)


def introduce(who: str) -> None:
    """Name this process in its lines from now on: ``worker 2``."""
    _Formatter.who = who


def name_of_process() -> str:
    """Return what `introduce` was told last."""
    return _Formatter.who or f"process {os.getpid()}"


def _launched_as() -> str:
    """Name this process by what its launcher says, until its store knows better."""
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


def _is_taken(record: logging.LogRecord, ours: logging.Handler) -> bool:
    """Whether another handler gets a record too."""
    logger: logging.Logger | None = logging.getLogger(record.name)
    while logger is not None:
        for handler in logger.handlers:
            if handler is not ours and _writes(handler) and record.levelno >= handler.level:
                return True
        logger = logger.parent if logger.propagate else None
    return False
