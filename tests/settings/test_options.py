"""Options: an argument beats the environment, which beats the default; what MXNet's variables do."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

import kvstore as kv
from kvstore.kernels import cpu
from kvstore.settings.options import StoreConfig, store_config

WITHOUT_MEANING = [
    "MXNET_KVSTORE_USETREE",
    "MXNET_KVSTORE_LOGTREE",
    "MXNET_KVSTORE_TREE_ARRAY_BOUND",
    "MXNET_KVSTORE_TREE_BACKTRACK",
    "MXNET_KVSTORE_TREE_LINK_USAGE_PENALTY",
    "MXNET_KVSTORE_SERIAL_PUSH",
    "MXNET_KVSTORE_DIST_ROW_SPARSE_VERBOSE",
]


def test_defaults() -> None:
    assert store_config({}, {}) == StoreConfig(
        timeout=300, threads=0, group="default", processes=0, on_peer_loss="raise", spin=50e-6
    )


@pytest.mark.parametrize(
    ("options", "environment", "field", "value"),
    [
        ({}, {"KVSTORE_TIMEOUT": "2.5"}, "timeout", 2.5),
        ({"timeout": 7}, {"KVSTORE_TIMEOUT": "2.5"}, "timeout", 7.0),
        ({}, {"KVSTORE_TIMEOUT": ""}, "timeout", 300.0),
        ({}, {"KVSTORE_NUM_THREADS": "3"}, "threads", 3),
        ({}, {"MXNET_KVSTORE_REDUCTION_NTHREADS": "4"}, "threads", 4),
        ({}, {"KVSTORE_NUM_THREADS": "3", "MXNET_KVSTORE_REDUCTION_NTHREADS": "4"}, "threads", 3),
        ({"threads": 5}, {"KVSTORE_NUM_THREADS": "3"}, "threads", 5),
        ({"group": "second"}, {}, "group", "second"),
        ({"processes": 1}, {}, "processes", 1),
        ({}, {"KVSTORE_SPIN": "0.5"}, "spin", 0.5),
        ({"spin": 0}, {"KVSTORE_SPIN": "0.5"}, "spin", 0.0),
        ({"on_peer_loss": "continue"}, {}, "on_peer_loss", "continue"),
    ],
)
def test_where_an_option_comes_from(
    options: dict[str, Any], environment: dict[str, str], field: str, value: Any
) -> None:
    found = getattr(store_config(options, environment), field)
    assert found == value
    assert type(found) is type(value)


@pytest.mark.parametrize(
    "options",
    [
        {"timeout": 0},
        {"timeout": -1},
        {"timeout": math.nan},
        {"timeout": math.inf},
        {"timeout": 1e300},
        {"threads": -1},
        {"processes": 2},
        {"processes": -1},
        {"on_peer_loss": "ignore"},
    ],
)
def test_values_out_of_range(options: dict[str, Any]) -> None:
    [name] = options
    with pytest.raises(kv.ConfigError, match=name):
        store_config(options, {})
    with pytest.raises(kv.ConfigError, match=name):
        kv.create("local", **options)


@pytest.mark.parametrize(
    ("options", "environment", "source"),
    [
        ({"timeout": "soon"}, {}, "timeout"),
        ({"timeout": None}, {}, "timeout"),
        ({"threads": "many"}, {}, "threads"),
        ({"group": 3}, {}, "group"),
        ({"on_peer_loss": None}, {}, "on_peer_loss"),
        ({}, {"KVSTORE_TIMEOUT": "soon"}, "KVSTORE_TIMEOUT"),
        ({}, {"KVSTORE_NUM_THREADS": "2.5"}, "KVSTORE_NUM_THREADS"),
        ({}, {"MXNET_KVSTORE_REDUCTION_NTHREADS": "x"}, "MXNET_KVSTORE_REDUCTION_NTHREADS"),
    ],
)
def test_values_of_the_wrong_type_name_their_source(
    options: dict[str, Any], environment: dict[str, str], source: str
) -> None:
    with pytest.raises(kv.ArgumentError, match=f"^{source} must be"):
        store_config(options, environment)


def test_unknown_options() -> None:
    with pytest.raises(kv.ConfigError, match=r"unknown option a, b; known are timeout, threads"):
        store_config({"b": 1, "a": 2, "timeout": 3}, {})


@pytest.mark.parametrize(
    ("given", "near"), [("tiemout", "timeout"), ("num_threads", "threads"), ("slice_byte", "slice_bytes")]
)
def test_unknown_options_that_are_near(given: str, near: str) -> None:
    with pytest.raises(kv.ConfigError, match=rf"unknown option {given}, did you mean '{near}'\?; known are"):
        kv.create("local", **{given: 1})


def test_a_configuration_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        store_config({}, {}).timeout = 1  # type: ignore[misc]


@pytest.mark.parametrize("variable", WITHOUT_MEANING)
def test_variables_of_mxnet_that_mean_nothing_here_are_named(
    variable: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv(variable, "1")
    kv.create("local").close()
    [record] = caplog.records
    assert record.levelname == "WARNING"
    assert record.getMessage().startswith(f"{variable} is set and has no effect here: ")


def test_the_environment_is_read_when_a_store_is_made(
    monkeypatch: pytest.MonkeyPatch, kernel_settings: None
) -> None:
    monkeypatch.setenv("MXNET_KVSTORE_REDUCTION_NTHREADS", "3")
    with kv.create():
        assert cpu.threads() == 3
    monkeypatch.setenv("KVSTORE_TIMEOUT", "0.001")
    with pytest.raises(kv.ArgumentError):
        kv.create(timeout="x")
    with kv.create(threads=2) as store:
        assert cpu.threads() == 2
        assert store._config.timeout == 0.001


def test_a_store_without_the_option_leaves_the_threads_alone(kernel_settings: None) -> None:
    cpu.set_threads(3)
    with kv.create():
        assert cpu.threads() == 3


@pytest.mark.parametrize("threads", [2.7, True, None, [2], "two"])
def test_threads_are_a_whole_number(threads: Any) -> None:
    with pytest.raises(TypeError, match="threads"):
        store_config({"threads": threads}, {})
