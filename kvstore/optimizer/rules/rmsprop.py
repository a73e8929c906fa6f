"""RMSProp."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from ..builtin import ElementwiseOptimizer
from ..checks import flag, fraction, non_negative, optional, setting
from ..optimizer import Array, Index
from ..registry import register


@register
class RMSProp(ElementwiseOptimizer):
    """RMSProp (Tieleman and Hinton), or Graves's centred one (arXiv:1308.0850, equations 38 to 45).

    ``g = clip(rescale_grad * grad) + wd * w``; ``v = rho * v + (1 - rho) * g**2``;
    ``w -= lr * g / (sqrt(v) + epsilon)``. Centred: also ``q = rho * q + (1 - rho) * g`` and
    ``m = momentum * m - lr * g / sqrt(v - q**2 + epsilon); w += m``. Finally the weights are clipped.

    Parameters
    ----------
    learning_rate : float, default 0.001
    rho : float, default 0.9
    momentum : float, default 0.9
        Used if centred.
    epsilon : float, default 1e-8
    centered : bool, default False
    clip_weights : float, optional
        Bound of the weights; None or 0 means no bound.
    **common
        Keywords of `Optimizer`.

    Notes
    -----
    State: ``v``; centred ``(q, v, m)``.
    """

    default_learning_rate = 0.001
    repeats = True
    structural = ElementwiseOptimizer.structural | {"centered"}
    renamed: ClassVar[Mapping[str, str]] = {"gamma1": "rho", "gamma2": "momentum"}
    rho: float = setting(fraction, default=0.9)
    momentum: float = setting(non_negative, default=0.9)
    epsilon: float = setting(non_negative, default=1e-8)
    centered: bool = setting(flag, default=False)
    clip_weights: float | None = setting(optional(non_negative), default=None)

    def rule(self) -> str:
        """Return the name of the compiled rule."""
        return "rmsprop_centered" if self.centered else "rmsprop"

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of one update."""
        own = (self.rho, self.epsilon, self.clip_weights or math.inf)
        return (
            (*self._common_parameters(index), *own, self.momentum)
            if self.centered
            else (*self._common_parameters(index), *own)
        )
