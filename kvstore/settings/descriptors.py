"""Descriptors 0 to 2 belong to the standard streams, also in a process that was started without them.

Otherwise the next file, socket or memory gets such a number, and the first line that a C library prints is
written to it.
"""

from __future__ import annotations

import fcntl
import os

from ..errors import ConfigError

_STANDARD = 3  # stdin, stdout, stderr


def occupy_standard() -> None:
    """Open /dev/null for each standard stream that is closed.

    Raises
    ------
    ConfigError
        A stream is closed, and /dev/null cannot be opened.
    """
    for number in range(_STANDARD):
        if not _is_open(number):
            _open_nothing(number)


def above_standard(descriptor: int) -> int:
    """Return a descriptor of the same file whose number is not that of a standard stream."""
    if descriptor >= _STANDARD:
        return descriptor
    try:
        return fcntl.fcntl(descriptor, fcntl.F_DUPFD_CLOEXEC, _STANDARD)
    finally:
        os.close(descriptor)


def new_memory(name: str) -> int:
    """Return the descriptor of new memory that can be sealed and has no path; /proc shows its name."""
    return above_standard(os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING))


def _is_open(number: int) -> bool:
    try:
        fcntl.fcntl(number, fcntl.F_GETFD)
    except OSError:
        return False
    return True


def _open_nothing(number: int) -> None:
    try:
        opened = os.open(os.devnull, os.O_RDWR)
    except OSError as error:
        raise ConfigError(
            f"descriptor {number} of this process is closed, and {os.devnull} cannot be opened in its place "
            f"({error.strerror}): start the process with its standard streams open, or provide {os.devnull}"
        ) from error
    if opened == number:
        os.set_inheritable(number, True)
    else:  # another thread has just opened a file with this number
        os.close(opened)
