"""The base class of all optimizers: keywords, update counts, multipliers, configuration."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import numpy as np

from ..arrays import pages
from ..arrays.element_types import HALVES
from ..errors import ArgumentError, ConfigError, nearest
from . import checks
from .changes import REVISION, FactorTable, NameTable, ParameterTable, begin_change, note_change
from .checks import Settings
from .lr_scheduler import LRScheduler, Schedule, from_config
from .registry import RegistrableOptimizer, create, register

if TYPE_CHECKING:
    import numpy.typing as npt

Array: TypeAlias = "npt.NDArray[Any]"
Index: TypeAlias = "int | str"
# The state of one key: None, an array, or a tuple of these.
State: TypeAlias = "Array | tuple[State, ...] | None"

# Accepted for compatibility with MXNet; they do not change the results of training.
_IGNORED = frozenset({"sym", "param_dict", "aggregate_num", "use_fused_step"})
#: Names of keywords in other libraries.
_SYNONYMS = {
    "lr": "learning_rate",
    "weight_decay": "wd",
    "eps": "epsilon",
    "betas": "beta1",
    "clip": "clip_gradient",
    "scheduler": "lr_scheduler",
}
_NOT_SHOWN = _IGNORED | {"learning_rate", "param_idx2name"}
_ABSENT = object()
_SCALARS = (bool, int, float, str)


class _ScheduleConflict(ConfigError, UserWarning):
    """The rate is that of the schedule. MXNet raises UserWarning here, so this is a UserWarning, too."""


class Optimizer(RegistrableOptimizer):
    """Base class of all optimizers, also of user-defined ones.

    Parameters
    ----------
    rescale_grad : float, default 1
        Factor of the gradient, applied first; often 1 / batch size.
    param_idx2name : dict, optional
        Names of the parameters by key, for multipliers (and for LARS, which uses the ending of the name).
    wd : float, default 0
        Weight decay.
    clip_gradient : float, optional
        Clips the rescaled gradient to ``[-clip_gradient, clip_gradient]``, unless it is None or 0.
    learning_rate : float, optional
        The default is that of the class, or the ``base_lr`` of the schedule. A given rate replaces both.
    lr_scheduler : LRScheduler or callable, optional
        Returns the learning rate for ``num_update``, the largest update count of all keys.
    begin_num_update : int, default 0
        First value of the update counts.
    multi_precision : bool, default False
        If True, keep a float32 copy of 16-bit weights and compute the updates with it.
    lr_mult, wd_mult : dict, optional
        Multipliers; see `set_lr_mult`.
    param_dict : dict, optional
        Objects with ``lr_mult`` and ``wd_mult`` by key, as in Gluon. They take precedence.
    sym, aggregate_num, use_fused_step
        Ignored; they exist in MXNet.

    Raises
    ------
    TypeError
        If a keyword is unknown, or is one that MXNet has renamed.
    ConfigError
        If a value is out of range.

    Notes
    -----
    A user-defined optimizer overrides `create_state` and `update`. With the decorator `register` it can be
    created by name, saved, and sent to other processes, which must import it too. Keep each constructor
    argument as an attribute of the same name, or override `get_config`.
    """

    #: Whether a compiled rule updates each element separately, so that a store can fuse it with the sum.
    fused: ClassVar[bool] = False
    #: Learning rate if neither the caller nor a schedule has one.
    default_learning_rate: ClassVar[float] = 0.01
    #: Hyper-parameters and their checks. A subclass lists its own; those of its bases are added.
    settings: ClassVar[Settings] = {
        "rescale_grad": checks.finite,
        "param_idx2name": NameTable,
        "wd": checks.finite,
        "clip_gradient": checks.optional(checks.non_negative),
        "learning_rate": checks.optional(checks.finite),
        "begin_num_update": checks.count,
        "multi_precision": checks.flag,
        "lr_mult": FactorTable,
        "wd_mult": FactorTable,
    }
    #: Settings that determine the form of the states; they cannot change after the first update.
    structural: ClassVar[frozenset[str]] = frozenset({"multi_precision", "begin_num_update"})
    #: Settings whose value 0 means no state; they cannot change from or to 0 after the first update.
    optional_state: ClassVar[frozenset[str]] = frozenset()
    #: Names of all constructor arguments, also those of the bases.
    keywords: ClassVar[frozenset[str]]
    #: Defaults of the constructor arguments; those of the class itself are first.
    defaults: ClassVar[Mapping[str, Any]]
    #: New names of renamed keywords, by old name.
    renamed: ClassVar[Mapping[str, str]] = {}
    #: Check of each attribute that is a setting.
    _watched: ClassVar[Settings]

    rescale_grad: float
    wd: float
    clip_gradient: float | None
    begin_num_update: int
    multi_precision: bool
    lr_mult: dict[Index, float]
    wd_mult: dict[Index, float]
    lr: float
    lr_scheduler: Schedule | None
    # The rate of the schedule, with its update and the number of `REVISION` for which it was computed.
    _rate: float = 0.0
    _rate_at: tuple[int, int] | None = None

    register = staticmethod(register)  # both attributes exist in MXNet too
    create_optimizer = staticmethod(create)

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        tables = [base.settings for base in reversed(cls.__bases__) if issubclass(base, Optimizer)]
        tables.append(vars(cls).get("settings", {}))
        cls.settings = {name: check for table in tables for name, check in table.items()}
        first_wins: dict[str, Any] = {}
        for base in cls.__mro__:
            first_wins |= {k: v for k, v in _own_defaults(base).items() if k not in first_wins}
        cls.defaults = first_wins
        cls.keywords = frozenset(cls.defaults)
        cls._watched = _setting_checks(cls)

    def __init__(
        self,
        rescale_grad: float = 1.0,
        param_idx2name: Mapping[Index, str] | None = None,
        wd: float = 0.0,
        clip_gradient: float | None = None,
        learning_rate: float | None = None,
        lr_scheduler: Schedule | None = None,
        sym: Any = None,
        begin_num_update: int = 0,
        multi_precision: bool = False,
        param_dict: Mapping[Index, Any] | None = None,
        aggregate_num: int | None = None,
        use_fused_step: bool | None = None,
        lr_mult: Mapping[Index, float] | None = None,
        wd_mult: Mapping[Index, float] | None = None,
        **unknown: Any,
    ) -> None:
        _refuse_unknown(type(self), unknown)
        self._store_settings(
            rescale_grad=rescale_grad,
            wd=wd,
            clip_gradient=clip_gradient,
            begin_num_update=begin_num_update,
            multi_precision=multi_precision,
            lr_mult=lr_mult,
            wd_mult=wd_mult,
        )
        self.idx2name: dict[Index, str] = NameTable("param_idx2name", param_idx2name)
        self.param_dict: dict[Index, Any] = ParameterTable("param_dict", param_dict)
        self.num_update: int = self.begin_num_update
        self._index_update_count: dict[Index, int] = {}
        self._warned_of_halves = False
        self._store_rate(learning_rate, lr_scheduler)

    def __setattr__(self, name: str, value: Any) -> None:
        check = self._watched.get(name)
        if check is None:
            object.__setattr__(self, name, value)
        else:
            self._assign_setting(name, check(name, value))

    def _assign_setting(self, name: str, value: Any) -> None:
        """Set an attribute that is a setting to a checked value; an equal scalar is not a change."""
        before = vars(self).get(name, _ABSENT)
        comparable = type(before) is type(value) and (value is None or isinstance(value, _SCALARS))
        if comparable and before == value:
            object.__setattr__(self, name, value)
            return
        begin_change()
        object.__setattr__(self, name, value)
        self._note_change()

    def _note_change(self) -> None:
        """Count a change of a setting.

        Rules that cache results of settings override this to clear the cache.
        """
        note_change()

    # ------------------------------------------------------------------ methods of user-defined rules

    def create_state(self, index: Index, weight: Array) -> State:
        """Return a new state for a key. It is called at the first update of the key.

        Parameters
        ----------
        index : int or str
            The key.
        weight : ndarray
            The weight of the key (with `multi_precision`, the float32 copy).

        Returns
        -------
        None, ndarray or tuple of these
        """
        return None

    def update(self, index: Index, weight: Array, grad: Any, state: Any) -> None:
        """Count one update of a key and apply it to `weight` and `state` in place.

        Parameters
        ----------
        index : int or str
            The key.
        weight : ndarray
            The weight; it is changed in place.
        grad : ndarray
            Sum of the gradients, with the shape and dtype of the weight, neither rescaled nor clipped. Do not
            change it.
        state : None, ndarray or tuple
            The state that `create_state` returned.

        Notes
        -----
        A user-defined optimizer calls ``self._update_count(index)``, then ``self._get_lr(index)`` and
        ``self._get_wd(index)``. ``self._index_update_count[index]`` is the number of this update.
        """
        raise NotImplementedError(f"{type(self).__name__} must override update(index, weight, grad, state)")

    def sparse_mode(self, weight_is_sparse: bool) -> str:
        """Return how a row-sparse gradient is applied.

        Returns
        -------
        {"rows", "dense"}
            ``"rows"`` updates the rows in the gradient, ``"dense"`` all rows: other gradients are zero.
        """
        return "dense"

    # -------------------------------------------------------------------------------- 16-bit weights

    def keeps_master(self, weight: Array) -> bool:
        """Return whether the state of this weight contains a float32 copy of it."""
        return self.multi_precision and is_half(weight.dtype)

    def create_state_multi_precision(self, index: Index, weight: Array) -> State:
        """Return the state of a key, for 16-bit weights together with a float32 copy of the weight.

        The result is that of `create_state`, or ``(copy, create_state(copy))`` with `multi_precision` and a
        16-bit weight. Without `multi_precision` a 16-bit weight causes a warning.
        """
        if self.keeps_master(weight):
            master = pages.copy(weight, np.float32)
            return (master, self.create_state(index, master))
        if is_half(weight.dtype) and not self._warned_of_halves:
            self._warned_of_halves = True
            warnings.warn(
                f"{weight.dtype} weights lose small updates to rounding; consider multi_precision=True, "
                "which keeps a float32 copy of them",
                stacklevel=2,
            )
        return self.create_state(index, weight)

    def update_multi_precision(self, index: Index, weight: Array, grad: Any, state: Any) -> None:
        """Apply `update`. If the state has a float32 copy, update the copy and round it to `weight`."""
        if not self.keeps_master(weight):
            self.update(index, weight, grad, state)
            return
        master, inner = state
        self.update(index, master, dense_gradient(grad).astype(np.float32), inner)
        weight[...] = master.astype(weight.dtype)

    # ------------------------------------------------------------------------------ rates and counts

    @property
    def learning_rate(self) -> float:
        """Current learning rate, without multipliers. An assignment calls `set_learning_rate`."""
        return self.lr if self.lr_scheduler is None else self.lr_scheduler(self.num_update)

    @learning_rate.setter
    def learning_rate(self, lr: float) -> None:
        self.set_learning_rate(lr)

    def set_learning_rate(self, lr: float) -> None:
        """Set the learning rate.

        Raises
        ------
        ConfigError
            If the optimizer has a schedule, or `lr` is not a finite number.
        """
        self.configure(learning_rate=checks.finite("learning_rate", lr))

    def set_lr_mult(self, args_lr_mult: Mapping[Index, float]) -> None:
        """Replace the multipliers of the learning rate.

        Parameters
        ----------
        args_lr_mult : dict
            Factors by key, or by a name of `param_idx2name`. The factor of a key is
            ``param_dict[key].lr_mult`` if it exists, else that of the key, else that of its name, else 1.
        """
        self._store_settings(lr_mult=args_lr_mult)

    def set_wd_mult(self, args_wd_mult: Mapping[Index, float]) -> None:
        """Replace the multipliers of the weight decay; see `set_lr_mult`."""
        self._store_settings(wd_mult=args_wd_mult)

    def _update_count(self, index: Index) -> int:
        """Count one update of a key and return its number."""
        counts = self._index_update_count
        t = counts[index] = counts.get(index, self.begin_num_update) + 1
        if t > self.num_update:
            vars(self)["num_update"] = t  # not a setting, and this is faster
        return t

    def _get_lr(self, index: Index) -> float:
        """Return the rate of a key, with its multiplier."""
        return self._key_rates(index)[0]

    def _get_wd(self, index: Index) -> float:
        """Return the weight decay of a key, with its multiplier."""
        return self._key_rates(index)[1]

    def _key_rates(self, index: Index) -> tuple[float, float]:
        lr = self.lr if self.lr_scheduler is None else self._scheduled_rate()
        if not (self.lr_mult or self.wd_mult or self.param_dict):
            return lr, self.wd
        if index in self.param_dict:
            parameter = self.param_dict[index]
            return lr * parameter.lr_mult, self.wd * parameter.wd_mult
        return lr * self._key_factor(self.lr_mult, index), self.wd * self._key_factor(self.wd_mult, index)

    def _key_factor(self, table: dict[Index, float], index: Index) -> float:
        if index in table:
            return table[index]
        name = self.idx2name.get(index)
        return 1.0 if name is None else table.get(name, 1.0)

    def _scheduled_rate(self) -> float:
        # All keys of a step have the same update number: the curve is computed once.
        if self._rate_at != (self.num_update, REVISION.number):
            assert self.lr_scheduler is not None
            vars(self)["_rate"] = float(self.lr_scheduler(self.num_update))
            vars(self)["_rate_at"] = self.num_update, REVISION.number
        return self._rate

    # -------------------------------------------------------------------------------- configuration

    def get_config(self) -> dict[str, Any]:
        """Return keyword arguments that create an equal optimizer; JSON can represent them.

        They contain the multipliers of `param_dict`, by key. They do not contain update counts and states.

        Raises
        ------
        ConfigError
            If the optimizer does not keep an argument as an attribute, or the schedule is a plain callable.
        """
        config = {name: self._described_setting(name) for name in sorted(self.keywords - _IGNORED)}
        for name, attribute in (("lr_mult", self.lr_mult), ("wd_mult", self.wd_mult)):
            own = {key: float(getattr(parameter, name)) for key, parameter in self.param_dict.items()}
            config[name] = [[key, factor] for key, factor in {**attribute, **own}.items()]
        config["param_idx2name"] = [[key, text] for key, text in self.idx2name.items()]
        return config

    def described(self, names: Iterable[str]) -> dict[str, Any]:
        """Return some settings as in `get_config`; the schedule and the rate are one setting."""
        wanted = set(names)
        if "lr_scheduler" in wanted:
            wanted.add("learning_rate")
        try:
            config = self.get_config()
        except ConfigError:  # possibly of another setting
            config = {name: self._described_setting(name) for name in wanted}
        return {name: config[name] for name in wanted}

    def configure(self, **changes: Any) -> None:
        """Change settings of the optimizer. If one of them is not valid, none changes.

        Parameters
        ----------
        **changes
            Constructor keywords and their new values.

        Raises
        ------
        ConfigError
            If a name is unknown, a value is out of range, the optimizer has a schedule and gets a
            `learning_rate`, or a change after the first update needs states of another form.
        """
        checked = {name: self._checked_setting(name, value) for name, value in changes.items()}
        self._refuse_new_structure(checked)
        if changes.keys() & {"learning_rate", "lr_scheduler"}:
            self._change_rate(changes, checked)
        if "param_idx2name" in checked:
            self.idx2name = checked.pop("param_idx2name")
        for name, value in checked.items():
            self._assign_setting(name, value)
        if not self._index_update_count:
            self.num_update = self.begin_num_update

    def _checked_setting(self, name: str, value: Any) -> Any:
        known = self.keywords - _IGNORED
        if name not in known:
            hint = f"{nearest(name, known, _SYNONYMS)}; known: {', '.join(sorted(known))}"
            raise ConfigError(f"{type(self).__name__} has no setting {name!r}{hint}")
        if name == "lr_scheduler":
            return as_schedule(value)
        return self.settings.get(name, _plain_setting)(name, value)

    def _refuse_new_structure(self, checked: Mapping[str, Any]) -> None:
        if not self._index_update_count:
            return
        for name, value in checked.items():
            if name in self.structural and value != getattr(self, name):
                raise ConfigError(
                    f"{name} determines the form of the states: it cannot change after the first update"
                )
            if name in self.optional_state and bool(value) != bool(getattr(self, name)):
                raise ConfigError(
                    f"{name} cannot change from 0 or to 0 after the first update: 0 means no state"
                )

    def _change_rate(self, changes: Mapping[str, Any], checked: dict[str, Any]) -> None:
        rate = checked.pop("learning_rate", None)
        schedule = checked.pop("lr_scheduler", self.lr_scheduler)
        if schedule is not None and "lr_scheduler" not in changes:
            raise _ScheduleConflict(
                "the learning rate is that of a schedule; pass a new lr_scheduler, or lr_scheduler=None "
                "together with the new rate"
            )
        if schedule is None and rate is None:
            rate = self.learning_rate
        self._store_rate(rate, schedule)

    def _store_rate(self, learning_rate: float | None, schedule: Any) -> None:
        rate = self.settings["learning_rate"]("learning_rate", learning_rate)
        self._assign_setting("lr_scheduler", _with_rate(as_schedule(schedule), rate))
        self._assign_setting("lr", self.default_learning_rate if rate is None else rate)

    def _store_settings(self, **values: Any) -> None:
        """Check settings and store them as attributes."""
        for name, value in values.items():
            setattr(self, name, self.settings[name](name, value))

    def _described_setting(self, name: str) -> Any:
        if name == "learning_rate":
            return self.lr if self.lr_scheduler is None else None
        if name == "lr_scheduler":
            return described_schedule(self.lr_scheduler)
        if name == "param_idx2name":
            return None
        try:
            return checks.plain(getattr(self, name))
        except AttributeError:
            raise ConfigError(
                f"{type(self).__name__} does not keep its argument {name!r} as an attribute; keep it, or "
                "override get_config"
            ) from None

    def __repr__(self) -> str:
        shown = {
            "learning_rate": self.learning_rate,
            **self._shown_arguments(),
            "num_update": self.num_update,
        }
        return f"{type(self).__name__}({', '.join(f'{name}={value!r}' for name, value in shown.items())})"

    def _shown_arguments(self) -> dict[str, Any]:
        """Return the rule's own arguments, the weight decay, and others that differ from the default."""
        common = Optimizer.defaults
        values = {name: getattr(self, name, _ABSENT) for name in self.defaults if name not in _NOT_SHOWN}
        return {
            name: value
            for name, value in values.items()
            if value is not _ABSENT
            and (name not in common or name == "wd" or (value or None) != (common[name] or None))
        }


