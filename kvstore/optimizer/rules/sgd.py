"""Stochastic gradient descent."""

from __future__ import annotations

import math
from typing import Any

from ..builtin import ElementwiseOptimizer
from ..checks import flag, non_negative, setting
from ..optimizer import Array, Index
from ..registry import register


@register
class SGD(ElementwiseOptimizer):
    """Stochastic gradient descent, optionally with momentum.

    ``g = clip(rescale_grad * grad) + wd * w``; ``w -= lr * g``, or with momentum
    ``m = momentum * m - lr * g; w += m``.

    Parameters
    ----------
    learning_rate : float, default 0.1
    momentum : float, default 0
    lazy_update : bool, default False
        If True, a row-sparse gradient updates only its rows; weight decay and momentum do not change others.
    multi_precision : bool, default False
    **common
        Keywords of `Optimizer`.

    Notes
    -----
    State: the momentum, or None without.
    """

    default_learning_rate = 0.1
    repeats = True
    optional_state = frozenset({"momentum"})
    momentum: float = setting(non_negative, default=0.0)
    lazy_update: bool = setting(flag, default=False)

    def __init__(
        self,
        learning_rate: float | None = None,
        momentum: float = 0.0,
        lazy_update: bool = False,
        multi_precision: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, multi_precision=multi_precision, **common)
        self._store_settings(momentum=momentum, lazy_update=lazy_update)

    def sparse_mode(self, weight_is_sparse: bool) -> str:
        """Return "rows" if lazy, or if rows without a gradient do not change."""
        return "rows" if self.lazy_update or not (self.momentum or self.wd) else "dense"

    def rule(self) -> str:
        """Return the name of the compiled rule."""
        return "sgd_momentum" if self.momentum else "sgd"

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of one update."""
        lr, wd = self._key_rates(index)
        return (lr, wd, self.rescale_grad, self.clip_gradient or math.inf, self.momentum)
