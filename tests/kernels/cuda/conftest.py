"""Where the kernels of these tests run."""

from __future__ import annotations

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
from fake_cuda import driver_in_process
from fake_cuda.cases import DeviceTarget, HostTarget, Target

# There are no wheels for some machines. What needs neither numba nor a GPU is tested everywhere.
if find_spec("numba") is None:
    others = Path(__file__).parent.glob("test_*.py")
    collect_ignore = [path.name for path in others if path.name != "test_table.py"]


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