def _own_defaults(klass: type) -> dict[str, Any]:
    """Return the arguments of a class's own constructor, and their defaults."""
    if klass is object or "__init__" not in vars(klass):
        return {}
    kinds = (inspect.Parameter.POSITIONAL_OR_KEYWORD, inspect.Parameter.KEYWORD_ONLY)
    _, *parameters = inspect.signature(vars(klass)["__init__"]).parameters.values()
    return {parameter.name: parameter.default for parameter in parameters if parameter.kind in kinds}


def _refuse_unknown(kind: type[Optimizer], unknown: Mapping[str, Any]) -> None:
    for name in unknown:
        if name in kind.renamed:
            raise ArgumentError(f"{kind.__name__}: the keyword {name!r} is now called {kind.renamed[name]!r}")
        hint = nearest(name, kind.keywords, _SYNONYMS)
        known = ", ".join(sorted(kind.keywords))
        raise ArgumentError(f"{kind.__name__} has no keyword {name!r}{hint}; it takes {known}")


def _plain_setting(name: str, value: Any) -> Any:
    return checks.plain(value)


def _setting_checks(kind: type[Optimizer]) -> Settings:
    """Return the check of each attribute in which an optimizer of this class stores a setting."""
    others: Settings = {
        "lr": lambda _, value: checks.finite("learning_rate", value),
        "lr_scheduler": lambda _, value: as_schedule(value),
        "idx2name": NameTable,
        "param_dict": ParameterTable,
    }
    aliased = _IGNORED | {"learning_rate", "param_idx2name"}
    return {name: kind.settings.get(name, _plain_setting) for name in kind.keywords - aliased} | dict(others)


