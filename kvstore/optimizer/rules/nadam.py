"""Nadam."""

from __future__ import annotations

import math

from ..builtin import ElementwiseOptimizer
from ..checks import finite, setting
from ..optimizer import Array, Index
from ..registry import register
from .moments import TwoMoments


@register
class Nadam(TwoMoments, ElementwiseOptimizer):
    """Adam with Nesterov momentum (Dozat, ICLR 2016 workshop).

    With ``mu(t) = beta1 * (1 - 0.5 * 0.96**(t * schedule_decay))`` and ``P(t) = mu(1) * ... * mu(t)``:
    ``g = clip(rescale_grad * grad) + wd * w``, moments as in `Adam`,
    ``x = (1 - mu(t)) * g / (1 - P(t)) + mu(t + 1) * m / (1 - P(t + 1))``,
    ``w -= lr * x / (sqrt(v / (1 - beta2**t)) + epsilon)``.

    Parameters
    ----------
    learning_rate : float, default 0.001
    beta1, beta2 : float, default 0.9 and 0.999
    epsilon : float, default 1e-8
    schedule_decay : float, default 0.004
    **common
        Keywords of `Optimizer`.

    Notes
    -----
    State: ``(m, v)``. Each key has its own ``P``, which depends on its update count. MXNet has one product
    for all keys and multiplies it at each update of any key, so it decreases faster with more keys.
    """

    default_learning_rate = 0.001
    rule_name = "nadam"
    schedule_decay: float = setting(finite, default=0.004)

    def _note_change(self) -> None:
        """Clear the products, which depend on the settings."""
        super()._note_change()
        # The last count of each key, and its product; the next product is one multiplication.
        self._products: dict[Index, tuple[int, float]] = {}

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of update number `t`."""
        now, following, product = (
            self._momentum_at(t),
            self._momentum_at(t + 1),
            self._momentum_product(index, t),
        )
        corrections = (1.0 - product, 1.0 - product * following, 1.0 - self.beta2**t)
        return (
            *self._common_parameters(index),
            self.beta1,
            self.beta2,
            self.epsilon,
            now,
            following,
            *corrections,
        )

    def _momentum_at(self, t: int) -> float:
        return self.beta1 * (1.0 - 0.5 * math.pow(0.96, t * self.schedule_decay))

    def _momentum_product(self, index: Index, t: int) -> float:
        """Return ``P(t)``, always by the same multiplications, so that a resumed run has the same bits."""
        done, product = self._products.get(index, (0, 1.0))
        if done > t:  # counts were restored
            done, product = 0, 1.0
        for step in range(done + 1, t + 1):
            if product == 0.0:
                break
            product *= self._momentum_at(step)
        self._products[index] = (t, product)
        return product
