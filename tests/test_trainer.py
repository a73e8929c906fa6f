"""`kvstore.trainer`: the behaviour of Gluon's Trainer, on every store, with the weights of a loop by hand."""

from __future__ import annotations

import logging
import re
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import paths
import pytest
from jobs import Job
from procs_trainer import GRADIENTS, by_hand, feed, made, values
from servers import ServedJob

import kvstore as kv
from kvstore.trainer import Parameter, Trainer

F = np.float32
SGD = {"learning_rate": 0.1, "momentum": 0.9, "wd": 0.01}
TABLE = (6, 2)


def ones(*shape: int) -> Any:
    return np.ones(shape or (2,), F)


@pytest.fixture(autouse=True)
def no_variable_of_mxnet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MXNET_UPDATE_ON_KVSTORE", raising=False)


# --------------------------------------------------------------------------------------- calls on the store


class Recorder(kv.KVStoreBase):
    """A store that sums and keeps nothing, and records its calls."""

    capable = False
    name = "recorder"

    def __init__(self) -> None:
        self.calls: list[Any] = []

    def is_capable(self, capability: str) -> bool:  # type: ignore[override]
        self.calls.append(("is_capable", capability))
        return self.capable

    @property
    def type(self) -> str:
        self.calls.append("type")
        return self.name

    def set_gradient_compression(self, params: Any) -> None:
        self.calls.append(("set_gradient_compression", params))

    def set_optimizer(self, optimizer: Any) -> None:
        self.calls.append(("set_optimizer", optimizer.rescale_grad))

    def broadcast(self, key: Any, value: Any, out: Any, priority: int = 0) -> None:
        self.calls.append(("broadcast", key, len(out)))
        for one in out:
            one[...] = value

    def pushpull(self, key: Any, value: Any, out: Any = None, priority: int = 0) -> None:
        self.calls.append(("pushpull", key, len(value), None if out is None else len(out), priority))
        total = sum(value)
        for one in value if out is None else out:
            one[...] = total

    def save_optimizer_states(self, fname: Any, dump_optimizer: bool = False) -> None:
        self.calls.append(("save_optimizer_states", fname, dump_optimizer))

    def load_optimizer_states(self, fname: Any) -> None:
        self.calls.append(("load_optimizer_states", fname))


@pytest.fixture
def recorder() -> Iterator[type[Recorder]]:
    """A class for the registry, which is put back after the test."""
    before = dict(kv.KVStoreBase.kv_registry)
    yield kv.KVStoreBase.register(type("Recorder", (Recorder,), {}))
    kv.KVStoreBase.kv_registry.clear()
    kv.KVStoreBase.kv_registry.update(before)


def trio() -> list[Parameter]:
    """Three parameters with two replicas each; the middle one has no gradient."""
    return [
        Parameter("weight", [ones(), ones()]),
        Parameter("mean", [ones(), ones()], grad_req="null"),
        Parameter("bias", [ones(3), ones(3)]),
    ]


def test_nothing_is_asked_before_the_first_step(recorder: type[Recorder]) -> None:
    store = recorder()
    Trainer(trio(), "sgd", kvstore=store)
    assert store.calls == []


def test_the_calls_where_the_store_updates(recorder: type[Recorder]) -> None:
    recorder.capable = True
    store = recorder()
    trainer = Trainer(trio(), "sgd", kvstore=store, compression_params={"type": "2bit"})
    trainer.step(4)
    start = [
        ("is_capable", "optimizer"),
        "type",
        ("is_capable", "optimizer"),
        ("set_gradient_compression", {"type": "2bit"}),
        ("set_optimizer", 0.25),
        ("broadcast", 0, 2),
        ("broadcast", 1, 2),
        ("broadcast", 2, 2),
    ]
    step = [("pushpull", 0, 2, 2, 0), ("pushpull", 2, 2, 2, -2)]
    assert store.calls == start + step
    trainer.step(4)
    assert store.calls == start + step + step


def test_the_calls_where_the_trainer_updates(recorder: type[Recorder]) -> None:
    with_name = Trainer(trio(), "sgd", kvstore="recorder")
    with_name.step(1)
    store = with_name.kvstore
    assert isinstance(store, recorder)
    start = [("is_capable", "optimizer"), "type"]
    start += [("broadcast", key, 2) for key in range(3)]
    assert store.calls == [*start, ("pushpull", 0, 2, None, 0), ("pushpull", 2, 2, None, -2)]


def test_the_calls_that_save_and_load(recorder: type[Recorder]) -> None:
    recorder.capable = True
    store = recorder()
    trainer = Trainer(trio(), "sgd", kvstore=store)
    trainer.save_states("a")
    trainer.load_states("b")
    assert store.calls[-2:] == [("save_optimizer_states", "a", True), ("load_optimizer_states", "b")]
    assert trainer.optimizer.param_dict[0].lr_mult == 1


