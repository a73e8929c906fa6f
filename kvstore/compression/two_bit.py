"""Two bits for each element: +threshold, -threshold, or nothing."""

from __future__ import annotations

from typing import ClassVar

from ..errors import ConfigError
from .codec import CompiledCodec, as_float32, register


@register
class TwoBit(CompiledCodec):
    """MXNet's 2-bit compression, bit for bit: a sixteenth of the bytes.

    With x = residual + gradient: x >= threshold sends +threshold, x <= -threshold sends -threshold, anything
    else 0; the residual becomes x less what was sent. However large x is, one threshold is sent at a time.

    Parameters
    ----------
    threshold : float
        Above zero; rounded to float32. About the size of the larger gradients: what is much larger takes many
        pushes to arrive, and what is much smaller gathers for as long.

    Raises
    ------
    ConfigError
        The threshold is no number, or not above zero.
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
        """What one code stands for."""
        return self._threshold
