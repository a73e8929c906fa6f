"""Gradients rounded to 16-bit floats, to nearest even, without residuals."""

from __future__ import annotations

from typing import ClassVar

from .codec import CompiledCodec, register


@register
class Float16(CompiledCodec):
    """IEEE half precision: 11 bits of mantissa, half of the bytes. Values above 65504 become infinity."""

    name: ClassVar[str] = "fp16"
    _code = "half"


@register
class BFloat16(CompiledCodec):
    """The upper half of a float32: 8 bits of mantissa, the range of float32, half of the bytes."""

    name: ClassVar[str] = "bf16"
    _code = "bfloat"
