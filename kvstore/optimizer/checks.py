"""Checks of hyper-parameters: each gets a name and a value, and returns the value to keep, or raises."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from ..arrays.grouping import plain_key
from ..errors import ConfigError, KeyKindError

Check = Callable[[str, Any], Any]
Settings = Mapping[str, Check]


class DeclaredSetting:
    """A declared setting, before its class is complete."""

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
    except OverflowError:  # an int larger than any float
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
    """Return `value` as a bool; 0 and 1 are accepted too."""
    if not isinstance(value, (bool, np.bool_, numbers.Real)) or float(value) not in (0.0, 1.0):
        raise ConfigError(f"{name} must be True or False, got {value!r}")
    return bool(value)


def optional(check: Check) -> Check:
    """Return a check that also accepts None."""

    def checked(name: str, value: Any) -> Any:
        return None if value is None else check(name, value)

    return checked


def text(name: str, value: Any) -> str:
    """Return `value` as a plain str."""
    if not isinstance(value, str):
        raise ConfigError(f"{name} must be a string, got {value!r}")
    return str.__str__(value)


def key(name: str, value: Any) -> int | str:
    """Return a key, or the name of a parameter, as a plain int or str; NumPy's integers are accepted too."""
    try:
        return plain_key(value)
    except KeyKindError as error:
        raise ConfigError(f"{name}: {error}") from error


def parameter(name: str, value: Any) -> Any:
    """Return an object with the multipliers of a key."""
    for factor in ("lr_mult", "wd_mult"):
        if not hasattr(value, factor):
            raise ConfigError(f"{name} must be an object with {factor}, got {value!r}")
        finite(f"{name}.{factor}", getattr(value, factor))
    return value


def plain(value: Any) -> Any:
    """Return a scalar of NumPy as a Python number or string, and other values unchanged."""
    return value.item() if isinstance(value, np.generic) else value


def pairs(name: str, value: Any) -> dict[Any, Any]:
    """Return a dict made of a dict, a list of pairs or None."""
    try:
        return dict(value or {})
    except (TypeError, ValueError):
        raise ConfigError(f"{name} must be a dict, got {value!r}") from None
