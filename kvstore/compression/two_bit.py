"""Two bits for each element: +threshold, -threshold, or nothing."""

from __future__ import annotations

from typing import ClassVar

from ..errors import ConfigError
from .codec import CompiledCodec, as_float32, register


@register
class TwoBit(CompiledCodec):
    """MXNet's 2-bit compression, with identical bits. It sends a sixteenth of the bytes.

    Let x = residual + gradient. If x >= threshold, +threshold is sent; if x <= -threshold, -threshold is
    sent; else 0 is sent. The residual becomes x minus the sent value. One push sends at most one threshold,
    however large x is.

    Parameters
    ----------
    threshold : float
        A number above zero. It is rounded to float32. Choose about the size of the larger gradients: a much
        larger gradient needs many pushes, and a much smaller gradient accumulates over many pushes.

    Raises
    ------
    ConfigError
        The threshold is not a number, or not above zero.
    """

    name: ClassVar[str] = "2bit"
    feedback: ClassVar[bool] = True
    _code = "two_bit"

    def __init__(self, threshold: float = 0.5) -> None:
        self._threshold = as_float32(self.name, threshold)
        if self._threshold <= 0:
            raise ConfigError(f"threshold of '2bit' must be above zero in float32, got {threshold!r}")

    @property
    def threshold(self) -> float:
        """Magnitude of a value that is sent."""
        return self._threshold
