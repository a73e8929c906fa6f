"""LAMB."""

from __future__ import annotations

import math

from ... import kernels
from ...arrays import pages
from ..builtin import WholeTensorOptimizer
from ..checks import flag, non_negative, optional, setting
from ..optimizer import Array, Index, State
from ..registry import register
from .moments import TwoMoments


@register
class LAMB(TwoMoments, WholeTensorOptimizer):
    """Layer-wise adaptive moments (You and others, arXiv:1904.00962).

    ``g = clip(rescale_grad * grad)``, moments as in `Adam`,
    ``u = m / (1 - beta1**t) / (sqrt(v / (1 - beta2**t)) + epsilon) + wd * w``, and
    ``w -= lr * |w| / |u| * u``. The ratio is 1 if one of the norms is 0 or the quotient is not finite.

    Parameters
    ----------
    learning_rate : float, default 0.001
    beta1, beta2 : float, default 0.9 and 0.999
    epsilon : float, default 1e-6
    lower_bound, upper_bound : float, optional
        Bounds of ``|w|`` in the ratio.
    bias_correction : bool, default True
        If False, the moments are not corrected.
    **common
        Keywords of `Optimizer`.

    Notes
    -----
    State: ``(m, v)``. Norms are those of the whole tensor, summed in double precision.
    """

    default_learning_rate = 0.001
    epsilon: float = setting(non_negative, default=1e-6)
    lower_bound: float | None = setting(optional(non_negative), default=None)
    upper_bound: float | None = setting(optional(non_negative), default=None)
    bias_correction: bool = setting(flag, default=True)

    def create_state(self, index: Index, weight: Array) -> State:
        """Return zeros for the mean and the variance."""
        return (pages.zeros_like(weight), pages.zeros_like(weight))

    def step(self, index: Index, weight: Array, grad: Array, states: tuple[Array, ...]) -> None:
        """Count one update of a key and apply it."""
        cpu = kernels.cpu
        m, v = states
        params = self._step_parameters(index, weight, self._update_count(index))
        cpu.update([(cpu.rule_id("lamb_moments"), params, [grad], weight, None, states, [])])
        rate = params[0] * self._trust_ratio(*cpu.lamb_norms(weight, m, v, params))
        cpu.update([(cpu.rule_id("lamb_apply"), (rate, *params[1:]), [], weight, None, states, [])])

    def _step_parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        lr, wd = self._key_rates(index)
        corrections = self._bias_corrections(weight, t) if self.bias_correction else (1.0, 1.0)
        return (
            lr,
            wd,
            self.rescale_grad,
            self._clip_bound(),
            self.beta1,
            self.beta2,
            self.epsilon,
            *corrections,
        )

    def _trust_ratio(self, weight_squares: float, step_squares: float) -> float:
        """Return the trust ratio of the two sums of squares."""
        norm, step = math.sqrt(weight_squares), math.sqrt(step_squares)
        if self.lower_bound:
            norm = max(norm, self.lower_bound)
        if self.upper_bound:
            norm = min(norm, self.upper_bound)
        return trust_ratio(norm, step)


def trust_ratio(numerator: float, denominator: float) -> float:
    """Return the quotient, or 1 if it is 0, infinite or NaN."""
    if denominator == 0 or not 0 < numerator / denominator < math.inf:
        return 1.0
    return numerator / denominator
