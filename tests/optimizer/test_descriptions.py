"""Optimizers as text, and the words for two that differ."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore as kv
from kvstore.optimizer import descriptions, registry
from kvstore.optimizer.optimizer import Optimizer


class Keeping(Optimizer):
    """A rule with an unchecked argument; it is registered during these tests only."""

    def __init__(self, extra: Any = None, **common: Any) -> None:
        super().__init__(**common)
        self.extra = extra


@pytest.fixture(autouse=True)
def registered(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(registry._registry, "keeping", Keeping)


def test_scalars_and_keys_of_numpy_travel() -> None:
    """As values and keys of every setting, in the constructor and in an assignment."""
    optimizer = Keeping(
        extra=np.float32(0.5),
        learning_rate=np.float32(0.25),
        wd=np.float64(0.5),
        begin_num_update=np.int64(3),
        multi_precision=np.bool_(True),
        lr_mult={np.int64(1): np.float32(2), np.str_("w"): np.int32(3)},
        param_idx2name={np.int32(1): np.str_("w")},
        lr_scheduler=kv.lr_scheduler.MultiFactorScheduler(
            [np.int64(2)], np.float32(0.5), warmup_mode=np.str_("linear")
        ),
    )
    optimizer.wd_mult[np.uint8(4)] = np.float32(0.5)
    optimizer.lr_scheduler.base_lr = np.float32(0.125)  # type: ignore[union-attr]
    optimizer.extra = np.float16(1.5)
    text = descriptions.text_of(optimizer)
    again = Optimizer.from_config(**json.loads(text))
    assert descriptions.text_of(again) == text
    assert again.lr_mult == {1: 2.0, "w": 3.0}
    assert again.wd_mult == {4: 0.5}
    assert type(next(iter(optimizer.lr_mult))) is int


@pytest.mark.parametrize("value", [np.zeros(2), {1, 2}, object(), b"x"])
def test_a_setting_that_json_cannot_represent_is_named(value: Any) -> None:
    with pytest.raises(kv.ConfigError, match="Keeping cannot be saved or sent: its setting extra is"):
        descriptions.text_of(Keeping(extra=value))


@pytest.mark.parametrize("key", [True, 0.5, None, b"w", (1,), 2**63])
@pytest.mark.parametrize("setting", ["lr_mult", "wd_mult", "param_idx2name"])
def test_a_key_that_is_none_is_refused(setting: str, key: Any) -> None:
    with pytest.raises(kv.ConfigError, match=setting):
        kv.optimizer.SGD(**{setting: {key: "w" if setting == "param_idx2name" else 1}})


def test_many_differences_are_counted() -> None:
    one, other = (descriptions.text_of(kv.optimizer.SGD(lr_mult=dict.fromkeys(range(9), n))) for n in (1, 2))
    text = descriptions.describe_conflict(one, 2, other, 5)
    assert "lr_mult[0] 1.0 on worker 2 and 2.0 on worker 5" in text
    assert "and 6 more" in text


@given(
    st.text(),
    st.recursive(
        st.none() | st.text() | st.integers(), lambda x: st.lists(x) | st.dictionaries(st.text(), x)
    ),
)
def test_no_text_makes_it_fail(text: str, value: Any) -> None:
    """The scheduler raises it, for descriptions that workers have sent."""
    for one in (text, json.dumps(value), json.dumps({"name": "sgd", "config": value})):
        assert "worker 1" in descriptions.describe_conflict(
            one, 0, json.dumps({"name": "sgd", "config": {"wd": 1}}), 1
        )
