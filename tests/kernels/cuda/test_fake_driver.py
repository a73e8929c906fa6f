"""The driver without a GPU detects errors that a real one would not forgive."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from fake_cuda import DEVICES, FakeDriver
from fake_cuda.fixtures import fake_cuda  # noqa: F401


def call(name: str, *arguments: Any) -> Any:
    from cuda.bindings import driver

    error, *results = getattr(driver, name)(*arguments)
    if error != driver.CUresult.CUDA_SUCCESS:
        raise RuntimeError(error.name)
    return results[0] if results else None


@pytest.fixture
def device(fake_cuda: FakeDriver) -> Any:  # noqa: F811
    from cuda.core import Device

    first = Device(0)
    first.set_current()
    return first


def test_a_copy_beyond_the_end_of_a_block_is_refused(device: Any) -> None:
    block, host = call("cuMemAlloc", 64), np.zeros(65, np.uint8)
    call("cuMemcpyHtoD", block, host.ctypes.data, 64)
    for start, size in ((int(block), 65), (int(block) + 1, 64)):
        with pytest.raises(RuntimeError, match="INVALID_VALUE"):
            call("cuMemcpyHtoD", start, host.ctypes.data, size)
    call("cuMemFree", block)
    with pytest.raises(RuntimeError, match="INVALID_VALUE"):
        call("cuMemFree", block)


def test_what_is_alive_is_counted(device: Any, fake_cuda: FakeDriver) -> None:  # noqa: F811
    before = fake_cuda.live()
    block, pinned = call("cuMemAlloc", 100), call("cuMemHostAlloc", 50, 0)
    stream = device.create_stream()
    alive = fake_cuda.live()
    assert alive.blocks - before.blocks == 2
    assert alive.device_bytes[0] - before.device_bytes[0] == 100
    assert alive.pinned_bytes - before.pinned_bytes == 50
    assert alive.streams - before.streams == 1
    assert (fake_cuda.owner(int(block)), fake_cuda.owner(pinned), fake_cuda.owner(8)) == (0, -1, -2)
    stream.close()
    call("cuMemFree", block)
    call("cuMemFreeHost", pinned)
    assert fake_cuda.live() == before


def test_a_lazy_stream_waits_for_the_other_only_if_told_so(device: Any, fake_cuda: FakeDriver) -> None:  # noqa: F811
    fake_cuda.lazy = True
    for told in (False, True):
        a, b = device.create_stream(), device.create_stream()
        block, copy = call("cuMemAlloc", 4), call("cuMemAlloc", 4)
        call("cuMemsetD8Async", block, 7, 4, a.handle)
        if told:
            b.wait(a.record())
        call("cuMemcpyDtoDAsync", copy, block, 4, b.handle)
        b.sync()
        seen = np.zeros(4, np.uint8)
        call("cuMemcpyDtoHAsync", seen.ctypes.data, copy, 4, b.handle)
        assert seen.tolist() == [7 if told else 0xA5] * 4
        a.close()
        b.close()
        call("cuMemFree", block)
        call("cuMemFree", copy)


def test_memory_has_an_end_and_calls_can_fail(device: Any, fake_cuda: FakeDriver) -> None:  # noqa: F811
    fake_cuda.memory = 1000
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        call("cuMemAlloc", 1001)
    fake_cuda.fail("cuMemAlloc_v2", 2, after=1)
    block = call("cuMemAlloc", 10)
    with pytest.raises(RuntimeError, match="OUT_OF_MEMORY"):
        call("cuMemAlloc", 10)
    call("cuMemFree", block)


def test_a_broken_device_fails_whatever_waits(device: Any, fake_cuda: FakeDriver) -> None:  # noqa: F811
    stream = device.create_stream()
    fake_cuda.broken = 700
    with pytest.raises(Exception, match="ILLEGAL_ADDRESS"):
        stream.sync()
    fake_cuda.broken = 0
    stream.close()


def test_devices_reach_each_other_unless_told_otherwise(fake_cuda: FakeDriver) -> None:  # noqa: F811
    from cuda.core import Device

    assert call("cuDeviceGetCount") == DEVICES  # cuda-core before 1.2 asks NVML, which is not here
    assert Device(0).can_access_peer(1)
    fake_cuda.peers = False
    assert not Device(0).can_access_peer(1)
