"""The ports at which processes listen if no other setting gives a port: any free port, or one of a range."""

from __future__ import annotations

import re
import secrets
import socket
from collections.abc import Callable
from typing import TypeVar

from ..errors import ConfigError
from .environment import text_of

T = TypeVar("T")


def port_range(text: str) -> range:
    """Return the ports of a value of KVSTORE_PORTS; an empty range for an empty text.

    Raises
    ------
    ConfigError
        The text is neither a port nor a range such as ``7000-7100``.
    """
    if not text:
        return range(0)
    match = re.fullmatch(r"([0-9]{1,5})(?:-([0-9]{1,5}))?", text)
    first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, 0)
    if not 1 <= first <= last <= 65535:
        raise ConfigError(
            f"KVSTORE_PORTS={text!r} is not a range of ports from 1 to 65535: write it as in 7000-7100"
        )
    return range(first, last + 1)


def bound_in_range(
    bind: Callable[[int], T], kinds: type[Exception], where: str, text: str | None = None
) -> T | None:
    """Call `bind` with the ports of KVSTORE_PORTS, in random order, until one of them is free.

    Parameters
    ----------
    bind : callable
        It raises an exception of `kinds` if the port is taken.
    kinds : type
        See `bind`.
    where : str
        The address, for the error.
    text : str, optional
        The value of KVSTORE_PORTS. With None, that of this process.

    Returns
    -------
    object
        What `bind` returns; None, without a call, if KVSTORE_PORTS is not set.

    Raises
    ------
    ConfigError
        No port of the range can be used, or the variable is wrong.
    """
    text = text_of("ports") if text is None else text
    ports = port_range(text)
    if not ports:
        return None
    refused: Exception | None = None
    for port in sorted(secrets.SystemRandom().sample(ports, len(ports)), key=_is_held):
        try:
            return bind(port)
        except kinds as error:  # noqa: PERF203 - a port that is taken is a usual case
            refused = error
    raise ConfigError(
        f"none of the ports KVSTORE_PORTS={text} is free at {where} ({refused}): name more; a scheduler "
        "takes three, each server two, and `kvstore run` two for MASTER_PORT"
    ) from refused


def _is_held(port: int) -> bool:
    """Return whether a socket of this machine is bound to the port, or was until a minute ago."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        try:
            probe.bind(("", port))
        except OSError:
            return True
    return False
