"""Settings of an optimizer that change while it is in a store: the same in each type of store, at each time.

The reference is an updater without a store, whose optimizer is changed in the same way.
"""

from __future__ import annotations

import contextlib
import copy
import itertools
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore as kv
from kvstore.optimizer import changes
from kvstore.optimizer.lr_scheduler import FactorScheduler, LRScheduler, PolyScheduler
from kvstore.optimizer.optimizer import Optimizer

KEYS = ("a", "b")
STEPS = 4
RULES = (
    *("sgd", "nag", "adam", "adamw", "adagrad", "adadelta", "adamax", "nadam", "rmsprop", "ftrl", "ftml"),
    *("signum", "sgld", "dcasgd", "lamb", "lars", "groupadagrad", "test"),
)
#: Settings that cannot change, or not to any value.
FIXED = {"multi_precision", "begin_num_update", "centered", "param_dict"}
ODD: dict[str, Any] = {
    "lr_scheduler": PolyScheduler(9, base_lr=0.5),
    "learning_rate": np.float32(0.25),
    "lr_mult": {"a": np.float32(0.5), "second": 0.25},
    "wd_mult": {"a": 2, "second": 0.25},
    "param_idx2name": {"b": "second"},
    "clip_gradient": 0.5,
    "wd": np.float64(0.125),
    "lazy_update": True,
    "seed": np.int64(3),
    "upper_bound": 0.75,
    "lower_bound": 0.5,
    "clip_weights": 0.75,
}


def made(name: str) -> Optimizer:
    start: dict[str, Any] = {"rescale_grad": 0.5, "lr_mult": {"second": 0.5}, "wd_mult": {"second": 2}}
    start |= {"momentum": 0.5} if "momentum" in type(kv.optimizer.create(name)).keywords else {}
    return kv.optimizer.create(name, learning_rate=0.125, **start)


def settings(name: str) -> list[str]:
    kind = type(kv.optimizer.create(name))
    return sorted(set(kind.settings) - FIXED - ({"wd", "wd_mult"} if name == "groupadagrad" else set()))


def assign(optimizer: Any, setting: str) -> None:
    """Change a setting of an object as a program does."""
    if setting == "param_idx2name":
        optimizer.idx2name = ODD[setting]
        return
    now = getattr(optimizer, setting)
    if setting not in ODD:
        setattr(optimizer, setting, not now if isinstance(now, bool) else now * 0.5 + 0.125)
    else:
        setattr(optimizer, setting, ODD[setting])


def gradient(number: int) -> Any:
    return np.random.default_rng(number).standard_normal((4, 3)).astype(np.float32)


def start() -> dict[str, Any]:
    return {key: np.ones((4, 3), np.float32) for key in KEYS}


def expected(optimizer: Optimizer, change: Callable[[Optimizer], None], before: int) -> dict[str, Any]:
    """Return the weights of an updater without a store."""
    weights, update = start(), kv.optimizer.get_updater(optimizer)
    for number, (_, key) in enumerate(itertools.product(range(STEPS), KEYS)):
        if number == before:
            change(optimizer)
        update(key, gradient(number), weights[key])
    return weights


def trained(
    store: Any, optimizer: Optimizer, change: Callable[[Optimizer], None], before: int
) -> dict[str, Any]:
    store.set_updater(None)
    store.push(list(KEYS), list(start().values()))
    store.set_optimizer(optimizer)
    for number, (_, key) in enumerate(itertools.product(range(STEPS), KEYS)):
        if number == before:
            change(optimizer)
        store.push(key, gradient(number))
    weights = start()
    store.pull(list(KEYS), out=list(weights.values()))
    return weights


def same(ours: dict[str, Any], reference: dict[str, Any], what: str) -> None:
    for key in KEYS:
        np.testing.assert_allclose(ours[key], reference[key], rtol=1e-6, atol=1e-7, err_msg=what)


@pytest.mark.parametrize("rule", RULES)
def test_each_setting_of_each_optimizer(store: kv.KVStore, rule: str) -> None:
    """Before the first push, between two keys of a step, before the first repeated key, and later."""
    store.init(list(KEYS), list(start().values()))
    for setting, before in itertools.product([*settings(rule), "lr_scheduler"], (0, 1, 2, 5)):
        change = partial(assign, setting=setting)
        ours = trained(store, made(rule), change, before)
        same(ours, expected(made(rule), change, before), f"{setting} before push {before}")


