"""Arrays on GPUs in stores on servers: pushes and pulls of these arrays give the values of `local`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import numpy as np
import pytest
from real_gpu import RealArray, needs_gpu
from references import assert_same_bits, draw, total

import kvstore as kv

SIZES = [1, 5, 33, 5000]


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def served(
    request: pytest.FixtureRequest, one_server: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> Iterator[kv.KVStore]:
    if request.param == "real":
        needs_gpu()
    else:
        request.getfixturevalue("cuda")
    for name, value in one_server.items():
        monkeypatch.setenv(name, value)
    with kv.create("dist_device_sync") as store:
        yield store


@pytest.mark.parametrize("k", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "float16", "int32"])
def test_sums(served: kv.KVStore, dtype: str, k: int) -> None:
    values = {n: [draw(dtype, n, n + i) for i in range(k)] for n in SIZES}
    keys = [f"k{n}" for n in SIZES]
    served.init(keys, [RealArray(own[0]) for own in values.values()])
    given = [[RealArray(value) for value in own] for own in values.values()]
    outs = [[RealArray(np.zeros_like(own[0])), np.zeros_like(own[0])] for own in values.values()]
    served.pushpull(keys, given, out=outs)
    for n, (there, here) in zip(SIZES, outs, strict=True):
        assert_same_bits(there.get(), total(values[n]))
        assert_same_bits(here, total(values[n]))
    served.pushpull(keys, given)
    for n, own in zip(SIZES, given, strict=True):
        for array in own:
            assert_same_bits(array.get(), total(values[n]))


def test_weights_in_the_background(served: kv.KVStore) -> None:
    weight, gradient = draw("float32", 100, 1), draw("float32", 100, 2)
    with kv.create("local", processes=1) as local:
        for store in (local, served):
            store.init("w", weight)
            store.set_optimizer(kv.optimizer.create("sgd", learning_rate=0.1, momentum=0.9))
        there, here = RealArray(weight), weight.copy()
        for _ in range(3):
            work = [
                served.push("w", RealArray(gradient), async_op=True),
                served.pull("w", out=there, async_op=True),
            ]
            local.push("w", gradient)
            for one in work:
                one.wait()
        local.pull("w", out=here)
        assert_same_bits(there.get(), here)


def test_mixed_places_in_one_list_change_nothing(served: kv.KVStore) -> None:
    value = draw("float32", 10, 1)
    served.init("w", value)
    with pytest.raises(kv.ArrayError, match=r"'w'.*GPU"):
        served.push("w", [value, RealArray(value)])
    out = np.empty_like(value)
    served.pull("w", out=out)
    assert_same_bits(out, value)
