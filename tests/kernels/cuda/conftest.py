"""Where the kernels of these tests run."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from fake_cuda import driver_in_process
from fake_cuda.cases import DeviceTarget, HostTarget, Target

pytest.importorskip("numba")


@pytest.fixture(scope="session")
def compiled() -> HostTarget:
    """The processor, by numba."""
    return HostTarget(compiled=True)


@pytest.fixture(scope="session")
def interpreted() -> HostTarget:
    """The processor, by Python: for small arrays."""
    return HostTarget(compiled=False)


@pytest.fixture(params=["compiled", pytest.param("device", marks=pytest.mark.gpu)])
def target(request: pytest.FixtureRequest) -> Iterator[Target]:
    """The processor and, with ``-m gpu``, a device."""
    if request.param == "compiled":
        yield HostTarget(compiled=True)
        return
    if "fake-cuda" in (driver_in_process() or ""):
        pytest.skip("this process has a driver without a GPU")
    try:
        device = DeviceTarget()
    except Exception as error:
        pytest.skip(f"no CUDA device: {error}")
    yield device
    device.close()
