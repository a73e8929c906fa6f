"""Options of schedulers and servers, read from variables; `kvstore run` sets the same in all processes."""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from kvstore.errors import ConfigError

from .definitions import DEFAULTS, SETTINGS
from .environment import process_variables

log = logging.getLogger("kvstore.ps.config")


@dataclass(frozen=True)
class PsConfig:
    """Options of a scheduler or a server; workers use its times too.

    `kvstore.settings.definitions` has the meaning and the variable of each option.
    """

    timeout: float = DEFAULTS["timeout"]
    threads: int = DEFAULTS["threads"]
    heartbeat: float = DEFAULTS["heartbeat"]
    dead_after: float = DEFAULTS["dead_after"]
    resend: float = DEFAULTS["resend"]
    snapshot: str = DEFAULTS["snapshot"]
    snapshot_interval: float = DEFAULTS["snapshot_interval"]
    server_restarts: int = DEFAULTS["server_restarts"]
    journal: str = DEFAULTS["journal"]
    streams: int = DEFAULTS["streams"]

    def __post_init__(self) -> None:
        for name in ("timeout", "heartbeat", "dead_after", "resend", "snapshot_interval"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be a positive, finite number of seconds, got {getattr(self, name)}"
                )
        if self.heartbeat > self.dead_after / 2:
            raise ConfigError(
                f"dead_after ({self.dead_after:g} s) must be at least twice heartbeat ({self.heartbeat:g} "
                f"s), "
                "because one late heartbeat does not mean that a process is dead"
            )
        for name in ("threads", "server_restarts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.server_restarts and not self.snapshot:
            raise ConfigError(
                "a restarted server needs a snapshot: name a folder for snapshots (KVSTORE_SNAPSHOT)"
            )


def ps_config(environment: Mapping[str, str] | None = None, **options: Any) -> PsConfig:
    """Return the options from the environment; `options` take precedence.

    In ps-lite, 0 switches a time off. Here a variable PS_* with the value 0 is ignored, with a warning.

    Raises
    ------
    ConfigError
        A value is not a number, or out of range.
    """
    env = process_variables() if environment is None else environment
    found = {field.name: _variable_value(env, field.name) for field in fields(PsConfig)}
    return PsConfig(**{name: value for name, value in found.items() if value is not None} | options)


def _variable_value(env: Mapping[str, str], name: str) -> Any:
    row = SETTINGS[name]
    variable = _first_set(env, row.names())
    if variable is None or row.kind is str:
        return env[variable] if variable else None
    try:
        value: float = row.kind(env[variable])
    except ValueError:
        kind = "an integer" if row.kind is int else "a number"
        raise ConfigError(f"{variable}={env[variable]!r} is not {kind}: correct or unset it") from None
    unit = {alias.variable: alias.unit for alias in row.aliases}.get(variable)
    return value / 1000 if unit == "milliseconds" else value


def _first_set(env: Mapping[str, str], variables: tuple[str, ...]) -> str | None:
    for variable in variables:
        if env.get(variable) == "0" and variable.startswith("PS_"):
            _warn_ignored(variable)
        elif env.get(variable):
            return variable
    return None


@functools.cache
def _warn_ignored(variable: str) -> None:
    """Warn once in a process."""
    log.warning("%s=0 has no effect here: the death of a process is always noticed", variable)
