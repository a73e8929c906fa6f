"""Errors of kvstore that are also MXNet's, so that a program written for MXNet catches them."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import FunctionType
from typing import Any, ParamSpec, TypeVar

from ..errors import KVStoreError
from .library import mx

MXNetError = mx.base.MXNetError

#: Class of kvstore -> subclass that is also an MXNetError.
_made: dict[type[KVStoreError], type[KVStoreError]] = {}

Arguments = ParamSpec("Arguments")
Anything = TypeVar("Anything")


def raises_mxnet_error(function: Callable[Arguments, Anything]) -> Callable[Arguments, Anything]:
    """Make each error of kvstore that a function raises an `MXNetError`, too."""

    @functools.wraps(function)
    def call(*args: Arguments.args, **options: Arguments.kwargs) -> Anything:
        try:
            return function(*args, **options)
        except KVStoreError as error:
            # In place: the attributes and the traceback of the error do not change.
            error.__class__ = _combined_class(type(error))
            raise

    return call


def all_raise_mxnet_errors(kind: type[Anything]) -> type[Anything]:
    """Apply `raises_mxnet_error` to all methods and properties of a class."""
    for name, member in list(vars(kind).items()):
        if isinstance(member, FunctionType):
            setattr(kind, name, raises_mxnet_error(member))
        elif isinstance(member, property) and member.fget is not None:
            setattr(kind, name, property(raises_mxnet_error(member.fget), doc=member.__doc__))
    return kind


def _combined_class(ours: type[KVStoreError]) -> Any:
    """Return a class of the same name that is an `MXNetError` as well; created at its first error."""
    if issubclass(ours, MXNetError):
        return ours
    if ours not in _made:
        _made[ours] = type(ours.__name__, (ours, MXNetError), {"__doc__": ours.__doc__})
    return _made[ours]
