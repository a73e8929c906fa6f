"""The store's calls to BytePS; it has never run on a live one.

BytePS is played here, by its signatures as they were recorded from its source. tests/engines runs the store
in two processes on a stand-in that sums over `dist_sync`.
"""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import tarfile
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_byteps import signatures

import kvstore as kv
from kvstore.stores.collectives import byteps

RECORDED = json.loads(signatures.RECORDED.read_text())


def parameters(function: Any) -> list[str]:
    """As `signatures.read` has them."""
    found = inspect.signature(function).parameters.values()
    return [p.name if p.default is p.empty else f"{p.name}={p.default!r}" for p in found]


class Told:
    """byteps.torch and its operations, in a process whose peers make the same calls, when they may."""

    def __init__(self) -> None:
        self.started = 0
        self.places = (0, 2, 0)
        self.declared: list[str] = []
        self.sums: list[tuple[str, int]] = []  # name and priority
        self.under_way: dict[int, Any] = {}
        self.memory: dict[str, Any] = {}
        self.held = False
        self.answer: Exception | None = None

    def init(self, lazy: bool = True) -> None:
        self.started += 1

    def rank(self) -> int:
        return self.places[0]

    def size(self) -> int:
        return self.places[1]

    def local_rank(self) -> int:
        return self.places[2]

    def declare(self, name: str) -> int:
        self.declared += [name] if name not in self.declared else []
        return 0

    def push_pull_async_inplace(
        self, tensor: Any, average: bool = True, name: Any = None, version: int = 0, priority: int = 0
    ) -> int:
        assert not average
        assert name in self.declared, "declared by the first sum, in an order of its own"
        assert self.memory.setdefault(name, tensor) is tensor, "memory that BytePS has never seen"
        assert name not in [other for other, _ in self.under_way.values()]
        handle = len(self.sums)
        self.sums.append((name, priority))
        self.under_way[handle] = name, tensor
        return handle

    def poll(self, handle: int) -> bool:
        return not self.held

    def synchronize(self, handle: int) -> Any:
        assert not self.held, "waited inside of BytePS, where there is no deadline"
        name, tensor = self.under_way.pop(handle)
        if self.answer is not None:
            raise self.answer
        tensor *= 1 if ".first." in name else self.size()  # first values: the other workers add zeros
        return tensor


@pytest.fixture
def bps(monkeypatch: pytest.MonkeyPatch) -> Told:
    told = Told()
    package: Any = types.ModuleType("byteps")
    framework: Any = types.ModuleType("torch")
    package.torch, told.ops = told, told  # type: ignore[attr-defined]
    framework.from_numpy = lambda array: array
    modules = {"byteps": package, "byteps.torch": told, "byteps.torch.ops": told, "torch": framework}
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(byteps, "_numbers", {})
    monkeypatch.setattr(byteps, "_started", {})
    return told


@pytest.fixture
def store(bps: Told) -> Iterator[kv.KVStore]:
    with kv.create("byteps", timeout=0.5) as made:
        made.init(["b", "a"], [np.ones(3), np.ones(3, np.float32)])
        bps.sums.clear()
        yield made


# -------------------------------------------------------------------------------------------- signatures


@pytest.mark.parametrize("name", signatures.NAMES)
def test_what_plays_byteps_has_its_signatures(name: str) -> None:
    recorded = RECORDED["functions"][name]
    assert parameters(getattr(Told(), name)) == recorded
    if name not in ("push_pull_async_inplace",):
        assert name in RECORDED["exported"]
    assert "byteps_push_pull" in RECORDED["exported"]


def test_the_stand_in_has_them_too() -> None:
    folder = Path(signatures.__file__).parent
    assert signatures.read_one(folder / "byteps/torch/ops.py") == RECORDED["functions"]


@pytest.mark.nightly
def test_the_recorded_signatures_are_those_of_the_newest_byteps(tmp_path: Path) -> None:
    fetch = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "-q",
        "--no-deps",
        "--no-binary",
        ":all:",
        "-d",
        str(tmp_path),
    ]
    done = subprocess.run([*fetch, "byteps"], capture_output=True, text=True, check=False)
    found = list(tmp_path.glob("byteps-*.tar.gz"))
    if not found:
        pytest.skip(f"pip cannot fetch it: {done.stderr[-300:]}")
    with tarfile.open(found[0]) as archive:
        archive.extractall(tmp_path, filter="data")
    folder = tmp_path / found[0].name.removesuffix(".tar.gz")
    assert folder.name == f"byteps-{RECORDED['version']}"
    assert signatures.read(folder) == RECORDED["functions"]
    assert signatures.exported(folder) == RECORDED["exported"]


# --------------------------------------------------------------------------------------------------- store


def test_byteps_is_started_once(bps: Told) -> None:
    bps.places = (3, 4, 1)
    with kv.create("byteps") as store, kv.create("byteps"):
        assert (store.rank, store.num_workers, store.local_rank) == (3, 4, 1)
    assert bps.started == 1


