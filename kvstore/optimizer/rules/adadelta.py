"""AdaDelta."""

from __future__ import annotations

from ..builtin import ElementwiseOptimizer
from ..checks import fraction, non_negative, setting
from ..optimizer import Array, Index
from ..registry import register


@register
class AdaDelta(ElementwiseOptimizer):
    """AdaDelta (Zeiler, arXiv:1212.5701), with a learning rate.

    ``g = clip(rescale_grad * grad) + wd * w``; ``a = rho * a + (1 - rho) * g**2``;
    ``d = sqrt(b + epsilon) / sqrt(a + epsilon) * g``; ``b = rho * b + (1 - rho) * d**2``; ``w -= lr * d``.

    Parameters
    ----------
    learning_rate : float, default 1
    rho : float, default 0.9
    epsilon : float, default 1e-6
    **common
        Keywords of `Optimizer`.

    Notes
    -----
    State: ``(a, b)``. MXNet 1.9.1 ignored the learning rate and scaled the gradient of the caller in place.
    """

    default_learning_rate = 1.0
    rule_name = "adadelta"
    repeats = True
    rho: float = setting(fraction, default=0.9)
    epsilon: float = setting(non_negative, default=1e-6)

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of one update."""
        return (*self._common_parameters(index), self.rho, self.epsilon)
