"""Gluon's trainer without Gluon, for parameters that hold arrays of any library."""

from .parameter import Parameter
from .trainer import Trainer

__all__ = ["Parameter", "Trainer"]
