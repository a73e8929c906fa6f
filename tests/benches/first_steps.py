"""The first step of the rules that benches compare, in float64 and from zero states."""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from bench.cases import local as cases

Array = npt.NDArray[np.float64]


def first_step(update: str, weight: Array, grad: Array) -> Array:
    """Return the weight after it; `update` is that of a case: SGD with momentum, or else Adam."""
    grad = grad + cases.WEIGHT_DECAY * weight
    if update == "sgd_momentum":
        return weight - cases.LEARNING_RATE * grad
    rate = cases.LEARNING_RATE * math.sqrt(1 - cases.BETA2) / (1 - cases.BETA1)
    m, v = (1 - cases.BETA1) * grad, (1 - cases.BETA2) * grad**2
    return weight - rate * m / (np.sqrt(v) + cases.EPSILON)
