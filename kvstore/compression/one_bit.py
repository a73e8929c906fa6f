"""One bit for each element: +1 or -1."""

from __future__ import annotations

from typing import ClassVar

from .codec import CompiledCodec, as_float32, register


@register
class OneBit(CompiledCodec):
    """MXNet's 1-bit compression, bit for bit: a thirty-second of the bytes.

    With x = residual + gradient: x > threshold sends +1, anything else -1; the residual becomes x less what
    was sent. The threshold decides, and is not sent. Scale gradients to a size of about 1: multiply the loss,
    and divide with the optimizer's ``rescale_grad``.

    Parameters
    ----------
    threshold : float
        Any number; rounded to float32.

    Raises
    ------
    ConfigError
        The threshold is no number.
    """

    name: ClassVar[str] = "1bit"
    feedback: ClassVar[bool] = True
    _code = "one_bit"

    def __init__(self, threshold: float = 0.5) -> None:
        self._threshold = as_float32(self.name, threshold)

    @property
    def threshold(self) -> float:
        """Above it, +1 is sent."""
        return self._threshold
