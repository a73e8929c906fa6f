"""`device` on a real GPU, poisoned memory and guard zones around every array; run with ``-m gpu``.

What needs no framework runs on the driver in C, too (tests/fake_cuda), with smaller arrays.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from real_gpu import RealArray, needs_gpu
from references import DTYPES, assert_same_bits, draw, total

import kvstore as kv
from kvstore.devices import driver
from kvstore.kernels.cuda import RULE_STATES

Array = npt.NDArray[Any]
gpu_only = pytest.mark.gpu


@pytest.fixture(params=["fake", pytest.param("real", marks=pytest.mark.gpu)])
def sizes(request: pytest.FixtureRequest) -> Iterator[list[int]]:
    """Sizes that the driver at hand is quick with: around those of vectors, blocks and chunks."""
    if request.param == "real":
        needs_gpu()
        yield [1, 3, 4, 5, 255, 1024, 8191, 8192, 8193, 70_001, 3_000_017]
        return
    request.getfixturevalue("cuda")
    yield [1, 5, 33, 300]


def on_gpu(arrays: dict[Any, Array], offset: int = 0) -> dict[Any, RealArray]:
    return {key: RealArray(array, offset=offset) for key, array in arrays.items()}


@pytest.mark.parametrize("offset", [0, 8])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("k", [1, 2, 3, 4, 8, 9, 17])
def test_sums(sizes: list[int], dtype: str, k: int, offset: int) -> None:
    values = {n: [draw(dtype, n, 31 * n + i, special=True) for i in range(k)] for n in sizes}
    with kv.create("device") as store:
        store.init(sizes, [RealArray(own[0]) for own in values.values()])
        outs = [
            [RealArray(np.zeros_like(own[0]), offset=offset) for _ in range(2)] for own in values.values()
        ]
        given = [[RealArray(value, offset=offset) for value in own] for own in values.values()]
        store.pushpull(sizes, given, out=outs)
        for n, own in zip(sizes, outs, strict=True):
            for out in own:
                assert_same_bits(out.get(), total(values[n]))
            assert_same_bits(store.view(n).numpy(), total(values[n]))
        for n, own in zip(sizes, given, strict=True):
            for array, value in zip(own, values[n], strict=True):
                assert_same_bits(array.get(), value)  # only read


SETTINGS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd_momentum": ("sgd", {"momentum": 0.9}),
    "signsgd": ("signum", {"momentum": 0.0}),
    "signum": ("signum", {"momentum": 0.9}),
    "rmsprop_centered": ("rmsprop", {"centered": True}),
    "dcasgd_momentum": ("dcasgd", {"momentum": 0.9}),
}


@pytest.mark.parametrize("dtype", ["float32", "float64", "float16 master", "bfloat16 master"])
@pytest.mark.parametrize("rule", RULE_STATES)
def test_updates(sizes: list[int], rule: str, dtype: str) -> None:
    kind, _, master = dtype.partition(" ")
    name, settings = SETTINGS.get(rule, (rule, {}))
    settings = {"learning_rate": 0.1, "multi_precision": bool(master), **settings}
    weights = {n: draw(kind, n, n) for n in sizes}
    with kv.create("local") as local, kv.create("device") as store:
        local.init(sizes, list(weights.values()))
        store.init(sizes, list(on_gpu(weights).values()))
        for one in (local, store):
            one.set_optimizer(kv.optimizer.create(name, **settings))
        for step in range(2):
            values = [[draw(kind, n, 7 * step + i) for i in range(2)] for n in sizes]
            local.push(sizes, values)
            store.push(sizes, [[RealArray(value) for value in own] for own in values])
            for n in sizes:
                assert_same_bits(store.view(n).numpy(), local.view(n))


@pytest.mark.parametrize("codec", ["2bit", "1bit", "fp16", "bf16"])
@pytest.mark.parametrize("k", [1, 3, 4])
def test_compressed_pushes(sizes: list[int], codec: str, k: int) -> None:
    with kv.create("device") as host, kv.create("device") as store:
        zeros = {n: np.zeros(n, np.float32) for n in sizes}
        host.init(sizes, list(zeros.values()))
        store.init(sizes, list(on_gpu(zeros).values()))
        for one in (host, store):
            one.set_gradient_compression({"type": codec})
        for step in range(3):
            values = [[draw("float32", n, 7 * step + i, special=True) for i in range(k)] for n in sizes]
            host.push(sizes, values)
            store.push(sizes, [[RealArray(value) for value in own] for own in values])
            for n in sizes:
                assert_same_bits(store.view(n).numpy(), host.view(n))


def test_plans(sizes: list[int]) -> None:
    values = {n: [draw("float32", n, n + i) for i in range(4)] for n in sizes}
    with kv.create("device") as store:
        store.init(sizes, [RealArray(np.zeros(n, np.float32)) for n in sizes])
        given = [[RealArray(value) for value in own] for own in values.values()]
        outs = [RealArray(np.zeros(n, np.float32)) for n in sizes]
        plan = store.bind(sizes, given, out=outs)
        for _ in range(3):
            plan()
        for n, out in zip(sizes, outs, strict=True):
            assert_same_bits(out.get(), total(values[n]))


def test_conversions(sizes: list[int]) -> None:
    for source in ("float32", "float16", "bfloat16"):
        values = {n: draw(source, n, n, special=True) for n in sizes}
        with kv.create("device") as store:
            store.init(sizes, list(on_gpu(values).values()))
            for target in ("float32", "float16", "bfloat16"):
                kind = draw(target, 1, 0).dtype
                outs = {n: RealArray(np.zeros(n, kind)) for n in sizes}
                store.pull(sizes, out=list(outs.values()))
                with np.errstate(all="ignore"):
                    for n, out in outs.items():
                        assert_same_bits(out.get(), values[n].astype(kind))


# ------------------------------------------------------------------------------------------ with frameworks


@pytest.fixture
def torch() -> Any:
    needs_gpu()
    module = pytest.importorskip("torch")
    if not module.cuda.is_available():
        pytest.skip("this PyTorch sees no GPU")
    return module


@gpu_only
def test_memory_is_back_to_its_start(torch: Any) -> None:
    values = [torch.ones(4_000_000, device="cuda") for _ in range(3)]
    made = driver.get_driver()

    def cycle() -> None:
        with kv.create("device") as store:
            store.init("a", values[0])
            store.set_optimizer(kv.optimizer.Adam())
            plan = store.bind("a", values, out=values[1])
            for _ in range(3):
                plan()
                store.push("a", values[:2])
        gc.collect()
        torch.cuda.synchronize()

    cycle()  # kernels are loaded, and contexts are there
    before, _ = made.memory(0)
    for _ in range(3):
        cycle()
    after, _ = made.memory(0)
    assert after >= before


@gpu_only
@pytest.mark.parametrize("name", ["float32", "bfloat16", "float16", "int64"])
def test_tensors(torch: Any, name: str) -> None:
    dtype = getattr(torch, name)
    values = [torch.arange(6, device="cuda").reshape(2, 3).to(dtype) + i for i in range(3)]
    with kv.create("device") as store:
        store.init("a", torch.zeros(2, 3, dtype=dtype, device="cuda"))
        turned = torch.zeros(3, 2, dtype=dtype, device="cuda").t()
        outs = [torch.zeros(2, 3, dtype=dtype, device="cuda"), turned, torch.zeros(2, 3, dtype=dtype)]
        store.pushpull("a", [values[0], values[1].t().contiguous().t(), values[2]], out=outs)
        for out in outs:
            assert torch.equal(out.cpu(), sum(values).cpu())
        home = torch.from_dlpack(store.attach("a", values[0]))
        assert home.dtype == dtype
        assert torch.equal(home, values[0])


@gpu_only
def test_gradients_of_parameters(torch: Any) -> None:
    weight = torch.nn.Parameter(torch.ones(1000, device="cuda"))
    (weight * 2).sum().backward()
    with kv.create("device") as store:
        store.init("w", weight)
        store.set_optimizer(kv.optimizer.SGD(learning_rate=0.5))
        store.pushpull("w", weight.grad, out=weight)
        assert not weight.detach().any()


@gpu_only
def test_the_caller_s_stream_and_no_wait(torch: Any) -> None:
    side = torch.cuda.Stream()
    value, out = torch.zeros(1_000_000, device="cuda"), torch.zeros(1_000_000, device="cuda")
    with kv.create("device") as store:
        store.init("a", value)
        store.push("a", [value, value])
        torch.cuda.synchronize()
        with torch.cuda.stream(side):
            torch.cuda._sleep(200_000_000)
            value.fill_(3)
            store.push("a", [value, value])
        marker = torch.cuda.Event()
        store.pull("a", out=out)  # on the other stream: waits there, not here
        marker.record()
        assert not marker.query()
        torch.cuda.synchronize()
        assert torch.equal(out, torch.full_like(out, 6))


@gpu_only
@pytest.mark.parametrize("seed", range(5))
def test_many_calls_on_many_streams(torch: Any, seed: int) -> None:
    chance = np.random.default_rng(seed)
    streams = [torch.cuda.Stream() for _ in range(4)]
    expected = torch.zeros(300_000, device="cuda")
    with kv.create("device") as store:
        store.init("a", expected)
        store.set_updater(None)
        for step in range(40):
            with torch.cuda.stream(streams[chance.integers(4)]):
                value = torch.full((300_000,), float(step), device="cuda")
                store.push("a", [value, value])
        out = torch.empty_like(expected)
        store.pull("a", out=out)
        torch.cuda.synchronize()
        assert torch.equal(out, torch.full_like(out, 2 * 39.0))


@gpu_only
def test_updaters_with_tensors(torch: Any) -> None:
    def accumulate(key: Any, merged: Any, stored: Any) -> None:
        torch.from_dlpack(stored).add_(torch.as_tensor(merged, device="cuda"))

    with kv.create("device") as store:
        store.init("a", torch.ones(5000, device="cuda"))
        store.set_updater(accumulate)
        store.push("a", [torch.ones(5000, device="cuda")] * 2)
        assert store.view("a").numpy().tolist() == [3.0] * 5000


@gpu_only
def test_cupy_arrays(torch: Any) -> None:
    cupy: Callable[..., Any] | Any = pytest.importorskip("cupy")
    with kv.create("device") as store, cupy.cuda.Stream(non_blocking=True):
        store.init("a", cupy.zeros((3, 4), cupy.float32))
        value, out = cupy.arange(12, dtype=cupy.float32).reshape(4, 3).T, cupy.zeros((3, 4), cupy.float32)
        store.pushpull("a", [value, value], out=out)
        cupy.testing.assert_array_equal(out, 2 * value)
        cupy.testing.assert_array_equal(cupy.asarray(store.view("a")), 2 * value)


@gpu_only
def test_jax_arrays(torch: Any) -> None:
    jax: Any = pytest.importorskip("jax")
    if jax.default_backend() != "gpu":
        pytest.skip("this JAX sees no GPU")
    value = jax.numpy.arange(5, dtype=jax.numpy.float32)
    with kv.create("device") as store:
        store.init("a", value)
        store.push("a", [value, value + 1])
        assert store.view("a").numpy().tolist() == [1, 3, 5, 7, 9]
        with pytest.raises(kv.ArrayError, match="read-only"):
            store.pull("a", out=value)