WAYS: dict[str, Callable[[Any], None]] = {
    "learning_rate": lambda o: setattr(o, "learning_rate", 0.75),
    "lr": lambda o: setattr(o, "lr", 0.75),
    "set_learning_rate": lambda o: o.set_learning_rate(0.75),
    "configure": lambda o: o.configure(wd=0.25, learning_rate=0.75),
    "set_lr_mult": lambda o: o.set_lr_mult({"a": 0.25}),
    "set_wd_mult": lambda o: o.set_wd_mult({"b": 0.25}),
    "an entry": lambda o: o.lr_mult.__setitem__("a", 0.25),
    "entries": lambda o: o.lr_mult.update({"a": 0.25, "b": 3}),
    "more entries": lambda o: o.wd_mult.__ior__({"a": 0.25}),
    "a default": lambda o: o.lr_mult.setdefault("a", 0.25),
    "no entry": lambda o: o.lr_mult.pop("second"),
    "no such entry": lambda o: o.wd_mult.__delitem__("second"),
    "no entries": lambda o: o.lr_mult.clear(),
    "no last entry": lambda o: o.lr_mult.popitem(),
    "a name": lambda o: o.idx2name.__setitem__("a", "second"),
    "an object": lambda o: o.param_dict.__setitem__("a", SimpleNamespace(lr_mult=0.25, wd_mult=1)),
    "a schedule": lambda o: setattr(o, "lr_scheduler", FactorScheduler(1, 0.5, base_lr=0.5)),
}


@pytest.mark.parametrize("way", WAYS)
def test_each_way_to_change_a_setting(store: kv.KVStore, way: str) -> None:
    def sgd() -> Optimizer:
        return kv.optimizer.SGD(
            learning_rate=0.5,
            wd=0.125,
            lr_mult={"second": 2},
            wd_mult={"second": 3},
            param_idx2name={"b": "second"},
        )

    store.init(list(KEYS), list(start().values()))
    same(trained(store, sgd(), WAYS[way], 3), expected(sgd(), WAYS[way], 3), way)


def test_what_a_schedule_or_an_object_with_multipliers_changes_itself(store: kv.KVStore) -> None:
    def optimizer() -> tuple[Optimizer, Callable[[Any], None]]:
        parameter = SimpleNamespace(lr_mult=1.0, wd_mult=1.0)
        rule = kv.optimizer.SGD(lr_scheduler=LRScheduler(0.5), param_dict={"a": parameter})

        def change(rule: Any) -> None:
            rule.lr_scheduler.base_lr = np.float32(0.25)
            parameter.lr_mult = 0.5

        return rule, change

    (rule, change), (other, other_change) = optimizer(), optimizer()
    store.init(list(KEYS), list(start().values()))
    same(trained(store, rule, change, 3), expected(other, other_change, 3), "")


def pushes(store: kv.KVStore) -> dict[str, Callable[[], None]]:
    one, out = np.ones(2, np.float32), np.empty(2, np.float32)

    def step() -> None:
        with store.step():
            store.push("a", one)

    calls: dict[str, Callable[[], None]] = {
        "push": lambda: store.push("a", one),
        "list": lambda: store.push(["a"], [[one]]),
        "pushpull": lambda: store.pushpull("a", one, out=out),
        "async": lambda: store.push("a", one, async_op=True).wait(),
        "async pushpull": lambda: store.pushpull("a", one, out=out, async_op=True).wait(),
        "step": step,
        "rows": lambda: store.push("a", kv.RowSparseArray(np.ones(2, np.float32), [0, 1], (2,))),
        "nested": lambda: store.push([["a"]], [[[one]]]),
    }
    with contextlib.suppress(kv.CapabilityError):
        calls["plan"] = store.bind("a", one, out=out)
    return calls if not store._backend.no_steps else {k: v for k, v in calls.items() if k != "step"}


def test_each_kind_of_push_sends_it(store: kv.KVStore) -> None:
    """Every rate is one that no other call used, so each push must have had its own."""
    store.init("a", np.zeros(2, np.float32))
    optimizer = kv.optimizer.SGD(learning_rate=1)
    store.set_optimizer(optimizer)
    total, out = 0.0, np.empty(2, np.float32)
    for number, (name, push) in enumerate(pushes(store).items()):
        optimizer.learning_rate = 2.0**number
        total += 2.0**number
        push()
        store.pull("a", out=out)
        assert (out == -total).all(), name


def test_an_updater_of_an_optimizer_is_followed_too(store: kv.KVStore) -> None:
    store.init("a", np.zeros(2, np.float32))
    optimizer = kv.optimizer.SGD(learning_rate=1)
    store.set_updater(kv.optimizer.get_updater(optimizer))
    optimizer.learning_rate = 4
    store.push("a", np.ones(2, np.float32))
    optimizer.lr = 8
    store.push("a", np.ones(2, np.float32))
    out = np.empty(2, np.float32)
    store.pull("a", out=out)
    assert (out == -12).all()


