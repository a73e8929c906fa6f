"""Names of stores, KVStoreBase, the registry, and TestStore (contract 1, 2.1, 2.2)."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pace
import pytest

import kvstore as kv
from kvstore.factory import _warn_apart
from kvstore.store_kinds import STORES

#: On engines of other libraries; tests of their own make them.
ENGINES = ("byteps", "horovod", "mpi", "nccl")


def ones(*shape: int) -> Any:
    return np.ones(shape or (2, 3), np.float32)


@pytest.fixture
def registry() -> Iterator[dict[str, type]]:
    """The registry, put back after the test."""
    before = dict(kv.KVStoreBase.kv_registry)
    yield kv.KVStoreBase.kv_registry
    kv.KVStoreBase.kv_registry.clear()
    kv.KVStoreBase.kv_registry.update(before)


# --------------------------------------------------------------------------------------------------- create


@pytest.mark.parametrize("name", sorted({*STORES} - {*ENGINES}))
def test_every_native_name(name: str, one_server: Mapping[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    for variable, value in one_server.items():
        monkeypatch.setenv(variable, value)
    with kv.create(name) as store:
        assert store.type == name
        store.init("a", ones())
    with kv.create(name.upper()) as store:
        assert store.type == name


def test_the_default_is_local() -> None:
    with kv.create() as store:
        assert store.type == "local"


@pytest.mark.parametrize("name", [None, 3, b"local", ["local"], True])
def test_a_name_is_a_str(name: Any) -> None:
    with pytest.raises(TypeError, match="name must be a str"):
        kv.create(name)


@pytest.mark.parametrize(("van", "slices"), [("zmq", 1), ("p3", 3)])
def test_dist_is_p3_where_the_van_is(
    van: str, slices: int, one_server: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for variable, value in {**one_server, "DMLC_PS_VAN_TYPE": van}.items():
        monkeypatch.setenv(variable, value)
    monkeypatch.setenv("MXNET_KVSTORE_SLICE_THRESHOLD", "1024")
    with kv.create("dist_sync") as store:
        store.init("a", np.zeros(3000, np.float32))
        assert len(store._backend._keys.get("a").parts) == slices  # type: ignore[attr-defined]


def test_p3_has_rounds(monkeypatch: pytest.MonkeyPatch, one_server: Mapping[str, str]) -> None:
    for variable, value in {**one_server, "DMLC_PS_VAN_TYPE": "p3"}.items():
        monkeypatch.setenv(variable, value)
    with pytest.raises(kv.ConfigError, match=r"DMLC_PS_VAN_TYPE.*dist_sync"):
        kv.create("dist_async")
    monkeypatch.setenv("DMLC_PS_VAN_TYPE", "ibverbs")
    with pytest.raises(kv.ConfigError, match=r"ibverbs.*zmq"):
        kv.create("dist_sync")


def test_every_name_of_the_contract_is_known() -> None:
    names = [
        "local",
        "local_update_cpu",
        "local_allreduce_cpu",
        "device",
        "local_allreduce_device",
        "nccl",
        "dist",
        "dist_sync",
        "dist_device_sync",
        "dist_sync_device",
        "dist_device",
        "dist_async",
        "dist_device_async",
        "dist_async_device",
        "shared",
        "p3",
        "dist_p3",
        "mpi",
        "horovod",
        "byteps",
    ]
    assert sorted(names) == sorted(STORES)


@pytest.mark.parametrize(
    ("name", "near"),
    [("locl", "local"), ("dist_snyc", "dist_sync"), ("horovot", "horovod"), ("devices", "device")],
)
def test_unknown_names_get_the_nearest(name: str, near: str) -> None:
    with pytest.raises(ValueError, match=rf"unknown store '{name}'; did you mean '{near}'\? Known stores: "):
        kv.create(name)


@pytest.mark.parametrize("name", ["", "foo", " local ", "distasync_", "local\n"])
def test_unknown_names_never_make_a_local_store(name: str) -> None:
    with pytest.raises(kv.ConfigError, match=r"(?s)unknown store .*[.?] Known stores: byteps, .*teststore"):
        kv.create(name)


def test_unknown_options_are_refused() -> None:
    with pytest.raises(
        kv.ConfigError, match=r"unknown option treads, did you mean 'threads'\?; known are .*threads"
    ):
        kv.create("local", treads=2)


def test_creating_is_lazy() -> None:
    code = "import sys, kvstore; assert not any(m.startswith('kvstore.stores.local') for m in sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=pace.seconds(60))


# ------------------------------------------------------------------------------------------------- the base


def test_the_base_has_no_methods_of_its_own() -> None:
    base = kv.KVStoreBase()
    for call in (
        lambda: base.broadcast("a", 1, 2),
        lambda: base.pushpull("a", 1),
        lambda: base.pushpull("a", 1, out=None, priority=0),
        lambda: base.set_optimizer(None),
        lambda: base.is_capable("optimizer"),
        lambda: base.save_optimizer_states("f", dump_optimizer=True),
        lambda: base.load_optimizer_states("f"),
        lambda: base.type,
        lambda: base.rank,
        lambda: base.num_workers,
    ):
        with pytest.raises(NotImplementedError):
            call()
    assert kv.KVStoreBase.OPTIMIZER == "optimizer"


# ------------------------------------------------------------------------------------------------- registry


def test_a_registered_class_is_made_by_its_name(registry: dict[str, type]) -> None:
    @kv.KVStoreBase.register
    class MyStore(kv.KVStoreBase):
        def __init__(self, depth: int = 1) -> None:
            self.depth = depth

    assert registry["mystore"] is MyStore
    assert type(kv.create("MyStore")) is MyStore
    assert kv.create("mystore", depth=3).depth == 3


def test_any_class_may_be_registered_and_goes_first(registry: dict[str, type]) -> None:
    @kv.register
    class Local:
        pass

    assert type(kv.create("local")) is Local


def test_register_gives_the_class_back(registry: dict[str, type]) -> None:
    class Another:
        pass

    assert kv.KVStoreBase.register(Another) is Another


@pytest.mark.parametrize("what", [3, "name", lambda: None, None])
def test_only_classes_are_registered(registry: dict[str, type], what: Any) -> None:
    before = dict(registry)
    with pytest.raises(TypeError, match="takes a class"):
        kv.KVStoreBase.register(what)
    assert registry == before


def test_a_second_class_of_a_name_warns_and_wins(registry: dict[str, type]) -> None:
    kv.register(type("Twice", (), {}))
    with pytest.warns(UserWarning, match=r"'twice': .*TWICE replaces .*Twice") as caught:
        second = kv.register(type("TWICE", (), {}))
    assert caught[0].filename == __file__
    assert type(kv.create("twice")) is second


def test_unknown_names_list_registered_ones(registry: dict[str, type]) -> None:
    kv.register(type("Peculiar", (), {}))
    with pytest.raises(kv.ConfigError, match="did you mean 'peculiar'"):
        kv.create("peculia")


# ------------------------------------------------------------------------------------------------ TestStore


@pytest.fixture
def store() -> Any:
    return kv.create("TestStore")


def test_what_a_teststore_is(store: Any) -> None:
    assert type(store) is kv.TestStore
    assert (store.type, store.rank, store.num_workers) == ("teststore", 0, 1)
    assert not kv.TestStore.is_capable("optimizer")
    assert not store.is_capable("OPTIMIZER")
    with pytest.raises(ValueError, match="unknown capability"):
        store.is_capable("foo")
    for name in ("init", "push", "pull", "row_sparse_pull", "set_gradient_compression", "_barrier"):
        assert not hasattr(store, name)
    for call in (
        lambda: store.set_optimizer(kv.optimizer.SGD()),
        lambda: store.save_optimizer_states("f"),
        lambda: store.load_optimizer_states("f"),
    ):
        with pytest.raises(NotImplementedError):
            call()


def test_teststore_broadcasts_and_keeps_nothing(store: Any) -> None:
    one, two, three = np.zeros((2, 3)), ones() * 0, np.zeros((2, 3), np.int32)
    store.broadcast("a", ones() * 4, out=one)
    store.broadcast("a", ones() * 5, out=[two, three])
    assert (one == 4).all()
    assert (two == 5).all()
    assert (three == 5).all()


def test_teststore_sums(store: Any) -> None:
    values, out = [ones(), 2 * ones(), 4 * ones()], 0 * ones()
    store.pushpull(None, values, out=out)
    assert (out == 7).all()
    assert [v[0, 0] for v in values] == [1, 2, 4]
    store.pushpull("a", tuple(values))
    assert all((v == 7).all() for v in values)


def test_teststore_copies_a_single_array(store: Any) -> None:
    value, outs = ones(), [0 * ones(), 0 * ones()]
    store.pushpull("a", value, out=outs)
    assert all((out == 1).all() for out in outs)
    store.pushpull("a", value)
    store.pushpull("a", [value], out=value)
    assert (value == 1).all()


def test_teststore_fills_outs_that_need_a_buffer(store: Any) -> None:
    out = np.zeros((3, 4), np.float32).T[:, :][:4:2]
    store.broadcast("a", ones(*out.shape), out=out)
    assert (out == 1).all()
    swapped = np.zeros((2, 3), ">f4")
    store.pushpull("a", [ones(), ones()], out=swapped)
    assert (swapped == 2).all()


@pytest.mark.parametrize(
    ("value", "error"),
    [
        ([], kv.ShapeError),
        ([ones(), ones(3, 2)], kv.ShapeError),
        ([ones(), ones().astype(np.float64)], kv.DTypeError),
        ([ones(), [ones()]], kv.ArrayError),
        (None, kv.ArrayError),
    ],
)
def test_what_a_teststore_refuses(store: Any, value: Any, error: type[Exception]) -> None:
    out = 0 * ones()
    with pytest.raises(error):
        store.pushpull("a", value, out=out)
    with pytest.raises((kv.ArrayError, error)):
        store.broadcast("a", value, out=out)
    with pytest.raises(kv.ShapeError):
        store.pushpull("a", ones(), out=[out, ones(3, 2)])
    assert not out.any()


LAUNCHERS = {
    "torchrun": {
        "RANK": "1", "WORLD_SIZE": "2", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2",
        "TORCHELASTIC_RUN_ID": "some",
    },
    "openmpi": {
        "OMPI_COMM_WORLD_RANK": "1", "OMPI_COMM_WORLD_SIZE": "2", "OMPI_COMM_WORLD_LOCAL_RANK": "1",
        "OMPI_COMM_WORLD_LOCAL_SIZE": "2", "PMIX_NAMESPACE": "some",
    },
    "slurm": {
        "SLURM_STEP_ID": "0", "SLURM_JOB_ID": "7", "SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_LOCALID": "0", "SLURM_STEP_TASKS_PER_NODE": "1(x2)", "SLURM_NODEID": "1",
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ["local", "device"])
@pytest.mark.parametrize("launcher", LAUNCHERS)
def test_a_store_apart_from_what_a_launcher_has_started_warns(
    launcher: str, name: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for variable, value in LAUNCHERS[launcher].items():
        monkeypatch.setenv(variable, value)
    _warn_apart.cache_clear()
    kv.create(name, processes=1).close()
    assert caplog.text == ""
    kv.create(name).close()
    kv.create(name).close()
    (record,) = caplog.records
    text = record.getMessage()
    assert f"rank 1 of 2 trains separately: {launcher} has started 2 processes, but store {name!r}" in text
    assert ("'shared'" in text) == (launcher != "slurm")  # its ranks are on two machines
    assert "'dist_sync'" in text


def test_a_process_on_its_own_is_not_warned(caplog: pytest.LogCaptureFixture) -> None:
    for name in ("local", "device", "shared"):
        kv.create(name).close()
    assert caplog.text == ""


def test_variables_that_say_too_little_are_left_to_stores_that_need_them(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    kv.create("device").close()
    assert caplog.text == ""
