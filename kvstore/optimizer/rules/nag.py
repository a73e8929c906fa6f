"""Nesterov's accelerated gradient."""

from __future__ import annotations

from typing import Any

from ..builtin import ElementwiseOptimizer
from ..checks import non_negative, setting
from ..optimizer import Array, Index
from ..registry import register


@register
class NAG(ElementwiseOptimizer):
    """Nesterov's accelerated gradient.

    ``g = clip(rescale_grad * grad) + wd * w``; ``m = momentum * m - lr * g; w += momentum * m - lr * g``.

    Parameters
    ----------
    learning_rate : float, default 0.1
    momentum : float, default 0.9
    multi_precision : bool, default False
    **common
        Keywords of `Optimizer`.

    Notes
    -----
    State: the momentum, or None without. MXNet 1.9.1 stored a momentum computed with the new weight when `wd`
    was not 0; here, as in its master branch, it is the old one.
    """

    default_learning_rate = 0.1
    repeats = True
    optional_state = frozenset({"momentum"})
    momentum: float = setting(non_negative, default=0.9)

    def __init__(
        self,
        learning_rate: float | None = None,
        momentum: float = 0.9,
        multi_precision: bool = False,
        **common: Any,
    ) -> None:
        super().__init__(learning_rate=learning_rate, multi_precision=multi_precision, **common)
        self._store_settings(momentum=momentum)

    def rule(self) -> str:
        """Return the name of the compiled rule."""
        return "nag" if self.momentum else "sgd"

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of one update."""
        return (*self._common_parameters(index), self.momentum)