def test_calls_of_the_store_change_the_object_too(store: kv.KVStore) -> None:
    store.init("a", np.zeros(2, np.float32))
    optimizer = kv.optimizer.SGD(learning_rate=1)
    store.set_optimizer(optimizer)
    store.set_learning_rate(2)
    store.update_optimizer(wd=0.25)
    assert (optimizer.learning_rate, optimizer.wd) == (2, 0.25)
    optimizer.wd = 0
    store.update_optimizer(lr_scheduler=LRScheduler(4))
    store.push("a", np.ones(2, np.float32))
    store.update_optimizer(lr_scheduler=None, learning_rate=16)
    optimizer.rescale_grad = 0.5
    store.push("a", np.ones(2, np.float32))
    out = np.empty(2, np.float32)
    store.pull("a", out=out)
    assert (out == -12).all()


def test_a_file_of_states_brings_the_object_its_settings(store: kv.KVStore, tmp_path: Path) -> None:
    store.init("a", np.zeros(2, np.float32))
    optimizer = kv.optimizer.SGD(learning_rate=1, momentum=0.5)
    store.set_optimizer(optimizer)
    store.push("a", np.ones(2, np.float32))
    store.save_optimizer_states(tmp_path / "states", dump_optimizer=True)
    optimizer.learning_rate = 64
    store.push("a", np.ones(2, np.float32))
    store.load_optimizer_states(tmp_path / "states")
    assert optimizer.learning_rate == 1
    optimizer.learning_rate = 2  # the loaded optimizer has no rate of its own
    store.push("a", np.ones(2, np.float32))
    out = np.empty(2, np.float32)
    store.pull("a", out=out)
    assert (out == -1 - 64.5 - 2.5).all()


def test_a_change_that_is_refused_is_refused_until_it_is_taken_back(store: kv.KVStore) -> None:
    """The settings that determine the form of the states; the values stay as they are."""
    store.init("a", np.zeros(2, np.float32))
    optimizer = kv.optimizer.SGD(learning_rate=1, momentum=0.5)
    store.set_optimizer(optimizer)
    store.push("a", np.ones(2, np.float32))
    optimizer.momentum = 0.0
    for _ in range(2):
        with pytest.raises(kv.ConfigError, match="momentum"):
            store.push("a", np.ones(2, np.float32))
    optimizer.momentum = 0.5
    out = np.empty(2, np.float32)
    store.pushpull("a", np.ones(2, np.float32), out=out)
    assert (out == -2.5).all()


@pytest.mark.parametrize(
    ("setting", "value"),
    [("wd", "x"), ("lr", None), ("momentum", np.float32("nan")), ("lr_mult", {0.5: 1}), ("lr_scheduler", 3)],
)
def test_a_value_that_is_not_valid_is_refused_at_the_assignment(setting: str, value: Any) -> None:
    optimizer = kv.optimizer.SGD(learning_rate=1, momentum=0.5)
    before = optimizer.get_config()
    with pytest.raises(kv.ConfigError, match=setting.replace("lr", "l", 1)[:1]):
        setattr(optimizer, setting, value)
    with pytest.raises(kv.ConfigError):
        optimizer.lr_mult["w"] = "x"  # type: ignore[assignment]
    assert optimizer.get_config() == before


@given(
    st.lists(
        st.tuples(st.sampled_from(["set", "del", "update", "pop", "clear", "default"]), st.integers(0, 3))
    )
)
def test_a_table_is_a_dict_whose_changes_are_seen(steps: list[tuple[str, int]]) -> None:
    table, plain = changes.FactorTable("lr_mult", {}), {}
    for verb, key in steps:
        before, seen = dict(plain), changes.REVISION.number
        for one in (table, plain):
            if verb == "set":
                one[np.int64(key)] = 0.5 + key
            elif verb == "del" and key in one:
                del one[key]
            elif verb == "update":
                one.update({key: 2.0}, **{"w": 3.0})
            elif verb == "pop":
                one.pop(key, None)
            elif verb == "clear":
                one.clear()
            elif verb == "default":
                one.setdefault(key, 4.0)
        assert table == plain
        assert all(type(name) in (int, str) for name in table)
        assert plain == before or changes.REVISION.number != seen


def unpickled(optimizer: Optimizer) -> Any:
    return pickle.loads(pickle.dumps(optimizer))  # noqa: S301 - it was made here


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, unpickled])
def test_a_copy_is_an_optimizer_of_its_own(copied: Callable[[Optimizer], Optimizer]) -> None:
    optimizer = kv.optimizer.Nadam(lr_mult={"w": 2}, param_idx2name={0: "w"}, lr_scheduler=LRScheduler(0.5))
    again = copied(optimizer)
    assert again.get_config() == optimizer.get_config()
    seen = changes.REVISION.number
    again.lr_mult["w"] = 3
    assert changes.REVISION.number != seen
    again.wd = 0.5
    assert optimizer.wd == 0
