"""MXNet's optimizers in stores: translated where the formulas are the same, else run by MXNet's own code.

kvstore's optimizers follow the master branch. Some of its formulas differ from those of 1.9.1
(docs/from-mxnet.md). A rule that would compute other weights is not translated: MXNet's own code then
updates, in the worker.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..errors import CapabilityError, ConfigError
from ..optimizer import Optimizer, checks, create, lr_scheduler
from ..optimizer.lr_scheduler import LRScheduler
from ..optimizer.optimizer import Array, Index, State, dense_gradient
from .arrays import as_ndarray, gradient_as_ndarray, rows_of

#: Settings of all optimizers of MXNet, with the same names here.
_COMMON = ("rescale_grad", "wd", "clip_gradient", "multi_precision", "begin_num_update")


@dataclass(frozen=True)
class _RuleTranslation:
    """An optimizer of kvstore that can replace one of MXNet.

    Attributes
    ----------
    name : str
        Name of kvstore's optimizer.
    settings : dict
        MXNet's attribute -> kvstore's keyword.
    differs : callable
        Returns the difference of the formulas with the present settings, or an empty text.
    fixed : dict
        kvstore's keywords for which MXNet has no attribute.
    shown : callable
        Returns kvstore's state of a key in MXNet's order.
    """

    name: str
    settings: Mapping[str, str]
    differs: Callable[[Any], str]
    fixed: Mapping[str, Any] = field(default_factory=dict)
    shown: Callable[[State], State] = lambda state: state


def _same_names(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def _copy_last(state: State) -> State:
    """Move the float32 copy behind the momentum."""
    return state[::-1] if isinstance(state, tuple) else state


def _square_first(state: State) -> State:
    """Move the mean of the squares before the mean."""
    if not isinstance(state, tuple):
        return state
    first, second, *rest = state
    return (second, first, *rest) if rest else (first, _square_first(second))


def _no_difference(optimizer: Any) -> str:
    return ""


def _says_where(*settings: str, says: str) -> Callable[[Any], str]:
    """Make a function that returns `says` if all of these settings are on."""
    return lambda optimizer: says if all(getattr(optimizer, name) for name in settings) else ""


_clips_late = _says_where("wd", "clip_gradient", says="1.9.1 adds the weight decay before it clips")
_nag_differs = _says_where(
    "wd", "momentum", says="1.9.1 computes the decay of the momentum with the new weight"
)
_lars_differs = _says_where(
    "momentum", "momentum_correction", says="1.9.1 corrects the momentum when the rate changes"
)
_dcasgd_differs = _says_where("wd", says="1.9.1 does not add the weight decay to the squared gradient")


def _rmsprop_differs(optimizer: Any) -> str:
    return _clips_late(optimizer) if optimizer.centered else "1.9.1 has epsilon inside the root"


_MOMENTS = _same_names("beta1", "beta2", "epsilon")
_SGD = _RuleTranslation("sgd", _same_names("momentum", "lazy_update"), _no_difference, shown=_copy_last)
_RULES = {
    "SGD": _SGD,
    "ccSGD": _SGD,
    "NAG": _RuleTranslation("nag", _same_names("momentum"), _nag_differs, shown=_copy_last),
    "Adam": _RuleTranslation("adam", {**_MOMENTS, **_same_names("lazy_update")}, _clips_late),
    # 1.9.1 has no epsilon, and 0/0 is NaN there; this value is too small to change other results.
    "Adamax": _RuleTranslation("adamax", _same_names("beta1", "beta2"), _clips_late, {"epsilon": 1e-30}),
    "FTML": _RuleTranslation("ftml", _MOMENTS, _clips_late),
    "Ftrl": _RuleTranslation("ftrl", _same_names("lamda1", "beta"), _no_difference),
    "Signum": _RuleTranslation("signum", _same_names("momentum", "wd_lh"), _no_difference),
    "SGLD": _RuleTranslation("sgld", {}, _no_difference),
    "LAMB": _RuleTranslation(
        "lamb", {**_MOMENTS, **_same_names("lower_bound", "upper_bound", "bias_correction")}, _no_difference
    ),
    "LARS": _RuleTranslation(
        "lars",
        {"eps": "epsilon", **_same_names("momentum", "lazy_update", "eta")},
        _lars_differs,
        shown=_copy_last,
    ),
    "DCASGD": _RuleTranslation("dcasgd", _same_names("momentum", "lamda"), _dcasgd_differs),
    "RMSProp": _RuleTranslation(
        "rmsprop",
        {"gamma1": "rho", "gamma2": "momentum", **_same_names("epsilon", "centered", "clip_weights")},
        _rmsprop_differs,
        shown=_square_first,
    ),
}
#: Classes of MXNet whose updates change the optimizer itself, in addition to the states.
_KEEPS = ("Nadam", "LARS", "LBSGD")


def rule_of(optimizer: Any) -> _RuleTranslation | None:
    """Return the rule that replaces exactly this class, or None."""
    kind = type(optimizer)
    return _RULES.get(kind.__name__) if kind.__module__.startswith("mxnet.") else None


def translation_obstacle(optimizer: Any) -> str:
    """Return the reason why an optimizer cannot be translated, or an empty text."""
    rule = rule_of(optimizer)
    if rule is None:
        return "kvstore has no such rule, or one with another formula"
    try:
        _translate_schedule(optimizer)
    except ConfigError as error:
        return str(error)
    return rule.differs(optimizer)


def keeps_states_only(optimizer: Any) -> bool:
    """Return whether an update keeps data in the states only, so that any worker can run the next update."""
    kind = type(optimizer)
    return kind.__module__.startswith("mxnet.") and kind.__name__ not in _KEEPS


def check_scale(optimizer: Any) -> None:
    """Raise ConfigError for a `rescale_grad` that no batch size yields."""
    scale = checks.finite("rescale_grad", optimizer.rescale_grad)
    if scale < 0:
        raise ConfigError(
            f"rescale_grad is {scale:g}, and Gluon makes it as 1 / batch_size: pass a batch_size above 0 to "
            "step (for ascent instead of descent, a negative learning_rate)"
        )


# ------------------------------------------------------------------------------------------ translation


@dataclass
class TranslatedOptimizer:
    """An optimizer of MXNet and its translation; changes of the first are applied to the second.

    Attributes
    ----------
    theirs : mxnet.optimizer.Optimizer
    ours : Optimizer
    """

    theirs: Any
    ours: Optimizer = field(init=False)
    _schedule: LRScheduler | None = field(init=False, default=None)
    _progress: _ScheduleProgress | None = field(init=False, default=None)

    def __post_init__(self) -> None:
        rule = rule_of(self.theirs)
        if rule is None:
            raise ConfigError(f"{type(self.theirs).__name__}: {translation_obstacle(self.theirs)}")
        self._rule = rule
        self._told: dict[str, Any] = {}
        self._note_settings(_translate_schedule(self.theirs))
        self.ours = create(self._rule.name, **self._told)

    def apply_changes(self, keys: list[Index], update: Callable[..., None]) -> None:
        """Before these keys are pushed: apply changes of MXNet's object to the optimizer of the store.

        Raises
        ------
        CapabilityError
            With the changed settings the formula of MXNet differs.
        ConfigError
            A schedule of MXNet was changed in place.
        """
        if self._watched_settings() == self._seen and self._has_same_factors(keys):
            return
        why = self._rule.differs(self.theirs)
        if why:
            raise CapabilityError(
                f"{type(self.theirs).__name__} cannot change like this while the store updates ({why}): undo "
                "the change, or make it before set_optimizer"
            )
        is_new = self.theirs.lr_scheduler is not self._seen[0]
        schedule = _translate_schedule(self.theirs) if is_new else self._schedule
        changed = self._changed_settings(schedule)
        if changed:
            update(**changed)
        self._note_settings(schedule)

    def _changed_settings(self, schedule: LRScheduler | None) -> dict[str, Any]:
        now = self._store_settings(schedule)
        changed = {name: value for name, value in now.items() if value != self._told[name]}
        if "lr_scheduler" in changed:
            changed["learning_rate"] = now["learning_rate"]
        return changed

    def _note_settings(self, schedule: LRScheduler | None) -> None:
        """Record that the store has the present settings."""
        if schedule is not self._schedule or self._progress is None:
            self._schedule, self._progress = schedule, _ScheduleProgress(self.theirs.lr_scheduler)
        self._told, self._seen = self._store_settings(schedule), self._watched_settings()
        self._factors = self._factors_of(self.theirs.param_dict)

    def _watched_settings(self) -> tuple[Any, ...]:
        """Return all settings except the multipliers of parameters; each push compares them."""
        theirs, names = self.theirs, (*_COMMON, *self._rule.settings)
        if self._progress is not None:
            self._progress.check(theirs.lr_scheduler)
        tables = (dict(theirs.lr_mult), dict(theirs.wd_mult), dict(theirs.idx2name))
        return theirs.lr_scheduler, theirs.lr, *(getattr(theirs, name) for name in names), *tables

    def _factors_of(self, keys: Iterable[Index]) -> dict[Index, tuple[Any, Any]]:
        """Return the multipliers of the parameters of these keys."""
        parameters = self.theirs.param_dict
        found = [(key, parameters[key]) for key in keys if key in parameters]
        return {key: (parameter.lr_mult, parameter.wd_mult) for key, parameter in found}

    def _has_same_factors(self, keys: list[Index]) -> bool:
        if not self.theirs.param_dict:
            return True
        return all(self._factors.get(key) == pair for key, pair in self._factors_of(keys).items())

    def mxnet_state(self, state: State) -> State:
        """Return a key's state in MXNet's order."""
        return self._rule.shown(state)

    def count_updates(self, keys: list[Index]) -> None:
        """Count an update of each key, as MXNet's object would have."""
        self.theirs._update_count(keys)

    def apply_loaded(self, loaded: Optimizer) -> None:
        """Apply the settings of an optimizer that was read from a file."""
        for theirs, ours in {**_same_names(*_COMMON), **self._rule.settings}.items():
            setattr(self.theirs, theirs, getattr(loaded, ours))
        schedule = self._schedule
        if loaded.lr_scheduler != schedule:
            self.theirs.lr_scheduler = loaded.lr_scheduler
            schedule = _translate_schedule(self.theirs)
        if loaded.lr_scheduler is None:
            self.theirs.lr = loaded.lr
        self._note_settings(schedule)
        # The store has the multipliers of the file; those of the parameters are applied at the next step.
        self._told.update(lr_mult=loaded.lr_mult, wd_mult=loaded.wd_mult, param_idx2name=loaded.idx2name)
        self._factors.clear()

    def _store_settings(self, schedule: LRScheduler | None) -> dict[str, Any]:
        theirs, rule = self.theirs, self._rule
        settings = {name: getattr(theirs, name) for name in _COMMON}
        settings.update({ours: getattr(theirs, name) for name, ours in rule.settings.items()})
        settings.update(rule.fixed)
        settings["lr_scheduler"] = schedule
        settings["learning_rate"] = theirs.lr if schedule is None else None
        settings["param_idx2name"] = dict(theirs.idx2name)
        settings["lr_mult"], settings["wd_mult"] = (
            _key_multipliers(theirs, "lr_mult"),
            _key_multipliers(theirs, "wd_mult"),
        )
        return settings