Optimizer.defaults = _own_defaults(Optimizer)
Optimizer.keywords = frozenset(Optimizer.defaults)
Optimizer._watched = _setting_checks(Optimizer)


def as_schedule(value: Any) -> Schedule | None:
    """Return a schedule from a schedule, a callable, its description, or None."""
    if value is None or isinstance(value, LRScheduler):
        return value
    if callable(value):
        schedule: Schedule = value
        return schedule
    if isinstance(value, Mapping):
        return from_config(dict(value))
    raise ConfigError(f"lr_scheduler must be a schedule or a callable, got {value!r}")


def described_schedule(schedule: Schedule | None) -> dict[str, Any] | None:
    """Return ``{"name", "config"}`` of a schedule."""
    if schedule is None:
        return None
    if not isinstance(schedule, LRScheduler):
        raise ConfigError(
            f"the schedule {schedule!r} is a plain callable, which can be neither saved nor sent; write a "
            "subclass of LRScheduler and decorate it with @kvstore.optimizer.lr_scheduler.register"
        )
    return {"name": type(schedule).__name__, "config": schedule.get_config()}


def _with_rate(schedule: Schedule | None, rate: float | None) -> Schedule | None:
    if rate is None or not isinstance(schedule, LRScheduler) or schedule.base_lr == rate:
        return schedule
    import logging

    logging.getLogger("kvstore").warning(
        "learning_rate %s replaces the base_lr %s of the schedule", rate, schedule.base_lr
    )
    return schedule.with_base_lr(rate)


def is_half(dtype: np.dtype[Any]) -> bool:
    """Return whether a dtype is float16 or bfloat16."""
    return dtype.itemsize == 2 and dtype.name in HALVES


def dense_gradient(grad: Any) -> Array:
    """Return a gradient as an ndarray; missing rows of a row-sparse gradient are zero."""
    return grad if isinstance(grad, np.ndarray) else grad.todense()
