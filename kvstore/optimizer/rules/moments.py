"""What the optimizers with two moments share."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np

from ..builtin import BuiltIn
from ..checks import Settings, fraction, non_negative
from ..optimizer import Array


class TwoMoments(BuiltIn):
    """Keeps running means of the gradient and of its square, with decay rates `beta1` and `beta2`."""

    settings: ClassVar[Settings] = {"beta1": fraction, "beta2": fraction, "epsilon": non_negative}
    beta1: float
    beta2: float
    epsilon: float

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-8,
        **common: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, **common)
        self._keep(beta1=beta1, beta2=beta2, epsilon=epsilon)

    def _corrected(self, lr: float, t: int) -> float:
        """Rate times the bias correction of both moments (Kingma and Ba, arXiv:1412.6980, section 2)."""
        return lr * math.sqrt(1.0 - self.beta2**t) / (1.0 - self.beta1**t)

    def _corrections(self, weight: Array, t: int) -> tuple[float, float]:
        """Return ``1 - beta1**t`` and ``1 - beta2**t`` of the betas as the kernel rounds them.

        The kernel's moments decay by the rounded betas: exact ones would leave a bias of 1e-5 for beta2 =
        0.999.
        """
        if weight.dtype.char == "d":
            return 1.0 - self.beta1**t, 1.0 - self.beta2**t
        return 1.0 - float(np.float32(self.beta1)) ** t, 1.0 - float(np.float32(self.beta2)) ** t
