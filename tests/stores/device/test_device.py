"""`device` with arrays on GPUs: places, streams, launches, updates, files, memory.

What holds for every store is in test_device_contract.py. The GPUs are fake (tests/support/lazy_driver.py).
"""

from __future__ import annotations

import random
import subprocess
import sys
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import fake_torch
import ml_dtypes
import numpy as np
import numpy.typing as npt
import pace
import pytest
from fake_torch import FakeTorch
from lazy_driver import GpuArray, LazyDriver, installed, new_stream
from on_gpu import OnGpu
from references import assert_same_bits, draw, total
from safetensors import safe_open

import kvstore as kv
from kvstore.devices import driver
from kvstore.devices.arrays import DeviceArray
from kvstore.kernels import cuda
from kvstore.observe.counters import MEMORY, UPDATING

Array = npt.NDArray[Any]
Golden = Callable[[str], Any]
BF16 = np.dtype(ml_dtypes.bfloat16)
#: The order in which the fake GPUs run queued work.
SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(8, 200))]
NOTHING = {"bytes": 0, "events": 0, "streams": 0}


@pytest.fixture
def fake() -> Iterator[LazyDriver]:
    with installed(3) as made:
        yield made


@pytest.fixture
def torch(fake: LazyDriver, monkeypatch: pytest.MonkeyPatch) -> FakeTorch:
    made = FakeTorch(fake)
    monkeypatch.setitem(sys.modules, "torch", made)
    return made


@pytest.fixture
def gpu(fake: LazyDriver) -> Callable[..., GpuArray]:
    def make(content: Any, dtype: Any = np.float32, **options: Any) -> GpuArray:
        return GpuArray(fake, np.asarray(content, dtype), **options)

    return make


@pytest.fixture
def store() -> Iterator[kv.KVStore]:
    with kv.create("device") as made:
        yield made


Gpu = Callable[..., GpuArray]


def values_of(store: kv.KVStore, key: Any) -> list[float]:
    seen = store.view(key)
    host = seen.numpy() if isinstance(seen, DeviceArray) else seen
    return [float(x) for x in np.ravel(host)]


def content(path: Path) -> tuple[Any, dict[str, bytes]]:
    """Metadata and tensors of a file, whose order is the library's."""
    with safe_open(path, framework="numpy") as file:
        return file.metadata(), {name: file.get_tensor(name).tobytes() for name in file.keys()}  # noqa: SIM118


def backend(store: kv.KVStore) -> Any:
    return store._backend


# ---------------------------------------------------------------------------------------------- without a GPU


