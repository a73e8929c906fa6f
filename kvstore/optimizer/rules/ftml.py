"""FTML."""

from __future__ import annotations

from ..builtin import ElementwiseOptimizer
from ..checks import fraction, setting
from ..optimizer import Array, Index
from ..registry import register
from .moments import TwoMoments


@register
class FTML(TwoMoments, ElementwiseOptimizer):
    """Follow the moving leader (Zheng and Kwok, ICML 2017, algorithm 1).

    ``g = clip(rescale_grad * grad) + wd * w``; ``v = beta2 * v + (1 - beta2) * g**2``;
    ``d' = (1 - beta1**t) / lr * (sqrt(v / (1 - beta2**t)) + epsilon)``;
    ``z = beta1 * z + (1 - beta1) * g - (d' - beta1 * d) * w``; ``d = d'``; ``w = -z / d``.

    Parameters
    ----------
    learning_rate : float, default 0.0025
        Above 0.
    beta1, beta2 : float, default 0.6 and 0.999
    epsilon : float, default 1e-8
    **common
        Keywords of `Optimizer`.

    Notes
    -----
    State: ``(d, v, z)``.
    """

    default_learning_rate = 0.0025
    rule_name = "ftml"
    beta1: float = setting(fraction, default=0.6)

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of update number `t`."""
        own = (self.beta1, self.beta2, self.epsilon)
        return (*self._divided_by(index), *own, *self._bias_corrections(weight, t))
