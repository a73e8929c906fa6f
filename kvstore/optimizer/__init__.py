"""Optimizers, learning-rate schedules, and the updater that applies them.

Names, keywords and defaults are those of MXNet's master branch.
"""

from . import lr_scheduler
from .adadelta import AdaDelta
from .adagrad import AdaGrad
from .adam import Adam
from .adamax import Adamax
from .adamw import AdamW
from .dcasgd import DCASGD
from .ftml import FTML
from .ftrl import Ftrl
from .groupadagrad import GroupAdaGrad
from .lamb import LAMB
from .lars import LARS
from .nadam import Nadam
from .nag import NAG
from .optimizer import Optimizer
from .registry import create, register
from .rmsprop import RMSProp
from .sgd import SGD
from .sgld import SGLD
from .signum import Signum
from .test import Test
from .updater import Updater, get_updater

__all__ = [
    "DCASGD",
    "FTML",
    "LAMB",
    "LARS",
    "NAG",
    "SGD",
    "SGLD",
    "AdaDelta",
    "AdaGrad",
    "Adam",
    "AdamW",
    "Adamax",
    "Ftrl",
    "GroupAdaGrad",
    "Nadam",
    "Optimizer",
    "RMSProp",
    "Signum",
    "Test",
    "Updater",
    "create",
    "get_updater",
    "lr_scheduler",
    "register",
]
