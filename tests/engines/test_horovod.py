"""The store's calls to Horovod, and its handling of the results; this file plays Horovod."""

from __future__ import annotations

import logging
import sys
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest

import kvstore as kv
from kvstore import waiting
from kvstore.stores.collectives import horovod


class HorovodInternalError(RuntimeError):
    pass


class Told:
    """horovod.torch of a process whose peers make the same calls, when they may."""

    Sum = 1
    HorovodInternalError = HorovodInternalError

    def __init__(self) -> None:
        self.names: list[str] = []
        self.under_way: dict[int, tuple[list[str], Sequence[Any]]] = {}
        self.done: dict[int, str] = {}
        self.answer = ""  # text of the error that operations end with
        self.held = False
        self.started = 0
        self.places = (0, 2, 0)

    def is_initialized(self) -> bool:
        return self.started > 0

    def init(self) -> None:
        self.started += 1

    def rank(self) -> int:
        return self.places[0]

    def size(self) -> int:
        return self.places[1]

    def local_rank(self) -> int:
        return self.places[2]

    def mpi_enabled(self) -> bool:
        return False

    def allreduce_async_(self, array: Any, op: int, name: str) -> int:
        return self._begin([f"allreduce.{name}"], [array])

    def grouped_allreduce_async_(self, arrays: Sequence[Any], op: int, name: str) -> int:
        assert len({array.dtype for array in arrays}) == 1
        assert len(arrays) > 1
        return self._begin([f"grouped_allreduce.{name}_{i}" for i in range(len(arrays))], arrays)

    def broadcast_async_(self, array: Any, root: int, name: str) -> int:
        assert root == 0
        return self._begin([f"broadcast.{name}"], [])

    def poll(self, handle: int) -> bool:
        assert handle in self.done or handle in self.under_way, "polled after it was taken"
        return handle in self.done

    def synchronize(self, handle: int) -> None:
        text = self.done.pop(handle)
        if text:
            raise HorovodInternalError(text)

    def release(self) -> None:
        """Complete the sums in flight."""
        for handle, (_, arrays) in list(self.under_way.items()):
            for array in arrays:
                array *= self.size()
            self.done[handle] = self.answer
            del self.under_way[handle]

    def _begin(self, names: list[str], arrays: Sequence[Any]) -> int:
        assert all(array.size for array in arrays), "nothing is to be sent"
        busy = {name for names, _ in self.under_way.values() for name in names}
        if busy & set(names):
            raise HorovodInternalError("a tensor with the same name as another that is being processed")
        handle = len(self.names)
        self.names += names
        self.under_way[handle] = (names, arrays)
        if not self.held:
            self.release()
        return handle


