"""`shared` with arrays on GPUs, which are fake (tests/support/lazy_driver.py): in turn with the host."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pace
import pytest
from jobs import Job
from lazy_driver import GpuArray, LazyDriver, installed
from references import assert_same_bits, draw, total

import kvstore as kv


@pytest.fixture
def fake() -> Iterator[LazyDriver]:
    with installed(2) as made:
        yield made


@pytest.fixture
def store(fake: LazyDriver) -> Iterator[kv.KVStore]:
    with kv.create("shared") as made:
        yield made


@pytest.mark.parametrize("host", [-1, 1])
@pytest.mark.parametrize("size", [2, 3])
def test_workers_with_and_without_a_gpu(job: Callable[..., Job], size: int, host: int) -> None:
    made = job(size)
    made.start_all("procs_device", "rounds", host)
    first, *others = made.results()
    assert all(other == first for other in others)


def test_host_arrays_never_import_cuda() -> None:
    code = """
import sys
import numpy as np
import kvstore as kv
with kv.create("shared") as store:
    a = np.ones(5, np.float32)
    store.init("a", a)
    store.pushpull("a", [a, a], out=a)
loaded = {name.partition(".")[0] for name in sys.modules} & {"cuda", "numba", "numba_cuda", "torch", "cupy"}
assert not loaded, loaded
"""
    subprocess.run([sys.executable, "-c", code], check=True, timeout=pace.seconds(100))


def test_values_and_outs_on_several_gpus(store: kv.KVStore, fake: LazyDriver) -> None:
    values = [draw("float32", 100, seed) for seed in range(3)]
    store.init("a", np.zeros(100, np.float32))
    given = [GpuArray(fake, value, i % 2) for i, value in enumerate(values)]
    outs = [GpuArray(fake, np.zeros(100, np.float16)), GpuArray(fake, np.zeros(100, np.float32), 1)]
    store.pushpull("a", given, out=[*outs, host := np.zeros(100, np.float32)])
    assert_same_bits(outs[1].get(), total(values))
    assert_same_bits(host, total(values))
    np.testing.assert_array_equal(outs[0].get(), total(values).astype(np.float16))


def test_what_is_refused_changes_nothing(store: kv.KVStore, fake: LazyDriver) -> None:
    store.init(["a", "b"], [np.ones(3, np.float32)] * 2)
    good = GpuArray(fake, np.full(3, 5, np.float32))
    bad: list[Any] = [
        GpuArray(fake, np.zeros(4, np.float32)),
        GpuArray(fake, np.zeros(3, np.float64)),
        GpuArray(fake, np.zeros(3, np.int16)),
        [good, np.zeros(3, np.float32)],
        [good, GpuArray(fake, np.zeros(4, np.float32))],
    ]
    for wrong in bad:
        for call in (store.push, store.pushpull):
            with pytest.raises(kv.KVStoreError):
                call(["a", "b"], [good, wrong])
    for out in (GpuArray(fake, np.zeros(4, np.float32)), GpuArray(fake, np.zeros(3), readonly=True)):
        with pytest.raises(kv.KVStoreError):
            store.pull(["a", "b"], out=[good, out])
        with pytest.raises(kv.KVStoreError):
            store.pushpull(["a", "b"], [good, good], out=[good, out])
    assert good.get().tolist() == [5, 5, 5]
    assert store.view("a").tolist() == store.view("b").tolist() == [1, 1, 1]


def test_an_optimizer_and_compression_work_as_with_host_arrays(fake: LazyDriver) -> None:
    with kv.create("shared") as one, kv.create("shared", group="other") as two:
        for store in (one, two):
            store.init("a", np.zeros(50, np.float32))
            store.set_optimizer(kv.optimizer.Adam(learning_rate=0.1))
            store.set_gradient_compression({"type": "2bit"})
        for step in range(4):
            value = draw("float32", 50, step)
            one.push("a", value)
            two.push("a", GpuArray(fake, value))
            assert_same_bits(one.view("a"), two.view("a"))


def test_memory_goes_back(fake: LazyDriver) -> None:
    value = GpuArray(fake, np.ones(100, np.float32))
    with kv.create("shared") as store:
        store.init("a", value)
        store.pushpull("a", [value, value])
        store.push("a", value)
        store.pull("a", out=value)
    value.release()
    assert fake.leftovers() == {"bytes": 0, "events": 0, "streams": 0}
