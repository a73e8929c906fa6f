"""The gradients of one step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from ..arrays.host import readable_array
from ..arrays.sparse import RowSparseArray
from ..errors import ArrayError, ConfigError
from .parameter import TrainableParameter, check_factors


class _StaleGradient(ConfigError, UserWarning):
    """A gradient was not written since an earlier step.

    MXNet raises UserWarning here, so this is a UserWarning, too.
    """


class StepGradients(NamedTuple):
    """A parameter in one step: its key, and for each gradient whether it is used."""

    key: int
    param: TrainableParameter
    fresh: list[bool]

    def pushed(self) -> list[Any]:
        """Return the gradients of this step.

        Zeros for absent ones, because the other workers wait for this worker's part.
        """
        grads = self.param.list_grad()
        return [grad for grad, ok in zip(grads, self.fresh, strict=True) if ok] or [_zeros_like(grads[0])]

    def is_sparse(self) -> bool:
        """Return whether the gradients are row-sparse."""
        return isinstance(self.param.list_grad()[0], RowSparseArray)


def of_step(params: Sequence[TrainableParameter], ignore_stale: bool) -> list[StepGradients]:
    """Return the gradients of all parameters that have any.

    Raises
    ------
    ConfigError
        A gradient was not written since the last step, or a factor is not a number.
    """
    active = [(key, param) for key, param in enumerate(params) if param.grad_req != "null"]
    for _, param in active:
        check_factors(param)
    found = [StepGradients(key, param, _fresh_gradients(param)) for key, param in active]
    for one in found:
        if not ignore_stale and not all(one.fresh):
            raise _StaleGradient(
                f"the gradient of parameter {one.param.name!r}, replica {one.fresh.index(False)}, was "
                "not written since the last step; if not every batch uses it, pass ignore_stale_grad=True"
            )
    return found


def mark_stale(gradients: Sequence[StepGradients]) -> None:
    """Mark the gradients as used by a step."""
    for one in gradients:
        if getattr(one.param, "fresh", None) is not None:
            one.param.fresh = [False] * len(one.fresh)  # type: ignore[attr-defined]


def _fresh_gradients(param: TrainableParameter) -> list[bool]:
    """Return, for each gradient, whether it was written since the last step."""
    grads = param.list_grad()
    if not grads and param.list_data():
        raise ArrayError(
            f"parameter {param.name!r} has data and no gradient, and its grad_req is {param.grad_req!r}: "
            "give it a gradient, or set its grad_req to 'null'"
        )
    if not grads:
        raise ArrayError(f"parameter {param.name!r} has no data yet; give it some before the first step")
    fresh = getattr(param, "fresh", None)
    return [True] * len(grads) if fresh is None else list(fresh)


def _zeros_like(grad: Any) -> Any:
    if isinstance(grad, RowSparseArray):
        return RowSparseArray.zeros(grad.shape, grad.dtype)
    return np.zeros_like(readable_array(grad, "gradient"))
