"""AdaGrad with one rate for each row."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from ... import kernels
from ...arrays.sparse import RowSparseArray
from ...errors import ConfigError, ShapeError
from ..builtin import WholeTensorOptimizer, widened_copy
from ..checks import Settings, non_negative, setting
from ..optimizer import Array, Index, State, is_half
from ..registry import register


def _no_decay(name: str, value: Any) -> float:
    if value != 0:
        raise ConfigError(f"GroupAdaGrad has no weight decay: wd must be 0, got {value!r}")
    return 0.0


@register
class GroupAdaGrad(WholeTensorOptimizer):
    """AdaGrad with one accumulator for each row of a table, for embeddings.

    ``g = clip(rescale_grad * grad)``; ``h += mean(g**2)`` of each row; ``w -= lr * g / (sqrt(h) + epsilon)``.
    A row-sparse gradient updates only its rows.

    Parameters
    ----------
    learning_rate : float, default 0.01
    epsilon : float, default 1e-6
    **common
        Keywords of `Optimizer`; `wd` must be 0.

    Notes
    -----
    State: ``h``, shape ``(rows, 1)``. Weights must have two dimensions.
    """

    settings: ClassVar[Settings] = {"wd": _no_decay}
    renamed: ClassVar[Mapping[str, str]] = {"eps": "epsilon"}
    epsilon: float = setting(non_negative, default=1e-6)

    def create_state(self, index: Index, weight: Array) -> State:
        """Return a history of zeros, one for each row.

        Raises
        ------
        ShapeError
            If the weight has not two dimensions.
        """
        if weight.ndim != 2:
            raise ShapeError(
                f"GroupAdaGrad needs weights of two dimensions, key {index!r} has shape {weight.shape}"
            )
        return np.zeros((weight.shape[0], 1), weight.dtype)

    def sparse_mode(self, weight_is_sparse: bool) -> str:
        """Return "rows"."""
        return "rows"

    def step(self, index: Index, weight: Array, grad: Any, states: tuple[Array, ...]) -> None:
        """Count one update of a key and apply it."""
        self._update_count(index)
        lr, _ = self._key_rates(index)
        params = (lr, 0.0, self.rescale_grad, self._clip_bound(), self.epsilon)
        (history,) = states
        if isinstance(grad, np.ndarray):
            kernels.cpu.group_adagrad(params, grad, weight, history)
        else:
            kernels.cpu.group_adagrad(params, grad.data, weight, history, grad.indices)

    def _wide_gradient(self, grad: Any) -> Any:
        if isinstance(grad, np.ndarray):
            return super()._wide_gradient(grad)
        data = np.ascontiguousarray(grad.data)
        return RowSparseArray(widened_copy(data) if is_half(data.dtype) else data, grad.indices, grad.shape)