def _key_multipliers(optimizer: Any, name: str) -> dict[Index, float]:
    """Return multipliers by key or name; those of Gluon's parameters have precedence."""
    own = {key: float(getattr(parameter, name)) for key, parameter in optimizer.param_dict.items()}
    return {**getattr(optimizer, name), **own}


_SCHEDULES = {
    "FactorScheduler": _same_names("step", "factor", "stop_factor_lr", "base_lr"),
    "MultiFactorScheduler": _same_names("step", "factor", "base_lr"),
    "PolyScheduler": {"power": "pwr", "base_lr_orig": "base_lr", **_same_names("max_update", "final_lr")},
    "CosineScheduler": {"base_lr_orig": "base_lr", **_same_names("max_update", "final_lr")},
}


def _translate_schedule(optimizer: Any) -> LRScheduler | None:
    """Return the schedule of an optimizer as a schedule of kvstore.

    Raises
    ------
    ConfigError
        The schedule has another class, or was used already: MXNet's schedules lose their first rate.
    """
    theirs = optimizer.lr_scheduler
    if theirs is None or isinstance(theirs, LRScheduler):
        return theirs
    name = type(theirs).__name__
    if name not in _SCHEDULES or not type(theirs).__module__.startswith("mxnet."):
        raise ConfigError(f"the schedule {name} is none of {', '.join(_SCHEDULES)}")
    if getattr(theirs, "count", 0):
        raise ConfigError(f"the schedule {name} has been in use; make a new one")
    if theirs.warmup_steps and theirs.warmup_final_lr != getattr(theirs, "base_lr_orig", theirs.base_lr):
        raise ConfigError(f"the schedule {name} warms up to another rate than the optimizer's learning_rate")
    settings = {ours: getattr(theirs, attribute) for attribute, ours in _SCHEDULES[name].items()}
    settings.update(
        {name: getattr(theirs, name) for name in ("warmup_steps", "warmup_begin_lr", "warmup_mode")}
    )
    made: LRScheduler = getattr(lr_scheduler, name)(**settings)
    return made


