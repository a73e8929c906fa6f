"""Errors that are both ours and MXNet's: a program written for MXNet catches what it has always caught."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

from ..errors import KVStoreError
from .library import mx

MXNetError = mx.base.MXNetError

#: Class of ours -> the one that is both.
_made: dict[type[KVStoreError], type[KVStoreError]] = {}

Arguments = ParamSpec("Arguments")
Anything = TypeVar("Anything")


def raises_both(function: Callable[Arguments, Anything]) -> Callable[Arguments, Anything]:
    """Let every error of ours that leaves a function be an `MXNetError`, too."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **options: Arguments.kwargs) -> Anything:
        try:
            return function(*args, **options)
        except KVStoreError as error:
            # In place: what it carries and its traceback stay as they are.
            error.__class__ = _both(type(error))
            raise

    return call


def all_raise_both(kind: type[Anything]) -> type[Anything]:
    """Do so for all methods and properties of a class."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType):
            setattr(kind, name, raises_both(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(kind, name, property(raises_both(member.fget), doc=member.__doc__))
    return kind


def _both(ours: type[KVStoreError]) -> Any:
    """Return a class of the same name that is an `MXNetError` as well; made when it is first raised."""
    if issubclass(ours, MXNetError):
        return ours
    if ours not in _made:
        _made[ours] = type(ours.__name__, (ours, MXNetError), {"__doc__": ours.__doc__})
    return _made[ours]
