"""Options of servers and scheduler: their sources, and invalid combinations."""

from __future__ import annotations

import logging
from typing import Any

import pytest

import kvstore as kv
from kvstore.settings import parameter_server
from kvstore.settings.parameter_server import PsConfig, ps_config


def test_defaults() -> None:
    assert ps_config({}) == PsConfig()


@pytest.mark.parametrize(
    ("environment", "field", "value"),
    [
        ({"KVSTORE_TIMEOUT": "2.5"}, "timeout", 2.5),
        ({"KVSTORE_NUM_THREADS": "3"}, "threads", 3),
        ({"KVSTORE_HEARTBEAT": "0.25"}, "heartbeat", 0.25),
        ({"PS_HEARTBEAT_INTERVAL": "1"}, "heartbeat", 1.0),
        ({"PS_HEARTBEAT_INTERVAL": "1", "KVSTORE_HEARTBEAT": "2"}, "heartbeat", 2.0),
        ({"KVSTORE_DEAD_AFTER": "9"}, "dead_after", 9.0),
        ({"PS_HEARTBEAT_TIMEOUT": "20"}, "dead_after", 20.0),
        ({"KVSTORE_RESEND": "1.5"}, "resend", 1.5),
        ({"PS_RESEND_TIMEOUT": "1500"}, "resend", 1.5),
        ({"KVSTORE_RESEND": "2", "PS_RESEND_TIMEOUT": "1500"}, "resend", 2.0),
        ({"KVSTORE_SNAPSHOT": "/x"}, "snapshot", "/x"),
        ({"KVSTORE_SNAPSHOT_INTERVAL": "7"}, "snapshot_interval", 7.0),
        ({"KVSTORE_SNAPSHOT": "/x", "KVSTORE_SERVER_RESTARTS": "2"}, "server_restarts", 2),
    ],
)
def test_variables(environment: dict[str, str], field: str, value: Any) -> None:
    found = getattr(ps_config(environment), field)
    assert found == value
    assert type(found) is type(value)


def test_options_beat_variables() -> None:
    assert ps_config({"KVSTORE_TIMEOUT": "2"}, timeout=3.0).timeout == 3


@pytest.mark.parametrize(
    ("environment", "words"),
    [
        ({"KVSTORE_TIMEOUT": "soon"}, "KVSTORE_TIMEOUT='soon' is not a number"),
        ({"KVSTORE_NUM_THREADS": "1.5"}, "KVSTORE_NUM_THREADS='1.5' is not an integer"),
        ({"KVSTORE_TIMEOUT": "nan"}, "timeout must be a positive, finite"),
        ({"KVSTORE_HEARTBEAT": "0"}, "heartbeat must be a positive"),
        ({"KVSTORE_DEAD_AFTER": "inf"}, "dead_after must be a positive, finite"),
        ({"KVSTORE_RESEND": "-1"}, "resend must be"),
        ({"KVSTORE_SNAPSHOT_INTERVAL": "0"}, "snapshot_interval must be"),
        ({"KVSTORE_NUM_THREADS": "-1"}, "threads must be 0 or more"),
        ({"KVSTORE_HEARTBEAT": "4"}, "must be at least twice heartbeat"),
        ({"KVSTORE_SERVER_RESTARTS": "1"}, "needs a snapshot"),
    ],
)
def test_what_makes_no_sense_is_refused(environment: dict[str, str], words: str) -> None:
    with pytest.raises(kv.ConfigError, match=words):
        ps_config(environment)


@pytest.mark.parametrize("name", ["PS_HEARTBEAT_INTERVAL", "PS_HEARTBEAT_TIMEOUT"])
def test_heartbeats_cannot_be_switched_off(name: str, caplog: pytest.LogCaptureFixture) -> None:
    parameter_server._warn_ignored.cache_clear()
    with caplog.at_level(logging.WARNING, "kvstore.ps.config"):
        for _ in range(2):
            assert ps_config({name: "0"}) == PsConfig()
    (record,) = caplog.records
    assert record.getMessage().startswith(f"{name}=0 has no effect here")
