"""`nccl` in one process with several GPUs, on a stand-in for NCCL: tests/fake_nccl says what that shows.

Work on a stream runs only when a thread waits for it, and fresh memory is poison: an order that is not
kept gives wrong sums. Several processes: test_nccl_processes.py. A real NCCL: the tests marked `gpu`.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

import fake_nccl
import numpy as np
import pytest
from fake_cuda import FakeDriver
from real_gpu import RealArray, needs_gpu
from references import draw

import kvstore as kv
from kvstore.devices import driver
from kvstore.observe.counters import FRAME, MEMORY, MOVING, SUMMING
from kvstore.stores.collectives.nccl.library import TYPES


@pytest.fixture
def nccl(cuda: FakeDriver) -> Iterator[fake_nccl.FakeNccl]:
    if why := fake_nccl.missing():
        pytest.skip(why)
    made = fake_nccl.install()
    made.forget()
    yield made
    assert made.live() == 0, "communicators were left behind"


@pytest.fixture
def store(nccl: fake_nccl.FakeNccl) -> Iterator[kv.KVStore]:
    with kv.create("nccl") as made:
        yield made


def on(devices: int | list[int], content: Any, **options: Any) -> Any:
    """An array on a GPU, or a list of such arrays on several, each of them one larger in value."""
    if isinstance(devices, int):
        return RealArray(content, device=devices, **options)
    return [
        RealArray(content + np.asarray(i, content.dtype), device=d, **options) for i, d in enumerate(devices)
    ]


def ones(n: int = 5, dtype: Any = np.float32) -> Any:
    return np.ones(n, dtype)


def values(arrays: list[Any]) -> list[Any]:
    return [array.get().tolist() for array in arrays]


# ------------------------------------------------------------------------------------------------ the sums


def test_one_sum_over_all_gpus(store: kv.KVStore, nccl: fake_nccl.FakeNccl) -> None:
    store.init("w", on(0, 0 * ones()))
    grads, outs = on([0, 1, 2], ones()), on([0, 1, 2], 0 * ones())
    store.push("w", grads)
    store.pull("w", out=outs)
    assert values(outs) == 3 * [[6.0] * 5]
    assert values(grads) == [[1.0] * 5, [2.0] * 5, [3.0] * 5]
    assert nccl.history() == ["all_reduce float32 5 op 0 root 0 of 3"]
    assert nccl.calls("ncclCommInitAll") == 1
    assert store.placement() == {"w": [(f"worker 0 cuda:{device}", 20) for device in range(3)]}


def test_keys_that_were_never_initialised_leave_nothing(store: kv.KVStore, nccl: fake_nccl.FakeNccl) -> None:
    for shape in (5, 3):
        grads, outs = on([0, 1, 2], ones(shape)), [*on([3, 0], ones(shape)), np.zeros(shape)]
        store.pushpull("w", grads, out=outs)
        assert values(outs[:2]) == 2 * [[6.0] * shape]
        assert outs[2].tolist() == [6.0] * shape
        store.pushpull("w", grads)
        assert values(grads) == 3 * [[6.0] * shape]
    sums = [f"all_reduce float32 {n} op 0 root 0 of 3" for n in (5, 5, 3, 3)]
    assert nccl.history() == sums
    assert store.keys() == []
    assert store.placement() == {}
    with pytest.raises(kv.KeyNotFoundError, match="'w'"):
        store.pull("w", out=outs)
    with pytest.raises(kv.ArrayError, match="on the host and on a GPU"):
        store.pushpull("w", [grads[0], np.ones(3, np.float32)])
    store.init("w", grads[0])
    with pytest.raises(kv.KeyNotFoundError, match="'v'"):
        store.pushpull(["w", "v"], [grads, grads])


def test_pushpull_in_place_and_with_outs(store: kv.KVStore) -> None:
    store.init("w", on(1, ones()))
    grads = on([0, 1], ones())
    store.pushpull("w", grads)
    assert values(grads) == 2 * [[3.0] * 5]
    outs = on([1, 3, 0], 0 * ones())  # also where no value was
    store.pushpull("w", grads, out=outs)
    assert values(outs) == 3 * [[6.0] * 5]
    assert values(grads) == 2 * [[3.0] * 5]


def test_the_keys_of_a_call_go_together(store: kv.KVStore, nccl: fake_nccl.FakeNccl) -> None:
    keys = ["a", "b", "c"]
    store.init(keys, [on(0, 0 * ones(n)) for n in (3, 4, 5)])
    before = nccl.calls("ncclGroupEnd")
    grads = [on([0, 1], ones(n)) for n in (3, 4, 5)]
    store.pushpull(keys, grads)
    assert nccl.calls("ncclGroupEnd") == before + 1
    assert [line.split()[2] for line in nccl.history()] == ["3", "4", "5"]
    assert [values(own) for own in grads] == [2 * [[3.0] * n] for n in (3, 4, 5)]


def test_keys_on_other_gpus_in_one_call(store: kv.KVStore, nccl: fake_nccl.FakeNccl) -> None:
    store.init(["a", "b", "c"], [on(0, ones(3))] * 3)
    a, b, c = on([0, 1], ones(3)), on([1, 2, 3], ones(3)), on([2], ones(3))
    for _ in range(2):
        store.push(["a", "b", "c"], [a, b, c])
    outs = [on(3, 0 * ones(3)) for _ in range(3)]
    store.pull(["a", "b", "c"], out=outs)
    assert values(outs) == [[3.0] * 3, [6.0] * 3, [1.0] * 3]
    assert sorted(nccl.history()) == 2 * ["all_reduce float32 3 op 0 root 0 of 2"] + 2 * [
        "all_reduce float32 3 op 0 root 0 of 3"
    ]
    assert nccl.calls("ncclCommInitAll") == 2


def test_several_values_of_a_gpu_are_summed_there_first(store: kv.KVStore, nccl: fake_nccl.FakeNccl) -> None:
    store.init("w", on(0, 0 * ones()))
    grads = [on(device, (i + 1) * ones()) for i, device in enumerate([0, 1, 0, 1, 1])]
    store.pushpull("w", grads)
    assert values(grads) == 5 * [[15.0] * 5]
    assert nccl.history() == ["all_reduce float32 5 op 0 root 0 of 2"]


def test_one_gpu_needs_no_nccl(store: kv.KVStore, nccl: fake_nccl.FakeNccl) -> None:
    store.init("w", on(2, 0 * ones()))
    grad = on(2, ones())
    store.pushpull("w", [grad, grad])
    assert values([grad]) == [[2.0] * 5]
    store.pushpull("w", grad)
    assert values([grad]) == [[2.0] * 5]
    assert nccl.history() == []
    assert nccl.calls("ncclCommInitAll") == 0


@pytest.mark.parametrize("dtype", TYPES)
def test_element_types(store: kv.KVStore, nccl: fake_nccl.FakeNccl, dtype: str) -> None:
    parts = [np.abs(draw(dtype, 33, i)) for i in range(2)]
    store.init("w", on(0, parts[0]))
    outs = on([0, 1], 0 * parts[0])
    store.pushpull("w", [on(i, part) for i, part in enumerate(parts)], out=outs)
    with np.errstate(all="ignore"):
        wide = np.float32 if parts[0].dtype.itemsize == 2 else parts[0].dtype
        expected = (parts[0].astype(wide) + parts[1].astype(wide)).astype(parts[0].dtype)
    assert [out.get().tobytes() for out in outs] == 2 * [expected.tobytes()]
    assert nccl.history() == [f"all_reduce {dtype} 33 op 0 root 0 of 2"]


def test_a_value_is_a_copy_of_the_stores_own_memory(store: kv.KVStore) -> None:
    store.init(["a", "b"], [on(0, ones()), on(0, 2 * ones())])
    store.push(["a", "b"], [on([0, 1], ones()), on([0, 1], 2 * ones())])
    store.push(["a", "b"], [store.view("b"), store.view("a")])
    outs = on([0, 0], 0 * ones())
    store.pull(["a", "b"], out=outs)
    assert values(outs) == [[5.0] * 5, [3.0] * 5]


def test_scalars_empty_and_strided_arrays(store: kv.KVStore) -> None:
    store.init(["s", "e"], [on(0, np.float64(1)), on(0, np.zeros((0, 3)))])
    scalars, empties = on([0, 1], np.array(2.0)), on([0, 1], np.zeros((0, 3)))
    store.pushpull(["s", "e"], [scalars, empties])
    assert [float(one.get()) for one in scalars] == [5.0, 5.0]
    turned = on(1, ones(6).reshape(2, 3))
    turned.shape, turned.strides = (3, 2), (4, 12)
    store.init("t", on(0, np.ones((3, 2), np.float32)))
    interface = dict(turned.__cuda_array_interface__, shape=(3, 2), strides=(4, 12))
    strided = type("Strided", (), {"__cuda_array_interface__": interface, "shape": (3, 2)})()
    with pytest.raises(kv.ArrayError, match="not contiguous"):
        store.push("t", [on(0, np.ones((3, 2), np.float32)), strided])


def test_the_streams_of_the_callers_are_waited_for(store: kv.KVStore) -> None:
    made = driver.get_driver()
    streams = [made.stream(device) for device in range(2)]
    store.init("w", on(0, 0 * ones()))
    for turn in range(3):
        grads = [RealArray((turn + 1) * ones(), device=d, stream=streams[d]) for d in range(2)]
        outs = [RealArray(0 * ones(), device=d, stream=streams[d]) for d in range(2)]
        store.pushpull("w", grads, out=outs)
        plain = on([0, 1], 0 * ones())
        store.pushpull("w", outs, out=plain)  # other streams than before
        alone = RealArray(0 * ones(), stream=streams[0])
        store.pushpull("w", 3 * [outs[0]], out=alone)
        assert values([alone]) == [[6.0 * (turn + 1)] * 5]
        assert values(outs) == 2 * [[2.0 * (turn + 1)] * 5]
        assert values(plain) == 2 * [[4.0 * (turn + 1)] * 5]
    del grads, outs, plain, alone
    for device, stream in enumerate(streams):
        made.drop_stream(stream, device)


def test_two_stores_take_turns(nccl: fake_nccl.FakeNccl) -> None:
    with kv.create("nccl") as one, kv.create("nccl") as other:
        for store in (one, other):
            store.init("w", on(0, 0 * ones()))
        for turn in range(3):
            grads = on([0, 1], turn * ones())
            one.pushpull("w", grads)
            other.pushpull("w", grads)
            assert values(grads) == 2 * [[2 * (2 * turn + 1.0)] * 5]
        one.close()
        other.pushpull("w", grads)


# ----------------------------------------------------------------------------------- the host, and inspection


def test_a_key_of_the_host_moves_to_the_gpus(store: kv.KVStore) -> None:
    store.init(["a", "h"], [2 * ones(), 7 * ones()])
    outs = on([0, 1], 0 * ones())
    store.pull("a", out=outs)
    assert values(outs) == 2 * [[2.0] * 5]
    assert store.placement()["a"] == [("worker 0", 20)]
    store.pushpull(["a", "h"], [on([0, 1], ones()), 4 * ones()], out=[outs, [outs[1], on(0, ones())]])
    assert values(outs) == [[3.0] * 5, [4.0] * 5]
    assert store.placement() == {
        "a": [("worker 0 cuda:0", 20), ("worker 0 cuda:1", 20)],
        "h": [("worker 0", 20)],
    }
    found = ones()
    store.pull("a", out=found)
    assert found.tolist() == [3.0] * 5
    store.push("a", [ones(), ones()])  # host values of a key on GPUs
    store.pull("a", out=found)
    assert found.tolist() == [2.0] * 5
    assert store.placement()["a"] == [("worker 0 cuda:0", 20)]


def test_keys_of_the_host_alone(store: kv.KVStore) -> None:
    store.init("w", ones())
    out = ones()
    store.pushpull("w", [ones(), 2 * ones()], out=out)
    assert out.tolist() == [3.0] * 5
    assert store.view("w").tolist() == [3.0] * 5


def test_views_homes_and_files(store: kv.KVStore, tmp_path: Any) -> None:
    store.init(["b", "a"], [on(0, ones()), on(1, 2 * ones())])
    assert store.keys() == ["b", "a"]
    view = store.view("a")
    assert (view.device, view.readonly, view.numpy().tolist()) == (1, True, [2.0] * 5)
    home = store.attach("a", on(1, 3 * ones()))
    store.push("a", [home, on(0, ones())])
    assert store.view("a").numpy().tolist() == [4.0] * 5
    store.save(tmp_path / "values")
    store.push(["a", "b"], [on([0, 1], ones())] * 2)
    store.load(tmp_path / "values")
    found = on([1, 0], 0 * ones())
    store.pull(["a", "b"], out=found)
    assert values(found) == [[4.0] * 5, [1.0] * 5]
    del view, home
    numbers = store.statistics()
    assert (numbers.keys, numbers.nbytes) == (2, 40)


def test_sums_of_gpus_are_counted(store: kv.KVStore) -> None:
    store.init(["a", "b"], [on(0, ones()), np.ones(5, np.float32)])
    store._counters.take_times()
    store.pushpull("a", on([0, 1], ones()))
    store.pull("a", out=on(1, ones()))
    found = store._counters.read()
    assert (found["sent"][FRAME], found["received"][FRAME]) == (40, 40)
    assert (found["sent"][MEMORY], found["received"][MEMORY]) == (0, 20)
    assert (found["rounds"], found["keys"], found["nbytes"]) == (1, 2, 40)
    assert (found["spans"][SUMMING], found["spans"][MOVING]) == (1, 1)
    assert sorted(store._backend.names().values()) == ["a", "b"]


def test_a_pull_converts(store: kv.KVStore) -> None:
    store.init("w", on(0, ones()))
    store.push("w", on([0, 1], ones()))
    outs = [np.empty(5, np.float64), on(1, np.zeros(5, np.float16)), on(0, np.zeros(5, np.int32))]
    store.pull("w", out=outs)
    assert outs[0].tolist() == [3.0] * 5
    assert values(outs[1:]) == 2 * [[3] * 5]


def test_operations_that_do_not_wait(store: kv.KVStore) -> None:
    store.init(["a", "h"], [on(0, 0 * ones()), ones()])
    grads, outs, host = on([0, 1], ones()), on([0, 1], 0 * ones()), 2 * ones()
    works = [
        store.push("a", grads, async_op=True),
        store.pull("a", out=outs, async_op=True),
        store.pushpull(["a", "h"], [grads, host], async_op=True),
    ]
    for work in works:
        work.wait()
    assert values(outs) == 2 * [[3.0] * 5]
    assert values(grads) == 2 * [[3.0] * 5]
    assert host.tolist() == [2.0] * 5


def test_broadcast(store: kv.KVStore) -> None:
    outs = on([0, 1, 2], 0 * ones())
    store.broadcast("w", on(1, ones()), out=outs)
    assert values(outs) == 3 * [[1.0] * 5]
    with pytest.raises(kv.ShapeError):
        store.broadcast("v", on(1, ones()), out=on(0, ones(4)))
    assert store.keys() == ["w"]


# ------------------------------------------------------------------------------------------------- mistakes


def test_mistakes_change_nothing(store: kv.KVStore, nccl: fake_nccl.FakeNccl) -> None:
    store.init(["w", "h"], [on(0, ones()), ones()])
    good = on([0, 1], ones())
    for error, call in (
        (kv.KeyNotFoundError, lambda: store.push(["w", "v"], [good, good])),
        (kv.ShapeError, lambda: store.push("w", [good[0], on(1, ones(4))])),
        (kv.DTypeError, lambda: store.push("w", [good[0], on(1, ones().astype(np.float64))])),
        (kv.ArrayError, lambda: store.push("w", [good[0], ones()])),
        (kv.ArrayError, lambda: store.pushpull("w", on(0, ones(), readonly=True))),
        (kv.ShapeError, lambda: store.pull("h", out=on(0, ones(4)))),
        (kv.DuplicateKeyError, lambda: store.init("w", ones())),
        (kv.DuplicateKeyError, lambda: store.init("h", on(0, ones()))),
        (kv.DuplicateKeyError, lambda: store.init("n", on([0, 1], ones()))),
        (kv.KeyKindError, lambda: store.init(3, on(0, ones()))),
    ):
        with pytest.raises(error):
            call()
    assert store.keys() == ["w", "h"]
    assert store.view("w").numpy().tolist() == [1.0] * 5
    assert nccl.history() == []


def test_what_the_store_does_not_do(store: kv.KVStore) -> None:
    store.init("w", on(0, np.ones((4, 2), np.float32)))
    assert store.is_capable("optimizer") is False
    rows = kv.RowSparseArray(np.ones((2, 2), np.float32), np.array([0, 2]), (4, 2))
    for call in (
        lambda: store.set_optimizer(kv.optimizer.SGD(learning_rate=0.1)),
        lambda: store.set_updater(lambda *_: None),
        lambda: store.set_gradient_compression({"type": "2bit"}),
        lambda: store.push("w", rows),
        lambda: store.init("t", rows),
        lambda: store.row_sparse_pull("w", out=rows, row_ids=np.array([0])),
        lambda: store.bind("w", on(0, ones())),
        store.join,
    ):
        with pytest.raises(kv.CapabilityError):
            call()
    with pytest.raises(kv.ConfigError, match="on_peer_loss"):
        kv.create("nccl", on_peer_loss="continue")


def test_an_error_of_nccl_ends_the_store_but_not_its_reading(
    store: kv.KVStore, nccl: fake_nccl.FakeNccl
) -> None:
    store.init("w", on(0, ones()))
    grads = on([0, 1], ones())
    store.push("w", grads)
    nccl.fail("ncclAllReduce", 3, after=1)
    with pytest.raises(kv.KVStoreError, match=r"sum of key 'w' NCCL reports 'internal error'.*NCCL_DEBUG"):
        store.push("w", grads)
    with pytest.raises(kv.KVStoreError, match="start the job again"):
        store.push("w", grads)
    assert nccl.live() == 0
    assert store.view("w").numpy().shape == (5,)
    nccl.fail("ncclCommInitAll", 1)
    with kv.create("nccl") as other:
        other.init("w", on(0, ones()))
        with pytest.raises(kv.KVStoreError, match=r"start of NCCL on GPUs \[0, 1\].*unhandled cuda error"):
            other.push("w", grads)


def test_memory_that_runs_out_breaks_nothing(store: kv.KVStore, cuda: FakeDriver) -> None:
    store.init("w", on(0, ones()))
    grads = on([0, 1], ones())
    cuda.fail("cuMemAlloc_v2", 2)
    with pytest.raises(MemoryError):
        store.push("w", grads)
    store.pushpull("w", grads)
    assert values(grads) == 2 * [[3.0] * 5]
    four = [*grads, *on([0, 1], ones())]
    for after in range(4):  # room for the sums of each GPU, and for what its kernel works on
        cuda.fail("cuMemAllocAsync", 2, after)
        with pytest.raises(MemoryError):
            store.push("w", four)
        assert store.view("w").numpy().tolist() == [3.0] * 5, after
    store.pushpull("w", four)
    assert values(four) == 4 * [[9.0] * 5]


def test_without_nccl4py_the_error_says_how_to_get_it(
    cuda: FakeDriver, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "nccl.bindings", None)
    with pytest.raises(kv.MissingBackendError, match=r"pip install 'kvstore-train\[nccl\]'"):
        kv.create("nccl")


# ---------------------------------------------------------------------------------------------- a real NCCL


@pytest.mark.gpu
def test_a_real_nccl_with_one_process() -> None:
    """Sums over all GPUs there are; with one, of a communicator that has one."""
    needs_gpu()
    pytest.importorskip("nccl.bindings")
    devices = list(range(driver.get_driver().count))
    with kv.create("nccl") as store:
        for dtype in TYPES:
            part = np.abs(draw(dtype, 1001, 1)) if dtype[0] != "i" else np.ones(1001, dtype)
            store.init(dtype, on(0, 0 * part))
            grads = [RealArray(part, device=device) for device in devices]
            store.pushpull(dtype, grads)
            expected = len(devices) * part.astype(np.float64)
            if part.dtype.kind in "iu":
                expected = expected.astype(np.int64).astype(dtype).astype(np.float64)  # wraps around
            for grad in grads:
                np.testing.assert_allclose(grad.get().astype(np.float64), expected, rtol=1e-2)
        engine = store._backend.engine  # type: ignore[attr-defined]
        comm = engine._make_communicators((0,))[0] if len(devices) == 1 else None
        if comm is not None:  # the calls of several GPUs, with one
            from kvstore.devices.streams import DeviceStream
            from kvstore.stores.collectives.nccl.library import CollectiveArray

            array, out = RealArray(ones()), RealArray(0 * ones())
            job = CollectiveArray(0, array.address, out.address, 5, "float32")
            engine.sum_on_gpus([job], {0: DeviceStream(0, 1)}, "the test")
            assert out.get().tolist() == [1.0] * 5
        assert engine.versions()["NCCL"].startswith("2.")
