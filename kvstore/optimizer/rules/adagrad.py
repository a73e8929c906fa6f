"""AdaGrad."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar

from ..builtin import ElementwiseOptimizer
from ..checks import non_negative, setting
from ..optimizer import Array, Index
from ..registry import register


@register
class AdaGrad(ElementwiseOptimizer):
    """AdaGrad (Duchi, Hazan and Singer, JMLR 12, 2011).

    ``g = clip(rescale_grad * grad) + wd * w``; ``h += g**2``; ``w -= lr * g / (sqrt(h) + epsilon)``.
    A row-sparse gradient updates only its rows; weight decay does not change the other rows.

    Parameters
    ----------
    learning_rate : float, default 0.01
    epsilon : float, default 1e-6
    **common
        Keywords of `Optimizer`.

    Notes
    -----
    State: ``h``.
    """

    rule_name = "adagrad"
    repeats = True
    renamed: ClassVar[Mapping[str, str]] = {"eps": "epsilon"}
    epsilon: float = setting(non_negative, default=1e-6)

    def sparse_mode(self, weight_is_sparse: bool) -> str:
        """Return "rows"."""
        return "rows"

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of one update."""
        return (*self._common_parameters(index), self.epsilon)
