"""The variables of this process: no other module reads or changes them."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from types import MappingProxyType

from .definitions import SETTINGS

_changing = threading.Lock()


def process_variables() -> Mapping[str, str]:
    """Show all of them as they are and will be: to look at several, or to hand them to another process."""
    return MappingProxyType(os.environ)


def first_set(env: Mapping[str, str], names: Iterable[str]) -> str | None:
    """Name the first of the variables that is set."""
    return next((name for name in names if env.get(name)), None)


def text_of(name: str) -> str:
    """Text of a setting that has a default, by its name in the table: of the first variable that is set."""
    row = SETTINGS[name]
    variable = first_set(os.environ, row.names())
    return os.environ[variable] if variable else str(row.default)


def set_variables(changes: Mapping[str, str]) -> None:
    """Set variables for the rest of this process."""
    os.environ.update(changes)


@contextlib.contextmanager
def changed_variables(changes: Mapping[str, str | None]) -> Iterator[None]:
    """Set variables, or unset those that are None, for a while: one caller after the other."""
    with _changing:
        before = {name: os.environ.get(name) for name in changes}
        _set(changes)
        try:
            yield
        finally:
            _set(before)


def _set(changes: Mapping[str, str | None]) -> None:
    for name, value in changes.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