@pytest.fixture
def hvd(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    package: Any = types.ModuleType("horovod")
    package.torch = told
    package.__version__ = "0"
    framework: Any = types.ModuleType("torch")
    framework.from_numpy, framework.__version__ = lambda array: array, "1"
    for name, module in {"horovod": package, "horovod.torch": told, "torch": framework}.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(horovod, "_numbers", {})
    return told


@pytest.fixture
def store(hvd: Told) -> Iterator[kv.KVStore]:
    with kv.create("horovod", timeout=20) as made:
        made.init(["a", "b", "c"], [np.ones(3), np.ones(3), np.ones(3, np.float32)])
        hvd.names.clear()
        yield made
        hvd.release()


def test_horovod_is_started_once(hvd: Told) -> None:
    hvd.places = (3, 4, 1)
    with kv.create("horovod") as store, kv.create("horovod"):
        assert (store.rank, store.num_workers, store.local_rank) == (3, 4, 1)
        assert store._backend.engine.versions() == {"horovod": "0", "torch": "1", "controller": "Gloo"}
    assert hvd.started == 1


def test_a_start_that_fails(hvd: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails() -> None:
        raise ValueError("Horovod initialization failed.")

    monkeypatch.setattr(hvd, "init", fails)
    with pytest.raises(kv.KVStoreError, match="did not start"):
        kv.create("horovod")


@pytest.mark.parametrize("absent", ["horovod", "torch"])
def test_without_horovod_the_error_says_how_to_get_it(
    hvd: Told, absent: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, absent, None)
    with pytest.raises(kv.MissingBackendError, match=r"pip install.*horovodrun -np 2"):
        kv.create("horovod")


def test_one_key_goes_by_its_name_in_two_turns(hvd: Told, store: kv.KVStore) -> None:
    for _ in range(3):
        store.push("a", np.ones(3))
    store.push("b", np.ones(3))
    base = "allreduce.kvstore.default.0.key"
    assert hvd.names == [f"{base}.a.0", f"{base}.a.1", f"{base}.a.0", f"{base}.b.0"]


def test_keys_go_together_by_type_under_a_name_that_says_what_they_are(hvd: Told, store: kv.KVStore) -> None:
    store.push(["a", "b", "c"], [np.ones(3), np.ones(3), np.ones(3, np.float32)])
    store.push(["a", "b"], [np.ones(3), np.ones(3)])
    store.push(["b", "a"], [np.ones(3), np.ones(3)])
    store.push(["a", "c"], [np.ones(3), np.ones(3, np.float32)])
    groups = [name.rsplit(".", 2)[1:] for name in hvd.names if name.startswith("grouped")]
    assert [turn for _, turn in groups] == ["0_0", "0_1", "1_0", "1_1", "0_0", "0_1"]
    assert len({base for base, _ in groups}) == 1, "the order of a call's keys is the store's"
    assert [name for name in hvd.names if name.startswith("allreduce")] == [
        "allreduce.kvstore.default.0.key.c.0",
        "allreduce.kvstore.default.0.key.a.0",
        "allreduce.kvstore.default.0.key.c.1",
    ]


def test_empty_arrays_are_not_sent(hvd: Told, store: kv.KVStore) -> None:
    store.init(["e", "f"], [np.empty((0, 3)), np.empty(0, np.int8)])
    hvd.names.clear()
    store.push("e", np.empty((0, 3)))
    store.push(["e", "f"], [np.empty((0, 3)), np.empty(0, np.int8)])
    store.push(["e", "a"], [np.empty((0, 3)), np.ones(3)])
    assert [name.rsplit(".", 2)[1] for name in hvd.names] == ["a"]


def test_lists_of_other_sizes_have_other_names(hvd: Told) -> None:
    for group, shapes in (("one", (3, 4)), ("two", (4, 3))):
        with kv.create("horovod", group=group) as store:
            store.init(["a", "b"], [np.ones(shape) for shape in shapes])
            store.push(["a", "b"], [np.ones(shape) for shape in shapes])
    first, second = (
        name.rsplit(".", 2)[1] for name in hvd.names if name.startswith("grouped") and "_0" in name
    )
    assert first != second


def test_stores_of_a_group_are_numbered(hvd: Told) -> None:
    for group in ("default", "default", "other"):
        kv.create("horovod", group=group).init("a", np.ones(1))
    assert [name for name in hvd.names if name.endswith("first.a.0")] == [
        f"broadcast.kvstore.{place}.first.a.0" for place in ("default.0", "default.1", "other.0")
    ]


def test_a_third_operation_of_a_name_waits_for_the_first(hvd: Told, store: kv.KVStore) -> None:
    hvd.held = True
    works = [store.push("a", np.ones(3), async_op=True) for _ in range(2)]
    third: list[Any] = []
    thread = threading.Thread(target=lambda: third.append(store.push("a", np.ones(3), async_op=True)))
    thread.start()
    thread.join(0.2)
    assert not third
    hvd.held = False
    hvd.release()
    thread.join(20)
    for work in (*works, *third):
        work.wait()
    assert len(hvd.names) == 3


def test_what_workers_mean_differently_is_a_config_error(hvd: Told, store: kv.KVStore) -> None:
    hvd.answer = "Mismatched allreduce tensor shapes: One rank sent ..., but another ..."
    with pytest.raises(kv.ConfigError, match=r"have different arrays in the sum of key a.*Mismatched"):
        store.push("a", np.ones(3))
    hvd.answer = ""
    store.push("a", np.ones(3))
    assert (store.view("a") == 2).all()


def test_any_other_error_is_the_loss_of_a_peer(hvd: Told, store: kv.KVStore) -> None:
    hvd.answer = "Horovod has been shut down."
    with pytest.raises(kv.PeerLostError, match=r"worker 0: .*the sum of 2 keys \(a, b\).*been shut down"):
        store.push(["a", "b"], [np.ones(3), np.ones(3)])
    with pytest.raises(kv.KVStoreError, match=r"been shut down.*start the job again"):
        store.push("a", np.ones(3))
    assert (store.view("a") == 1).all()


def test_an_operation_that_cannot_begin_is_the_loss_of_a_peer(
    hvd: Told, store: kv.KVStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuses(*_: Any, **__: Any) -> None:
        raise HorovodInternalError("Horovod has been shut down.")

    monkeypatch.setattr(hvd, "allreduce_async_", refuses)
    for background in (False, True):
        with pytest.raises(kv.KVStoreError, match="been shut down"):
            work = store.push("a", np.ones(3), async_op=background)
            assert work is not None
            work.wait()


def test_a_wait_ends_at_the_deadline_and_says_before_for_what(
    hvd: Told, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(waiting, "NOTICE_AFTER", 0.05)
    with kv.create("horovod", timeout=0.3) as store:
        store.init("a", np.ones(3))
        hvd.held = True
        with (
            caplog.at_level(logging.WARNING),
            pytest.raises(kv.TimeoutError, match="all workers must call it, and with the same keys"),
        ):
            store.push("a", np.ones(3))
        assert [record.getMessage() for record in caplog.records] == [
            "worker 0 has waited 0 s for the sum of key a; all workers must call it"
        ]
        with pytest.raises(kv.KVStoreError, match="start the job again"):
            store.barrier()
        assert (store.view("a") == 1).all()


@pytest.mark.parametrize("leave", [False, True])
def test_close_waits_for_what_is_under_way_unless_an_error_left(hvd: Told, leave: bool) -> None:
    store = kv.create("horovod", timeout=20)
    store.init("a", np.ones(3))
    hvd.held = True
    finish: Callable[[], None] = store._backend.start_push([("a", [np.ones(3)])])
    timer = threading.Timer(0.3, hvd.release)
    timer.start()
    if leave:
        store._backend.abandon()
    store.close()
    assert bool(hvd.under_way) == leave
    timer.join()
    finish()


def test_optimizers_are_ignored_with_one_line_each(
    store: kv.KVStore, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            store.set_optimizer(kv.optimizer.SGD())
            store.save_optimizer_states("nowhere")
            store.load_optimizer_states("nowhere")
    assert [record.getMessage().split()[0] for record in caplog.records] == [
        "set_optimizer",
        "save_optimizer_states",
        "load_optimizer_states",
    ]
    store.push("a", np.ones(3))
    assert (store.view("a") == 2).all()
