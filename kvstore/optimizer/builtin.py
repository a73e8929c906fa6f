"""The two kinds of optimizers that run on compiled kernels: element by element, and over whole tensors."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from .. import kernels
from ..arrays import pages
from ..arrays.element_types import FLOATS
from ..errors import ConfigError, DTypeError, ShapeError
from .declared import DeclaredOptimizer, keyword
from .lr_scheduler import Schedule
from .optimizer import Array, Index, State, dense_gradient, is_half


class BuiltInOptimizer(DeclaredOptimizer):
    """Base of the optimizers of this package."""

    # Keywords of all constructors, in addition to a rule's own settings, for type checkers; see `Optimizer`.
    _learning_rate: float | None = keyword(alias="learning_rate", kw_only=False)
    rescale_grad: float = keyword(1.0)
    _names: Mapping[Index, str] | None = keyword(alias="param_idx2name")
    wd: float = keyword(0.0)
    clip_gradient: float | None = keyword()
    _schedule: Schedule | None = keyword(alias="lr_scheduler")
    _symbol: Any = keyword(alias="sym")
    begin_num_update: int = keyword(0)
    multi_precision: bool = keyword(False)
    _parameters_by_key: Mapping[Index, Any] | None = keyword(alias="param_dict")
    _aggregate: int | None = keyword(alias="aggregate_num")
    _fused_step: bool | None = keyword(alias="use_fused_step")
    _rate_factors: Mapping[Index, float] | None = keyword(alias="lr_mult")
    _decay_factors: Mapping[Index, float] | None = keyword(alias="wd_mult")

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        # A user-defined class that derives from a built-in one with its own update has no compiled rule: each
        # update must call its method.
        if vars(cls).keys() & {"update", "update_multi_precision"}:
            cls.fused = False

    def create_state_multi_precision(self, index: Index, weight: Array) -> State:
        """Return the state of a key; see `Optimizer`.

        Raises
        ------
        DTypeError
            If the weight is not of a floating-point type.
        """
        if weight.dtype.name not in FLOATS:
            kinds = ", ".join(FLOATS)
            raise DTypeError(
                f"{type(self).__name__} updates weights of {kinds}; key {index!r} is {weight.dtype}"
            )
        return super().create_state_multi_precision(index, weight)

    def update(self, index: Index, weight: Array, grad: Any, state: Any) -> None:
        """Count one update of a key and apply it in place; `grad` may be row-sparse."""
        self._apply_rule(index, weight, grad, None, arrays_of(state))

    def update_multi_precision(self, index: Index, weight: Array, grad: Any, state: Any) -> None:
        """Apply `update`, to the float32 copy if there is one, and round that into `weight`."""
        if type(self).update is not BuiltInOptimizer.update or not self.keeps_master(weight):
            super().update_multi_precision(index, weight, grad, state)
            return
        self._apply_rule(index, weight, grad, state[0], arrays_of(state[1]))

    def _apply_rule(
        self, index: Index, weight: Array, grad: Any, master: Array | None, states: tuple[Array, ...]
    ) -> None:
        raise NotImplementedError

    def _clip_bound(self) -> float:
        """Return the bound of the gradient in the form of the kernels."""
        return self.clip_gradient or math.inf


class ElementwiseOptimizer(BuiltInOptimizer):
    """An optimizer whose rule updates each element separately, so that a store can fuse it with its sum."""

    fused = True
    #: Name of the compiled rule.
    rule_name: ClassVar[str]
    #: Whether `parameters` depend on settings only, not on the number of the update. Not inherited.
    repeats: ClassVar[bool] = False

    def is_repeated(self) -> bool:
        """Return whether all updates of a key have the same parameters while the settings are the same."""
        return bool(vars(type(self)).get("repeats")) and self.lr_scheduler is None

    def rule(self) -> str:
        """Return the name of the compiled rule for the present settings."""
        return self.rule_name

    def create_state(self, index: Index, weight: Array) -> State:
        """Return zeros for each state of the compiled rule: None, an array, or a tuple of arrays."""
        zeros = tuple(pages.zeros_like(weight) for _ in range(kernels.cpu.rule_states(self.rule())))
        return zeros if len(zeros) > 1 else zeros[0] if zeros else None

    def parameters(self, index: Index, weight: Array, t: int) -> tuple[float, ...]:
        """Return the parameters of update number `t` of a key, in the order of the compiled rule."""
        raise NotImplementedError

    def advance(self, index: Index, weight: Array) -> tuple[float, ...]:
        """Count one update of a key and return its parameters."""
        return self.parameters(index, weight, self._update_count(index))

    def _common_parameters(self, index: Index) -> tuple[float, float, float, float]:
        """Return the first parameters of every rule: rate, decay, rescaling, bound of the gradient."""
        lr, wd = self._key_rates(index)
        return lr, wd, self.rescale_grad, self.clip_gradient or math.inf

    def _divided_by(self, index: Index) -> tuple[float, float, float, float]:
        """Return `_common_parameters` for a rule that divides by the rate.

        Raises
        ------
        ConfigError
            If the rate is not positive: the weights would be NaN.
        """
        common = self._common_parameters(index)
        if common[0] <= 0:
            name = type(self).__name__
            raise ConfigError(f"{name} needs a learning rate above 0, key {index!r} has {common[0]}")
        return common

    def _apply_rule(
        self, index: Index, weight: Array, grad: Any, master: Array | None, states: tuple[Array, ...]
    ) -> None:
        check_fit(grad, weight)
        rule = kernels.cpu.rule_id(self.rule())
        params = self.advance(index, weight)
        if isinstance(grad, np.ndarray) or self.sparse_mode(False) == "dense":
            kernels.cpu.update([(rule, params, [contiguous_gradient(grad)], weight, master, states, [])])
            return
        kernels.cpu.update_rows(rule, params, [grad.data], [None], grad.indices, weight, master, states)


class WholeTensorOptimizer(BuiltInOptimizer):
    """An optimizer whose rule needs norms or means of a whole tensor.

    For 16-bit weights, the rule computes in float32: on their float32 copy, or on a temporary one.
    """

    def _apply_rule(
        self, index: Index, weight: Array, grad: Any, master: Array | None, states: tuple[Array, ...]
    ) -> None:
        check_fit(grad, weight)
        if not is_half(weight.dtype):
            self.step(index, weight, self._wide_gradient(grad), states)
            return
        wide = widened_copy(weight) if master is None else master
        held = tuple(widened_copy(state) for state in states) if master is None else states
        self.step(index, wide, self._wide_gradient(grad), held)
        kernels.cpu.cast(wide, weight)
        if master is None:
            for state, value in zip(states, held, strict=True):
                kernels.cpu.cast(value, state)

    def step(self, index: Index, weight: Array, grad: Any, states: tuple[Array, ...]) -> None:
        """Count one update of a key and apply it; all arrays are float32, or all float64."""
        raise NotImplementedError

    def _wide_gradient(self, grad: Any) -> Any:
        """Return a gradient in the precision of the computation."""
        plain = contiguous_gradient(grad)
        return widened_copy(plain) if is_half(plain.dtype) else plain


def arrays_of(state: Any) -> tuple[Any, ...]:
    """Return the arrays of a state in order, without None."""
    if state is None:
        return ()
    if isinstance(state, tuple):
        return tuple(array for part in state for array in arrays_of(part))
    return (state,)


def map_state(state: Any, change: Callable[[Any], Any]) -> Any:
    """Return a state of the same form, with each array changed."""
    if isinstance(state, tuple):
        return tuple(map_state(part, change) for part in state)
    return None if state is None else change(state)


def check_fit(grad: Any, weight: Array) -> None:
    """Raise ShapeError or DTypeError unless a gradient has the shape and type of its weight."""
    if grad.shape != weight.shape:
        raise ShapeError(f"a gradient of shape {grad.shape} does not fit a weight of shape {weight.shape}")
    if grad.dtype != weight.dtype:
        raise DTypeError(f"a gradient of type {grad.dtype} does not fit a weight of type {weight.dtype}")


def contiguous_gradient(grad: Any) -> Array:
    """Return a gradient as the dense array that kernels take."""
    return np.ascontiguousarray(dense_gradient(grad))


def widened_copy(array: Array) -> Array:
    """Return a float32 copy."""
    return array.astype(np.float32)
