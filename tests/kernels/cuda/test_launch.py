"""Loading and launching: the host code that a GPU would run, on a driver without one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pace
import pytest
from fake_cuda import FakeDriver
from fake_cuda.cases import DeviceTarget, fresh
from fake_cuda.fixtures import fake_cuda  # noqa: F401

from kvstore.kernels.cuda import KernelRow, KernelSpec, launch_image, load_kernel

F32 = np.float32
SUM = KernelSpec("sum", "float32", 2)


@pytest.fixture
def device(fake_cuda: FakeDriver) -> DeviceTarget:  # noqa: F811
    target = DeviceTarget()
    yield target
    target.close()


def test_many_keys_are_one_launch(fake_cuda: FakeDriver, device: DeviceTarget) -> None:  # noqa: F811
    sizes = [5, 8192, 20_000, 64, 0]
    values = [[np.arange(n, dtype=F32) + j for j in range(2)] for n in sizes]
    sources = [[device.put(value) for value in its] for its in values]
    results = [fresh(device, n, F32) for n in sizes]
    device.run(
        SUM,
        [
            KernelRow(n, tuple(source.address for source in its), result.address)
            for n, its, result in zip(sizes, sources, results, strict=True)
        ],
    )
    for result, (a, b) in zip(results, values, strict=True):
        assert result.read().tobytes() == (a + b).tobytes()
    assert fake_cuda.launches == [("sum_float32_k2", 1 + 1 + 3 + 1)]


def test_a_threshold_travels_as_four_bytes(fake_cuda: FakeDriver, device: DeviceTarget) -> None:  # noqa: F811
    t = F32(1 / 3)
    gradient = np.array([t, -t, 0, np.nextafter(t, F32(0))], F32)
    source, residual = device.put(gradient), device.put(np.zeros(4, F32))
    words = fresh(device, 4, np.uint8)
    row = KernelRow(4, (source.address,), residuals=(residual.address,), words=(words.address,))
    device.run(KernelSpec("quantise_2bit", k=1), [row], t)
    assert words.read().tolist() == [0b11_10_00_00, 0, 0, 0]


def test_nothing_to_do_is_no_launch(fake_cuda: FakeDriver, device: DeviceTarget) -> None:  # noqa: F811
    device.run(KernelSpec("sum"), [KernelRow(0, (16,), 16)])
    assert fake_cuda.launches == []


def test_a_kernel_is_loaded_once_for_a_device(fake_cuda: FakeDriver) -> None:  # noqa: F811
    from cuda.core import Device

    Device(1).set_current()
    Device(0).set_current()
    first = load_kernel(SUM, 0)
    assert load_kernel(SUM, Device(0)) is first
    assert load_kernel(SUM, 1) is not first
    assert (first.spec, first.device, load_kernel(SUM, 1).device) == (SUM, 0, 1)


def test_work_happens_in_the_order_of_the_stream(fake_cuda: FakeDriver) -> None:  # noqa: F811
    """On a lazy driver nothing is launched before a thread waits."""
    from cuda.core import Device

    fake_cuda.lazy = True
    device = Device(0)
    device.set_current()
    target = DeviceTarget()
    source, dst = target.put(np.full(100, 2, F32)), fresh(target, 100, F32)
    words, chunks = launch_image(
        KernelSpec("sum"), [KernelRow(100, (source.address, source.address), dst.address)]
    )
    place = target.put(words)
    load_kernel(KernelSpec("sum"), device)(target.stream, place.address, chunks)
    assert fake_cuda.launches == []
    target.stream.sync()
    assert fake_cuda.launches == [("sum_float32_any", 1)]
    assert (dst.read() == 4).all()
    target.close()


WITHOUT_NUMBA = """
import sys
for name in ("numba", "numba_cuda", "llvmlite"):
    sys.modules[name] = None
sys.path.insert(0, sys.argv[1])
import numpy as np
from fake_cuda import install
from fake_cuda.cases import DeviceTarget, fresh
from kvstore.kernels.cuda import KernelRow, KernelSpec
driver = install()
driver.interpreted = True
target = DeviceTarget()
source, dst = target.put(np.arange(5, dtype=np.float32)), fresh(target, 5, np.float32)
target.run(KernelSpec("sum", k=2), [KernelRow(5, (source.address, source.address), dst.address)])
assert dst.read().tolist() == [0, 2, 4, 6, 8]
assert driver.launches == [("sum_float32_k2", 1)]
target.close()
assert driver.live().blocks == 0
"""


def test_a_process_without_numba_launches_what_was_made_ahead(fake_cuda: FakeDriver) -> None:  # noqa: F811
    command = [sys.executable, "-c", WITHOUT_NUMBA, str(Path(__file__).parents[2] / "support")]
    subprocess.run(command, check=True, timeout=pace.seconds(60))


def test_an_error_of_a_launch_is_raised(fake_cuda: FakeDriver, device: DeviceTarget) -> None:  # noqa: F811
    source, dst = device.put(np.zeros(8, F32)), fresh(device, 8, F32)
    fake_cuda.fail("cuLaunchKernelEx", 1)
    fake_cuda.fail("cuLaunchKernel", 1)
    with pytest.raises(Exception, match="INVALID_VALUE"):
        device.run(KernelSpec("sum"), [KernelRow(8, (source.address,), dst.address)])
