"""Gradients rounded to 16-bit floats, to nearest even; nothing is kept of what the rounding leaves out."""

from __future__ import annotations

from typing import ClassVar

from .codec import CompiledCodec, register


@register
class Float16(CompiledCodec):
    """IEEE half precision: 11 bits of mantissa, half of the bytes. Beyond 65504 is infinity."""

    name: ClassVar[str] = "fp16"
    _code = "half"


@register
class BFloat16(CompiledCodec):
    """The upper half of a float32: 8 bits of mantissa, its full range, half of the bytes."""

    name: ClassVar[str] = "bf16"
    _code = "bfloat"
