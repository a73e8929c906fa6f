"""Common code of the optimizers with two moments."""

from __future__ import annotations

import math

import numpy as np

from ..builtin import BuiltInOptimizer
from ..checks import fraction, non_negative, setting
from ..optimizer import Array


class TwoMoments(BuiltInOptimizer):
    """Keeps running means of the gradient and of its square, with decay rates `beta1` and `beta2`."""

    beta1: float = setting(fraction, default=0.9)
    beta2: float = setting(fraction, default=0.999)
    epsilon: float = setting(non_negative, default=1e-8)

    def _corrected_rate(self, lr: float, t: int) -> float:
        """Return the rate times the bias correction of both moments (arXiv:1412.6980, section 2)."""
        return lr * math.sqrt(1.0 - self.beta2**t) / (1.0 - self.beta1**t)

    def _bias_corrections(self, weight: Array, t: int) -> tuple[float, float]:
        """Return ``1 - beta1**t`` and ``1 - beta2**t`` of the betas as the kernel rounds them.

        The kernel's moments decay by the rounded betas: exact ones would leave a bias of 1e-5 for beta2 =
        0.999.
        """
        if weight.dtype.char == "d":
            return 1.0 - self.beta1**t, 1.0 - self.beta2**t
        return 1.0 - float(np.float32(self.beta1)) ** t, 1.0 - float(np.float32(self.beta2)) ** t
