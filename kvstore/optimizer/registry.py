"""Create optimizers by name or from their configuration."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from ..errors import ArgumentError, ConfigError, nearest

if TYPE_CHECKING:
    from .optimizer import Optimizer

Klass = TypeVar("Klass", bound="type[Optimizer]")

_registry: dict[str, type[Optimizer]] = {}

# Names of MXNet that kvstore does not have, and the replacement.
_RETIRED = {
    "ccsgd": "it was another name of 'sgd'",
    "lbsgd": "use 'lars' with a warm-up schedule",
    "adabelief": "register an optimizer of your own, or use 'adamw'",
    "lans": "use 'lamb'",
}


class RegistrableOptimizer:
    """Base of `Optimizer`: classes that `register` accepts and `from_config` creates again."""

    def get_config(self) -> dict[str, Any]:
        """Return keyword arguments that create an equal object; JSON can represent them."""
        raise NotImplementedError

    def describe(self) -> dict[str, Any]:
        """Return ``{"name": registered name, "config": get_config()}``, the arguments of `from_config`."""
        return {"name": name_of(type(self)), "config": self.get_config()}

    @staticmethod
    def from_config(name: str, config: Mapping[str, Any]) -> Optimizer:
        """Create an optimizer from its registered name and the result of `get_config`.

        Raises
        ------
        ConfigError
            If the name is unknown or the configuration is not valid.
        """
        klass = find(name)
        try:
            return klass(**config)
        except TypeError as error:
            raise ConfigError(f"the configuration of optimizer {name!r} does not fit: {error}") from error


def register(klass: Klass) -> Klass:
    """Register an optimizer class by its class name in lower case. Usable as a decorator.

    Parameters
    ----------
    klass : subclass of Optimizer
        If its name is already registered, it replaces the old class, with a warning.

    Returns
    -------
    klass
        The same class.

    Raises
    ------
    TypeError
        If `klass` is not a subclass of `Optimizer`.

    Examples
    --------
    >>> @register
    ... class Halve(Optimizer):
    ...     def update(self, index, weight, grad, state):
    ...         self._update_count(index)
    ...         weight *= 0.5
    """
    if not _is_registrable(klass):
        raise ArgumentError(f"register takes a subclass of Optimizer, not {klass!r}")
    name = klass.__name__.lower()
    known = _registry.get(name)
    if known is not None and known is not klass:
        warnings.warn(
            f"optimizer {name!r}: {klass.__module__}.{klass.__qualname__} replaces "
            f"{known.__module__}.{known.__qualname__}",
            stacklevel=2,
        )
    _registry[name] = klass
    return klass


def create(name: str, **kwargs: Any) -> Optimizer:
    """Create an optimizer by its registered name, in upper or lower case.

    Parameters
    ----------
    name : str
        For example ``"sgd"``.
    **kwargs
        Keyword arguments of its constructor.

    Raises
    ------
    TypeError
        If `name` is not a string, or a keyword is unknown.
    ConfigError
        If no optimizer has this name (the message lists the known names), or a value is out of range.

    Examples
    --------
    >>> create("Adam", learning_rate=0.01).beta2
    0.999
    """
    return find(name)(**kwargs)


def find(name: str) -> type[Optimizer]:
    """Return the class registered under `name`."""
    if not isinstance(name, str):
        raise ArgumentError(f"the name of an optimizer is a string, not {type(name).__name__}")
    small = name.lower()
    klass = _registry.get(small)
    if klass is None:
        hint = f": {_RETIRED[small]}" if small in _RETIRED else nearest(small, _registry)
        raise ConfigError(f"no optimizer is called {name!r}{hint}; known: {', '.join(sorted(_registry))}")
    return klass


def name_of(klass: type[RegistrableOptimizer]) -> str:
    """Return the name under which `klass` is registered."""
    name = klass.__name__.lower()
    if _registry.get(name) is not klass:
        raise ConfigError(
            f"{klass.__module__}.{klass.__qualname__} is not registered, so it has no name to save or send; "
            "decorate the class with @kvstore.optimizer.register"
        )
    return name


def _is_registrable(klass: Any) -> bool:
    return inspect.isclass(klass) and issubclass(klass, RegistrableOptimizer)