class Spied:
    """A store of the library that records the calls of its verbs."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.store = kv.create(name)
        for verb in ("init", "broadcast", "push", "pull", "pushpull", "row_sparse_pull"):
            monkeypatch.setattr(self.store, verb, self._noted(verb))

    def _noted(self, verb: str) -> Callable[..., Any]:
        real = getattr(self.store, verb)

        def call(key: Any, *args: Any, priority: int = 0, **kwargs: Any) -> Any:
            self.calls.append((verb, key, priority))
            return real(key, *args, priority=priority, **kwargs) if verb != "init" else real(key, *args)

        return call


def rows(*ids: int, value: float = 1) -> kv.RowSparseArray:
    return kv.RowSparseArray(np.full((len(ids), TABLE[1]), value, F), list(ids), TABLE)


def test_the_calls_for_row_sparse_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    spied = Spied("local", monkeypatch)
    dense = Parameter("dense", [ones(*TABLE), ones(*TABLE)], [rows(1), rows(2)])
    plain = Parameter("plain", [ones(), ones()])
    with spied.store as store:
        Trainer([plain, dense], "sgd", kvstore=store, update_on_kvstore=True).step(1)
        assert spied.calls == [
            ("broadcast", [0, 1], 0),
            ("pushpull", [0], 0),
            ("push", 1, -1),
            ("push", [0, 1], 0),  # at the end of the step
            ("pull", [0], 0),
            ("pull", 1, -1),
        ]


def test_the_calls_for_row_sparse_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    spied = Spied("local", monkeypatch)
    table = Parameter("table", kv.RowSparseArray.from_dense(ones(*TABLE)), rows(1))
    with spied.store as store:
        trainer = Trainer([Parameter("plain", ones()), table], "sgd", kvstore=store)
        table.row_sparse_data([1, 2])
        trainer.step(1)
        calls = [("broadcast", [0], 0), ("init", 1, 0), ("row_sparse_pull", 1, -1)]
        at_its_end = [("push", [0, 1], 0), ("pull", [0], 0)]
        assert spied.calls == [*calls, ("pushpull", [0], 0), ("push", 1, -1), *at_its_end]


# ----------------------------------------------------------------------------------- choosing a store


def type_of(kvstore: Any, replicas: int = 1, **options: Any) -> tuple[str | None, bool]:
    """Name of the store that is chosen, and whether it updates."""
    with Trainer([Parameter("w", [ones()] * replicas)], "sgd", kvstore=kvstore, **options) as trainer:
        trainer._prepare_store()
        choice = trainer._choice
        return None if choice.store is None else choice.store.type, choice.updates


@pytest.mark.parametrize(
    "name", ["local", "local_allreduce_cpu", "device", "Local_Allreduce_Device", "teststore"]
)
def test_one_replica_in_one_process_needs_no_store(name: str) -> None:
    assert type_of(name) == (None, False)


@pytest.mark.parametrize(
    ("name", "replicas", "chosen"),
    [
        (None, 1, (None, False)),
        (None, 2, (None, False)),
        ("local", 2, ("local", True)),
        ("device", 2, ("device", True)),
        ("DEVICE", 2, ("device", True)),
        ("teststore", 2, ("teststore", False)),
        ("shared", 1, ("shared", True)),
    ],
)
def test_the_store_that_is_chosen(name: str | None, replicas: int, chosen: tuple[str | None, bool]) -> None:
    assert type_of(name, replicas) == chosen


@pytest.mark.parametrize("name", ["dist_sync", "dist_async", "p3"])
def test_stores_on_servers_are_made_for_one_replica(
    name: str, one_server: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in one_server.items():
        monkeypatch.setenv(variable, value)
    assert type_of(name) == (name, True)


def test_a_registered_store_is_made_for_one_replica(recorder: type[Recorder]) -> None:
    assert type_of("Recorder") == ("recorder", False)


@pytest.mark.parametrize(
    ("variable", "argument", "updates"),
    [("0", None, False), ("1", None, True), ("", None, True), ("0", True, True), ("1", False, False)],
)
def test_the_argument_beats_the_environment(
    variable: str, argument: bool | None, updates: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", variable)
    assert type_of("local", 2, update_on_kvstore=argument) == ("local", updates)


def test_a_variable_that_is_no_number(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "yes")
    with pytest.raises(kv.ConfigError, match="MXNET_UPDATE_ON_KVSTORE='yes'"):
        type_of("local", 2)


def test_a_trainer_that_wants_the_store_to_update_gets_one() -> None:
    assert type_of("local", 1, update_on_kvstore=True) == ("local", True)


@pytest.mark.parametrize(("name", "updates"), [("local", False), ("device", True)])
def test_large_weights_of_local_are_updated_by_the_trainer(name: str, updates: bool) -> None:
    big = np.broadcast_to(F(1), (4097, 4096))
    chosen = kv.trainer.store_choice.choose_store(name, None, [stub(data=[big, big])], 2)  # type: ignore[attr-defined]
    assert chosen.updates is updates
    chosen.close()


def stub(**parts: Any) -> Any:
    """As little as a parameter may be."""
    data = parts.get("data", [ones()])
    grads = parts.get("grads", [np.zeros_like(one) for one in data])
    return SimpleNamespace(
        name="stub",
        grad_req="write",
        list_data=lambda: data,
        list_grad=lambda: grads,
        **parts.get("more", {}),
    )


def test_async_stores_update(one_server: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in one_server.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("MXNET_UPDATE_ON_KVSTORE", "0")
    assert type_of("dist_async") == ("dist_async", True)
    with pytest.raises(kv.ConfigError, match="no rounds"):
        type_of("dist_async", update_on_kvstore=False)
    rare = Parameter("rare", ones(*TABLE), rows(1))
    trainer = Trainer([rare], "sgd", kvstore="dist_async", update_on_kvstore=False)
    with pytest.raises(kv.ConfigError, match="no rounds"):
        trainer.step(1)


@pytest.mark.parametrize(
    ("kvstore", "options", "error", "message"),
    [
        ("teststore", {"update_on_kvstore": True}, kv.ConfigError, r"TestStore.*update_on_kvstore=False"),
        (None, {"update_on_kvstore": True}, kv.ConfigError, "need a store"),
        (3, {}, kv.ArgumentError, "the name of one"),
        ("sharde", {}, kv.ConfigError, "did you mean 'shared'"),
    ],
)
def test_stores_that_cannot_be_meant(kvstore: Any, options: Any, error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        type_of(kvstore, 2, **options)


def test_a_store_that_was_made_in_vain_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = []
    monkeypatch.setattr(kv.KVStore, "close", lambda self: closed.append(self.type))
    with pytest.raises(kv.CapabilityError):  # `local` does not compress
        Trainer(trio(), "sgd", kvstore="local", compression_params={"type": "2bit"}).step(1)
    assert closed == ["local"]


def test_a_worker_that_trains_on_its_own_is_told(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    torchrun = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}
    for name, value in {**torchrun, "TORCHELASTIC_RUN_ID": "some"}.items():
        monkeypatch.setenv(name, value)
    with caplog.at_level(logging.WARNING, "kvstore"):
        assert type_of("device") == (None, False)
    assert "rank 1 of 4 trains separately: torchrun has started 4 processes, but store" in caplog.text


SPARSE = {"local": False, "shared": False}


@pytest.mark.parametrize("name", SPARSE)
def test_row_sparse_gradients_are_the_trainers_where_it_is_alone(name: str) -> None:
    param = Parameter("w", [ones(*TABLE)] * 2, [rows(1), rows(2)])
    with Trainer([param], "sgd", kvstore=name) as trainer:
        trainer._prepare_store()
        assert trainer._choice.updates is False


def test_row_sparse_gradients_go_to_the_servers(
    one_server: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in one_server.items():
        monkeypatch.setenv(variable, value)
    with Trainer([Parameter("w", ones(*TABLE), rows(1))], "sgd", kvstore="dist_sync") as trainer:
        trainer._prepare_store()
        assert trainer._choice.updates is True


@pytest.mark.parametrize(
    ("kvstore", "options", "message"),
    [
        (None, {}, "need a store"),
        ("local", {"update_on_kvstore": False}, "updated where they are"),
        (kv.TestStore(), {}, "no verbs for row-sparse"),
    ],
)
def test_row_sparse_weights_need_a_store_that_updates(kvstore: Any, options: Any, message: str) -> None:
    param = Parameter("w", kv.RowSparseArray.from_dense(ones(*TABLE)), rows(1))
    with pytest.raises(kv.ConfigError, match=message):
        Trainer([param], "sgd", kvstore=kvstore, **options).step(1)


# ------------------------------------------------------------------------------------------------ weights


@pytest.mark.parametrize("updates", [True, False])
@pytest.mark.parametrize("rule", ["sgd", "adam", "lamb"])
def test_weights_are_those_of_a_loop_by_hand(store_name: str, rule: str, updates: bool) -> None:
    if "async" in store_name and not updates:
        pytest.skip("no rounds, no sums to update with")
    settings = {"learning_rate": 0.05, "wd": 0.01}
    params = made(replicas=2)
    with Trainer(params, rule, settings, kvstore=store_name, update_on_kvstore=updates) as trainer:
        for step in range(4):
            feed(params, step, range(2))
            trainer.step(8)
    for param, expected in zip(params, by_hand(rule, settings, 4, workers=1, replicas=2), strict=True):
        for replica in param.list_data():
            np.testing.assert_array_equal(replica, expected)


def test_one_replica_without_a_store() -> None:
    params = made(replicas=1)
    trainer = Trainer(params, "sgd", SGD)
    for step in range(3):
        feed(params, step, range(1))
        trainer.step(8)
    for param, expected in zip(params, by_hand("sgd", SGD, 3, workers=1, replicas=1), strict=True):
        np.testing.assert_array_equal(param.data(), expected)


def test_replicas_count_as_one_update() -> None:
    params = made(replicas=2)
    schedule = kv.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1)
    trainer = Trainer(params, "sgd", {"lr_scheduler": schedule}, kvstore="local", update_on_kvstore=False)
    for step in range(3):
        feed(params, step, range(2))
        trainer.step(1)
    assert trainer.optimizer.num_update == 3
    assert trainer.learning_rate == 0.25


def test_sums_and_updates_may_be_two_steps() -> None:
    params = made(replicas=2)
    trainer = Trainer(params, "sgd", SGD, kvstore="device", update_on_kvstore=False)
    feed(params, 0, range(2))
    trainer.allreduce_grads()
    for number, param in enumerate(params):
        total = values(GRADIENTS, 0, 0, 0)[number] + values(GRADIENTS, 0, 0, 1)[number]
        for grad in param.list_grad():
            np.testing.assert_array_equal(grad, total)
    trainer.update(8)
    for param, expected in zip(params, by_hand("sgd", SGD, 1, workers=1, replicas=2), strict=True):
        np.testing.assert_array_equal(param.data(1), expected)


@pytest.mark.parametrize("verb", ["allreduce_grads", "update"])
def test_two_steps_need_sums_that_come_back(verb: str) -> None:
    trainer = Trainer(trio(), "sgd", kvstore="local")
    with pytest.raises(kv.ConfigError, match=rf"{verb}.*update_on_kvstore=False"):
        getattr(trainer, verb)(*([1] if verb == "update" else []))


def test_parameters_without_gradient_stay() -> None:
    params = trio()
    params[0].grad()[:] = 1
    with Trainer(params, "sgd", SGD, kvstore="local") as trainer:
        trainer.step(1)
    assert (params[1].data() == 1).all()
    assert (params[0].data() < 1).all()


def test_replicas_begin_with_the_first_ones_values() -> None:
    param = Parameter("w", [ones(), 5 * ones()])
    with Trainer([param], "sgd", kvstore="local") as trainer:
        trainer.step(1)
    assert (param.data(1) == 1).all()


def test_parameters_of_a_dict_are_taken_by_name() -> None:
    params = {"b": Parameter("b", ones()), "a": Parameter("a", ones())}
    assert [param.name for param in Trainer(params, "sgd")._params] == ["a", "b"]


def test_anything_that_answers_like_a_parameter() -> None:
    weight = ones()
    odd = np.ones(4, F)[::2]
    bare = stub(data=[weight], grads=[ones()])
    more = stub(data=[odd], grads=[ones()], more={"lr_mult": 0.5, "fresh": [True]})
    Trainer([bare, more], "sgd", {"learning_rate": 0.5}).step(1)
    assert weight.tolist() == [0.5, 0.5]
    assert odd.tolist() == [0.75, 0.75]  # memory with gaps gets the result, too
    assert more.fresh == [False]


def test_weights_of_sixteen_bits_keep_a_copy() -> None:
    settings = {"learning_rate": 2.0**-12, "multi_precision": True}
    weights = []
    for updates in (True, False):
        param = Parameter("w", [np.ones(3, np.float16), np.ones(3, np.float16)])
        with Trainer([param], "sgd", settings, kvstore="local", update_on_kvstore=updates) as trainer:
            for _ in range(4):
                param.grad()[:] = 1
                param.grad(1)[:] = 0
                trainer.step(1)
        weights.append(param.data().tolist())
    assert weights == [[1 - 2.0**-10] * 3] * 2


# ------------------------------------------------------------------------------------------ row-sparse


@pytest.mark.parametrize("updates", [True, False])
def test_row_sparse_gradients_of_dense_weights(store_name: str, updates: bool) -> None:
    if "async" in store_name and not updates:
        pytest.skip("no rounds, no sums to update with")
    param = Parameter("w", [ones(*TABLE), ones(*TABLE)])
    param.set_grad([rows(1, 3), rows(3, 5, value=2)])
    settings = {"learning_rate": 0.5, "lazy_update": True}
    with Trainer([param], "sgd", settings, kvstore=store_name, update_on_kvstore=updates) as trainer:
        trainer.step(1)
    for replica in param.list_data():
        assert replica[:, 0].tolist() == [1, 0.5, 1, -0.5, 1, 0]
    if not updates:
        assert [grad.indices.tolist() for grad in param.list_grad()] == [[1, 3, 5]] * 2


def test_row_sparse_weights(store_name: str) -> None:
    table = Parameter("table", kv.RowSparseArray.from_dense(ones(*TABLE)), rows(1))
    plain = Parameter("plain", ones())
    with Trainer([table, plain], "sgd", {"learning_rate": 0.5}, kvstore=store_name) as trainer:
        for step in range(2):
            table.set_grad(rows(step, 4))
            plain.grad()[:] = 1
            trainer.step(1)
        found = table.row_sparse_data([4, 1, 2, 4])
        assert found.indices.tolist() == [1, 2, 4]
        assert found.data[:, 0].tolist() == [0.5, 1, 0]
        out = kv.RowSparseArray.zeros(TABLE)
        trainer.row_sparse_pull(table, out, [0])
        assert out.data.tolist() == [[0.5, 0.5]]
        assert plain.data().tolist() == [0, 0]
        with pytest.raises(kv.RowIndexError):
            table.row_sparse_data([6])


def test_rows_of_what_has_none() -> None:
    plain = Parameter("plain", ones())
    with pytest.raises(kv.ConfigError, match="'plain' is dense"):
        plain.row_sparse_data([1])
    trainer = Trainer([plain], "sgd")
    with pytest.raises(kv.ConfigError, match="no store with row-sparse"):
        trainer.row_sparse_pull(plain, None, [1])
    with pytest.raises(kv.ArgumentError, match="'other' does not belong to this trainer"):
        trainer.row_sparse_pull(Parameter("other", ones()), None, [1])
    with pytest.raises(kv.ConfigError, match="has no trainer"):
        Parameter("table", rows(1), rows(1)).row_sparse_data([1])


# -------------------------------------------------------------------------------------------- settings


def changed(trainer: Trainer, params: list[Parameter]) -> list[list[float]]:
    """Weights after steps between which everything is changed that can be."""
    found = []

    def step(batch_size: float = 1) -> None:
        for param in params:
            for grad in param.list_grad():
                grad[:] = 0.5
        trainer.step(batch_size)
        found.append([float(param.data()[0]) for param in params])

    step()
    trainer.set_learning_rate(0.25)
    step()
    params[0].lr_mult = 0
    params[1].wd_mult = 2
    step()
    step(batch_size=2)
    trainer.optimizer.wd = 0.5
    trainer.optimizer.set_lr_mult({0: 7})  # factors of parameters go first
    step()
    trainer.optimizer.clip_gradient = 0.125
    step()
    return found


@pytest.mark.parametrize("updates", [True, False])
def test_settings_change_while_training(store_name: str, updates: bool) -> None:
    if "async" in store_name and not updates:
        pytest.skip("no rounds, no sums to update with")
    params = [Parameter(name, [ones(), ones()]) for name in ("a", "b")]
    trainer = Trainer(params, "sgd", {"learning_rate": 1}, kvstore=store_name, update_on_kvstore=updates)
    with trainer:
        found = changed(trainer, params)
        assert trainer.learning_rate == 0.25
    a, b = 1.0, 1.0
    expected = []
    for step, (rate, of_a, batch, wd, most) in enumerate(
        [(1, 1, 1, 0, 9), (0.25, 1, 1, 0, 9), (0.25, 0, 1, 0, 9), (0.25, 0, 2, 0, 9), (0.25, 0, 1, 0.5, 9),
         (0.25, 0, 1, 0.5, 0.125)]
    ):  # fmt: skip
        gradient = min(1 / batch, most)
        a -= rate * of_a * (gradient + wd * a)
        b -= rate * (gradient + wd * (2 if step > 1 else 1) * b)
        expected.append([a, b])
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_schedules_go_on(store_name: str) -> None:
    param = Parameter("w", [ones(), ones()])
    schedule = kv.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1)
    found = []
    with Trainer([param], "sgd", {"lr_scheduler": schedule}, kvstore=store_name) as trainer:
        for _ in range(3):
            param.grad()[:] = 1
            trainer.step(1)
            found.append((float(param.data()[0]), trainer.learning_rate))
        with pytest.raises(UserWarning, match="schedule"):
            trainer.set_learning_rate(1)
    assert found == [(0, 1), (-0.5, 0.5), (-0.75, 0.25)]


def test_an_optimizer_of_the_callers_own() -> None:
    optimizer = kv.optimizer.SGD(learning_rate=0.5, rescale_grad=4)
    param = Parameter("w", ones(), lr_mult=0.5)
    trainer = Trainer([param], optimizer)
    assert trainer.optimizer is optimizer
    param.grad()[:] = 1
    trainer.step(batch_size=8)
    assert param.data().tolist() == [1 - 0.5 * 0.5 * 4 / 8] * 2


# ---------------------------------------------------------------------------------------------- states


def trained(
    store_name: str, steps: range, folder: Path, updates: bool | None, after: str = ""
) -> tuple[list[Any], Any]:
    """Train for some steps, from the files of an earlier run if `after`; return weights and counts."""
    params = made(replicas=2)
    if after:
        saved = np.load(folder / f"{after}.npz")
        for param in params:
            param.set_data(saved[param.name])
    settings = {"learning_rate": 0.05}
    with Trainer(params, "adam", settings, kvstore=store_name, update_on_kvstore=updates) as trainer:
        if after:
            trainer.load_states(folder / f"{after}.states")
        for step in steps:
            feed(params, step, range(2))
            trainer.step(8)
        np.savez(folder / f"{steps.stop}.npz", **{param.name: param.data() for param in params})
        trainer.save_states(folder / f"{steps.stop}.states")
        trainer.set_learning_rate(0.5)
        return [param.data().copy() for param in params], trainer.optimizer.num_update


@pytest.mark.parametrize("updates", [True, False])
def test_training_resumes_bit_for_bit(store_name: str, updates: bool, tmp_path: Path) -> None:
    if "async" in store_name and not updates:
        pytest.skip("no rounds, no sums to update with")
    whole, count = trained(store_name, range(5), tmp_path, updates)
    assert count == 5
    trained(store_name, range(2), tmp_path, updates)
    resumed, count = trained(store_name, range(2, 5), tmp_path, updates, after="2")
    assert count == 5
    for one, other in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(one, other)


def test_files_of_store_and_trainer_are_the_same(tmp_path: Path) -> None:
    whole, _ = trained("local", range(5), tmp_path, True)
    trained("local", range(2), tmp_path, False)
    resumed, _ = trained("local", range(2, 5), tmp_path, True, after="2")
    for one, other in zip(whole, resumed, strict=True):
        np.testing.assert_array_equal(one, other)


def test_the_loaded_optimizer_is_the_trainers(store_name: str, tmp_path: Path) -> None:
    param = Parameter("w", [ones(), ones()])
    with Trainer([param], "sgd", {"learning_rate": 0.25}, kvstore=store_name) as trainer:
        trainer.step(1)
        trainer.save_states(tmp_path / "states")
        trainer.set_learning_rate(9)
        trainer.step(1)
        trainer.load_states(tmp_path / "states")
        assert trainer.learning_rate == 0.25
        param.lr_mult = 2
        param.grad()[:] = 1
        trainer.step(1)
        assert param.data().tolist() == [0.5, 0.5]
        trainer.set_learning_rate(1)
        trainer.step(1)
        assert param.data().tolist() == [-1.5, -1.5]


def test_a_bad_file_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "bad").write_bytes(b"\x80\x04 a pickle")
    for updates in (True, False):
        trainer = Trainer(trio(), "adam", kvstore="local", update_on_kvstore=updates)
        optimizer = trainer.optimizer
        trainer.step(1)
        with pytest.raises(kv.StateFileError):
            trainer.load_states(tmp_path / "bad")
        assert trainer.optimizer is optimizer
        trainer.step(1)


# ------------------------------------------------------------------------------------- stale gradients


@pytest.mark.parametrize("updates", [True, False])
def test_a_stale_gradient_is_an_error(updates: bool) -> None:
    params = [Parameter(name, [ones(), ones()]) for name in ("a", "b")]
    trainer = Trainer(params, "sgd", {"learning_rate": 1}, kvstore="local", update_on_kvstore=updates)
    for param in params:
        param.set_grad([ones(), ones()])
    trainer.step(1)
    params[0].set_grad([ones(), ones()])
    with pytest.raises(UserWarning, match=r"parameter 'b', replica 0.*ignore_stale_grad"):
        trainer.step(1)
    assert [param.data()[0] for param in params] == [-1, -1]
    trainer.step(1, ignore_stale_grad=True)
    assert [param.data()[0] for param in params] == [-3, -1]


@pytest.mark.parametrize("updates", [True, False])
def test_of_some_replicas_the_fresh_ones_count(updates: bool) -> None:
    param = Parameter("w", [ones(), ones()], [3 * ones(), 5 * ones()])
    param.fresh = [False, True]
    trainer = Trainer([param], "sgd", {"learning_rate": 1}, kvstore="local", update_on_kvstore=updates)
    trainer.step(1, ignore_stale_grad=True)
    assert [array.tolist() for array in param.list_data()] == [[-4, -4]] * 2
    assert param.fresh == [False, False]


# ---------------------------------------------------------------------------------- data that arrive late


def test_parameters_that_get_their_data_later() -> None:
    early, late = Parameter("early", [ones(), ones()]), Parameter("late", grad_req="null")
    with Trainer([early, late], "sgd", {"learning_rate": 1}, kvstore="local") as trainer:
        trainer.step(1)
        with pytest.raises(kv.ConfigError, match="save_states: parameter 'late' has no data"):
            trainer.save_states("nowhere")
        late.set_data([ones(), 2 * ones()])
        trainer.step(1)
        assert late.data(1).tolist() == [1, 1]
        assert trainer.kvstore.keys() == [0, 1]


def test_a_gradient_needs_data_before_the_step() -> None:
    early, late = Parameter("early", [ones(), ones()]), Parameter("late")
    trainer = Trainer([early, late], "sgd")
    with pytest.raises(kv.ArrayError, match="'late' has no data yet"):
        trainer.step(1)
    late.set_data(ones())
    with pytest.raises(kv.ShapeError, match="'late' has 1, 'early' has 2"):
        trainer.step(1)
    with pytest.raises(kv.ConfigError, match="no parameter has data"):
        Trainer([Parameter("late")], "sgd").step(1)


def test_new_data_reach_the_store() -> None:
    param = Parameter("w", [ones(), ones()])
    with Trainer([param], "sgd", {"learning_rate": 1, "momentum": 0.5}, kvstore="local") as trainer:
        param.grad()[:] = 1
        trainer.step(1)
        old = trainer.kvstore
        param.set_data(np.full(2, 10))
        assert [array.tolist() for array in param.list_data()] == [[10, 10]] * 2
        trainer.step(1)
        assert param.data().tolist() == [9, 9]  # and momentum starts anew
        with pytest.raises(kv.ClosedError):
            old.keys()
            old.barrier()


def test_an_error_in_the_block_closes_the_store() -> None:
    trainer = Trainer([Parameter("w", [ones(), ones()])], "sgd", kvstore="local")
    with pytest.raises(ZeroDivisionError), trainer:
        trainer.step(1)
        raise ZeroDivisionError
    with pytest.raises(kv.ClosedError):
        trainer.step(1)


def test_a_store_of_the_callers_stays_open() -> None:
    with kv.create("local") as store:
        with Trainer([Parameter("w", ones())], "sgd", kvstore=store) as trainer:
            trainer.step(1)
        assert store.keys() == [0]


def test_without_rounds_no_worker_waits_for_a_stale_gradient(
    one_server: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in one_server.items():
        monkeypatch.setenv(variable, value)
    param = Parameter("w", ones())
    param.fresh = [False]
    settings = {"learning_rate": 1, "wd": 0.5}
    with Trainer([param], "sgd", settings, kvstore="dist_async") as trainer:
        trainer.step(1, ignore_stale_grad=True)
        assert param.data().tolist() == [1, 1]


def test_new_data_where_the_trainer_updates() -> None:
    param = Parameter("w", [ones(), ones()])
    trainer = Trainer([param], "sgd", {"learning_rate": 1}, kvstore="local", update_on_kvstore=False)
    trainer.step(1)
    store = trainer.kvstore
    param.set_data(np.full(2, 10, F))
    trainer.step(1)
    assert param.data(1).tolist() == [10, 10]
    assert trainer.kvstore is store


def test_stores_that_cannot_begin_anew(
    one_server: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in one_server.items():
        monkeypatch.setenv(variable, value)
    with kv.create("local") as store:
        for kvstore, what in ((store, "not created by the trainer"), ("dist_sync", "on servers")):
            param = Parameter("w", [ones(), ones()])
            with Trainer([param], "sgd", kvstore=kvstore) as trainer:
                trainer.step(1)
                with pytest.raises(RuntimeError, match=what):
                    param.set_data(5 * ones())
                assert (param.data() == 1).all()


# ------------------------------------------------------------------------------------------ parameters


def test_a_parameter_has_gradients_of_its_own() -> None:
    param = Parameter("w", [ones(2, 3), ones(2, 3)])
    assert [grad.shape for grad in param.list_grad()] == [(2, 3)] * 2
    assert param.shape == (2, 3)
    param.grad()[:] = 4
    param.zero_grad()
    assert (param.grad() == 0).all()
    sparse = Parameter("t", ones(*TABLE), rows(1))
    sparse.zero_grad()
    assert sparse.grad().nnz_rows == 0


def test_row_sparse_data_are_replaced_as_a_whole() -> None:
    table = Parameter("table", rows(1), rows(2))
    table.set_data(2 * np.eye(*TABLE, dtype=F))
    assert table.data().indices.tolist() == [0, 1]
    table.set_data(rows(5))
    assert table.data().indices.tolist() == [5]


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: Parameter("w", ones(), grad_req="no"), kv.ConfigError, "'w': grad_req"),
        (lambda: Parameter("w", [ones(2), ones(3)]), kv.ShapeError, "all of one shape"),
        (lambda: Parameter("w", []), kv.ShapeError, "one replica or more"),
        (lambda: Parameter("w", [ones(), ones()], ones()), kv.ShapeError, "pass one gradient for each"),
        (lambda: Parameter("w", rows(1)), kv.ArgumentError, "pass `grad`"),
        (lambda: Parameter("w", ones(), grad_req="null").list_grad(), kv.ConfigError, "no gradient"),
        (lambda: Parameter("w").data(), kv.ArrayError, "no data yet"),
        (lambda: Parameter("w", ones()).set_grad([ones(), ones()]), kv.ShapeError, "1 replicas"),
        (lambda: Parameter("w", ones()).set_data(ones(3)), kv.ShapeError, r"has shape \(2,\)"),
        (lambda: Parameter("w", 5), kv.ArgumentError, "'w': data must be an array.* and 5 is not an array"),
        (lambda: Parameter("w", [1, 2]), kv.ArgumentError, "and 1 is not an array; np.asarray"),
        (lambda: Parameter("w", bytearray(12)), kv.ArgumentError, "and a bytearray is not an array"),
        (lambda: Parameter("w", ones()).set_grad(5), kv.ArgumentError, "'w': grad must be an array"),
        (lambda: Parameter("w", ones(), lr_mult="a"), kv.ConfigError, "'w': lr_mult must be.*'a'"),  # type: ignore[arg-type]
        (lambda: Parameter("w", ones(), wd_mult=None), kv.ConfigError, "'w': wd_mult must be.*None"),  # type: ignore[arg-type]
        (lambda: Trainer({1: Parameter("a"), "b": Parameter("b")}, "sgd"), kv.ArgumentError, "int, str"),  # type: ignore[dict-item]
        (lambda: Trainer([*trio()[:1] * 2], "sgd"), kv.ArgumentError, "'weight' occurs twice"),
        (lambda: Trainer([], None), kv.ArgumentError, "an Optimizer such as.*None"),  # type: ignore[arg-type]
        (lambda: Trainer([], kv.optimizer.SGD), kv.ArgumentError, "an Optimizer such as"),  # type: ignore[arg-type]
        (lambda: Trainer([], "sgd", [("wd", 1)]), kv.ArgumentError, "a dict of keywords"),  # type: ignore[arg-type]
        (lambda: Trainer([], "sgd", 5), kv.ArgumentError, "a dict of keywords"),  # type: ignore[arg-type]
        (lambda: Trainer([], "sgd", {1: 2}), kv.ArgumentError, "a dict of keywords"),  # type: ignore[dict-item]
        (lambda: Trainer([], "sgd", update_on_kvstore="False"), kv.ConfigError, "update_on_kvstore must be"),  # type: ignore[arg-type]
        (
            lambda: Trainer(trio(), "sgd", kvstore=None, compression_params={"type": "3bit"}).step(1),
            kv.ConfigError,
            "3bit",
        ),
        (lambda: Trainer(trio(), "sgd").step(-1), kv.ConfigError, "batch_size must be a positive"),
        (lambda: Trainer(trio(), "sgd").step(float("nan")), kv.ConfigError, "batch_size must be a finite"),
        (lambda: Trainer(trio(), "sgd").step(1e-320), kv.ConfigError, "batch_size 1e-320 is too small"),
        (lambda: Trainer(3, "sgd"), kv.ArgumentError, "a list or a dict"),  # type: ignore[arg-type]
        (lambda: Trainer([3], "sgd"), kv.ArgumentError, "3 is not a parameter"),  # type: ignore[list-item]
        (lambda: Trainer([], "sdg"), kv.ConfigError, "did you mean 'sgd'"),
        (lambda: Trainer([], kv.optimizer.SGD(), {"wd": 1}), kv.ArgumentError, "optimizer_params"),
        (lambda: Trainer(trio(), "sgd").step(0), kv.ConfigError, "batch_size must be a positive"),
        (lambda: Trainer(trio(), "sgd").step(float("inf")), kv.ConfigError, "batch_size must be a finite"),
        (
            lambda: Trainer([*trio(), Parameter("one", ones())], "sgd"),
            kv.ShapeError,
            "'one' has 1, 'bias' has 2",
        ),
    ],
)
def test_mistakes_of_the_caller(make: Callable[[], Any], error: type, message: str) -> None:
    with pytest.raises(error, match=message):
        make()


# --------------------------------------------------------------------------------- all or nothing


def two(kind: Any = F) -> list[Parameter]:
    """Two parameters with two replicas each, and gradients of 1; the second is of another type."""
    pair = [Parameter("p", [ones(2), ones(2)]), Parameter("q", [np.ones((2, 2), kind) for _ in range(2)])]
    for param in pair:
        for grad in param.list_grad():
            grad.fill(1)
    return pair


def bad_type() -> tuple[list[Parameter], Trainer]:
    pair = two(np.int32)
    return pair, Trainer(pair, "sgd", update_on_kvstore=False)


def bad_gradient() -> tuple[list[Parameter], Trainer]:
    pair = two()
    pair[1].set_grad([np.ones((2, 2)), np.ones((2, 2))])
    return pair, Trainer(pair, "sgd", kvstore=None)


def bad_shape() -> tuple[list[Parameter], Trainer]:
    pair = [two()[1], two()[0]]
    return pair, Trainer(pair, "groupadagrad", update_on_kvstore=False)


def bad_factor() -> tuple[list[Parameter], Trainer]:
    pair = two()
    trainer = Trainer(pair, "lamb", update_on_kvstore=False)
    pair[1].lr_mult = "a"  # type: ignore[assignment]
    return pair, trainer


def bad_rate() -> tuple[list[Parameter], Trainer]:
    pair = two()
    pair[1].lr_mult = 0
    return pair, Trainer(pair, "ftrl", update_on_kvstore=False)


def bad_setting() -> tuple[list[Parameter], Trainer]:
    pair = two()
    trainer = Trainer(pair, "sgd", update_on_kvstore=False)
    pair[0].grad_req = "null"
    trainer.step(1)  # only q gets a state, without momentum
    pair[0].grad_req = "write"
    trainer.optimizer.momentum = 0.9  # type: ignore[attr-defined]
    return pair, trainer


def bad_precision() -> tuple[list[Parameter], Trainer]:
    pair = two(np.float16)
    trainer = Trainer(pair, "sgd", {"momentum": 0.9}, update_on_kvstore=False)
    trainer.step(1)
    trainer.optimizer.multi_precision = True
    return pair, trainer


@pytest.mark.filterwarnings("ignore:float16 weights")
@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (bad_type, kv.DTypeError, "parameter 'q': SGD updates weights of .*int32"),
        (bad_gradient, kv.DTypeError, "parameter 'q': a gradient of type float64"),
        (bad_shape, kv.ShapeError, "parameter 'p': GroupAdaGrad needs weights of two dimensions"),
        (bad_factor, kv.ConfigError, "parameter 'q': lr_mult must be a finite number, got 'a'"),
        (bad_rate, kv.ConfigError, "parameter 'q': Ftrl needs a learning rate above 0"),
        (bad_setting, kv.ConfigError, "parameter 'q': key 1 has 0 state arrays and SGD wants 1"),
        (bad_precision, kv.ConfigError, "parameter 'q': key 1 has no float32 copy of its weight"),
    ],
)
def test_what_the_trainer_cannot_update_changes_nothing(
    make: Callable[[], tuple[list[Parameter], Trainer]], error: type, message: str
) -> None:
    params, trainer = make()
    before = [array.copy() for param in params for array in (*param.list_data(), *param.list_grad())]
    counts = dict(trainer.optimizer._index_update_count), trainer.optimizer.num_update
    for attempt in (trainer.step, trainer.step, trainer.update):
        with pytest.raises(error, match=message):
            attempt(1)
    after = [array for param in params for array in (*param.list_data(), *param.list_grad())]
    for old, new in zip(before, after, strict=True):
        np.testing.assert_array_equal(old, new)
    assert counts == (trainer.optimizer._index_update_count, trainer.optimizer.num_update)


@pytest.mark.parametrize("updates", [True, False])
def test_a_factor_that_is_no_number_is_named(store_name: str, updates: bool) -> None:
    if "async" in store_name and not updates:
        pytest.skip("it has no rounds")
    pair = two()
    with Trainer(pair, "sgd", kvstore=store_name, update_on_kvstore=updates) as trainer:
        trainer.step(1)
        before = [array.copy() for param in pair for array in param.list_data()]
        pair[1].wd_mult = None  # type: ignore[assignment]
        with pytest.raises(kv.ConfigError, match="parameter 'q': wd_mult must be a finite number, got None"):
            trainer.step(1)
        for old, new in zip(before, [array for param in pair for array in param.list_data()], strict=True):
            np.testing.assert_array_equal(old, new)


class Refusing(kv.optimizer.SGD):
    """A rule of the user's own, which refuses an unsupported array only late."""

    def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
        if index == 1:
            raise RuntimeError("not this one")
        super().update(index, weight, grad, state)


