"""Checks of hyper-parameters: each takes a name and a value, and returns the value to keep, or raises."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..errors import ConfigError

Check = Callable[[str, Any], Any]
Settings = Mapping[str, Check]


class DeclaredSetting:
    """A setting, as long as its class is being made."""

    def __init__(self, check: Check, default: Any) -> None:
        self.check, self.default, self.annotation = check, default, ""


def setting(check: Check, *, default: Any) -> Any:
    """Declare a setting, its check and its default: ``momentum: float = setting(fraction, default=0.9)``."""
    return DeclaredSetting(check, default)


def finite(name: str, value: Any) -> float:
    """Return `value` as a float that is neither infinite nor NaN."""
    try:
        if not isinstance(value, bool) and isinstance(value, numbers.Real) and math.isfinite(value):
            return float(value)
    except OverflowError:  # an int beyond any float
        pass
    raise ConfigError(f"{name} must be a finite number, got {value!r}")


def non_negative(name: str, value: Any) -> float:
    """Return `value` as a float that is zero or more."""
    number = finite(name, value)
    if number < 0:
        raise ConfigError(f"{name} must not be negative, got {value!r}")
    return number


def fraction(name: str, value: Any) -> float:
    """Return `value` as a float in 0 <= value < 1."""
    number = non_negative(name, value)
    if number >= 1:
        raise ConfigError(f"{name} must be below 1, got {value!r}")
    return number


def count(name: str, value: Any) -> int:
    """Return `value` as an int that is zero or more."""
    if isinstance(value, bool) or not isinstance(value, numbers.Integral) or not 0 <= int(value) < 2**63:
        raise ConfigError(f"{name} must be an integer of zero or more that fits 64 bits, got {value!r}")
    return int(value)


def flag(name: str, value: Any) -> bool:
    """Return `value` as a bool; 0 and 1 are taken too."""
    if not isinstance(value, (bool, np.bool_, numbers.Real)) or float(value) not in (0.0, 1.0):
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def optional(check: Check) -> Check:
    """Return a check that also lets None through."""

    def checked(name: str, value: Any) -> Any:
        return None if value is None else check(name, value)

    return checked


def multipliers(name: str, value: Any) -> dict[int | str, float]:
    """Return a dict from key or name to multiplier; pairs are taken too, since JSON has no int keys."""
    return {key: finite(f"{name}[{key!r}]", factor) for key, factor in pairs(name, value).items()}


def names(name: str, value: Any) -> dict[int | str, str]:
    """Return a dict from key to the parameter's name; pairs are taken too."""
    table = pairs(name, value)
    if not all(isinstance(text, str) for text in table.values()):
        raise ConfigError(f"{name} must map keys to names, got {value!r}")
    return table


def parameters(name: str, value: Any) -> dict[int | str, Any]:
    """Return a dict from key to an object with the key's multipliers."""
    table = pairs(name, value)
    for key, parameter in table.items():
        for factor in ("lr_mult", "wd_mult"):
            if not hasattr(parameter, factor):
                raise ConfigError(f"{name}[{key!r}] must be an object with {factor}, got {parameter!r}")
            finite(f"{name}[{key!r}].{factor}", getattr(parameter, factor))
    return table


def pairs(name: str, value: Any) -> dict[Any, Any]:
    """Return a dict made of a dict, a list of pairs or None."""
    try:
        return dict(value or {})
    except (TypeError, ValueError):
        raise ConfigError(f"{name} must be a dict, got {value!r}") from None
