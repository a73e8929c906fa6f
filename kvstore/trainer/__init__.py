"""A trainer with the interface of Gluon's Trainer, for arrays of any library."""

from .parameter import Parameter
from .trainer import Trainer

__all__ = ["Parameter", "Trainer"]
