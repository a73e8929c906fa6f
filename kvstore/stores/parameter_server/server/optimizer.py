"""The settings of a store on a server, by version, and the optimizer's state of a slice or key.

A round uses the settings that its workers agreed on when they pushed, even if newer ones have arrived; so
every version has its own optimizer object. Objects of one generation share their states.
"""

from __future__ import annotations

import bisect
import json
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple, NoReturn

from ....arrays.grouping import Key
from ....errors import ConfigError, KVStoreError, StateFileError, UpdaterError
from ....optimizer import Optimizer, Updater
from ....optimizer.builtin import arrays_of
from ....optimizer.optimizer import State as Tree
from ....optimizer.settings_log import SettingsAt
from ....optimizer.update_clock import time_at
from ..native._native import UpdateCounts

_KEPT = 1024  # at most three rounds of a slice wait, and few programs change settings so often between them


class OptimizerVersion(NamedTuple):
    """The settings from a version on."""

    version: int
    #: The number of optimizers that were set, None included; each has its own states.
    generation: int
    optimizer: Optimizer | None
    #: The optimizer's description.
    text: str
    #: Number of the record that has set the update counts; see `UpdateClock`.
    epoch: int
    #: Whether states are stored for one more round, as values are: a step can be withdrawn.
    keeps_states: bool = False


class OptimizerVersions:
    """All versions of the settings of a store."""

    def __init__(self) -> None:
        self._versions = [OptimizerVersion(0, 0, None, "", 0)]

    def newest(self) -> OptimizerVersion:
        """Return the newest settings."""
        return self._versions[-1]

    def settings_at(self, version: int) -> OptimizerVersion:
        """Return the settings of a version."""
        if version >= self._versions[-1].version:
            return self._versions[-1]
        place = bisect.bisect_right(self._versions, version, key=lambda settings: settings.version)
        return self._versions[max(0, place - 1)]

    def make_version(self, version: int, settings: SettingsAt) -> OptimizerVersion:
        """Return settings for `install_version`; ConfigError: this server cannot create the optimizer."""
        ordinal, text, epoch, keeps_states = settings
        like = (one.optimizer for one in self._versions if (one.generation, one.text) == (ordinal, text))
        optimizer = next(like, None) or _optimizer_of(text)
        return OptimizerVersion(version, ordinal, optimizer, text, epoch, keeps_states)

    def install_version(self, settings: OptimizerVersion) -> None:
        """Install settings from their version on, in place of settings of the same version."""
        place = bisect.bisect_left(self._versions, settings.version, key=lambda one: one.version)
        found = self._versions[place : place + 1]
        end = place + 1 if found and found[0].version == settings.version else place
        self._versions[place:end] = [settings]
        del self._versions[1 : 1 - _KEPT]  # the first version is that of side keys

    def all_versions(self) -> list[OptimizerVersion]:
        """Return all versions, oldest first."""
        return list(self._versions)

    def describe_versions(self) -> list[dict[str, Any]]:
        """Return all versions as JSON types."""
        return [
            {
                "version": one.version,
                "era": one.generation,
                "text": one.text,
                "epoch": one.epoch,
                "keeps": one.keeps_states,
            }
            for one in self._versions
        ]

    @classmethod
    def from_description(cls, described: list[dict[str, Any]]) -> OptimizerVersions:
        """Return the versions that `describe_versions` has written."""
        versions = cls()
        for one in described:
            settings = SettingsAt(one["era"], one["text"], one["epoch"], bool(one.get("keeps")))
            versions.install_version(versions.make_version(int(one["version"]), settings))
        return versions


def _optimizer_of(text: str) -> Optimizer | None:
    if not text:
        return None
    try:
        made = json.loads(text)
        name, config = made["name"], made["config"]
    except (ValueError, TypeError, KeyError) as error:
        raise ConfigError(f"settings that describe no optimizer: {error!r}") from error
    if config is None:
        raise ConfigError(
            f"optimizer {name!r} cannot be sent to servers: register its class (and that of its schedule), "
            "and keep its arguments as attributes"
        )
    try:
        return Optimizer.from_config(name, config)
    except Exception as error:  # the worker could create it, so the classes here differ from the worker's
        raise ConfigError(
            f"{str(error) or type(error).__name__}. A server makes the optimizer and its schedule from its "
            "own modules: move the class into a module, and name it with --import (`kvstore run -s 1 "
            "--import my_rules train.py`; also an option of `kvstore role` and `kvstore server`)"
        ) from error