def test_replicas_stay_alike_where_a_rule_of_the_users_own_raises() -> None:
    pair = two()
    trainer = Trainer(pair, Refusing(learning_rate=0.5), update_on_kvstore=False)
    for step in (1, 2):
        with pytest.raises(RuntimeError, match="not this one"):
            trainer.step(2)
        for param in pair:
            np.testing.assert_array_equal(param.data(0), param.data(1))
        assert trainer.optimizer._index_update_count == {0: step}


def test_a_schedule_from_zero_is_no_rate_of_zero() -> None:
    """The rate that is checked is that of the update, not that before it."""
    schedule = kv.lr_scheduler.FactorScheduler(step=10, base_lr=0.5, warmup_steps=2, warmup_begin_lr=0.0)
    pair = two()
    trainer = Trainer(pair, "ftrl", {"lr_scheduler": schedule}, update_on_kvstore=False)
    trainer.step(1)
    assert (pair[1].data(1) != 1).all()


# ----------------------------------------------------------------------------------- several processes


@pytest.mark.parametrize("updates", [True, False])
@pytest.mark.parametrize("name", ["shared", "local"])
def test_workers_of_one_machine(job: Callable[..., Job], name: str, updates: bool) -> None:
    trained_together(job(2), name, updates)


@pytest.mark.parametrize("updates", [True, False])
def test_workers_with_servers(served: Callable[..., ServedJob], updates: bool) -> None:
    trained_together(served(2, 2), "dist_sync", updates)


