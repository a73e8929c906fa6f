"""AdaMax."""

from __future__ import annotations

from ..builtin import ElementwiseOptimizer
from ..optimizer import Array, Index
from ..registry import register
from .moments import TwoMoments


@register
class Adamax(TwoMoments, ElementwiseOptimizer):
    """AdaMax: Adam with the largest magnitude in place of the variance (arXiv:1412.6980, section 7.1).

    ``g = clip(rescale_grad * grad) + wd * w``; ``m = beta1 * m + (1 - beta1) * g``;
    ``u = max(beta2 * u, |g|)``; ``w -= lr / (1 - beta1**t) * m / (u + epsilon)``.

    Parameters
    ----------
    learning_rate : float, default 0.002
    beta1, beta2 : float, default 0.9 and 0.999
    epsilon : float, default 1e-8
    **common
        Keywords of `Optimizer`.

    Notes
    -----
    State: ``(m, u)``.
    """

    default_learning_rate = 0.002
    rule_name = "adamax"

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of update number `t`."""
        lr, *rest = self._common_parameters(index)
        return (lr / (1.0 - self.beta1**t), *rest, self.beta1, self.beta2, self.epsilon)
