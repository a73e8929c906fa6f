"""Plain descent for tests."""

from __future__ import annotations

from ..builtin import ElementwiseOptimizer
from ..optimizer import Array, Index
from ..registry import register


@register
class Test(ElementwiseOptimizer):
    """Plain descent for tests: ``w -= lr * (rescale_grad * grad + wd * w)``, no clipping.

    Notes
    -----
    No state. This is the rule of MXNet's master branch; that of 1.9.1 added ``rescale_grad * grad`` to the
    weight, which ``Test(learning_rate=-1)`` does here.
    """

    # Not a test case, although a test runner selects this name.
    __test__ = False
    rule_name = "test"
    repeats = True

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of one update."""
        return self._common_parameters(index)
