"""Learning-rate schedules: pure functions of the number of updates.

Names, arguments and values are those of MXNet's ``mx.lr_scheduler``, with two differences. A call does not
change the schedule, so the rates of any updates can be computed in any order; MXNet's schedules overwrite
their ``base_lr``. Polynomial and cosine schedules return ``final_lr`` after ``max_update`` also at the first
call.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, TypeVar, Union

from ..errors import ConfigError, nearest
from .changes import begin_change, note_change
from .checks import count, finite, plain

Schedule = Union["LRScheduler", Callable[[int], float]]
Klass = TypeVar("Klass", bound="type[LRScheduler]")

_registry: dict[str, type[LRScheduler]] = {}


def register(klass: Klass) -> Klass:
    """Register a schedule by its class name, so that it can be saved and sent. Usable as a decorator."""
    _registry[klass.__name__] = klass
    return klass


def from_config(spec: dict[str, Any]) -> LRScheduler:
    """Create a schedule from ``{"name": class name, "config": keyword arguments}``.

    Raises
    ------
    ConfigError
        If the name is unknown or the arguments are not valid.
    """
    name, config = spec.get("name"), spec.get("config")
    if not isinstance(name, str) or name not in _registry:
        known = ", ".join(sorted(_registry))
        raise ConfigError(f"no schedule is called {name!r}{nearest(str(name), _registry)}; known: {known}")
    try:
        return _registry[name](**config)  # type: ignore[arg-type] # checked by the call itself
    except TypeError as error:
        raise ConfigError(f"the configuration of {name} does not fit: {error}") from None


class LRScheduler:
    """Base class of the schedules: a warm-up, then a constant rate.

    Parameters
    ----------
    base_lr : float, default 0.01
        Rate at the end of the warm-up.
    warmup_steps : int, default 0
        Number of updates of the warm-up.
    warmup_begin_lr : float, default 0
        Rate at the beginning of the warm-up.
    warmup_mode : {"linear", "constant"}
        ``"linear"`` increases the rate linearly. ``"constant"`` keeps `warmup_begin_lr` until the end of the
        warm-up.

    Raises
    ------
    ConfigError
        If `warmup_begin_lr` exceeds `base_lr`, `warmup_steps` is negative or not an integer, or the mode is
        unknown.
    """

    options: ClassVar[tuple[str, ...]] = ("base_lr", "warmup_steps", "warmup_begin_lr", "warmup_mode")

    def __init__(
        self,
        base_lr: float = 0.01,
        warmup_steps: int = 0,
        warmup_begin_lr: float = 0,
        warmup_mode: str = "linear",
    ) -> None:
        self.base_lr = finite("base_lr", base_lr)
        self.warmup_steps = count("warmup_steps", warmup_steps)
        self.warmup_begin_lr = finite("warmup_begin_lr", warmup_begin_lr)
        self.warmup_mode = warmup_mode
        if warmup_begin_lr > base_lr:
            raise ConfigError(f"warmup_begin_lr {warmup_begin_lr} must not exceed base_lr {base_lr}")
        if warmup_mode not in ("linear", "constant"):
            raise ConfigError(f"warmup_mode is 'linear' or 'constant', not {warmup_mode!r}")

    def __setattr__(self, name: str, value: Any) -> None:
        """Store scalars of NumPy as Python's, and count the change, so that stores search for it."""
        begin_change()
        object.__setattr__(self, name, plain(value))
        note_change()

    @property
    def warmup_final_lr(self) -> float:
        """Rate at the end of the warm-up."""
        return self.base_lr

    def get_warmup_lr(self, num_update: int) -> float:
        """Return the rate of an update during the warm-up."""
        if self.warmup_mode == "constant":
            return self.warmup_begin_lr
        return self.warmup_begin_lr + (self.base_lr - self.warmup_begin_lr) * num_update / self.warmup_steps

    def after_warmup(self, num_update: int) -> float:
        """Return the rate of an update after the warm-up. Subclasses override this method."""
        return self.base_lr

    def __call__(self, num_update: int) -> float:
        """Return the learning rate of update `num_update`; the first update is 1."""
        if num_update < self.warmup_steps:
            return self.get_warmup_lr(num_update)
        return self.after_warmup(num_update)

    def get_config(self) -> dict[str, Any]:
        """Return keyword arguments that create an equal schedule."""
        return {name: getattr(self, name) for name in self.options}

    def with_base_lr(self, base_lr: float) -> LRScheduler:
        """Return a copy of the schedule with another base rate."""
        return type(self)(**{**self.get_config(), "base_lr": base_lr})

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, LRScheduler):
            return NotImplemented
        return type(self) is type(other) and self.get_config() == other.get_config()

    def __hash__(self) -> int:
        return hash(type(self))

    def __repr__(self) -> str:
        return f"{type(self).__name__}({', '.join(f'{k}={v!r}' for k, v in self.get_config().items())})"


