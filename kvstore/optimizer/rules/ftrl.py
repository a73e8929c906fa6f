"""FTRL-Proximal."""

from __future__ import annotations

from typing import Any

from ..builtin import ElementwiseOptimizer
from ..checks import non_negative, setting
from ..optimizer import Array, Index
from ..registry import register


@register
class Ftrl(ElementwiseOptimizer):
    """Follow the regularised leader, proximal (McMahan and others, KDD 2013, algorithm 1).

    ``g = clip(rescale_grad * grad)``; ``z += g - (sqrt(n + g**2) - sqrt(n)) / lr * w``; ``n += g**2``;
    ``w = 0`` where ``|z| <= lamda1``, else ``(sign(z) * lamda1 - z) / ((beta + sqrt(n)) / lr + wd)``.

    Parameters
    ----------
    lamda1 : float, default 0.01
        Strength of the L1 term.
    learning_rate : float, default 0.1
        Above 0.
    beta : float, default 1
    **common
        Keywords of `Optimizer`; `wd` is the L2 term.

    Notes
    -----
    State: ``(z, n)``. For a row-sparse key, a row-sparse gradient updates only its rows. For a dense key,
    every row is computed again from its state, as in MXNet, so rows that never had a gradient become 0.
    """

    default_learning_rate = 0.1
    rule_name = "ftrl"
    repeats = True
    lamda1: float = setting(non_negative, default=0.01)
    beta: float = setting(non_negative, default=1.0)

    def __init__(
        self, lamda1: float = 0.01, learning_rate: float | None = None, beta: float = 1.0, **common: Any
    ) -> None:
        super().__init__(learning_rate=learning_rate, **common)
        self._store_settings(lamda1=lamda1, beta=beta)

    def sparse_mode(self, weight_is_sparse: bool) -> str:
        """Return "rows" for a row-sparse key, else "dense"."""
        return "rows" if weight_is_sparse else "dense"

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of one update."""
        return (*self._divided_by(index), self.lamda1, self.beta)
