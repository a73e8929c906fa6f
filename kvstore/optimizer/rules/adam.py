"""Adam."""

from __future__ import annotations

import math

from ..builtin import ElementwiseOptimizer
from ..checks import flag, setting
from ..optimizer import Array, Index
from ..registry import register
from .moments import TwoMoments


@register
class Adam(TwoMoments, ElementwiseOptimizer):
    """Adam (Kingma and Ba, arXiv:1412.6980).

    ``g = clip(rescale_grad * grad) + wd * w``; ``m = beta1 * m + (1 - beta1) * g``;
    ``v = beta2 * v + (1 - beta2) * g**2``; ``w -= lr_t * m / (sqrt(v) + epsilon)`` with
    ``lr_t = lr * sqrt(1 - beta2**t) / (1 - beta1**t)``.

    Parameters
    ----------
    learning_rate : float, default 0.001
    beta1, beta2 : float, default 0.9 and 0.999
    epsilon : float, default 1e-8
    lazy_update : bool, default False
        If True, a row-sparse gradient updates only its rows; other weights and moments do not change.
    **common
        Keywords of `Optimizer`.

    Notes
    -----
    State: ``(m, v)``.
    """

    default_learning_rate = 0.001
    rule_name = "adam"
    lazy_update: bool = setting(flag, default=False)

    def sparse_mode(self, weight_is_sparse: bool) -> str:
        """Return "rows" if lazy."""
        return "rows" if self.lazy_update else "dense"

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of update number `t`."""
        lr, wd = self._key_rates(index)
        bound = self.clip_gradient or math.inf
        return (
            self._corrected_rate(lr, t),
            wd,
            self.rescale_grad,
            bound,
            self.beta1,
            self.beta2,
            self.epsilon,
        )
