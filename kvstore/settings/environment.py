"""Reads and changes the environment variables of this process; no other module does.

A new setting is added in `definitions`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from .definitions import SETTINGS

_changing = threading.Lock()


def process_variables() -> Mapping[str, str]:
    """Return a read-only live view of all environment variables."""
    return MappingProxyType(os.environ)


def first_set(env: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Return the name of the first variable that is set and not empty; None if there is none."""
    return next((name for name in names if env.get(name)), None)


def text_of(name: str) -> str:
    """Return the text of the first variable of a setting that is set, else the text of its default."""
    row = SETTINGS[name]
    variable = first_set(os.environ, row.names())
    return os.environ[variable] if variable else str(row.default)


def set_variables(changes: Mapping[str, str]) -> None:
    """Set variables for the rest of this process."""
    os.environ.update(changes)


@contextlib.contextmanager
def changed_variables(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables, or unset those that are None, during a `with` block; one thread at a time."""
    with _changing:
        before = {name: os.environ.get(name) for name in changes}
        _set_variables(changes)
        try:
            yield
        finally:
            _set_variables(before)


def _set_variables(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