def _rule_name(optimizer: Optimizer | None) -> str:
    return "no optimizer" if optimizer is None else type(optimizer).__name__


class OptimizerState(UpdateCounts):
    """The optimizer's state of a slice, or of a whole key.

    `updates`: their number in this generation; `num_update`: the schedule's time of the last of them.
    """

    __slots__ = ("generation", "updater")

    def __init__(self) -> None:
        self.generation = 0
        self.updater: Updater | None = None

    def use_settings(self, settings: OptimizerVersion) -> Updater:
        """Return the updater, with these settings; another generation begins with fresh states."""
        assert settings.optimizer is not None
        if self.updater is None or self.generation != settings.generation:
            return self.restart_counts(settings, 0, 0)
        self.updater.optimizer = settings.optimizer
        return self.updater

    def restart_counts(self, settings: OptimizerVersion, updates: int, num_update: int) -> Updater:
        """Begin with these counts and no states, in the settings' generation, and return the updater."""
        assert settings.optimizer is not None
        self.updater, self.generation = Updater(settings.optimizer), settings.generation
        self.updates, self.num_update = updates, num_update
        return self.updater

    def current_updater(self, settings: OptimizerVersion) -> Updater | None:
        """Return the updater if it belongs to the settings' generation."""
        return self.updater if self.generation == settings.generation else None

    def begin_update(self, settings: OptimizerVersion, key: Key, stamp: int) -> Updater:
        """Return the updater, with the optimizer's counts set to those of this state."""
        updater = self.use_settings(settings)
        optimizer = updater.optimizer
        optimizer._index_update_count = {key: self.updates} if self.updates else {}
        optimizer.num_update = max(optimizer.begin_num_update, time_at([stamp], settings.epoch))
        return updater

    def current_counts(self, key: Key) -> tuple[int, int]:
        """Return the optimizer's counts after an update, for `set_counts`."""
        assert self.updater is not None
        optimizer = self.updater.optimizer
        return optimizer._index_update_count.get(key, self.updates), optimizer.num_update

    def set_counts(self, counts: tuple[int, int]) -> None:
        """Set the counts, after an update."""
        self.updates, self.num_update = counts

    @contextmanager
    def count_update(self, settings: OptimizerVersion, key: Key, stamp: int) -> Iterator[Updater]:
        """Yield the updater for one update, which counts if the body succeeds."""
        updater = self.begin_update(settings, key, stamp)
        yield updater
        self.set_counts(self.current_counts(key))


def check_form(key: Key, tree: Tree, fresh: Tree, rows: int | None = None) -> None:
    """Raise StateFileError unless a state has the form of a fresh one; with `rows`, `fresh` is of one row."""
    theirs = [(array.dtype.name, array.shape) for array in arrays_of(tree)]
    ours = [
        (array.dtype.name, array.shape if rows is None else (rows, *array.shape[1:]))
        for array in arrays_of(fresh)
    ]
    if theirs != ours:
        raise StateFileError(f"a state of key {key!r} is {theirs}, where the optimizer keeps {ours}")


def refuse_parts(optimizer: Optimizer | None, key: Key) -> NoReturn:
    """Raise ConfigError for a rule that needs a whole key of which this server has only a part."""
    raise ConfigError(
        f"{_rule_name(optimizer)} needs whole tensors, and key {key!r} is spread over several servers; set "
        "the optimizer on every worker (the lowest rank moves such keys to one server), or start one server"
    )


def update_error(error: Exception, settings: OptimizerVersion, key: Key, server: int) -> Exception:
    """Return the exception that workers receive for an error in an update."""
    if isinstance(error, (KVStoreError, MemoryError)):
        return error
    kind = type(error).__name__
    told = UpdaterError(
        f"{_rule_name(settings.optimizer)} raised {kind} on key {key!r} (server {server}): {error}"
    )
    told.__cause__ = error
    return told
