"""One bit for each element: +1 or -1."""

from __future__ import annotations

from typing import ClassVar

from .codec import CompiledCodec, as_float32, register


@register
class OneBit(CompiledCodec):
    """MXNet's 1-bit compression, with identical bits. It sends a thirty-second of the bytes.

    Let x = residual + gradient. If x > threshold, +1 is sent, else -1; the residual becomes x minus the sent
    value. The threshold itself is not sent. Scale the gradients to about 1: multiply the loss, and divide
    with the ``rescale_grad`` of the optimizer.

    Parameters
    ----------
    threshold : float
        Any number. It is rounded to float32.

    Raises
    ------
    ConfigError
        The threshold is not a number.
    """

    name: ClassVar[str] = "1bit"
    feedback: ClassVar[bool] = True
    _code = "one_bit"

    def __init__(self, threshold: float = 0.5) -> None:
        self._threshold = as_float32(self.name, threshold)

    @property
    def threshold(self) -> float:
        """Limit of x; above it, +1 is sent."""
        return self._threshold
