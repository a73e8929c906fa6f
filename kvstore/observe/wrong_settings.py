"""Values of variables that stores, or the processes of a job with servers, refuse."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Mapping
from dataclasses import fields
from pathlib import Path

from kvstore.errors import ConfigError, KVStoreError
from kvstore.settings.definitions import SERVERS, SETTINGS, STORES, WORKER
from kvstore.settings.environment import first_set, process_variables
from kvstore.settings.options import StoreConfig, slice_threshold, store_config
from kvstore.settings.parameter_server import ps_config
from kvstore.settings.ports import port_range

from . import log, metrics

#: The setting without which a setting cannot be checked.
_PARTNER = {"heartbeat": "dead_after", "dead_after": "heartbeat", "server_restarts": "snapshot"}


def wrong_settings(environment: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return the error of each wrong variable, with its value.

    Variables that give a process its place in a job are checked by `settings.launchers` and `settings.roles`.
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
                text = str(error)
                found[variable] = text if variable in text else f"{variable}={env[variable]!r}: {text}"
    return found


def _check_log(env: Mapping[str, str]) -> None:
    if text := env["KVSTORE_LOG"].strip():
        log.parsed(text)


def _check_metrics(env: Mapping[str, str]) -> None:
    if text := env["KVSTORE_METRICS"].strip():
        metrics.check(text)


def _check_timeline(env: Mapping[str, str]) -> None:
    """Create a temporary folder in the folder of timelines, or where that will be created."""
    if text := env["KVSTORE_TIMELINE"].strip():
        folder = Path(os.path.expanduser(text)).absolute()
        with tempfile.TemporaryDirectory(dir=next(one for one in (folder, *folder.parents) if one.exists())):
            pass


def _check_van(env: Mapping[str, str]) -> None:
    if env["DMLC_PS_VAN_TYPE"] not in ("zmq", "p3"):
        raise ConfigError(f"DMLC_PS_VAN_TYPE={env['DMLC_PS_VAN_TYPE']!r} is unknown; known are zmq and p3")


def _check_update_on_kvstore(env: Mapping[str, str]) -> None:
    if not env["MXNET_UPDATE_ON_KVSTORE"].isdecimal():
        raise ConfigError(f"MXNET_UPDATE_ON_KVSTORE={env['MXNET_UPDATE_ON_KVSTORE']!r} must be 1 or 0")


_READERS: dict[str, Callable[[Mapping[str, str]], object]] = {
    **dict.fromkeys((row.name for row in SERVERS), ps_config),
    **dict.fromkeys((field.name for field in fields(StoreConfig)), lambda env: store_config({}, env)),
    "ports": lambda env: port_range(env["KVSTORE_PORTS"]),
    "slice_elements": slice_threshold,
    "van": _check_van,
    "update_on_kvstore": _check_update_on_kvstore,
    "log": _check_log,
    "metrics": _check_metrics,
    "timeline": _check_timeline,
}
