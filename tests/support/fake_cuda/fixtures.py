"""Fixtures of tests with a CUDA driver: `fake_cuda` for this process, `some_driver` for other processes."""

from __future__ import annotations

import ctypes.util
import gc
from collections.abc import Iterator

import pytest

from .driver import FakeDriver, driver_in_process, install


@pytest.fixture
def some_driver(request: pytest.FixtureRequest) -> None:
    """Skip where the bindings are missing, and where the fake driver would get in the way of a real one.

    Tests marked `gpu` need the real driver, all other tests need none.
    """
    pytest.importorskip("cuda.bindings.driver")
    pytest.importorskip("numba")
    real = ctypes.util.find_library("cuda") is not None
    if real != (request.node.get_closest_marker("gpu") is not None):
        pytest.skip("a real CUDA driver is here" if real else "there is no CUDA driver")


@pytest.fixture
def fake_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDriver]:
    """Return the fake driver in its initial state; fail if the test leaves a resource alive."""
    pytest.importorskip("cuda.core")
    pytest.importorskip("numba")
    loaded = driver_in_process()
    real = "fake-cuda" not in loaded if loaded else ctypes.util.find_library("cuda")
    if real:
        pytest.skip("a real CUDA driver is here")
    driver = install()
    monkeypatch.setenv("KVSTORE_CUDA_KERNELS", str(driver.kernels))
    driver.reset()
    gc.collect()
    before = driver.live()
    yield driver
    leaks, errors = driver.leaks, driver.errors
    driver.reset()
    gc.collect()
    assert not errors, errors[0]
    assert leaks or driver.live() == before
