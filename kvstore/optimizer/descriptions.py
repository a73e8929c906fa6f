"""Optimizers as text, for other processes; and the differences of two optimizers."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Protocol

from ..errors import ConfigError

_SHOWN = 3  # differences in an error
_LONGEST = 80  # characters of a value in an error
_TABLES = ("lr_mult", "wd_mult", "param_idx2name")
_MISSING: Any = object()


class DescribableOptimizer(Protocol):
    """An optimizer; the scheduler uses its texts only, and imports no optimizer."""

    def describe(self) -> dict[str, Any]:
        """Return its name and its settings."""

    def described(self, names: Iterable[str]) -> dict[str, Any]:
        """Return its settings with these names."""


def text_of(optimizer: DescribableOptimizer) -> str:
    """Return the name and the settings of an optimizer as JSON; equal optimizers have equal texts.

    Raises
    ------
    ConfigError
        The optimizer cannot be described, or JSON cannot represent a setting. The message names it.
    """
    described = optimizer.describe()
    odd = next((entry for entry in described["config"].items() if not _is_json(entry[1])), None)
    if odd is not None:
        raise ConfigError(
            f"{type(optimizer).__name__} cannot be saved or sent: its setting {odd[0]} is "
            f"{_short_text(odd[1])}, which JSON cannot represent; use numbers, strings, lists and dicts"
        )
    return json.dumps(described, sort_keys=True)


def changes_of(optimizer: DescribableOptimizer, changes: Iterable[str]) -> str:
    """Return the settings with these names as JSON, as in `text_of`: a record of changes.

    Raises
    ------
    ConfigError
        JSON cannot represent a setting.
    """
    config = optimizer.described(changes)
    return json.dumps(config, sort_keys=True)


def changed_text(text: str, changes: str) -> str:
    """Return the text of an optimizer after a change that `changes_of` has described.

    Raises
    ------
    ConfigError
        The change is that of a learning rate, and the optimizer has a schedule; or a text does not describe
        an optimizer.
    """
    try:
        described, config = json.loads(text), dict(json.loads(changes))
        before = dict(described["config"] or {})
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ConfigError(f"this is not a change of an optimizer: {_short_text(changes)}") from error
    if _has_schedule(described, config):
        raise ConfigError(
            "the learning rate is that of a schedule, which another worker has set: pass a new lr_scheduler, "
            "or lr_scheduler=None together with the new rate"
        )
    if described["config"] is None:  # each worker has its own object, to which the changes are applied
        described["changes"] = described.get("changes", {}) | config
    else:
        described["config"] = before | config
    return json.dumps(described, sort_keys=True)


def _has_schedule(described: Mapping[str, Any], changes: Mapping[str, Any]) -> bool:
    config = described["config"] or described.get("changes", {})
    return "learning_rate" in changes and "lr_scheduler" not in changes and bool(config.get("lr_scheduler"))


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError):
        return False
    return True


def describe_conflict(there: str, by: int, here: str, rank: int) -> str:
    """Return the differences between the optimizer of worker `by` and that of worker `rank`.

    Parameters
    ----------
    there, here : str
        Texts of `text_of`; the empty text means sums without an optimizer. Other texts, which another program
        could send, raise no error.
    """
    try:
        what = _describe_found(json.loads(there or "{}"), by, json.loads(here or "{}"), rank)
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError):
        what = [f"worker {by} has set one, and worker {rank} another one, in an unknown format"]
    more = f"; and {len(what) - _SHOWN} more" if len(what) > _SHOWN else ""
    return (
        f"the optimizers of two workers differ: {'; '.join(what[:_SHOWN])}{more}. Set the same optimizer on "
        "all workers; a setting can be changed after that"
    )


def _describe_found(theirs: Mapping[str, Any], by: int, ours: Mapping[str, Any], rank: int) -> list[str]:
    if theirs.get("name") != ours.get("name"):
        return [f"{_named_settings(theirs)} on worker {by} and {_named_settings(ours)} on worker {rank}"]
    rule = _named_settings(theirs)
    return [f"{rule} has {difference}" for difference in _list_differences(theirs, by, ours, rank)]


def _named_settings(described: Mapping[str, Any]) -> str:
    return repr(described["name"]) if described else "no optimizer"


def _list_differences(
    theirs: Mapping[str, Any], by: int, ours: Mapping[str, Any], rank: int
) -> Iterator[str]:
    before, now = _flat_config(theirs["config"] or {}), _flat_config(ours["config"] or {})
    for name in [*before, *(name for name in now if name not in before)]:
        one, other = before.get(name, _MISSING), now.get(name, _MISSING)
        if one != other:
            yield f"{name} {_short_text(one)} on worker {by} and {_short_text(other)} on worker {rank}"


def _flat_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return a configuration with an entry for each entry of a table, and of a schedule."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if name in _TABLES and value:
            flat |= {f"{name}[{key!r}]": entry for key, entry in value}
        elif name == "lr_scheduler" and value:
            flat[name] = value["name"]
            flat |= {f"{name}.{option}": entry for option, entry in value["config"].items()}
        elif name not in _TABLES:
            flat[name] = value
    return flat


def _short_text(value: Any) -> str:
    text = "not set" if value is _MISSING else repr(value)
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."
