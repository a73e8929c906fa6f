"""Parameters of `set_gradient_compression`, checked."""

from __future__ import annotations

import math
from typing import Any

from ..errors import ArgumentError, ConfigError

#: Codec name -> names of its parameters.
CODECS: dict[str, tuple[str, ...]] = {"2bit": ("threshold",), "1bit": ("threshold",), "fp16": (), "bf16": ()}


def check(params: Any) -> None:
    """Check the parameters of a codec.

    Raises
    ------
    ArgumentError
        Not a dict.
    ConfigError
        No type, an unknown type (names are literal, ``"2BIT"`` is none), an unknown parameter, or a threshold
        that is no number, or for 2bit not above zero.
    """
    if not isinstance(params, dict):
        raise ArgumentError(f"compression parameters are a dict like {{'type': '2bit'}}, not {params!r}")
    codec = params.get("type")
    if codec not in CODECS:
        raise ConfigError(f"compression type is {codec!r}; known are {', '.join(CODECS)}")
    unknown = sorted(set(params) - {"type", *CODECS[codec]})
    if unknown:
        raise ConfigError(f"codec {codec!r} has no parameter {', '.join(map(str, unknown))}")
    if "threshold" in params:
        _check_threshold(codec, params["threshold"])


def _check_threshold(codec: str, threshold: Any) -> None:
    try:
        value = float(threshold)
    except (TypeError, ValueError):
        raise ConfigError(f"threshold must be a number, got {threshold!r}") from None
    if math.isnan(value) or (codec == "2bit" and value <= 0):
        raise ConfigError(
            f"threshold of {codec!r} must be {'above zero' if codec == '2bit' else 'a number'}, got {value}"
        )
