"""Values of variables that no store, or no process of a job with servers, would take."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

from kvstore.errors import ConfigError, KVStoreError
from kvstore.observe import log, metrics
from kvstore.settings.definitions import SERVERS, SETTINGS, STORES, WORKER
from kvstore.settings.environment import first_set, process_variables
from kvstore.settings.options import StoreConfig, slice_threshold, store_config
from kvstore.settings.parameter_server import ps_config
from kvstore.settings.ports import port_range

#: What counts together with a setting.
_PARTNER = {"heartbeat": "dead_after", "dead_after": "heartbeat", "server_restarts": "snapshot"}


def wrong_settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Read each variable of stores and servers as those do.

    Returns
    -------
    dict
        What is wrong, with the value, by variable; those of the place in a job are left to
        `settings.launchers` and `settings.roles`.
    """
    env = process_variables() if environment is None else environment
    found = {}
    for row in (*STORES, *SERVERS):
        variable = first_set(env, row.names(WORKER))
        reader = _READERS.get(row.name)
        if variable is not None and reader is not None:
            partners = SETTINGS[_PARTNER.get(row.name, row.name)].names()
            try:
                reader({name: env[name] for name in (*partners, variable) if env.get(name)})
            except (KVStoreError, OSError) as error:
                told = str(error)
                found[variable] = told if variable in told else f"{variable}={env[variable]!r}: {told}"
    return found


def _log(env: Mapping[str, str]) -> None:
    if text := env["KVSTORE_LOG"].strip():
        log.parsed(text)


def _metrics(env: Mapping[str, str]) -> None:
    if text := env["KVSTORE_METRICS"].strip():
        metrics.check(text)


def _timeline(env: Mapping[str, str]) -> None:
    """Try to make a file where the folder is, or will be."""
    if text := env["KVSTORE_TIMELINE"].strip():
        folder = Path(os.path.expanduser(text)).absolute()
        there = next(one for one in (folder, *folder.parents) if one.exists())
        with tempfile.TemporaryDirectory(dir=there):
            pass


def _van(env: Mapping[str, str]) -> None:
    if env["DMLC_PS_VAN_TYPE"] not in ("zmq", "p3"):
        raise ConfigError(f"DMLC_PS_VAN_TYPE={env['DMLC_PS_VAN_TYPE']!r} is unknown; known are zmq and p3")


def _update_on_kvstore(env: Mapping[str, str]) -> None:
    if not env["MXNET_UPDATE_ON_KVSTORE"].isdecimal():
        raise ConfigError(f"MXNET_UPDATE_ON_KVSTORE={env['MXNET_UPDATE_ON_KVSTORE']!r} must be 1 or 0")


_READERS: dict[str, Callable[[Mapping[str, str]], object]] = {
    **dict.fromkeys((row.name for row in SERVERS), ps_config),
    **dict.fromkeys((field.name for field in fields(StoreConfig)), lambda env: store_config({}, env)),
    "ports": lambda env: port_range(env["KVSTORE_PORTS"]),
    "slice_elements": slice_threshold,
    "van": _van,
    "update_on_kvstore": _update_on_kvstore,
    "log": _log,
    "metrics": _metrics,
    "timeline": _timeline,
}
