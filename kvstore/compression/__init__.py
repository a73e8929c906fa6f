"""Gradient compression: codecs by name, and error feedback, which coarse codecs need to converge."""

from .codec import Codec, create, names, register
from .feedback import Feedback
from .one_bit import OneBit
from .pushed import Pushed
from .sixteen_bit import BFloat16, Float16
from .two_bit import TwoBit

__all__ = [
    "BFloat16",
    "Codec",
    "Feedback",
    "Float16",
    "OneBit",
    "Pushed",
    "TwoBit",
    "create",
    "names",
    "register",
]
