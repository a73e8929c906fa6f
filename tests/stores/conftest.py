"""The store's own driver over a CUDA driver in C that needs no GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from fake_cuda import FakeDriver
from fake_cuda.fixtures import fake_cuda  # noqa: F401

from kvstore.devices import driver


@pytest.fixture(scope="module")
def quick_collections() -> Iterator[None]:
    """Each test collects garbage to see that nothing leaks; numba's objects need not be looked at."""
    pytest.importorskip("cuda.core")
    pytest.importorskip("numba")
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture
def cuda(
    quick_collections: None,
    fake_cuda: FakeDriver,  # noqa: F811
) -> Iterator[FakeDriver]:
    """Make the store's driver anew, on a fake that runs work only when a thread waits for it.

    The arrays are to be small: kernels are interpreted, which is quicker than to compile them.
    """
    fake_cuda.interpreted = True
    fake_cuda.lazy = True
    before = driver.replace_driver(None)
    yield fake_cuda
    driver.replace_driver(before)
