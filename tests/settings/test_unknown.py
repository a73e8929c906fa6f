"""Misspelt variables are found, with the name that is meant; those of other programs are left alone."""

from __future__ import annotations

import logging
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.settings import unknown
from kvstore.settings.unknown import known_variables, unknown_variables

NAMES = sorted(name for name in known_variables() if name.startswith(("KVSTORE_", "DMLC_", "PS_", "MXNET_")))
NAMES = [name for name in NAMES if not name.startswith(unknown._DEVELOPMENT)]
MEANT = {
    "KVSTORE_NUM_THREAD": "KVSTORE_NUM_THREADS",
    "KV_STORE_TIMEOUT": "KVSTORE_TIMEOUT",
    "kvstore_timeout": "KVSTORE_TIMEOUT",
    "KVSTORE_WORKERS": "KVSTORE_NUM_WORKERS",
    "KVSTORE_LOG_LEVEL": "KVSTORE_LOG",
    "DMLC_NUM_WORKERS": "DMLC_NUM_WORKER",
    "DMLC_PS_ROOT_URL": "DMLC_PS_ROOT_URI",
    "PS_HEARTBEAT_TIMEOUTS": "PS_HEARTBEAT_TIMEOUT",
    "MXNET_UPDATE_ON_KV_STORE": "MXNET_UPDATE_ON_KVSTORE",
    "MXNET_KVSTORE_SLICE_TRESHOLD": "MXNET_KVSTORE_SLICE_THRESHOLD",
}
OTHERS = (
    *("MXNET_GPU_MEM_POOL_TYPE", "MXNET_UPDATE_AGGREGATION_SIZE", "DMLC_JOB_CLUSTER", "DMLC_NUM_ATTEMPT"),
    *("BYTEPS_LOCAL_SIZE", "BYTEPS_SERVER_ENGINE_THREAD", "DMLC_ENABLE_RDMA", "PS1", "KVM_PATH", "RANKS"),
    *(f"KVSTORE_{word}_ANYTHING" for word in ("TEST", "BENCH")),
    *("KVSTORE_SERVICE_HOST", "KVSTORE_PORT_80_TCP_ADDR"),
    *("KVSTORE_SCHEDULER_SERVICE_PORT", "KVSTORE_SCHEDULER_PORT_4711_TCP", "KVSTORE_SERVICE_PORT_HTTP"),
)


@pytest.mark.parametrize("name", MEANT)
def test_the_name_that_is_meant_is_given(name: str) -> None:
    assert unknown_variables({name: "1"}) == {name: f"did you mean {MEANT[name]}?"}


@pytest.mark.parametrize("name", OTHERS)
def test_variables_of_other_programs_are_left_alone(name: str) -> None:
    assert unknown_variables({name: "1"}) == {}


def test_a_name_of_kvstore_that_is_near_no_other_is_found_too() -> None:
    assert unknown_variables({"KVSTORE_QQQ": "1", "MXNET_KVSTORE_QQQ": ""}) == {
        "KVSTORE_QQQ": "",
        "MXNET_KVSTORE_QQQ": "",
    }


def test_no_known_variable_is_found() -> None:
    assert unknown_variables(dict.fromkeys(known_variables(), "1")) == {}


@given(name=st.sampled_from(NAMES), place=st.integers(0, 40), twice=st.booleans())
def test_one_letter_too_many_or_too_few_is_found(name: str, place: int, twice: bool) -> None:
    """Behind the prefix, of names that are long enough to be known by the rest."""
    first = name.index("_") + 1
    at = first + place % (len(name) - first)
    misspelt = name[:at] + name[at] * (2 * twice) + name[at + 1 :]
    if misspelt in known_variables() or (len(name) < 12 and not name.startswith("KVSTORE_")):
        return
    assert misspelt in unknown_variables({misspelt: "1"})


def test_a_process_warns_once_of_each(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("KVSTORE_NUM_THREAD", "2")
    unknown._warn_unknown.cache_clear()
    with caplog.at_level(logging.WARNING, "kvstore.config"):
        unknown.warn_of_unknown_variables()
        unknown.warn_of_unknown_variables()
    (line,) = [record.getMessage() for record in caplog.records]
    assert "KVSTORE_NUM_THREAD is set and has no effect" in line
    assert "did you mean KVSTORE_NUM_THREADS?" in line


def test_create_writes_one_line() -> None:
    program = "import kvstore as kv; kv.create(); kv.create('device')"
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={"KVSTORE_TIMOUT": "5", "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert [line for line in done.stderr.splitlines() if "did you mean KVSTORE_TIMEOUT?" in line] == [
        *done.stderr.splitlines()
    ]
    assert len(done.stderr.splitlines()) == 1
