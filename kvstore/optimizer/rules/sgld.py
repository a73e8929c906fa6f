"""Stochastic gradient Langevin dynamics."""

from __future__ import annotations

import zlib
from typing import Any

from ...errors import ConfigError
from ..builtin import ElementwiseOptimizer
from ..checks import count, setting
from ..optimizer import Array, Index
from ..registry import register


def _checked_seed(name: str, value: Any) -> int:
    if count(name, value) >= 2**32:
        raise ConfigError(f"{name} must be below 2**32, got {value!r}")
    return int(value)


@register
class SGLD(ElementwiseOptimizer):
    """Stochastic gradient Langevin dynamics (Welling and Teh, ICML 2011): half a step, plus noise.

    ``g = clip(rescale_grad * grad) + wd * w``; ``w += -lr / 2 * g + sqrt(lr) * normal``.

    Parameters
    ----------
    learning_rate : float, default 0.1
        Must not be negative.
    seed : int, default 0
        Seed of the noise; less than 2**32.
    **common
        Keywords of `Optimizer`.

    Notes
    -----
    No state. The noise of an element depends only on the seed, the key, the number of the update and the
    position in the tensor, so a run can be repeated and resumed with identical bits. MXNet uses a global
    generator instead.
    """

    default_learning_rate = 0.1
    rule_name = "sgld"
    seed: int = setting(_checked_seed, default=0)

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of update number `t`."""
        rate, *rest = self._common_parameters(index)
        if rate < 0:
            raise ConfigError(f"SGLD needs a learning rate of zero or more, key {index!r} has {rate}")
        return (rate, *rest, self.seed, zlib.crc32(str(index).encode()), t)
