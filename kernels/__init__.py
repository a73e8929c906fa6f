"""Arithmetic on raw arrays, without keys, stores and sockets.

`cpu` holds the loops compiled ahead of time (Cython and C, one build for each instruction-set level, chosen
when the module is loaded).
"""

from . import _cpu as cpu

__all__ = ["cpu"]