class _ScheduleProgress:
    """A copy of a schedule of MXNet, which detects whether a program has changed the schedule.

    Each call changes a schedule of MXNet, so such a change does not count.
    """

    def __init__(self, schedule: Any) -> None:
        self._copy = copy.copy(schedule)

    def check(self, schedule: Any) -> None:
        """Raise ConfigError if the schedule was changed by more than its calls."""
        if type(schedule) is not type(self._copy) or schedule is None or isinstance(schedule, LRScheduler):
            return
        if getattr(schedule, "count", 0) > getattr(self._copy, "count", 0):
            self._copy(schedule.count + 1)
        before, now = _settings_of(self._copy), _settings_of(schedule)
        changed = [name for name, value in now.items() if value != before[name]]
        if changed:
            raise ConfigError(
                f"{changed[0]} of the schedule {type(schedule).__name__} was changed, and the store updates "
                "with a translation of it: assign a new schedule to lr_scheduler of the optimizer"
            )


def _settings_of(schedule: Any) -> dict[str, Any]:
    """Return the attributes of a schedule of MXNet, without a rate that each call computes."""
    computed = {"base_lr"} if hasattr(schedule, "base_lr_orig") else set()
    return {name: value for name, value in vars(schedule).items() if name not in computed}


# ------------------------------------------------------------------------------------- MXNet's own code