@register
class FactorScheduler(LRScheduler):
    """Multiply the rate by `factor` after every `step` updates.

    Updates 1 to `step` have the base rate. The updates of the warm-up count too, so the first rate after a
    long warm-up can be a reduced one.

    Parameters
    ----------
    step : int
        Number of updates between two reductions.
    factor : float, default 1
        Factor of each reduction, at most 1.
    stop_factor_lr : float, default 1e-8
        Smallest rate.
    base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See `LRScheduler`.
    """

    options = ("step", "factor", "stop_factor_lr", *LRScheduler.options)

    def __init__(
        self, step: int, factor: float = 1, stop_factor_lr: float = 1e-8, base_lr: float = 0.01, **warmup: Any
    ) -> None:
        super().__init__(base_lr, **warmup)
        self.step = count("step", step)
        self.factor = _at_most_one(factor)
        self.stop_factor_lr = finite("stop_factor_lr", stop_factor_lr)
        if step < 1:
            raise ConfigError(f"step must be 1 or more, got {step}")

    def after_warmup(self, num_update: int) -> float:
        """Return the rate after the warm-up."""
        reductions = max(0, num_update - 1) // self.step
        if reductions == 0:
            return self.base_lr
        return max(self.stop_factor_lr, self.base_lr * self.factor**reductions)


@register
class MultiFactorScheduler(LRScheduler):
    """Multiply the rate by `factor` after each of the given updates.

    Parameters
    ----------
    step : list of int
        Numbers of these updates, strictly increasing, each 1 or more.
    factor : float, default 1
        Factor of each reduction, at most 1.
    base_lr, warmup_steps, warmup_begin_lr, warmup_mode
        See `LRScheduler`.
    """

    options = ("step", "factor", *LRScheduler.options)

    def __init__(self, step: Sequence[int], factor: float = 1, base_lr: float = 0.01, **warmup: Any) -> None:
        super().__init__(base_lr, **warmup)
        if not isinstance(step, (list, tuple)) or not step:
            raise ConfigError(f"step must be a list of update numbers, got {step!r}")
        self.step = [count("step", one) for one in step]
        self.factor = _at_most_one(factor)
        if self.step[0] < 1 or any(b <= a for a, b in zip(self.step, self.step[1:], strict=False)):
            raise ConfigError(f"step must rise strictly from 1 or more, got {list(step)}")

    def after_warmup(self, num_update: int) -> float:
        """Return the rate after the warm-up."""
        lr = self.base_lr
        for boundary in self.step:
            if num_update > boundary:
                lr *= self.factor
        return lr


class _DecreasingScheduler(LRScheduler):
    """Decrease the rate from the base rate to `final_lr` at `max_update`, along a curve."""

    options = ("max_update", "final_lr", *LRScheduler.options)

    def __init__(self, max_update: int, base_lr: float = 0.01, final_lr: float = 0, **warmup: Any) -> None:
        super().__init__(base_lr, **warmup)
        self.max_update = count("max_update", max_update)
        self.final_lr = finite("final_lr", final_lr)
        if max_update < 1:
            raise ConfigError(f"max_update must be 1 or more, got {max_update}")
        if self.max_update <= self.warmup_steps:
            raise ConfigError(
                f"max_update {max_update} must be larger than the {self.warmup_steps} warm-up steps"
            )

    @property
    def max_steps(self) -> int:
        """Number of updates between the warm-up and `max_update`."""
        return self.max_update - self.warmup_steps

    def after_warmup(self, num_update: int) -> float:
        """Return the rate after the warm-up."""
        if num_update >= self.max_update:
            return self.final_lr
        done = (num_update - self.warmup_steps) / self.max_steps
        return self.final_lr + (self.base_lr - self.final_lr) * self.remaining(done)

    def remaining(self, done: float) -> float:
        """Return the remaining part of the decrease after the fraction `done` of the steps, from 1 to 0."""
        raise NotImplementedError


@register
class PolyScheduler(_DecreasingScheduler):
    """Decrease the rate with a power of the remaining fraction of the steps.

    Parameters
    ----------
    max_update : int
        From this update the rate is `final_lr`.
    base_lr : float, default 0.01
        Rate at the end of the warm-up.
    pwr : float, default 2
        Exponent.
    final_lr : float, default 0
        Last rate.
    warmup_steps, warmup_begin_lr, warmup_mode
        See `LRScheduler`.
    """

    options = ("pwr", *_DecreasingScheduler.options)

    def __init__(
        self, max_update: int, base_lr: float = 0.01, pwr: float = 2, final_lr: float = 0, **warmup: Any
    ) -> None:
        super().__init__(max_update, base_lr, final_lr, **warmup)
        self.pwr = finite("pwr", pwr)

    def remaining(self, done: float) -> float:
        """Return a power of the remaining fraction of the steps."""
        return float((1 - done) ** self.pwr)


@register
class CosineScheduler(_DecreasingScheduler):
    """Decrease the rate along half a cosine wave.

    Parameters
    ----------
    max_update : int
        From this update the rate is `final_lr`.
    base_lr : float, default 0.01
        Rate at the end of the warm-up.
    final_lr : float, default 0
        Last rate.
    warmup_steps, warmup_begin_lr, warmup_mode
        See `LRScheduler`.
    """

    def remaining(self, done: float) -> float:
        """Return the height of the cosine wave, from 1 to 0."""
        return (1 + math.cos(math.pi * done)) / 2


register(LRScheduler)


def _at_most_one(factor: float) -> float:
    if finite("factor", factor) > 1:
        raise ConfigError(f"factor must not exceed 1, because the rate would increase; got {factor}")
    return float(factor)