def test_host_arrays_never_import_cuda() -> None:
    code = """
import sys
import numpy as np
import kvstore as kv
with kv.create("device") as store:
    a, b = np.ones(5, np.float32), np.zeros(5, np.float32)
    store.init(["a", "t"], [a, kv.RowSparseArray.zeros((4, 2))])
    store.set_optimizer(kv.optimizer.SGD())
    store.push("a", [a, a])
    store.pushpull("a", [a, a], out=b)
    store.bind("a", [a, a], out=b)()
    store.push("a", a, async_op=True).wait()
    store.pull("a", out=b)
loaded = {name.partition(".")[0] for name in sys.modules} & {"cuda", "numba", "numba_cuda", "torch", "cupy"}
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=pace.seconds(100))


def test_without_the_extra_an_array_of_a_gpu_names_the_command(
    monkeypatch: pytest.MonkeyPatch, gpu: Gpu
) -> None:
    array = gpu([1])
    before = driver.replace_driver(None)
    monkeypatch.setitem(sys.modules, "cuda.bindings.driver", None)
    try:
        with kv.create("device") as store, pytest.raises(kv.MissingBackendError, match="pip install"):
            store.init("a", array)
    finally:
        driver.replace_driver(before)


# ------------------------------------------------------------------------------------------------- one launch


def test_all_keys_of_a_call_are_one_launch(store: kv.KVStore, fake: LazyDriver, gpu: Gpu) -> None:
    keys = list(range(50))
    store.init(keys, [gpu(np.zeros(n)) for n in keys])
    values = [[gpu(np.full(n, 1)), gpu(np.full(n, 2))] for n in keys]
    outs = [gpu(np.zeros(n)) for n in keys]
    for verb in (
        lambda: store.push(keys, values),
        lambda: store.pull(keys, outs),
        lambda: store.pushpull(keys, values, outs),
        lambda: store.pushpull(keys, values),
    ):
        fake.launches.clear()
        verb()
        assert len(fake.launches) == 1, fake.launches
    assert all((out.get() == 3).all() for out in outs)
    assert all((pair[0].get() == 3).all() and (pair[1].get() == 3).all() for pair in values)


def test_types_are_a_launch_each(store: kv.KVStore, fake: LazyDriver, gpu: Gpu) -> None:
    store.init(["a", "b", "c"], [gpu([0]), gpu([0], np.float16), gpu([0], np.int64)])
    values = [[gpu([1]), gpu([2])], [gpu([1], np.float16)] * 2, [gpu([1], np.int64)] * 2]
    fake.launches.clear()
    store.push(["a", "b", "c"], values)
    assert sorted(name for name, _ in fake.launches) == ["sum_float16_k2", "sum_float32_k2", "sum_int64_k2"]


def test_the_image_goes_up_once_for_the_same_arrays(store: kv.KVStore, fake: LazyDriver, gpu: Gpu) -> None:
    store.init(["a", "b"], [gpu([0, 0]), gpu([0])])
    values, other = [[gpu([1, 2])], [gpu([3])]], [[gpu([4, 5])], [gpu([6])]]
    fake.run_all()
    for arrays, uploads in ((values, 1), (values, 0), (other, 1), (values, 0), (other, 0)):
        before = fake.uploads
        store.push(["a", "b"], arrays)
        assert fake.uploads - before == uploads
    assert values_of(store, "a") == [4, 5]


def test_parameters_go_up_when_they_change(store: kv.KVStore, fake: LazyDriver, gpu: Gpu) -> None:
    store.init("a", gpu([0, 0]))
    value = gpu([1, 2])

    def uploads() -> int:
        before = fake.uploads
        store.push("a", value)
        return fake.uploads - before

    store.set_optimizer(kv.optimizer.SGD(learning_rate=1))
    assert [uploads(), uploads(), uploads()] == [2, 0, 0]
    store.set_learning_rate(0.5)
    assert [uploads(), uploads()] == [1, 0]
    store.set_optimizer(kv.optimizer.Adam())
    assert [uploads(), uploads(), uploads()] == [2, 1, 1]  # its rate is another one each time


def test_the_host_never_waits(store: kv.KVStore, torch: FakeTorch, fake: LazyDriver) -> None:
    store.init(["a", "h"], [torch.tensor([0, 0]), np.zeros(2, np.float16)])
    half = torch.tensor([1, 1])
    half.dtype, half._memory.dtype = "torch.float16", np.dtype(np.float16)
    outs = [torch.tensor([0, 0]) for _ in range(3)]
    fake.waits = 0
    store.push("a", [torch.tensor([1, 1]), torch.tensor([2, 2])])
    for optimizer in (kv.optimizer.SGD(momentum=0.9), kv.optimizer.Adam(), kv.optimizer.DCASGD()):
        store.set_optimizer(optimizer)
        with torch.use((0, new_stream())):
            store.pushpull("a", torch.tensor([1, 1]), out=outs)
    store.set_optimizer(kv.optimizer.SGD(momentum=0.9, multi_precision=True))
    store.push("h", half)
    store.pull("a", out=outs)
    plan = store.bind("a", outs)
    plan()
    with torch.use((0, new_stream())):
        plan()
    assert fake.waits == 0


# ----------------------------------------------------------------------------------------------------- places


def test_a_key_lives_where_its_value_lies(store: kv.KVStore, gpu: Gpu) -> None:
    store.init(["a", "b", "c"], [gpu([1]), np.ones(2, np.float32), gpu([1, 2, 3], device=2)])
    assert store.placement() == {"a": [("cuda:0", 4)], "b": [("worker 0", 8)], "c": [("cuda:2", 12)]}
    assert store.statistics().nbytes == 24
    assert store.keys() == ["a", "b", "c"]


@pytest.mark.parametrize("timed", [False, True])
def test_what_gpus_do_is_counted(store: kv.KVStore, gpu: Gpu, timed: bool) -> None:
    if timed:
        store._counters.take_times()
    store.init(["a", "b"], [gpu([1, 2, 3]), np.ones(2, np.float32)])
    store.push("a", [gpu([1, 2, 3]), gpu([1, 2, 3])])
    store.pull("a", out=gpu([0, 0, 0]))
    store.pushpull(["a", "b"], [gpu([1, 2, 3]), gpu([1, 2])])
    plan = store.bind("a", gpu([1, 2, 3]))
    plan()
    found = store._counters.read()
    assert (found["sent"][MEMORY], found["received"][MEMORY]) == (24 + 20 + 12, 12 + 20 + 12)
    assert (found["rounds"], found["keys"], found["nbytes"]) == (4, 2, 20)
    assert found["spans"] == ([0, 1, 3, 0, 0] if timed else [0] * 5)
    assert store._backend.names() == {0: "a", 1: "b"}
    store.set_optimizer(kv.optimizer.SGD(learning_rate=0.1))
    plan()
    assert store._counters.read()["spans"][UPDATING] == timed


def test_a_host_key_moves_at_the_first_push_of_gpu_values(store: kv.KVStore, gpu: Gpu) -> None:
    store.init(["b", "a"], [np.ones(2, np.float32)] * 2)
    store.push("a", [gpu([1, 2], device=1), gpu([1, 2], device=2)])
    assert store.placement() == {"b": [("worker 0", 8)], "a": [("cuda:1", 8)]}
    store.push("a", [gpu([1, 2], device=2)])
    store.push("a", np.array([3, 4], np.float32))
    assert store.placement()["a"] == [("cuda:1", 8)]
    assert values_of(store, "a") == [3, 4]
    assert store.keys() == ["b", "a"]


def test_a_key_takes_its_states_along(store: kv.KVStore, gpu: Gpu) -> None:
    with kv.create("local") as local:
        for one in (store, local):
            one.init("a", np.ones(3, np.float32))
            one.set_optimizer(kv.optimizer.Adam(learning_rate=0.1))
        for step in range(4):
            value = draw("float32", 3, step)
            local.push("a", value)
            store.push("a", gpu(value) if step >= 2 else value)
        assert_same_bits(store.view("a").numpy(), local.view("a"))


def test_host_and_gpu_values_do_not_mix_in_a_list(store: kv.KVStore, gpu: Gpu) -> None:
    store.init(["a", "b"], [gpu([1]), np.ones(1, np.float32)])
    for key in ("a", "b"):
        for call in (store.push, store.pushpull):
            with pytest.raises(kv.ArrayError, match="on the host and on a GPU"):
                call(key, [gpu([5]), np.ones(1, np.float32)])
    assert (values_of(store, "a"), values_of(store, "b")) == ([1], [1])


def test_outs_may_lie_anywhere(store: kv.KVStore, torch: FakeTorch, gpu: Gpu) -> None:
    content = np.arange(6, dtype=np.float32).reshape(2, 3)
    for key, value in (("g", gpu(content)), ("h", content)):
        store.init(key, value)
        host, turned = np.zeros((2, 3), np.float32), np.zeros((3, 2), np.float32).T
        outs = [
            gpu(np.zeros((2, 3))), host, gpu(np.zeros((2, 3)), device=1), torch.tensor(np.zeros((2, 3))),
            torch.tensor(np.zeros((2, 3)), transposed=True), turned,
        ]  # fmt: skip
        store.pull(key, out=outs)
        for out in outs:
            np.testing.assert_array_equal(out if isinstance(out, np.ndarray) else out.get(), content)


TYPES = ["float32", "float16", "bfloat16", "float64", "int32", "uint8"]


@pytest.mark.parametrize("target", TYPES)
@pytest.mark.parametrize("source", TYPES)
@pytest.mark.parametrize("device", [0, 1])
def test_a_pull_converts_to_arrays_anywhere(
    store: kv.KVStore, gpu: Gpu, source: str, target: str, device: int
) -> None:
    kinds = [BF16 if name == "bfloat16" else np.dtype(name) for name in (source, target)]
    content = np.array([1.75, 2.25, 100]).astype(kinds[0])
    outs = [gpu(np.zeros(3), kinds[1], device=device) for _ in range(2)]
    store.init([1, 2], [gpu(content, kinds[0]), content])
    store.pull([1, 2], out=outs)
    for out in outs:
        np.testing.assert_array_equal(out.get(), content.astype(kinds[1]))


@pytest.mark.parametrize("peers", [True, False])
def test_values_and_outs_on_several_gpus(store: kv.KVStore, fake: LazyDriver, gpu: Gpu, peers: bool) -> None:
    fake.peers = peers
    drawn = [draw("float32", 40, seed) for seed in range(5)]
    store.init("a", gpu(np.zeros(40), device=1))
    values = [gpu(value, device=i % 3, stream=new_stream()) for i, value in enumerate(drawn)]
    outs = [gpu(np.zeros(40), device=i, stream=new_stream()) for i in range(3)]
    store.pushpull("a", values, out=outs)
    for out in outs:
        assert_same_bits(out.get(), total(drawn))
    for value, content in zip(values, drawn, strict=True):
        value.set(-content)  # on its own stream: the pushed array has been read before
    assert_same_bits(store.view("a").numpy(), total(drawn))
    assert fake._opened == ({(1, 0), (1, 2)} if peers else set())


def test_a_call_may_span_gpus(store: kv.KVStore, fake: LazyDriver, gpu: Gpu) -> None:
    store.init(["a", "b", "c"], [gpu([0], device=i) for i in range(3)])
    values = [[gpu([i + 1], device=i), gpu([10], device=i)] for i in range(3)]
    fake.launches.clear()
    store.push(["a", "b", "c"], values)
    assert len(fake.launches) == 3
    assert [values_of(store, key) for key in "abc"] == [[11], [12], [13]]


def test_places_mix_in_a_call(store: kv.KVStore, gpu: Gpu) -> None:
    store.init(["h", "g", "t"], [np.zeros(2, np.float32), gpu([0, 0]), kv.RowSparseArray.zeros((3, 2))])
    rows = kv.RowSparseArray(np.ones((1, 2), np.float32), [1], (3, 2))
    there, here = gpu([0, 0]), np.zeros(2, np.float32)
    store.pushpull(["h", "g", "t"], [np.ones(2, np.float32), gpu([2, 2]), rows], out=[[there], [here], []])
    assert (there.get().tolist(), here.tolist()) == ([1, 1], [2, 2])
    assert store.view("t").indices.tolist() == [1]


def test_row_sparse_stays_on_the_host(store: kv.KVStore, gpu: Gpu) -> None:
    store.init(["t", "g"], [kv.RowSparseArray.zeros((3, 2)), gpu(np.zeros((3, 2)))])
    rows = kv.RowSparseArray(np.ones((1, 2), np.float32), [1], (3, 2))
    for call, match in (
        (lambda: store.push("t", gpu(np.ones((3, 2)))), "'t' is row-sparse and stays on the host"),
        (lambda: store.push("g", rows), "row-sparse, and the key is on cuda:0"),
        (lambda: store.row_sparse_pull("g", out=rows, row_ids=[1]), "is on cuda:0"),
    ):
        with pytest.raises(kv.CapabilityError, match=match):
            call()
    out = gpu(np.full((3, 2), 7))
    store.pull("t", out=out)
    assert not out.get().any()


# --------------------------------------------------------------------------------------------- all or nothing


def test_a_call_that_is_refused_changes_nothing(store: kv.KVStore, fake: LazyDriver, gpu: Gpu) -> None:
    store.init(["g", "h", "m"], [gpu([1, 1]), np.ones(2, np.float32), np.ones(2, np.float32)])
    good = {"g": gpu([5, 5]), "h": np.full(2, 5, np.float32), "m": gpu([5, 5])}
    bad: list[Any] = [gpu([1, 2, 3]), gpu([1, 2], np.float64), gpu([1, 2], np.int16), "text", None]
    fake.launches.clear()
    for wrong in bad:
        for place in ("g", "h", "m"):
            values = [[value] if key != place else [wrong] for key, value in good.items()]
            for call in (store.push, store.pushpull):
                with pytest.raises(kv.KVStoreError):
                    call(["g", "h", "m"], values)
    for out in (gpu([1]), gpu([1, 1], readonly=True), np.zeros(3, np.float32), "text"):
        for keys in (["g", "h", "m"], ["h", "g", "m"]):
            outs: list[Any] = [gpu([9, 9]), gpu([9, 9]), out]
            with pytest.raises(kv.KVStoreError):
                store.pushpull(keys, [good[key] for key in keys], out=outs)
            with pytest.raises(kv.KVStoreError):
                store.pull(keys, out=outs)
            assert outs[0].get().tolist() == outs[1].get().tolist() == [9, 9]
    assert fake.launches == []
    assert [values_of(store, key) for key in ("g", "h", "m")] == [[1, 1]] * 3
    assert [place[0][0] for place in store.placement().values()] == ["cuda:0", "worker 0", "worker 0"]


def test_an_init_that_is_refused_initialises_nothing(store: kv.KVStore, gpu: Gpu) -> None:
    store.init("a", gpu([1]))
    for keys, values in (
        (["b", "a"], [gpu([1])] * 2),
        (["b", "c"], [gpu([1]), gpu([1], np.int16)]),
        (["b", "c"], [np.ones(1), gpu([1], np.int16)]),
        (["b", "c"], [gpu([1]), "text"]),
        (["b", "b"], [gpu([1])] * 2),
        ([1, 2], [gpu([1]), np.ones(1)]),
    ):
        with pytest.raises(kv.KVStoreError):
            store.init(keys, values)
    assert store.keys() == ["a"]
    with pytest.raises(kv.ShapeError):
        store.broadcast(["b", "c"], [gpu([1]), np.ones(1)], out=[gpu([1, 2]), np.ones(1)])
    assert store.keys() == ["a"]
    store.broadcast(["b", "c"], [gpu([1]), np.ones(1)], out=[np.ones(1, np.float32), gpu([1], np.float64)])
    assert store.keys() == ["a", "b", "c"]


def test_a_full_gpu(store: kv.KVStore, fake: LazyDriver, gpu: Gpu) -> None:
    arrays = [gpu(np.ones(1000)) for _ in range(3)]
    store.init(["a", "h"], [arrays[0], np.ones(1000, np.float32)])
    store.set_optimizer(kv.optimizer.Adam())
    store.push("a", arrays[1])
    fake.capacity = fake.in_use(0) + 100
    before = values_of(store, "a")
    optimizer = store._updater.optimizer  # type: ignore[union-attr]
    for call in (
        lambda: store.init("b", arrays[1]),
        lambda: store.push("h", arrays[1]),
        lambda: store.push(["a", "h"], [arrays[1], arrays[2]]),
    ):
        with pytest.raises(MemoryError):
            call()
    assert store.keys() == ["a", "h"]
    assert values_of(store, "h") == [1] * 1000
    assert values_of(store, "a") == before
    assert optimizer.num_update == 1
    fake.capacity = None
    store.push("h", arrays[1])
    assert store.placement()["h"] == [("cuda:0", 4000)]


# ---------------------------------------------------------------------------------------------------- streams


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_on_several_streams(torch: FakeTorch, fake: LazyDriver, seed: int) -> None:
    """Random calls on random streams end as they would one after the other."""
    fake._random.seed(seed)
    chance = random.Random(seed)
    streams = [(0, 0), *((0, new_stream()) for _ in range(3))]
    sizes = {"a": 5, "b": 300, "c": 33}
    expected = {key: np.zeros(n, np.float32) for key, n in sizes.items()}
    checks: list[tuple[Any, Array]] = []
    with kv.create("device") as store:
        store.init(list(sizes), [torch.tensor(zeros) for zeros in expected.values()])
        for step in range(25):
            with torch.use(chance.choice(streams)):
                keys = chance.sample(sorted(sizes), chance.randint(1, 3))
                values = [[np.full(sizes[key], step * 10 + i, np.float32) for i in range(2)] for key in keys]
                given = [[torch.tensor(value) for value in pair] for pair in values]
                outs = [torch.tensor(np.full(sizes[key], -1)) for key in keys]
                verb = chance.choice(["push", "pull", "pushpull", "in place", "plan"])
                if verb == "pull":
                    store.pull(keys, outs)
                elif verb == "push":
                    store.push(keys, given)
                elif verb == "plan":
                    store.bind(keys, given, outs)()
                else:
                    store.pushpull(keys, given, outs if verb == "pushpull" else None)
                if verb != "pull":
                    expected.update({key: pair[0] + pair[1] for key, pair in zip(keys, values, strict=True)})
                if verb != "push":
                    results = [pair[0] for pair in given] if verb == "in place" else outs
                    checks += [(out, expected[key]) for out, key in zip(results, keys, strict=True)]
                if (
                    verb != "push" and chance.random() < 0.2
                ):  # read on the stream of the call, before the others continue
                    for out, right in checks[-1:]:
                        np.testing.assert_array_equal(out.get(), right)
        fake.run_all()
        for out, right in checks:
            np.testing.assert_array_equal(out.get(), right)
        for key, right in expected.items():
            np.testing.assert_array_equal(store.view(key).numpy(), right)


def test_tensors_are_checked_each_time(store: kv.KVStore, torch: FakeTorch) -> None:
    def typed(content: Any, dtype: Any = np.float32, **options: Any) -> Any:
        return fake_torch.Tensor(torch, np.asarray(content, dtype), **options)

    store.init(["a", "b"], [typed([1, 2]), typed([3, 4], device=1)])
    wrong = [typed([1, 2, 3]), typed([[1, 2]]), typed([1, 2], np.float64), typed([1, 2], np.float16)]
    for _ in range(3):
        for bad in wrong:
            for call in (
                lambda bad=bad: store.push("a", bad),
                lambda bad=bad: store.pushpull("a", [typed([1, 1]), bad]),
                lambda bad=bad: store.push(["a", "b"], [bad, typed([1, 1], device=1)]),
            ):
                with pytest.raises(kv.KVStoreError):
                    call()
        with pytest.raises(kv.ShapeError):
            store.pushpull("a", typed([1, 1]), out=typed([1, 1, 1]))
        store.push("a", typed([1, 2]))
        assert values_of(store, "a") == [1, 2]
        converted = typed([0, 0], np.float16)
        store.pushpull(["a", "b"], [typed([5, 6]), typed([7, 8])], out=[converted, typed([0, 0])])
        assert converted.get().tolist() == [5, 6]
        assert values_of(store, "b") == [7, 8]
        store.push("a", [typed([1, 2]), typed([2, 3], device=2)])
        assert values_of(store, "a") == [3, 5]
    assert values_of(store, "b") == [7, 8]


@pytest.mark.parametrize("seed", SEEDS)
def test_calls_with_arrays_that_name_their_stream(fake: LazyDriver, gpu: Gpu, seed: int) -> None:
    """As above, with streams that may not live on; with updates and compression."""
    fake._random.seed(seed)
    chance = random.Random(seed)
    streams = [1, *(new_stream() for _ in range(3))]
    sizes = {"a": 5, "b": 300}
    with kv.create("device") as store, kv.create("device") as host:
        for one, make in ((store, gpu), (host, np.asarray)):
            one.init(list(sizes), [make(np.zeros(n, np.float32)) for n in sizes.values()])
        for step in range(25):
            if step % 8 == 4:
                optimizer = chance.choice(["sgd", "adam", "dcasgd"])
                for one in (store, host):
                    one.set_optimizer(kv.optimizer.create(optimizer))
            if step in (10, 20):
                for one in (store, host):
                    one.set_gradient_compression({"type": "2bit" if step == 10 else "fp16"})
            stream = chance.choice(streams)
            drawn = [[draw("float32", n, 100 * step + i) for i in range(2)] for n in sizes.values()]
            given = [[gpu(value, stream=stream) for value in own] for own in drawn]
            outs = [gpu(np.zeros(n), stream=chance.choice(streams)) for n in sizes.values()]
            host.push(list(sizes), drawn)
            store.pushpull(list(sizes), given, out=outs)
            for array in given[0]:
                array.set(np.full(5, np.nan))
            for key, out in zip(sizes, outs, strict=True):
                assert_same_bits(out.get(), host.view(key))


@pytest.mark.parametrize("seed", SEEDS)
def test_arrays_that_name_their_stream(store: kv.KVStore, fake: LazyDriver, gpu: Gpu, seed: int) -> None:
    fake._random.seed(seed)
    store.init("a", gpu(np.zeros(8), stream=new_stream()))
    values = [gpu(np.full(8, i), stream=new_stream()) for i in range(3)]
    outs = [gpu(np.zeros(8), stream=new_stream()) for i in range(2)]
    store.pushpull("a", values, out=outs)
    for value in values:
        value.set(np.full(8, -99))  # their owner continues at once
    for out in outs:
        np.testing.assert_array_equal(out.get(), 3)


@pytest.mark.parametrize("seed", SEEDS)
def test_asynchronous_calls_use_the_stream_of_the_call(
    store: kv.KVStore, torch: FakeTorch, fake: LazyDriver, seed: int
) -> None:
    fake._random.seed(seed)
    stream = (0, new_stream())
    with torch.use(stream):
        store.init("a", torch.tensor([0, 0]))
        value, out = torch.tensor([1, 2]), torch.tensor([0, 0])
        works = [
            store.push("a", [value, value], async_op=True),
            store.pull("a", out=out, async_op=True),
            store.pushpull("a", value, async_op=True),
        ]
    for work in works:
        assert work is not None
        work.wait()
    with torch.use(stream):
        assert out.get().tolist() == [2, 4]
        assert value.get().tolist() == [1, 2]


def test_an_async_error_reaches_wait(store: kv.KVStore, gpu: Gpu) -> None:
    store.init("a", gpu([0, 0]))
    work = store.push("a", gpu([1, 2], np.int16), async_op=True)
    assert work is not None
    with pytest.raises(kv.DTypeError):
        work.wait()


def test_what_a_library_lends_is_held_until_it_was_read(
    store: kv.KVStore, fake: LazyDriver, gpu: Gpu
) -> None:
    store.init("a", gpu([0, 0]))
    value = gpu([1, 2])
    alive = weakref.ref(value)
    fake.run_all()
    store.push("a", value)
    del value
    assert alive() is not None
    fake.run_all()
    backend(store)._gpus.forget_launches()  # launches hold addresses only
    store.push("a", gpu([3, 4]))
    assert alive() is None


def test_an_error_of_the_gpu_is_told_at_the_next_call(store: kv.KVStore, fake: LazyDriver, gpu: Gpu) -> None:
    store.init("a", gpu([0, 0]))
    fake.broken = kv.KVStoreError("the CUDA driver says 'an illegal memory access was encountered'")
    with pytest.raises(kv.KVStoreError, match="illegal memory access"):
        store.pull("a", out=np.zeros(2, np.float32))
    fake.broken = None


# --------------------------------------------------------------------------------------------------- overlaps


def test_views_may_be_pushed(store: kv.KVStore, gpu: Gpu) -> None:
    store.init(["a", "b"], [gpu([1]), gpu([2])])
    store.push("a", [store.view("a"), store.view("b"), store.view("a")])
    assert values_of(store, "a") == [4]
    store.push(["a", "b"], [store.view("b"), store.view("a")])
    assert (values_of(store, "a"), values_of(store, "b")) == ([2], [2])  # key by key, as on the host
    with pytest.raises(kv.ArrayError, match="read-only"):
        store.pull("a", out=store.view("a"))


class Part:
    """Some elements of an array on a GPU."""

    def __init__(self, whole: GpuArray, start: int, count: int) -> None:
        self._whole, self.shape, self._start = whole, (count,), start

    @property
    def __cuda_array_interface__(self) -> dict[str, Any]:
        whole = self._whole.__cuda_array_interface__
        return {**whole, "shape": self.shape, "data": (whole["data"][0] + 4 * self._start, False)}


def test_an_out_that_overlaps_a_value_in_part(store: kv.KVStore, gpu: Gpu) -> None:
    store.init("a", gpu(np.zeros(3000)))
    whole = gpu(np.arange(3001))
    store.pushpull("a", [Part(whole, 0, 3000)], out=[Part(whole, 1, 3000)])
    np.testing.assert_array_equal(whole.get(), [0, *range(3000)])
    np.testing.assert_array_equal(store.view("a").numpy(), range(3000))


def test_outs_that_overlap_end_as_on_the_host(store: kv.KVStore, gpu: Gpu) -> None:
    store.init([2, 1], [gpu([2, 2, 2]), gpu([1, 1, 1])])
    whole = gpu(np.zeros(5))
    store.pull([2, 1], out=[Part(whole, 0, 3), Part(whole, 2, 3)])
    assert whole.get().tolist() == [2, 2, 2, 1, 1]


def test_an_array_may_be_several_values_and_outs(store: kv.KVStore, gpu: Gpu) -> None:
    store.init("a", gpu([0]))
    one = gpu([1.5])
    store.pushpull("a", [one, one, one])
    assert one.get().tolist() == [4.5]


# ---------------------------------------------------------------------------------------------------- updates


def optimizers() -> list[Any]:
    made = {
        "sgd": {"wd": 0.1},
        "sgd_momentum": {"momentum": 0.9, "clip_gradient": 0.5},
        "signsgd": {"momentum": 0.0},
        "signum": {"momentum": 0.9},
        "rmsprop_centered": {"centered": True, "momentum": 0.9},
        "dcasgd_momentum": {"momentum": 0.9},
    }
    names = {
        "sgd_momentum": "sgd", "signsgd": "signum", "rmsprop_centered": "rmsprop", "dcasgd_momentum": "dcasgd"
    }  # fmt: skip
    return [
        pytest.param(names.get(rule, rule), made.get(rule, {}), rule, id=rule) for rule in cuda.RULE_STATES
    ]


@pytest.mark.parametrize(
    "dtype", ["float32", "float64", "float16", "bfloat16", "float16 master", "bfloat16 master"]
)
@pytest.mark.parametrize(("name", "settings", "rule"), optimizers())
@pytest.mark.filterwarnings("ignore:.*lose small updates")
def test_every_rule_is_that_of_the_host(
    gpu: Gpu, name: str, settings: dict[str, Any], rule: str, dtype: str
) -> None:
    kind, _, master = dtype.partition(" ")
    settings = {"multi_precision": bool(master), "learning_rate": 0.1, **settings}
    stores = kv.create("local"), kv.create("device")
    weight = {"a": draw(kind, 37, 1), "b": draw(kind, 3, 2)}
    with stores[0] as local, stores[1] as store:
        local.init(list(weight), list(weight.values()))
        store.init(list(weight), [gpu(array, array.dtype) for array in weight.values()])
        for one in stores:
            one.set_optimizer(kv.optimizer.create(name, **settings))
        assert store._updater is not None
        assert store._updater.optimizer.rule() == rule  # type: ignore[attr-defined]
        for step in range(3):
            values = [[draw(kind, len(w), 10 * step + i) for i in range(2)] for w in weight.values()]
            outs = [gpu(w, w.dtype) for w in weight.values()]
            local.push(list(weight), values)
            given = [[gpu(v, v.dtype) for v in pair] for pair in values]
            store.pushpull(list(weight), given, out=outs)
            for key, out in zip(weight, outs, strict=True):
                assert_same_bits(store.view(key).numpy(), local.view(key))
                assert_same_bits(out.get(), local.view(key))


@pytest.mark.parametrize("name", ["lamb", "lars", "groupadagrad", "sgld"])
def test_rules_without_a_kernel_say_which_have_one(store: kv.KVStore, gpu: Gpu, name: str) -> None:
    store.init("a", gpu([[1]]))
    store.set_optimizer(kv.optimizer.create(name))
    with pytest.raises(kv.CapabilityError, match=r"no CUDA kernel; .*sgd, sgd_momentum, nag, adam"):
        store.push("a", gpu([[1]]))
    assert values_of(store, "a") == [1]


def test_own_rules_run_on_the_host_only(store: kv.KVStore, gpu: Gpu) -> None:
    class Mine(kv.optimizer.Optimizer):
        def update(self, index: Any, weight: Any, grad: Any, state: Any) -> None:
            weight += 1

    store.init(["a", "h"], [gpu([1]), np.ones(1, np.float32)])
    store.set_optimizer(Mine())
    with pytest.raises(kv.CapabilityError, match="Mine has no CUDA kernel"):
        store.push(["a", "h"], [gpu([1]), np.ones(1, np.float32)])
    store.push("h", np.ones(1, np.float32))
    assert (values_of(store, "a"), values_of(store, "h")) == ([1], [2])


def test_an_own_state_that_two_elements_do_not_tell(store: kv.KVStore, gpu: Gpu) -> None:
    class Strange(kv.optimizer.SGD):
        def create_state(self, index: Any, weight: Any) -> Any:
            return np.arange(weight.size, dtype=np.float32).reshape(weight.shape)

    with kv.create("local") as local:
        for one, make in ((local, np.asarray), (store, gpu)):
            one.init("a", make(np.ones(5, np.float32)))
            one.set_optimizer(Strange(momentum=0.5))
            one.push("a", make(np.ones(5, np.float32)))
        assert_same_bits(store.view("a").numpy(), local.view("a"))


def test_a_failed_update_is_not_counted(store: kv.KVStore, gpu: Gpu) -> None:
    def schedule(num_update: int) -> float:
        if num_update == 2:
            raise ZeroDivisionError("on demand")
        return 1.0

    store.init("a", gpu([0]))
    store.set_optimizer(kv.optimizer.SGD(lr_scheduler=schedule))
    store.push("a", gpu([1]))
    with pytest.raises(kv.UpdaterError, match="on demand"):
        store.push("a", gpu([1]))
    assert store._updater is not None
    assert store._updater.optimizer.num_update == 1
    assert values_of(store, "a") == [-1]


def test_an_updater_gets_arrays_on_the_gpu(store: kv.KVStore, fake: LazyDriver, gpu: Gpu) -> None:
    calls = []

    def accumulate(key: Any, merged: Any, stored: Any) -> None:
        calls.append((key, type(merged), type(stored), merged.numpy().tolist(), stored.readonly))
        store.attach(key, merged.numpy() + stored.numpy())
        fake.copy(
            stored.__cuda_array_interface__["data"][0],
            (merged.numpy() + stored.numpy()).ctypes.data,
            stored.nbytes,
            stored.__cuda_array_interface__["stream"],
            0,
        )

    store.init([2, 1], [gpu([1, 1]), gpu([5, 5])])
    store.set_updater(accumulate)
    out = gpu([0, 0])
    store.pushpull([2, 1], [[gpu([2, 2]), gpu([3, 3])], gpu([1, 1])], out=[out, gpu([0, 0])])
    assert calls == [
        (1, DeviceArray, DeviceArray, [1, 1], False),
        (2, DeviceArray, DeviceArray, [5, 5], False),
    ]
    assert out.get().tolist() == values_of(store, 2) == [6, 6]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_updater_that_fails_leaves_the_value_alone(
    store: kv.KVStore, gpu: Gpu, error: type[BaseException]
) -> None:
    def spoil(key: Any, merged: Any, stored: Any) -> None:
        backend(store).copy_into(stored, np.full(2, 99, np.float32), key)
        raise error("on demand")

    store.init("a", gpu([1, 1]))
    store.set_updater(spoil)
    wanted = kv.UpdaterError if error is RuntimeError else error
    with pytest.raises(wanted):
        store.push("a", gpu([2, 2]))
    assert values_of(store, "a") == [1, 1]


def test_updaters_run_in_the_order_of_the_keys_wherever_these_lie(store: kv.KVStore, gpu: Gpu) -> None:
    calls: list[Any] = []
    store.init([9, 3, 5, -1], [gpu([0]), np.zeros(1, np.float32), gpu([0]), np.zeros(1, np.float32)])
    store.set_updater(lambda key, merged, stored: calls.append(key))
    one = np.ones(1, np.float32)
    store.push([9, 3, 5, -1], [gpu([1]), one, gpu([1]), one])
    assert calls == [-1, 3, 5, 9]


# ----------------------------------------------------------------------------------------------------- golden


@pytest.mark.parametrize("m", range(1, 9))
@pytest.mark.parametrize("dtype", ["float32", "float64", "int32", "int64", "int8", "uint8"])
def test_recorded_sums_bit_for_bit(store: kv.KVStore, gpu: Gpu, golden: Golden, dtype: str, m: int) -> None:
    recorded = golden("aggregate.npz")
    values = recorded[f"{dtype}_values"][:m]
    store.init("w", gpu(np.zeros_like(values[0]), dtype))
    store.push("w", [gpu(value, dtype) for value in values])
    ours = store.view("w").numpy()
    np.testing.assert_array_equal(ours.view(np.uint8), recorded[f"{dtype}_device_sum{m}"].view(np.uint8))


def lcg(n: int, r: int, lo: float = -2.0, hi: float = 2.0) -> Array:
    """The recorded inputs; see tests/data/README.md."""
    i = np.arange(n, dtype=np.uint64)
    c = np.uint64((r + 1) * 40503 * 65537 + 12345)
    u = ((i * np.uint64(2654435761) + c) % np.uint64(2**32)).astype(np.float64) / 2.0**32
    return (lo + (hi - lo) * u).astype(np.float32)


@pytest.mark.parametrize("where", ["gpu", "host", "moves"])
def test_recorded_compression_bit_for_bit(store: kv.KVStore, gpu: Gpu, golden: Golden, where: str) -> None:
    recorded = golden("compress2bit.npz")
    store.set_gradient_compression({"type": "2bit", "threshold": 0.5})
    first = lcg(33, 99)
    store.init(["many", "single"], [gpu(first) if where == "gpu" else first, np.zeros(33, np.float32)])
    np.testing.assert_array_equal(values_of(store, "many"), recorded["kv_device_pulls"][0])
    for r in range(4):
        there = where == "gpu" or (where == "moves" and r >= 2)
        values = [lcg(33, 10 * r + k, -1.3, 1.3) for k in range(3)]
        store.push("many", [gpu(value) if there else value for value in values])
        out = np.zeros(33, np.float32)
        store.pull("many", out=out)
        assert_same_bits(out, recorded["kv_device_pulls"][r + 1])
    for r in range(3):
        value = lcg(33, r, -1.3, 1.3)
        store.push("single", gpu(value) if where != "host" else value)
        out = np.zeros(33, np.float32)
        store.pull("single", out=out)
        assert_same_bits(out, recorded["kv_device_single_pulls"][r])


# ------------------------------------------------------------------------------------------------ compression


@pytest.mark.parametrize("codec", ["2bit", "1bit", "fp16", "bf16"])
@pytest.mark.parametrize("optimizer", [None, "sgd", "adam"])
def test_compression_is_that_of_the_host(gpu: Gpu, codec: str, optimizer: str | None) -> None:
    with kv.create("device") as host, kv.create("device") as store:
        for one, make in ((host, np.asarray), (store, gpu)):
            one.init([0, 1], [make(np.zeros(100, np.float32)), make(np.zeros(7, np.float32))])
            one.set_gradient_compression({"type": codec})
            if optimizer:
                one.set_optimizer(kv.optimizer.create(optimizer))
        for step in range(4):
            values = [[draw("float32", n, step * 7 + i) for i in range(1 + step)] for n in (100, 7)]
            host.push([0, 1], values)
            outs = [gpu(np.zeros(100)), gpu(np.zeros(7))]
            store.pushpull([0, 1], [[gpu(v) for v in own] for own in values], out=outs)
            for key, out in enumerate(outs):
                assert_same_bits(store.view(key).numpy(), host.view(key))
                assert_same_bits(out.get(), host.view(key))


def test_a_compressed_call_is_one_launch(store: kv.KVStore, fake: LazyDriver, gpu: Gpu) -> None:
    store.init(["a", "b"], [gpu(np.zeros(40)), gpu([0])])
    store.set_gradient_compression({"type": "2bit"})
    fake.launches.clear()
    store.push(["a", "b"], [[gpu(np.ones(40))] * 2, [gpu([1])] * 2])
    assert [name for name, _ in fake.launches] == ["reduce_2bit_k2"]


def test_a_threshold_may_change(store: kv.KVStore, gpu: Gpu) -> None:
    store.init("a", gpu([0]))
    value = gpu([1.0])
    results = []
    for threshold in (0.5, 0.5, 2.0, 0.25):
        store.set_gradient_compression({"type": "2bit", "threshold": threshold})
        store.push("a", value)
        results += values_of(store, "a")
    assert results == [0.5, 0.5, 2.0, 0.25]  # residuals 0.5, 1, 0, 0.75


@pytest.mark.parametrize("dtype", [np.float16, np.float64, np.int32])
def test_only_float32_is_compressed(store: kv.KVStore, gpu: Gpu, dtype: Any) -> None:
    store.init("a", gpu([0], dtype))
    store.set_gradient_compression({"type": "2bit"})
    with pytest.raises(kv.DTypeError, match="float32"):
        store.push("a", gpu([1], dtype))


@pytest.mark.parametrize(("before", "after"), [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu")])
def test_residuals_are_saved_wherever_they_lie(gpu: Gpu, tmp_path: Path, before: str, after: str) -> None:
    def place(where: str, array: Array) -> Any:
        return gpu(array) if where == "gpu" else array

    drawn = [[draw("float32", 9, 10 * step + i) for i in range(3)] for step in range(4)]
    with kv.create("device") as whole, kv.create("device") as one, kv.create("device") as two:
        for store in (whole, one, two):
            store.set_gradient_compression({"type": "2bit", "threshold": 2.0})
            store.init("a", np.zeros(9, np.float32))
        for values in drawn:
            whole.push("a", values)
        for values in drawn[:2]:
            one.push("a", [place(before, value) for value in values])
        one.save_residuals(tmp_path / "r")
        one.save_residuals(tmp_path / "again")
        assert content(tmp_path / "r") == content(tmp_path / "again")
        two.load_residuals(tmp_path / "r")
        for values in drawn[2:]:
            two.push("a", [place(after, value) for value in values])
        assert values_of(two, "a") == values_of(whole, "a")


# ------------------------------------------------------------------------------------------------------ files


@pytest.mark.parametrize(("before", "after"), [("gpu", "gpu"), ("gpu", "host"), ("host", "gpu")])
@pytest.mark.parametrize("name", ["adam", "sgd", "dcasgd"])
@pytest.mark.parametrize("kind", ["float32", "bfloat16"])
@pytest.mark.filterwarnings("ignore:.*lose small updates")
def test_files_go_from_place_to_place(
    gpu: Gpu, tmp_path: Path, before: str, after: str, name: str, kind: str
) -> None:
    def place(where: str, array: Array) -> Any:
        return gpu(array, array.dtype) if where == "gpu" else array

    def fresh(where: str) -> kv.KVStore:
        store = kv.create("device" if where == "gpu" else "local")
        store.init(["a", "b"], [place(where, draw(kind, n, n)) for n in (5, 3)])
        settings = {"momentum": 0.9} if name == "sgd" else {}
        settings["multi_precision"] = kind != "float32"  # type: ignore[assignment]
        store.set_optimizer(kv.optimizer.create(name, learning_rate=0.1, **settings))
        return store  # type: ignore[no-any-return]

    def train(store: kv.KVStore, where: str, steps: range) -> None:
        for step in steps:
            store.push("a", place(where, draw(kind, 5, step)))
            if step % 2:
                store.push("b", place(where, draw(kind, 3, step)))

    with fresh(before) as whole, fresh(before) as one, fresh(after) as two:
        train(whole, before, range(6))
        train(one, before, range(3))
        one.save(tmp_path / "v")
        one.save_optimizer_states(tmp_path / "s")
        two.load(tmp_path / "v")
        two.load_optimizer_states(tmp_path / "s")
        train(two, after, range(3, 6))
        for key in ("a", "b"):
            assert values_of(two, key) == values_of(whole, key)


def test_the_file_is_that_of_the_host(gpu: Gpu, tmp_path: Path) -> None:
    for name, make in (("local", np.asarray), ("device", gpu)):
        with kv.create(name) as store:
            store.init(["a", "b"], [make(np.ones(5, np.float32)), np.ones(3)])
            store.set_optimizer(kv.optimizer.Adam())
            store.push("a", make(np.full(5, 2, np.float32)))
            store.save(tmp_path / f"{name}.v")
            store.save_optimizer_states(tmp_path / f"{name}.s", dump_optimizer=True)
            store.push("a", make(np.full(5, 2, np.float32)))  # the states are still there
    for part in ("v", "s"):
        assert content(tmp_path / f"local.{part}") == content(tmp_path / f"device.{part}")


def test_states_that_do_not_fit_are_refused(gpu: Gpu, tmp_path: Path) -> None:
    with kv.create("local") as other, kv.create("device") as store:
        other.init("a", np.ones(4, np.float32))
        store.init("a", gpu(np.ones(5)))
        for one in (other, store):
            one.set_optimizer(kv.optimizer.Adam())
        other.push("a", np.ones(4, np.float32))
        other.save_optimizer_states(tmp_path / "s")
        with pytest.raises(kv.StateFileError, match="do not fit"):
            store.load_optimizer_states(tmp_path / "s")
        store.push("a", gpu(np.ones(5)))


# ------------------------------------------------------------------------------------------------------ plans


def test_a_plan_is_one_launch_and_nothing_else(store: kv.KVStore, fake: LazyDriver, gpu: Gpu) -> None:
    keys = list(range(20))
    store.init(keys, [gpu(np.zeros(n + 1)) for n in keys])
    values = [[gpu(np.full(n + 1, n)), gpu(np.full(n + 1, 1))] for n in keys]
    outs = [gpu(np.zeros(n + 1)) for n in keys]
    plan = store.bind(keys, values, out=outs)
    assert values_of(store, 3) == [0] * 4  # binding does nothing
    plan()
    fake.launches.clear()
    queued, uploads = sum(map(len, fake._streams.values())), fake.uploads
    plan()
    assert len(fake.launches) == 1
    assert sum(map(len, fake._streams.values())) == queued + 1
    assert fake.uploads == uploads
    assert all((out.get() == n + 1).all() for n, out in enumerate(outs))
    assert (store.statistics().pushes, store.statistics().pulls) == (2, 2)
    assert repr(plan) == "<Plan: pushpull of 20 keys>"


@pytest.mark.parametrize("where", ["host", "gpu", "both", "moves", "shared"])
def test_plans_do_what_pushpull_does(gpu: Gpu, where: str) -> None:
    def places(array: Array) -> list[Any]:
        there = {"host": (0, 0), "shared": (0, 0), "gpu": (1, 1), "both": (0, 1), "moves": (1, 1)}[where]
        return [gpu(array) if gpu_too else array.copy() for gpu_too in there]

    name = "local" if where == "shared" else "device"
    with kv.create(name) as bound, kv.create("local") as plain:
        start = np.arange(4, dtype=np.float32)
        bound.init(["a", "b"], [start, start] if where == "moves" else places(start))
        plain.init(["a", "b"], [start, start])
        drawn = [draw("float32", 4, seed) for seed in range(2)]
        values = [list(pair) for pair in zip(*(places(value) for value in drawn), strict=True)]
        outs = places(start)
        plan = bound.bind(["a", "b"], values, out=outs)
        for optimizer in (None, kv.optimizer.SGD(momentum=0.9), kv.optimizer.Adam()):
            for one in (bound, plain):
                if optimizer is not None:
                    one.set_optimizer(type(optimizer)(**optimizer.get_config()))
            for _ in range(2):
                plan()
                plain.push(["a", "b"], [drawn, drawn])
                for key, out in zip("ab", outs, strict=True):
                    assert values_of(bound, key) == values_of(plain, key)
                    got = out if isinstance(out, np.ndarray) else out.get()
                    assert got.tolist() == values_of(plain, key)
        bound.set_updater(None)
        plan()
        assert values_of(bound, "a") == (drawn[0] + drawn[1]).tolist()


def test_a_plan_in_place(store: kv.KVStore, gpu: Gpu) -> None:
    store.init(["a", "h"], [gpu([0]), np.zeros(1, np.float32)])
    for key, values in (
        ("a", [gpu([1]), gpu([2])]),
        ("h", [np.ones(1, np.float32), np.full(1, 2, np.float32)]),
    ):
        plan = store.bind(key, values)
        for wanted in (3, 6, 12):
            plan()
            for value in values:
                assert (value if isinstance(value, np.ndarray) else value.get()).tolist() == [wanted]


def test_a_plan_knows_its_store_is_closed(gpu: Gpu) -> None:
    for make in (gpu, lambda content: np.asarray(content, np.float32)):
        with kv.create("device") as store:
            store.init("a", make([0]))
            plan = store.bind("a", make([1]))
        with pytest.raises(kv.ClosedError):
            plan()


@pytest.mark.parametrize("change", ["compression", "load", "threshold", "momentum"])
def test_a_plan_follows_what_changes(store: kv.KVStore, gpu: Gpu, tmp_path: Path, change: str) -> None:
    with kv.create("device") as other:
        value = np.array([0.3, -2.0], np.float32)
        stores = {store: gpu(value), other: value}
        plans = {}
        for one, array in stores.items():
            one.init("a", gpu([0, 0]) if one is store else np.zeros(2, np.float32))
            if change in ("load", "momentum"):
                one.set_optimizer(kv.optimizer.SGD(momentum=0.5 if change == "load" else 0.0))
            if change == "threshold":
                one.set_gradient_compression({"type": "2bit", "threshold": 0.5})
            plans[one] = one.bind("a", array, out=gpu([0, 0]))
            plans[one]()
            if change == "compression":
                one.set_gradient_compression({"type": "1bit"})
            elif change == "threshold":
                one.set_gradient_compression({"type": "2bit", "threshold": 0.25})
            elif change == "load":
                one.save_optimizer_states(tmp_path / "s")
                plans[one]()
                one.load_optimizer_states(tmp_path / "s")
            else:
                one.set_optimizer(kv.optimizer.SGD(momentum=0.5))
            plans[one]()
            plans[one]()
        assert values_of(store, "a") == values_of(other, "a")


def test_a_plan_is_checked_when_it_is_made(store: kv.KVStore, gpu: Gpu) -> None:
    store.init(["a", "h"], [gpu([0]), np.zeros(1, np.float32)])
    for key, value, out in (
        ("a", gpu([1, 2]), None),
        ("a", gpu([1]), gpu([1, 2])),
        ("a", gpu([1]), gpu([1], readonly=True)),
        ("h", np.zeros(2, np.float32), None),
        ("h", np.zeros(1, np.float32), np.zeros(3, np.float32)),
        ("zzz", gpu([1]), None),
    ):
        with pytest.raises(kv.KVStoreError):
            store.bind(key, value, out)


def test_a_plan_looks_again_when_it_is_told(store: kv.KVStore, torch: FakeTorch) -> None:
    store.init("a", torch.tensor([0]))
    value, other = torch.tensor([1]), torch.tensor([2])
    plan = store.bind("a", value, out=torch.tensor([0]))
    plan()
    plan.refresh()
    bound = plan._bound
    plan()
    assert plan._bound is bound  # nothing had moved
    value._memory = other._memory  # as `tensor.data = other`
    plan.refresh()
    plan()
    assert values_of(store, "a") == [2]


def test_stores_that_bind_nothing_say_so() -> None:
    with kv.create("shared") as store:
        store.init("a", np.zeros(2, np.float32))
        with pytest.raises(kv.CapabilityError, match="does not support bind"):
            store.bind("a", np.zeros(2, np.float32))


# ----------------------------------------------------------------------------------------------------- memory


def test_memory_is_back_to_its_start(fake: LazyDriver, gpu: Gpu, tmp_path: Path) -> None:
    values = [gpu(np.ones(500)) for _ in range(3)]
    outs = [gpu(np.zeros(500), device=i) for i in range(2)]
    fake.run_all()
    before = fake.leftovers()
    for _ in range(2):
        store = kv.create("device")
        store.init(["a", "b"], [values[0], np.ones(500, np.float32)])
        store.set_optimizer(kv.optimizer.Adam())
        for _ in range(3):
            store.pushpull(["a", "b"], [values, values], out=[outs, outs])
        store.set_gradient_compression({"type": "2bit"})
        plan = store.bind("a", values, out=outs[0])
        plan()
        store.set_gradient_compression({"type": "fp16"})
        plan()
        store.set_updater(lambda key, merged, stored: None)
        store.push("a", values)
        store.save(tmp_path / "v")
        store.close()
        store.close()
        assert fake.leftovers() == before
        assert plan is not None
    for array in (*values, *outs):
        array.release()
    assert fake.leftovers() == NOTHING


def test_a_view_outlives_its_store(fake: LazyDriver, gpu: Gpu) -> None:
    value = gpu([1, 2])
    with kv.create("device") as store:
        store.init("a", value)
        view = store.view("a")
        assert view.readonly
    value.release()
    assert view.numpy().tolist() == [1, 2]
    del view
    assert fake.leftovers() == NOTHING


def test_a_forgotten_store_gives_its_values_back(fake: LazyDriver, gpu: Gpu) -> None:
    value = gpu([1, 2])
    store = kv.create("device")
    store.init("a", value)
    store.push("a", value)
    value.release()
    del store
    import gc

    gc.collect()
    assert fake.leftovers()["bytes"] == 4096  # a pinned block, kept for as long as the process


def test_empty_and_attach_give_arrays_where_the_key_lies(store: kv.KVStore, gpu: Gpu) -> None:
    store.init(["a", "h"], [gpu([1, 2], device=1), np.ones(2, np.float32)])
    made = store.empty("a")
    assert (made.shape, made.dtype, made.device, made.readonly) == ((2,), np.float32, 1, False)
    assert isinstance(store.empty("h"), np.ndarray)
    for source in (np.array([3, 4], np.float32), gpu([3, 4]), gpu([3, 4], device=1)):
        home = store.attach("a", source)
        assert home.numpy().tolist() == [3, 4]
        store.push("a", home)
        assert values_of(store, "a") == [3, 4]
    with pytest.raises(kv.ShapeError):
        store.attach("a", gpu([1]))


def test_on_gpu_puts_arrays_on_the_gpu(fake: LazyDriver) -> None:
    """The wrapper of test_device_contract.py works as it states."""
    with OnGpu(lambda array, **options: GpuArray(fake, array, **options)) as store:
        store.init("a", np.zeros(3, np.float32))
        out = np.zeros(3, np.float32)
        store.pushpull("a", [np.ones(3, np.float32)] * 2, out=out)
        assert store.placement() == {"a": [("cuda:0", 12)]}
        assert out.tolist() == [2, 2, 2]
        assert len(fake.launches) == 1
