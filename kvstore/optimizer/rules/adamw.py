"""AdamW."""

from __future__ import annotations

from typing import Any, ClassVar

from ..builtin import Elementwise
from ..checks import Settings, flag
from ..optimizer import Array, Index
from ..registry import register
from .moments import TwoMoments


@register
class AdamW(TwoMoments, Elementwise):
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
    settings: ClassVar[Settings] = {"correct_bias": flag}
    correct_bias: bool

    def __init__(
        self,
        learning_rate: float | None = None,
        beta1: float = 0.9,
        beta2: float = 0.999,
        epsilon: float = 1e-6,
        correct_bias: bool = True,
        **common: Any,
    ) -> None:
        super().__init__(learning_rate, beta1, beta2, epsilon, **common)
        self._keep(correct_bias=correct_bias)

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of update number `t`."""
        lr, *rest = self._common(index)
        rate = self._corrected(lr, t) if self.correct_bias else lr
        return (rate, *rest, self.beta1, self.beta2, self.epsilon)
