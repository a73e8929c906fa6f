"""Update rules of the tests' own, for this process and for servers, which import this module by name."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

import kvstore as kv

Array = npt.NDArray[Any]


@kv.optimizer.register
class Halving(kv.optimizer.Optimizer):
    """No compiled kernel, a state, and an error on demand."""

    def __init__(self, fail_on: Any = None, **settings: Any) -> None:
        super().__init__(**settings)
        self.fail_on = fail_on

    def create_state(self, index: Any, weight: Array) -> Any:
        return np.zeros(1, np.float32)

    def update(self, index: Any, weight: Array, grad: Array, state: Any) -> None:
        self._update_count(index)
        state += 1
        weight /= 2
        if index == self.fail_on:
            raise ZeroDivisionError("on demand")


@kv.optimizer.register
class Momentous(kv.optimizer.Optimizer):
    """A rule that looks at every element alone."""

    def create_state(self, index: Any, weight: Array) -> Any:
        return np.zeros_like(weight)

    def update(self, index: Any, weight: Array, grad: Any, state: Any) -> None:
        self._update_count(index)
        state += grad
        weight -= np.float32(self._get_lr(index)) * state


@kv.optimizer.register
class Added(kv.optimizer.Optimizer):
    """What MXNet 1.9.1 calls `test`: the gradient is added to the weight."""

    def create_state(self, index: Any, weight: Array) -> Any:
        return None

    def update(self, index: Any, weight: Array, grad: Any, state: Any) -> None:
        self._update_count(index)
        dense = grad.todense() if isinstance(grad, kv.RowSparseArray) else grad
        weight += np.float32(self.rescale_grad) * dense


@kv.optimizer.register
class FiniteOnly(Added):
    """Raises where a gradient is not finite, and says so in so many words."""

    def __init__(self, words: int = 1, **settings: Any) -> None:
        super().__init__(**settings)
        self.words = words

    def update(self, index: Any, weight: Array, grad: Any, state: Any) -> None:
        if not np.isfinite(grad).all():
            raise FloatingPointError("not finite: " + "∞" * self.words)
        super().update(index, weight, grad, state)
