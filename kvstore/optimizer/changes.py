"""Changes of settings: the messages of a store that has a copy of the caller's optimizer.

Each assignment of a setting increases a number of the process. A push compares it with the number of the push
before, and searches for changes only if the numbers differ. A store that uses the caller's object first
completes the earlier pushes, before an assignment.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, MutableMapping
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from weakref import WeakSet

from ..errors import ConfigError
from . import checks

if TYPE_CHECKING:
    from .optimizer import Optimizer


class SettingsRevision:
    """A number that is different after each change of a setting in this process."""

    __slots__ = ("number",)

    def __init__(self) -> None:
        self.number = 0


REVISION = SettingsRevision()
_NUMBERS = itertools.count(1)
#: No value of `REVISION`.
_NEVER = -1


class BackgroundPushes(Protocol):
    """Pushes in the background that read the settings of the caller's optimizer; the engine of a store."""

    busy: bool

    def wait_all(self) -> None:
        """Wait for all of them; return at once if one of them makes the change."""


_PUSHES: WeakSet[BackgroundPushes] = WeakSet()


def read_by(pushes: BackgroundPushes) -> None:
    """Complete these pushes before each change of a setting."""
    _PUSHES.add(pushes)


def begin_change() -> None:
    """Complete the pushes that were called before the change."""
    for pushes in list(_PUSHES):
        if pushes.busy:
            pushes.wait_all()


def note_change() -> None:
    """Increase the number, so that stores search for changes."""
    REVISION.number = next(_NUMBERS)  # `+= 1` in two threads could produce an earlier number again


class SettingTable(dict[Any, Any]):
    """A setting by key: keys are plain, entries are checked, and changes are counted."""

    #: Name of the setting, for errors; a table made by a copy or a pickle has it only at the end.
    name = "table"
    #: The check of an entry.
    check: ClassVar[staticmethod[[str, Any], Any]]

    def __init__(self, name: str, value: Any) -> None:
        self.name = name
        self.update(checks.pairs(name, value))

    def _checked_entry(self, key: Any, value: Any) -> tuple[Any, Any]:
        plain = checks.key(self.name, key)
        return plain, self.check(f"{self.name}[{plain!r}]", value)

    def __setitem__(self, key: Any, value: Any) -> None:
        entry = self._checked_entry(key, value)
        begin_change()
        super().__setitem__(*entry)
        note_change()

    def __delitem__(self, key: Any) -> None:
        begin_change()
        super().__delitem__(key)
        note_change()

    def update(self, *tables: Any, **entries: Any) -> None:
        """Set entries. If one of them is not valid, none changes."""
        checked = [self._checked_entry(*entry) for entry in dict(*tables, **entries).items()]
        begin_change()
        super().update(checked)
        note_change()

    def __ior__(self, other: Any) -> Any:  # type: ignore[misc]
        self.update(other)
        return self

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove an entry and return it."""
        begin_change()
        found = super().pop(key, *default)
        note_change()
        return found

    def popitem(self) -> tuple[Any, Any]:
        """Remove the last entry and return it."""
        begin_change()
        found = super().popitem()
        note_change()
        return found

    # The methods of `dict` would not call the methods above.
    clear = MutableMapping.clear
    setdefault = MutableMapping.setdefault


class FactorTable(SettingTable):
    """Factors by key or name."""

    check = staticmethod(checks.finite)


class NameTable(SettingTable):
    """Names of parameters by key."""

    check = staticmethod(checks.text)


class ParameterTable(SettingTable):
    """Objects with the multipliers of a key."""

    check = staticmethod(checks.parameter)


class WatchedOptimizer:
    """The caller's optimizer, of which a store has a copy.

    Attributes
    ----------
    optimizer : Optimizer
        The caller's object.
    seen : int
        The number of `REVISION` of the last check; the store has all changes up to it.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self.note_config(optimizer.get_config(), _NEVER)

    def changed_settings(self) -> tuple[dict[str, Any], dict[str, Any], int]:
        """Return the changed settings, for `Optimizer.configure`, and the arguments of `note_config`."""
        number = REVISION.number  # first: the next push finds concurrent changes
        config = self.optimizer.get_config()
        return differing_settings(config, self._sent), config, number

    def note_config(self, config: Mapping[str, Any], number: int) -> None:
        """Record that the store has this configuration."""
        self._sent = config
        # Multipliers of the caller's objects can change without a call of this module.
        self.seen = _NEVER if self.optimizer.param_dict else number

    def apply_changes(self, changes: Mapping[str, Any]) -> None:
        """Apply changes to the caller's object that the store has made already."""
        try:
            self.optimizer.configure(**changes)
        except ConfigError:  # another worker has replaced the schedule that this object still has
            self.optimizer.configure(**{"lr_scheduler": None, **changes})
        self.note_config(self.optimizer.get_config(), _NEVER)


def differing_settings(config: Mapping[str, Any], before: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of a configuration that differ from another one of the same class."""
    changes = {name: value for name, value in config.items() if value != before[name]}
    if "lr_scheduler" in changes:  # one setting with the rate: see `configure`
        changes["learning_rate"] = config["learning_rate"]
    return changes