def trained_together(made: Job, name: str, updates: bool) -> None:
    made.start_all("procs_trainer", "train", name, updates, 4)
    assert made.results() == ["trained"] * made.size


def test_asynchronous_workers(served: Callable[..., ServedJob]) -> None:
    made = served(2, 1)
    made.start_all("procs_trainer", "train_async")
    assert made.results() == ["trained"] * 2


def test_workers_of_mpi(tmp_path: Path) -> None:
    """Sums are made by the engine, and each worker updates."""
    pytest.importorskip("mpi4py", reason="there is no mpi4py")
    starter = Path(sys.executable).parent / "mpiexec"
    if not starter.exists():
        pytest.skip("there is no mpiexec next to this Python")
    code = "import sys; sys.path[:0] = sys.argv[1].split(':'); import procs_trainer; "
    code += "print(procs_trainer.train('mpi', False, 3))"
    ended = subprocess.run(
        [str(starter), "-n", "2", sys.executable, "-c", code, paths.IMPORTS],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "".join(ended.stdout.split()) == "trained" * 2  # lines of two processes may mix


@pytest.mark.parametrize("function", ["settings", "stale", "resume", "rows"])
def test_workers_agree(job: Callable[..., Job], function: str, tmp_path: Path) -> None:
    made = job(2)
    made.start_all("procs_trainer", function, "shared", str(tmp_path))
    first, second = made.results()
    assert first == second


@pytest.mark.parametrize(
    ("what", "steps", "named"), [("rate", 0, "learning_rate"), ("batch", 2, "rescale_grad")]
)
def test_other_settings_on_a_worker_are_refused_by_all(
    job: Callable[..., Job], what: str, steps: int, named: str
) -> None:
    made = job(2)
    made.start_all("procs_trainer", "other_settings", what, 100)
    for text in made.results():
        assert re.match(rf"after {steps}: worker \d: the optimizer of worker 1 has other .*{named}", text)


def test_settings_that_differ_on_purpose(job: Callable[..., Job]) -> None:
    made = job(2)
    made.start_all("procs_trainer", "other_settings", "rate", 0)
    assert made.results() == ["after 4"] * 2


def test_workers_agree_by_the_name_of_a_store_of_one_process(job: Callable[..., Job], tmp_path: Path) -> None:
    made = job(2)
    made.start_all("procs_trainer", "settings", "local", str(tmp_path))
    first, second = made.results()
    assert first == second


def test_workers_agree_with_servers(served: Callable[..., ServedJob], tmp_path: Path) -> None:
    made = served(2, 1)
    made.start_all("procs_trainer", "one_after_the_other", "dist_sync", str(tmp_path))
    first, second = made.results()
    assert first == second
