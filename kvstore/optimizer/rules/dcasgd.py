"""Delay-compensated asynchronous SGD."""

from __future__ import annotations

from ...arrays import pages
from ..builtin import ElementwiseOptimizer
from ..checks import finite, non_negative, setting
from ..optimizer import Array, Index, State
from ..registry import register


@register
class DCASGD(ElementwiseOptimizer):
    """SGD with compensation of stale gradients (Zheng and others, arXiv:1609.08326).

    ``g = clip(rescale_grad * grad) + wd * w``; ``d = lr * (g + lamda * g**2 * (w - w_before))``;
    ``w_before = w``; ``w -= d``, or with momentum ``m = momentum * m - d; w += m``.

    Parameters
    ----------
    learning_rate : float, default 0.1
    momentum : float, default 0
    lamda : float, default 0.04
        Strength of the compensation.
    **common
        Keywords of `Optimizer`.

    Notes
    -----
    State: ``(momentum or None, weight before the last update)``. With momentum MXNet 1.9.1 raises inside the
    updater and never changes a weight; here it works.
    """

    default_learning_rate = 0.1
    repeats = True
    optional_state = frozenset({"momentum"})
    momentum: float = setting(non_negative, default=0.0)
    lamda: float = setting(finite, default=0.04)

    def create_state(self, index: Index, weight: Array) -> State:
        """Return zero momentum or None, and a copy of the weight."""
        return (pages.zeros_like(weight) if self.momentum else None, pages.copy(weight))

    def rule(self) -> str:
        """Return the name of the compiled rule."""
        return "dcasgd_momentum" if self.momentum else "dcasgd"

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of one update."""
        return (*self._common_parameters(index), self.lamda, self.momentum)
