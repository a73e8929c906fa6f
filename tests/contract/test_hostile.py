"""Findings of a hostile user: each case once broke a store, a key, a file or a process."""

from __future__ import annotations

import copy
import gc
import os
import pickle
import resource
import signal
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pace
import pytest

import kvstore as kv

F = np.float32


@pytest.fixture
def store() -> Any:
    with kv.create("local", timeout=20) as made:
        yield made


def test_another_thread_empties_the_list_during_a_push(store: kv.KVStore) -> None:
    n = 4_000_000
    store.init("w", np.zeros(n, F))
    for delay in (0.0, 0.0005, 0.001, 0.002):
        values = [np.ones(n, F) for _ in range(4)]
        thread = threading.Timer(delay, values.clear)
        thread.start()
        store.push("w", values)
        thread.join()
        assert store.view("w")[[0, -1]].tolist() in ([4, 4], [0, 0])  # all of them, or none at all


def test_an_interrupted_call_does_not_keep_the_lock(store: kv.KVStore) -> None:
    store.init("w", np.zeros(4, F))
    gradient = np.ones(4, F)

    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(30):
            with pytest.raises(InterruptedError):
                signal.setitimer(signal.ITIMER_REAL, 0.002)
                while True:
                    store.push("w", gradient)
            pulled = threading.Thread(target=store.pull, args=("w", np.zeros(4, F)))
            pulled.start()
            pulled.join(10)
            assert not pulled.is_alive(), "the lock is held by a call that is over"
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_no_thread_for_asynchronous_calls(store: kv.KVStore, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    store.init("w", np.zeros(4, F))
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        with pytest.raises(kv.KVStoreError, match="async_op"):
            store.push("w", np.ones(4, F), async_op=True)
    out = np.ones(4, F)
    store.pull("w", out=out)
    assert not out.any()
    store.push("w", np.ones(4, F), async_op=True).wait()
    assert store.view("w").all()


def test_an_asynchronous_updater_that_forks(store: kv.KVStore) -> None:
    children = []

    def fork(key: object, gradient: object, weight: object) -> None:
        child = os.fork()
        if child:
            children.append(child)

    store.init("w", np.zeros(4, F))
    store.set_updater(fork)
    store.push("w", np.ones(4, F), async_op=True).wait()
    deadline = pace.deadline(20)
    while os.waitpid(children[0], os.WNOHANG)[0] == 0:
        if time.monotonic() > deadline:
            os.kill(children[0], signal.SIGKILL)
            os.waitpid(children[0], 0)
            pytest.fail("the child never ends")
        time.sleep(0.01)


@pytest.mark.parametrize("wrong", [[99, 3], [-1, 3], [3, 1], [1, 1]])
@pytest.mark.parametrize("sparse", [True, False])
def test_ids_that_are_changed_after_the_array_was_made(
    store: kv.KVStore, wrong: list[int], sparse: bool
) -> None:
    table = kv.RowSparseArray(np.ones((2, 3), F), [1, 3], (5, 3))
    store.init("t", kv.RowSparseArray.zeros((5, 3)) if sparse else np.zeros((5, 3), F))
    table.indices[:] = wrong
    out = np.full((5, 3), 7, F)
    if min(wrong) < 0 or max(wrong) > 4:
        with pytest.raises(kv.RowIndexError):
            store.push("t", table)
        with pytest.raises(kv.RowIndexError):
            store.init("u", table)
        store.pull("t", out=out)
        assert not out.any()
        return
    store.push("t", table)
    store.pull("t", out=out)
    assert out.sum() == 6


def test_parts_of_the_wrong_kind(store: kv.KVStore) -> None:
    store.init("t", kv.RowSparseArray.zeros((5, 3)))
    table = kv.RowSparseArray(np.ones((2, 3), F), [1, 3], (5, 3))
    table.indices = [0, 2]  # type: ignore[assignment]
    store.push("t", table)
    table.data = np.ones((3, 3), F)
    with pytest.raises(kv.ShapeError):
        store.push("t", table)
    assert store.view("t").indices.tolist() == [0, 2]


def test_init_without_memory_initialises_nothing(store: kv.KVStore) -> None:
    small, large = np.ones(1000, F), np.ones(50_000_000, F)
    pages_now = int(Path("/proc/self/statm").read_text().split()[0])
    limits = resource.getrlimit(resource.RLIMIT_AS)
    resource.setrlimit(resource.RLIMIT_AS, (pages_now * 4096 + 100_000_000, limits[1]))
    try:
        with pytest.raises(MemoryError):
            store.init(["a", "b"], [small, large])
    finally:
        resource.setrlimit(resource.RLIMIT_AS, limits)
    assert store.keys() == []


@pytest.mark.parametrize(
    ("saved", "loading", "shape"),
    [
        (kv.optimizer.SGD(momentum=0.9), kv.optimizer.SGD(momentum=0.9), (3,)),
        (kv.optimizer.SGD(), kv.optimizer.SGD(momentum=0.9), (2,)),
        (kv.optimizer.SGD(), kv.optimizer.SGD(multi_precision=True), (2,)),
        (kv.optimizer.LAMB(), kv.optimizer.LAMB(), (2, 1)),
    ],
    ids=["shape", "momentum", "multi_precision", "dimensions"],
)
@pytest.mark.filterwarnings("ignore:.*float16.*:UserWarning")
def test_states_that_do_not_fit(tmp_path: Path, saved: Any, loading: Any, shape: tuple[int, ...]) -> None:
    with kv.create() as one, kv.create() as two:
        for made, optimizer, form in ((one, saved, (2,)), (two, loading, shape)):
            made.init("w", np.ones(form, np.float16))
            made.set_optimizer(optimizer)
        one.push("w", np.ones(2, np.float16))
        one.save_optimizer_states(tmp_path / "states")
        with pytest.raises(kv.StateFileError, match="'w'"):
            two.load_optimizer_states(tmp_path / "states")
        two.push("w", np.ones(shape, np.float16))


def test_states_of_keys_of_the_other_kind(tmp_path: Path) -> None:
    with kv.create() as one, kv.create() as two:
        for made, key in ((one, 1), (two, "1")):
            made.init(key, np.ones(2, F))
            made.set_optimizer(kv.optimizer.SGD())
        one.push(1, np.ones(2, F))
        one.save_optimizer_states(tmp_path / "states")
        with pytest.raises(kv.StateFileError, match="int or str"):
            two.load_optimizer_states(tmp_path / "states")


def test_a_flipped_bit_in_the_values(store: kv.KVStore, tmp_path: Path) -> None:
    store.init("w", np.ones(3, F))
    store.save(tmp_path / "values")
    content = bytearray((tmp_path / "values").read_bytes())
    content[-1] ^= 0x40
    (tmp_path / "values").write_bytes(content)
    with pytest.raises(kv.StateFileError, match="checksum"):
        store.load(tmp_path / "values")
    assert store.view("w").tolist() == [1, 1, 1]


def test_an_updater_that_pushes_and_then_raises(store: kv.KVStore) -> None:
    seen = []

    def updater(key: Any, gradient: Any, weight: Any) -> None:
        if seen:
            weight += 1
            return
        seen.append(gradient)
        weight += 100
        store.push("w", np.full(4, 10, F))
        assert gradient.tolist() == [1, 1, 1, 1]
        raise ValueError

    store.init("w", np.zeros(4, F))
    store.set_updater(updater)
    with pytest.raises(kv.UpdaterError):
        store.push("w", np.ones(4, F))
    assert not store.view("w").any()


def test_an_updater_that_changes_its_arrays_attributes(store: kv.KVStore) -> None:
    def updater(key: Any, gradient: Any, weight: Any) -> None:
        weight.flags.writeable = gradient.flags.writeable = False

    store.init("w", np.zeros(4, F))
    store.set_updater(updater)
    store.push("w", np.ones(4, F))
    store.set_updater(None)
    store.push("w", np.ones(4, F))
    assert store.view("w").all()


def test_files_that_are_no_regular_files_stay(store: kv.KVStore, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    store.init("w", np.ones(3, F))
    store.set_optimizer(kv.optimizer.SGD())
    for save in (store.save, store.save_optimizer_states):
        with pytest.raises(OSError, match="regular"):
            save(tmp_path / "fifo")
    assert stat.S_ISFIFO((tmp_path / "fifo").stat().st_mode)
    assert os.listdir(tmp_path) == ["fifo"]


def test_permissions_of_files(store: kv.KVStore, tmp_path: Path) -> None:
    usual = tmp_path / "usual"
    usual.touch()
    store.init("w", np.ones(3, F))
    store.set_optimizer(kv.optimizer.SGD())
    for name, save in (("values", store.save), ("states", store.save_optimizer_states)):
        save(tmp_path / name)
        assert (tmp_path / name).stat().st_mode == usual.stat().st_mode
        (tmp_path / name).chmod(0o640)
        save(tmp_path / name)
        assert stat.S_IMODE((tmp_path / name).stat().st_mode) == 0o640


@pytest.mark.parametrize("name", ["sgd", "adam", "lamb"])
def test_a_schedule_that_raises(store: kv.KVStore, name: str) -> None:
    def schedule(count: int) -> float:
        raise LookupError("no rate today")

    store.init("w", np.ones(3, F))
    store.set_optimizer(kv.optimizer.create(name, lr_scheduler=schedule))
    with pytest.raises(kv.UpdaterError, match="no rate today") as caught:
        store.push("w", np.ones(3, F))
    assert isinstance(caught.value.__cause__, LookupError)
    assert store.view("w").tolist() == [1, 1, 1]


@pytest.mark.parametrize("how", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_store_is_not_copied(store: kv.KVStore, how: Callable[[Any], Any]) -> None:
    """A half-made copy of a store gave back what the store itself had, its descriptors for one."""
    descriptors = set(os.listdir("/proc/self/fd"))
    with pytest.raises(kv.ArgumentError, match="copied or pickled"):
        how(store)
    gc.collect()
    assert set(os.listdir("/proc/self/fd")) >= descriptors
    store.init("w", np.ones(3, F))
    assert store.view("w").tolist() == [1, 1, 1]


@pytest.mark.parametrize("threads", [2**31, 10**400, float("inf")])
def test_absurd_numbers_of_threads(threads: Any) -> None:
    with pytest.raises(kv.KVStoreError, match="threads"):
        kv.create("local", threads=threads)


def test_absurd_settings() -> None:
    with pytest.raises(kv.ConfigError):
        kv.optimizer.SGD(learning_rate=10**400)
    with pytest.raises(kv.ConfigError):
        kv.optimizer.SGD(lazy_update=np.array([1, 2]))
    for shape in ("x", (2.7, 3), (float("nan"), 2), (10**30, 2), 5):
        with pytest.raises(kv.ShapeError):
            kv.RowSparseArray.zeros(shape)  # type: ignore[arg-type]


def test_a_save_that_is_killed_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "values"
    body = f"""
import numpy as np, kvstore as kv
store = kv.create()
store.init("w", np.ones(2_000_000, np.float32))
while True:
    store.save({str(path)!r})
"""
    for delay in (0.05, 0.1, 0.15):
        process = subprocess.Popen([sys.executable, "-c", body], cwd=tmp_path)
        deadline = pace.deadline(30)
        while not path.exists() and time.monotonic() < deadline:
            time.sleep(0.01)
        time.sleep(delay)
        process.kill()
        process.wait()
        with kv.create() as store:
            store.load(path)
            assert store.view("w").all()


@pytest.mark.parametrize("priority", ["x", float("inf"), None, 1.5])
def test_a_priority_that_is_no_number(store: kv.KVStore, priority: Any) -> None:
    store.init("w", np.zeros(3, F))
    with pytest.raises(TypeError, match="priority"):
        store.push("w", np.ones(3, F), priority=priority, async_op=True)
    assert not store.view("w").any()