class ForeignOptimizer(Optimizer):
    """An optimizer of MXNet as an optimizer of kvstore: MXNet's code updates the store's memory.

    Parameters
    ----------
    theirs : mxnet.optimizer.Optimizer
        The object itself is used and counts the updates: a change takes effect at the next update.
    tables : set
        Keys of row-sparse weights, which MXNet's rules need as row-sparse arrays.

    Notes
    -----
    States are NumPy arrays, so a store can save them and choose their memory.
    """

    def __init__(self, theirs: Any, tables: set[Index]) -> None:
        super().__init__(begin_num_update=theirs.begin_num_update)
        self.theirs, self._tables = theirs, tables

    @staticmethod
    def for_mxnet(theirs: Any, tables: set[Index]) -> ForeignOptimizer:
        """Return an optimizer whose states have, in files, the name of MXNet's class."""
        name = f"MXNet{type(theirs).__name__}"
        made: ForeignOptimizer = type(name, (ForeignOptimizer,), {"__doc__": ForeignOptimizer.__doc__})(
            theirs, tables
        )
        return made

    @property
    def learning_rate(self) -> float:
        """Return the current rate of MXNet's object."""
        return float(self.theirs.learning_rate)

    @learning_rate.setter
    def learning_rate(self, lr: float) -> None:
        self.theirs.set_learning_rate(lr)

    def mxnet_state(self, state: State) -> State:
        """Return a key's state, which is in MXNet's order already."""
        return state

    def create_state_multi_precision(self, index: Index, weight: Array) -> State:
        """Return the state of MXNet's rule, as NumPy arrays."""
        array = np.ascontiguousarray(weight)
        shown = rows_of(array) if index in self._tables else as_ndarray(array)
        return _copy_state(self.theirs.create_state_multi_precision(index, shown))

    def update_multi_precision(self, index: Index, weight: Array, grad: Any, state: Any) -> None:
        """Run MXNet's update, and wait for it."""
        loan = _StateViews(index in self._tables)
        shown, states = loan.view(weight), loan.view(state)
        gradient = gradient_as_ndarray(grad)
        if index in self._tables and gradient.stype == "default":
            gradient = rows_of(dense_gradient(grad))
        self._share_counts()
        if self.theirs.aggregate_num > 0:
            self.theirs.update_multi_precision([index], [shown], [gradient], [states])
        else:
            self.theirs.update_multi_precision(index, shown, gradient, states)
        loan.wait_written()
        self.num_update = self.theirs.num_update

    def _share_counts(self) -> None:
        theirs, counts = self.theirs, self._index_update_count
        theirs._all_index_update_counts, theirs._index_update_count = {0: counts}, counts
        theirs.num_update = self.num_update


class _StateViews:
    """Arrays that MXNet's code reads and writes."""

    def __init__(self, as_rows: bool) -> None:
        self._as_rows = as_rows
        self._out: list[tuple[Array, Any]] = []

    def view(self, state: Any) -> Any:
        """Return MXNet's view of an array, or of a nested state."""
        if state is None:
            return None
        if isinstance(state, tuple):
            return tuple(self.view(part) for part in state)
        shown = rows_of(state) if self._as_rows else as_ndarray(state)
        self._out.append((state, shown))
        return shown

    def wait_written(self) -> None:
        """Wait until MXNet has written all arrays; raises the errors of its operations."""
        for array, shown in self._out:
            shown.wait_to_read()
            if self._as_rows:
                array[...] = shown.asnumpy()


def _copy_state(state: Any) -> State:
    """Copy a state of MXNet, nested to any depth, to NumPy."""
    if state is None:
        return None
    if isinstance(state, (tuple, list)):
        return tuple(_copy_state(part) for part in state)
    copied: Array = np.ascontiguousarray(state.asnumpy())
    return copied


def indices_of(groups: list[tuple[Any, Any]]) -> Iterator[Index]:
    """Return the keys of a push."""
    return (key for key, values in groups if values)
