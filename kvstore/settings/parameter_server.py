"""Options of a parameter server's processes, read from variables; `kvstore run` sets them alike for all."""

from __future__ import annotations

import functools
import logging
import math
import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from kvstore.errors import ConfigError

log = logging.getLogger("kvstore.ps.config")


@dataclass(frozen=True)
class PsConfig:
    """Options of a scheduler or a server; the times count for workers too.

    Attributes
    ----------
    timeout : float
        Seconds after which any wait ends with an error; KVSTORE_TIMEOUT.
    threads : int
        Threads for large work of a server; 0 takes the usable cores. KVSTORE_NUM_THREADS.
    heartbeat : float
        Seconds between two signs of life that the scheduler asks for; KVSTORE_HEARTBEAT, or
        PS_HEARTBEAT_INTERVAL.
    dead_after : float
        Seconds of silence after which a process counts as lost; KVSTORE_DEAD_AFTER, or PS_HEARTBEAT_TIMEOUT.
    resend : float
        Seconds after which a request without an answer is sent again; KVSTORE_RESEND, or PS_RESEND_TIMEOUT in
        milliseconds.
    snapshot : str
        Folder in which servers keep snapshots; empty: none are kept. KVSTORE_SNAPSHOT.
    snapshot_interval : float
        Seconds between two of them; KVSTORE_SNAPSHOT_INTERVAL.
    server_restarts : int
        How many lost servers the launcher starts again, in all; KVSTORE_SERVER_RESTARTS.
    """

    timeout: float = 300.0
    threads: int = 0
    heartbeat: float = 0.5
    dead_after: float = 5.0
    resend: float = 5.0
    snapshot: str = ""
    snapshot_interval: float = 30.0
    server_restarts: int = 0

    def __post_init__(self) -> None:
        for name in ("timeout", "heartbeat", "dead_after", "resend", "snapshot_interval"):
            if not 0 < getattr(self, name) < math.inf:
                raise ConfigError(
                    f"{name} must be a positive, finite number of seconds, got {getattr(self, name)}"
                )
        if self.heartbeat > self.dead_after / 2:
            raise ConfigError(
                f"dead_after ({self.dead_after:g} s) must be twice heartbeat ({self.heartbeat:g} s) or more, "
                "for one late sign of life is no death"
            )
        for name in ("threads", "server_restarts"):
            if getattr(self, name) < 0:
                raise ConfigError(f"{name} must be 0 or more, got {getattr(self, name)}")
        if self.server_restarts and not self.snapshot:
            raise ConfigError(
                "a server that starts again needs a snapshot to start from: name a folder for it"
            )


_VARIABLES: dict[str, tuple[str, ...]] = {
    "timeout": ("KVSTORE_TIMEOUT",),
    "threads": ("KVSTORE_NUM_THREADS",),
    "heartbeat": ("KVSTORE_HEARTBEAT", "PS_HEARTBEAT_INTERVAL"),
    "dead_after": ("KVSTORE_DEAD_AFTER", "PS_HEARTBEAT_TIMEOUT"),
    "resend": ("KVSTORE_RESEND", "PS_RESEND_TIMEOUT"),
    "snapshot": ("KVSTORE_SNAPSHOT",),
    "snapshot_interval": ("KVSTORE_SNAPSHOT_INTERVAL",),
    "server_restarts": ("KVSTORE_SERVER_RESTARTS",),
}
_WHOLE = ("threads", "server_restarts")
_MILLISECONDS = "PS_RESEND_TIMEOUT"


def ps_config(environment: Mapping[str, str] | None = None, **options: Any) -> PsConfig:
    """Make the options from the environment; `options` beat it.

    ps-lite's 0 switches a time off. Here it cannot be: such a variable is left alone, with a warning.

    Raises
    ------
    ConfigError
        A value is no number, or out of range.
    """
    env = os.environ if environment is None else environment
    found = {name: _value(env, name, _of(env, variables)) for name, variables in _VARIABLES.items()}
    return PsConfig(**{name: value for name, value in found.items() if value is not None} | options)


def _of(env: Mapping[str, str], variables: tuple[str, ...]) -> str | None:
    for variable in variables:
        if env.get(variable) == "0" and variable.startswith("PS_"):
            _warn(variable)
        elif env.get(variable):
            return variable
    return None


def _value(env: Mapping[str, str], name: str, variable: str | None) -> Any:
    if variable is None or name == "snapshot":
        return env[variable] if variable else None
    try:
        value: float = (int if name in _WHOLE else float)(env[variable])
    except ValueError:
        kind = "whole number" if name in _WHOLE else "number"
        raise ConfigError(f"{variable}={env[variable]!r} is no {kind}: correct or unset it") from None
    return value / 1000 if variable == _MILLISECONDS else value


@functools.cache
def _warn(variable: str) -> None:
    """Warn once in a process."""
    log.warning("%s=0 has no effect here: the death of a process is always noticed", variable)
