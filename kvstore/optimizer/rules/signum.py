"""Signum and signSGD."""

from __future__ import annotations

from ..builtin import ElementwiseOptimizer
from ..checks import finite, fraction, setting
from ..optimizer import Array, Index
from ..registry import register


@register
class Signum(ElementwiseOptimizer):
    """Steps of constant size with the sign of the momentum (Bernstein and others, arXiv:1802.04434).

    ``g = clip(rescale_grad * grad) + wd * w``; ``m = momentum * m - (1 - momentum) * g``;
    ``w = (1 - lr * wd_lh) * w + lr * sign(m)``. Without momentum (signSGD):
    ``w = (1 - lr * (wd + wd_lh)) * w - lr * sign(grad)``, without rescaling and clipping.

    Parameters
    ----------
    learning_rate : float, default 0.01
    momentum : float, default 0.9
        Below 1.
    wd_lh : float, default 0
        Decoupled weight decay.
    **common
        Keywords of `Optimizer`.

    Notes
    -----
    State: the momentum, or None without.
    """

    optional_state = frozenset({"momentum"})
    repeats = True
    momentum: float = setting(fraction, default=0.9)
    wd_lh: float = setting(finite, default=0.0)

    def rule(self) -> str:
        """Return the name of the compiled rule."""
        return "signum" if self.momentum else "signsgd"

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of one update."""
        lr, wd, rescale, clip = self._common_parameters(index)
        if not self.momentum:
            return (lr, wd + self.wd_lh, rescale, clip)
        return (lr, wd, rescale, clip, self.momentum, self.wd_lh)
