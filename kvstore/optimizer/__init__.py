"""Optimizers, learning-rate schedules, and the updater that applies them.

Names, keywords and defaults are those of MXNet's master branch.
"""

import sys

from . import lr_scheduler
from .optimizer import Optimizer
from .registry import create, register
from .rules.adadelta import AdaDelta
from .rules.adagrad import AdaGrad
from .rules.adam import Adam
from .rules.adamax import Adamax
from .rules.adamw import AdamW
from .rules.dcasgd import DCASGD
from .rules.ftml import FTML
from .rules.ftrl import Ftrl
from .rules.groupadagrad import GroupAdaGrad
from .rules.lamb import LAMB
from .rules.lars import LARS
from .rules.nadam import Nadam
from .rules.nag import NAG
from .rules.rmsprop import RMSProp
from .rules.sgd import SGD
from .rules.sgld import SGLD
from .rules.signum import Signum
from .rules.test import Test
from .updater import Updater, get_updater

# Old pickles have class names such as kvstore.optimizer.sgd.SGD, from before the folder of rules.
for _module in [name for name in sys.modules if name.startswith(f"{__name__}.rules.")]:
    sys.modules[_module.replace(".rules.", ".")] = sys.modules[_module]

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