def test_without_byteps_the_error_says_how_to_get_it(bps: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "byteps", None)
    monkeypatch.delitem(sys.modules, "byteps.torch")
    with pytest.raises(kv.MissingBackendError, match=r"pip install.*byteps.*bpslaunch"):
        kv.create("byteps")


def test_a_foreign_launcher_is_named(bps: Told, monkeypatch: pytest.MonkeyPatch) -> None:
    bps.places = (0, 1, 0)
    place = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2", "MASTER_PORT": "1"}
    for name, text in place.items():
        monkeypatch.setenv(name, text)
    with pytest.raises(kv.ConfigError, match=r"torchrun has started 2 .*bpslaunch"):
        kv.create("byteps")


def test_tensors_are_declared_when_keys_are_in_the_order_of_their_names(bps: Told, store: kv.KVStore) -> None:
    prefix = "kvstore.default.0."
    names = [name.removeprefix(prefix) for name in bps.declared]
    assert names[:3] == ["barrier", "first.kvstore.init.0", "key.kvstore.init.0"]
    assert names[3:] == ["first.a.0", "key.a.0", "first.b.0", "key.b.0"]
    count = len(names)
    for _ in range(3):
        store.push(["b", "a"], [np.ones(3), np.ones(3, np.float32)])
    store.barrier()
    assert len(bps.declared) == count


def test_sums_use_the_same_memory_each_time(bps: Told, store: kv.KVStore) -> None:
    for turn in range(3):
        mine = np.full(3, turn + 1.0)
        store.pushpull("b", mine)
        assert mine.tolist() == [2 * (turn + 1.0)] * 3
    assert {name for name, _ in bps.sums} == {"kvstore.default.0.key.b.0"}


def test_a_tensor_under_way_is_waited_for_before_the_next_sum(bps: Told, store: kv.KVStore) -> None:
    bps.held = True
    arrays = [np.ones(3), 3 * np.ones(3)]
    works = [store.pushpull("b", arrays[0], async_op=True)]
    bps.held = False
    works.append(store.pushpull("b", arrays[1], async_op=True))
    for work in works:
        work.wait()
    assert [array.tolist() for array in arrays] == [[2.0] * 3, [6.0] * 3]


def test_priority_goes_through(bps: Told, store: kv.KVStore) -> None:
    store.push("b", np.ones(3), priority=7, async_op=True).wait()
    assert bps.sums[-1] == ("kvstore.default.0.key.b.0", 7)


def test_the_others_add_zeros_to_the_first_value(bps: Told) -> None:
    bps.places = (1, 2, 1)
    with kv.create("byteps", timeout=1) as store:
        engine = store._backend.engine
        mine = np.arange(4, dtype=np.uint8)
        engine.broadcast([("w", mine)])
        assert mine.tolist() == [0] * 4
        bps.places = (0, 2, 0)


def test_eight_bit_and_half_types(store: kv.KVStore, bps: Told) -> None:
    for name in ("int8", "uint8", "float16"):
        store.init(name, np.ones(3, name))
        mine = np.ones(3, name)
        store.pushpull(name, mine)
        assert (mine.tolist(), mine.dtype.name) == ([2] * 3, name)
    kinds = {name.split(".")[4]: tensor.dtype.name for name, tensor in bps.memory.items() if ".key." in name}
    assert (kinds["int8"], kinds["uint8"], kinds["float16"]) == ("int32", "uint8", "float32")


def test_a_key_that_comes_again_in_another_size_has_another_tensor(bps: Told, store: kv.KVStore) -> None:
    store.init("v", np.ones(3))
    store._backend.discard(["v"])
    store.broadcast("v", np.ones(5), out=np.ones(5))
    mine = np.ones(5)
    store.pushpull("v", mine)
    assert bps.sums[-1][0] == "kvstore.default.0.key.v.1"


def test_waits_end_at_the_deadline(bps: Told, store: kv.KVStore) -> None:
    bps.held = True
    with pytest.raises(kv.TimeoutError, match=r"the sum of key b: all workers must call it"):
        store.push("b", np.ones(3))
    with pytest.raises(kv.KVStoreError, match="start the job again"):
        store.push("a", np.ones(3, np.float32))
    bps.held = False
    assert store.view("b").tolist() == [1.0] * 3


def test_errors_of_byteps(bps: Told, store: kv.KVStore) -> None:
    bps.answer = RuntimeError("lost its way")
    with pytest.raises(kv.KVStoreError, match=r"BytePS failed in the sum of key b: lost its way"):
        store.push("b", np.ones(3))


def test_optimizers_are_not_implemented_as_in_mxnet(store: kv.KVStore) -> None:
    assert store.is_capable("optimizer") is False
    for call in (
        lambda: store.set_optimizer(kv.optimizer.SGD(learning_rate=0.1)),
        lambda: store.save_optimizer_states("states"),
        lambda: store.load_optimizer_states("states"),
    ):
        with pytest.raises(NotImplementedError, match="byteps"):
            call()
