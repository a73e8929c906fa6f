"""The contract of every store, on arrays of a GPU: the tests of test_contract.py.

"lazy" is a driver in Python (tests/lazy_driver.py), "cuda" the real host code over a driver in C
(tests/fake_cuda), and with ``-m gpu`` the same tests run on a real GPU.
"""

from __future__ import annotations

import gc
import inspect
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import test_contract
from fake_cuda import FakeDriver
from fake_cuda import driver as fake_cuda_driver
from fake_cuda.fixtures import fake_cuda  # noqa: F401
from lazy_driver import GpuArray, LazyDriver
from on_gpu import OnGpu
from real_gpu import RealArray, needs_gpu

from kvstore.devices import driver
from kvstore.kernels.cuda import HostKernel

#: What is not so on a GPU, and why.
OTHERWISE = {
    "test_a_view_is_live_and_read_only": "a view is a DeviceArray",
    "test_views_may_be_pushed": "tested in test_device.py, with DeviceArrays",
    "test_an_own_optimizer": "own rules work on host arrays",
    "test_counts_follow_the_keys_that_were_updated": "own rules work on host arrays",
    "test_storages_mix_in_a_push": "row-sparse values stay on the host",
    "test_an_updater_gets_row_sparse_sums": "row-sparse values stay on the host",
    "test_other_types_are_refused": "the wrapper leaves such arrays on the host",
}


def contract() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, function in vars(test_contract).items():
        if name.startswith("test_") and "store" in inspect.signature(function).parameters:
            yield name, function


globals().update({name: function for name, function in contract() if name not in OTHERWISE})


def test_the_exceptions_are_tests_of_the_contract() -> None:
    assert set(OTHERWISE) <= {name for name, _ in contract()}


@pytest.fixture
def fake() -> Iterator[LazyDriver]:
    made = LazyDriver()
    before = driver.use(made)
    yield made
    driver.use(before)


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
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[FakeDriver]:
    """The store's own driver on the fake one, which does nothing before somebody waits.

    The arrays are tiny: to interpret the kernels is quicker than to compile them.
    """
    monkeypatch.setattr(fake_cuda_driver, "HostKernel", partial(HostKernel, compiled=False))
    fake_cuda.lazy = True
    before = driver.use(None)
    yield fake_cuda
    driver.use(before)


@pytest.fixture(params=["lazy", "cuda", pytest.param("real", marks=pytest.mark.gpu)])
def store(request: pytest.FixtureRequest) -> Iterator[OnGpu]:
    if request.param != "lazy":
        needs_gpu() if request.param == "real" else request.getfixturevalue("cuda")
        with OnGpu(RealArray) as made:
            yield made
        return
    fake: LazyDriver = request.getfixturevalue("fake")
    with OnGpu(lambda array, **options: GpuArray(fake, array, **options)) as made:
        yield made
    fake.assert_sound()


@pytest.fixture
def store_name() -> str:
    return "device"
