"""The store's driver and the real CUDA libraries, without a GPU: errors, contexts, several GPUs."""

from __future__ import annotations

import logging
from typing import Any

import numpy as np
import pytest
from fake_cuda import DEVICES, FakeDriver
from real_gpu import RealArray
from references import assert_same_bits, draw, total

import kvstore as kv
from kvstore.devices import driver

#: Error codes of the driver.
OUT_OF_MEMORY, ILLEGAL_ADDRESS = 2, 700


@pytest.fixture
def store(cuda: FakeDriver) -> Any:
    with kv.create("device") as made:
        yield made


def ones(n: int = 4, device: int = 0, **options: Any) -> RealArray:
    return RealArray(np.ones(n, np.float32), device, **options)


def test_one_launch_and_no_wait(store: kv.KVStore, cuda: FakeDriver) -> None:
    keys = list(range(30))
    store.init(keys, [ones(n + 1) for n in keys])
    store.set_optimizer(kv.optimizer.Adam())
    values, outs = [[ones(n + 1)] * 2 for n in keys], [ones(n + 1) for n in keys]
    plan = store.bind(keys, values, out=outs)
    plan()
    outs[0].get()
    waits = ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize")
    before = sum(cuda.calls(name) for name in waits)
    cuda.launches.clear()
    for _ in range(3):
        plan()
        store.pushpull(keys, values, out=outs)
    assert sum(cuda.calls(name) for name in waits) == before
    outs[0].get()
    assert [name for name, _ in cuda.launches] == ["update_adam_float32_any"] * 6


def test_no_memory_is_a_memory_error(store: kv.KVStore, cuda: FakeDriver) -> None:
    array = ones(1000)
    cuda.fail("cuMemAlloc_v2", OUT_OF_MEMORY)
    with pytest.raises(MemoryError, match="no memory left"):
        store.init("a", array)
    assert store.keys() == []
    store.init("a", array)


@pytest.mark.parametrize("call", ["cuMemcpyAsync", "cuEventRecord", "cuMemAllocAsync"])
def test_errors_of_the_driver_are_told_in_words(store: kv.KVStore, cuda: FakeDriver, call: str) -> None:
    store.init(["a", "b"], [ones(), np.ones(4, np.float32)])
    value = ones()
    cuda.fail(call, ILLEGAL_ADDRESS)
    with pytest.raises(kv.KVStoreError, match=rf"{call}: the CUDA driver says .*error 700"):
        store.push(["a", "b"], [np.ones(4, np.float32), value])
    store.push("a", value)
    assert store.view("a").numpy().tolist() == [1] * 4


def test_an_error_of_earlier_work_is_told_later(store: kv.KVStore, cuda: FakeDriver) -> None:
    store.init("a", ones())
    store.push("a", ones())
    cuda.broken = ILLEGAL_ADDRESS
    with pytest.raises(kv.KVStoreError, match="may show only now"):
        store.pull("a", out=np.zeros(4, np.float32))
    cuda.broken = 0


def test_the_caller_s_context_stays(store: kv.KVStore, cuda: FakeDriver) -> None:
    from cuda.core import Device

    for device in (0, 2):
        Device(device).set_current()
        store.init(device, ones(device=1))
        store.push(device, [ones(device=1), ones(device=3)])
        assert store.view(device).numpy().tolist() == [2] * 4
        assert Device().device_id == device


@pytest.mark.parametrize("peers", [True, False])
@pytest.mark.parametrize("forbidden", [True, False])
def test_several_gpus(
    cuda: FakeDriver,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    peers: bool,
    forbidden: bool,
) -> None:
    cuda.peers = peers
    if forbidden:
        monkeypatch.setenv("MXNET_ENABLE_GPU_P2P", "0")
    drawn = [draw("float32", 50, seed) for seed in range(6)]
    with caplog.at_level(logging.INFO, logger="kvstore"), kv.create("device") as store:
        store.init("a", RealArray(np.zeros(50, np.float32), 2))
        values = [RealArray(value, i % DEVICES) for i, value in enumerate(drawn)]
        outs = [RealArray(np.zeros(50, np.float32), i) for i in range(DEVICES)]
        copies = cuda.calls("cuMemcpyPeerAsync")
        store.pushpull("a", values, out=outs)
        for out in outs:
            assert_same_bits(out.get(), total(drawn))
        elsewhere = sum(i % DEVICES != 2 for i in range(6)) + DEVICES - 1
        direct = peers and not forbidden
        assert cuda.calls("cuMemcpyPeerAsync") - copies == (0 if direct else elsewhere)
    told = [record for record in caplog.records if "cannot reach" in record.message]
    assert len(told) == (0 if direct or forbidden else DEVICES - 1)


def test_events_order_the_streams_of_a_key(store: kv.KVStore, cuda: FakeDriver) -> None:
    from cuda.core import Device

    Device(0).set_current()
    made = [Device(0).create_stream() for _ in range(3)]
    first, second, third = (int(stream.handle) for stream in made)
    store.init("a", RealArray(np.zeros(500, np.float32), stream=first))
    value = RealArray(np.arange(500, dtype=np.float32), stream=second)
    out = RealArray(np.zeros(500, np.float32), stream=third)
    store.push("a", [value, value])
    store.pull("a", out=out)
    value.set(np.zeros(500, np.float32))
    np.testing.assert_array_equal(out.get(), 2 * np.arange(500))
    for array in (value, out):
        array.release()


def test_a_missing_driver_is_told(monkeypatch: pytest.MonkeyPatch, cuda: FakeDriver) -> None:
    cuda.fail("cuInit", 100)
    with pytest.raises(kv.MissingBackendError, match="no usable NVIDIA driver"):
        driver.CudaDriver()
