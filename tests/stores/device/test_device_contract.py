"""The contract of every store, on arrays of a GPU: the tests of test_contract.py.

"lazy" is a driver in Python (tests/support/lazy_driver.py), "cuda" the real host code over a driver in C
(tests/fake_cuda), and with ``-m gpu`` the same tests run on a real GPU.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import test_contract
from lazy_driver import GpuArray, LazyDriver
from on_gpu import OnGpu
from real_gpu import RealArray, needs_gpu

import kvstore as kv
from kvstore.devices import driver

#: The parts of the contract that do not hold on a GPU, and why.
OTHERWISE = {
    "test_a_view_is_live_and_read_only": "a view is a DeviceArray",
    "test_views_may_be_pushed": "tested in test_device.py, with DeviceArrays",
    "test_an_own_optimizer": "own rules work on host arrays",
    "test_counts_follow_the_keys_that_were_updated": "own rules work on host arrays",
    "test_storages_mix_in_a_push": "row-sparse values stay on the host",
    "test_an_updater_gets_row_sparse_sums": "row-sparse values stay on the host",
    "test_other_types_are_refused": "the wrapper leaves such arrays on the host",
    "test_the_work_for_many_keys_is_in_proportion_to_their_number": "below, with fewer keys",
}
#: The parts of the contract that do not hold between processes.
ROWS_STAY = {
    "test_row_sparse_keys_keep_the_union_of_rows",
    "test_pushpull_of_row_sparse_keys_into_dense_outs",
    "test_rows_of_any_number_of_dimensions",
}


def contract() -> Iterator[tuple[str, Callable[..., Any]]]:
    for name, function in vars(test_contract).items():
        if name.startswith("test_") and "store" in inspect.signature(function).parameters:
            yield name, function


globals().update({name: function for name, function in contract() if name not in OTHERWISE})


# Every thread of a kernel is Python here: 800 keys are millions of calls.
@pytest.mark.parametrize("few", [10, pytest.param(100, marks=pytest.mark.nightly)])
def test_the_work_is_in_proportion_to_the_number_of_keys(store: kv.KVStore, few: int) -> None:
    test_contract.work_follows_the_number_of_keys(store, few)


def test_the_exceptions_are_tests_of_the_contract() -> None:
    assert set(OTHERWISE) | ROWS_STAY <= {name for name, _ in contract()}


@pytest.fixture
def fake() -> Iterator[LazyDriver]:
    made = LazyDriver()
    before = driver.replace_driver(made)
    yield made
    driver.replace_driver(before)


@pytest.fixture(params=["lazy", "lazy shared", "cuda", pytest.param("real", marks=pytest.mark.gpu)])
def store(request: pytest.FixtureRequest) -> Iterator[OnGpu]:
    if request.param not in ("lazy", "lazy shared"):
        needs_gpu() if request.param == "real" else request.getfixturevalue("cuda")
        with OnGpu(RealArray) as made:
            yield made
        return
    fake: LazyDriver = request.getfixturevalue("fake")
    name = "shared" if request.param == "lazy shared" else "device"
    if name == "shared" and request.node.originalname in ROWS_STAY:
        pytest.skip("between processes, row-sparse keys are pulled to the host only")
    with OnGpu(lambda array, **options: GpuArray(fake, array, **options), name) as made:
        yield made
    fake.assert_sound()


@pytest.fixture
def store_name() -> str:
    return "device"
