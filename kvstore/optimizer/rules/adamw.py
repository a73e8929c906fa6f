"""AdamW."""

from __future__ import annotations

from ..builtin import ElementwiseOptimizer
from ..checks import flag, non_negative, setting
from ..optimizer import Array, Index
from ..registry import register
from .moments import TwoMoments


@register
class AdamW(TwoMoments, ElementwiseOptimizer):
    """Adam with decoupled weight decay (Loshchilov and Hutter, arXiv:1711.05101).

    ``g = clip(rescale_grad * grad)``, moments as in `Adam`, ``w -= lr_t * (m / (sqrt(v) + epsilon) + wd *
    w)``.

    Parameters
    ----------
    learning_rate : float, default 0.001
    beta1, beta2 : float, default 0.9 and 0.999
    epsilon : float, default 1e-6
    correct_bias : bool, default True
        If False, ``lr_t = lr``.
    **common
        Keywords of `Optimizer`.

    Notes
    -----
    State: ``(m, v)``.
    """

    default_learning_rate = 0.001
    rule_name = "adamw"
    epsilon: float = setting(non_negative, default=1e-6)
    correct_bias: bool = setting(flag, default=True)

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of update number `t`."""
        lr, *rest = self._common_parameters(index)
        rate = self._corrected_rate(lr, t) if self.correct_bias else lr
        return (rate, *rest, self.beta1, self.beta2, self.epsilon)
