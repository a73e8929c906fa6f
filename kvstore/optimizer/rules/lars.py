"""LARS."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import ClassVar

from ... import kernels
from ...arrays import pages
from ..builtin import WholeTensorOptimizer
from ..checks import flag, non_negative, setting
from ..optimizer import Array, Index, State
from ..registry import register


@register
class LARS(WholeTensorOptimizer):
    """Layer-wise adaptive rate scaling (You, Gitman and Ginsburg, arXiv:1708.03888).

    `SGD` with the rate ``lr * eta * |w| / (|rescale_grad * grad| + wd * |w| + epsilon)``. The rate is ``lr``
    if either norm is 0, and for parameters with a name that ends in ``gamma``, ``beta`` or ``bias``.

    Parameters
    ----------
    learning_rate : float, default 0.1
    momentum : float, default 0
    eta : float, default 0.001
        Trust coefficient.
    epsilon : float, default 1e-8
    lazy_update : bool, default False
        Accepted for compatibility with MXNet, and ignored: a row-sparse gradient always counts as dense,
        because the norms are those of the whole tensor.
    **common
        Keywords of `Optimizer`. The name of a key is looked up in `param_idx2name`; without one it is the
        key.

    Notes
    -----
    State: the momentum, or None without. Norms are those of the whole tensor, summed in double precision.
    """

    default_learning_rate = 0.1
    optional_state = frozenset({"momentum"})
    renamed: ClassVar[Mapping[str, str]] = {"eps": "epsilon"}
    momentum: float = setting(non_negative, default=0.0)
    eta: float = setting(non_negative, default=0.001)
    epsilon: float = setting(non_negative, default=1e-8)
    lazy_update: bool = setting(flag, default=False)

    def create_state(self, index: Index, weight: Array) -> State:
        """Return zero momentum, or None."""
        return pages.zeros_like(weight) if self.momentum else None

    def step(self, index: Index, weight: Array, grad: Array, states: tuple[Array, ...]) -> None:
        """Count one update of a key and apply it."""
        self._update_count(index)
        lr, wd = self._key_rates(index)
        params = (
            lr * self._rate_factor(index, weight, grad, wd),
            wd,
            self.rescale_grad,
            self._clip_bound(),
            self.momentum,
        )
        rule = kernels.cpu.rule_id("sgd_momentum" if states else "sgd")
        kernels.cpu.update([(rule, params, [grad], weight, None, states, [])])

    def _rate_factor(self, index: Index, weight: Array, grad: Array, wd: float) -> float:
        """Return the factor of the rate for one tensor."""
        if self.idx2name.get(index, str(index)).endswith(("gamma", "beta", "bias")):
            return 1.0
        norm = math.sqrt(kernels.cpu.sumsq(weight))
        slope = abs(self.rescale_grad) * math.sqrt(kernels.cpu.sumsq(grad))
        if not (0 < norm < math.inf and 0 < slope < math.inf):
            return 1.0
        return self.eta * norm / (slope + wd * norm + self.epsilon)
