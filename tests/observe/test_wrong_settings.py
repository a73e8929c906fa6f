"""Each variable of stores and servers is read as they read it."""

from __future__ import annotations

from pathlib import Path

import pytest

from kvstore.observe.wrong_settings import wrong_settings

WRONG = {
    "KVSTORE_TIMEOUT": "abc",
    "KVSTORE_NUM_THREADS": "-1",
    "MXNET_KVSTORE_REDUCTION_NTHREADS": "x",
    "KVSTORE_SPIN": "nan",
    "KVSTORE_SAME_HOST_SHM": "yes",
    "KVSTORE_CREDIT_BYTES": "7",
    "DMLC_PS_VAN_TYPE": "rdma",
    "MXNET_KVSTORE_SLICE_THRESHOLD": "1e6",
    "MXNET_UPDATE_ON_KVSTORE": "on",
    "KVSTORE_LOG": "foo",
    "KVSTORE_METRICS": "bar",
    "KVSTORE_TIMELINE": "/proc/x",
    "KVSTORE_HEARTBEAT": "10",
    "PS_RESEND_TIMEOUT": "x",
    "KVSTORE_SERVER_RESTARTS": "1",
}


@pytest.mark.parametrize("name", WRONG)
def test_a_wrong_value_is_told_with_its_variable(name: str) -> None:
    (found,) = wrong_settings({name: WRONG[name]}).items()
    assert found[0] == name
    assert name in found[1] and WRONG[name] in found[1]


def test_each_wrong_variable_is_told() -> None:
    two = {name: WRONG[name] for name in ("KVSTORE_TIMEOUT", "KVSTORE_LOG")}
    assert set(wrong_settings(two)) == set(two)


def test_right_values(tmp_path: Path) -> None:
    right = {
        **{"KVSTORE_TIMEOUT": "5", "KVSTORE_LOG": "debug:kvstore.ps", "KVSTORE_METRICS": ":9400"},
        **{"KVSTORE_TIMELINE": str(tmp_path / "deep/out"), "PS_RESEND_TIMEOUT": "0"},
        **{"KVSTORE_HEARTBEAT": "10", "KVSTORE_DEAD_AFTER": "60"},
        **{"KVSTORE_SERVER_RESTARTS": "1", "KVSTORE_SNAPSHOT": "x"},
    }
    assert wrong_settings(right) == wrong_settings({}) == {}
    assert wrong_settings({"KVSTORE_LOG": " ", "KVSTORE_METRICS": " ", "KVSTORE_TIMELINE": " "}) == {}
    assert list(tmp_path.iterdir()) == []
