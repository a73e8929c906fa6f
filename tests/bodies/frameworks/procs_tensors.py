"""Tensors with unusual memory, in workers; tests/arrays/test_torch_arrays.py starts them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.nn.parallel import DistributedDataParallel

import kvstore as kv
from kvstore.arrays.host import readable_array, writable_array
from kvstore.settings.launchers import detect_placement
from kvstore.torch import HookState, allreduce_hook, broadcast

FLOATS = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


def negative(values: Any, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a tensor of these values, whose memory holds them with the other sign."""
    values = torch.as_tensor(values, dtype=torch.float64)
    if dtype in (torch.float32, torch.float64):
        whole = torch.complex(torch.zeros_like(values), -values)
        made = whole.to(torch.complex64 if dtype == torch.float32 else torch.complex128).conj().imag
    else:
        made = torch._neg_view((-values).to(dtype))
    assert made.is_neg()
    return made


def shown(store: kv.KVStore, key: str, shape: tuple[int, ...], wide: type = np.float64) -> Any:
    out = np.empty(shape, wide)
    store.pull(key, out=out)
    return out.tolist()


# ------------------------------------------------------------------------------------------ negative bits


def signs(store_name: str, repeats: int) -> int:
    """Use tensors with the negative bit in every verb; return the number of wrong results."""
    torch.set_num_threads(1)
    with kv.create(store_name) as store:
        return sum(_signs(store, f"{n}.", FLOATS[n % len(FLOATS)]) for n in range(repeats))


def _signs(store: kv.KVStore, prefix: str, dtype: torch.dtype) -> int:
    key, workers = f"{prefix}{dtype}", store.num_workers
    values = torch.arange(1.0, 13).reshape(3, 4)
    strided = negative(values.repeat_interleave(2, 1), dtype)[:, ::2]
    wrong = []

    def check(found: Any, wanted: Any) -> None:
        found = found.tolist() if isinstance(found, torch.Tensor) else found
        wrong.append(not np.array_equal(np.asarray(found, np.float64), np.asarray(wanted, np.float64)))

    store.init(key, negative(values, dtype))
    check(shown(store, key, (3, 4)), values)
    store.push(key, [negative(values, dtype), strided])
    check(shown(store, key, (3, 4)), 2 * workers * values)
    for out in (negative(torch.zeros(3, 4), dtype), negative(torch.zeros(3, 8), dtype)[:, ::2]):
        store.pull(key, out=out)
        check(out, 2 * workers * values)
    other = torch.zeros(3, 4, dtype=torch.float64)
    store.pushpull(key, strided, out=[other, out])
    check(other, workers * values)
    check(out, workers * values)
    store.pushpull(key, out)  # in place
    check(out, workers**2 * values)
    plan = store.bind(key, strided, out) if store.type == "local" else None
    for _ in range(2):
        if plan is None:
            store.pushpull(key, strided, out=out)
        else:
            plan()
        check(out, workers * values)
    store.init(f"{key}.0", negative(7.0, dtype))
    none = negative(0.0, dtype)
    store.pull(f"{key}.0", out=none)
    check(none, 7)
    copies = [negative(torch.zeros(3, 4), dtype) for _ in range(2)]
    store.broadcast(f"{key}.b", negative(values, dtype), out=copies)
    for copy in copies:
        check(copy, values)
    if not store.type.startswith("dist"):
        check(np.asarray(store.attach(key, strided), np.float64), values)
    _rows(store, f"{key}.rows", dtype, check)
    for words in ("storage of 0 bytes", "storage of 8 bytes", "device meta", "a tensor with memory"):
        uses = (partial(store.push, f"{key}.0"), lambda tensor: store.pull(f"{key}.0", out=tensor))
        wrong.extend(words not in _error(use, hopeless(dtype)[words]()) for use in uses)
    check(shown(store, f"{key}.0", ()), 7)
    return sum(wrong)


def _rows(store: kv.KVStore, key: str, dtype: torch.dtype, check: Callable[[Any, Any], None]) -> None:
    ids = torch._neg_view(torch.tensor([-4, -1]))
    assert ids.tolist() == [4, 1]
    rows = torch.tensor([[4.0, 4], [1, 1]])
    table = kv.RowSparseArray(negative(rows, dtype), ids, (6, 2))
    check(table.indices, [1, 4])
    check(np.asarray(table.data, np.float64), [[1, 1], [4, 4]])
    store.init(key, kv.RowSparseArray.from_dense(negative(torch.ones(6, 2), dtype)))
    store.push(key, table)
    out = kv.RowSparseArray.zeros((6, 2), table.dtype)
    store.row_sparse_pull(key, out=out, row_ids=ids)
    check(out.indices, [1, 4])
    check(np.asarray(out.data, np.float64), store.num_workers * np.array([[1, 1], [4, 4]]))


def doors(store_name: str, folder: str) -> list[Any]:
    """Broadcast tensors with the negative bit, and average gradients that have it."""
    here = detect_placement()
    with kv.create(store_name) as store:
        state = {
            "single": negative(torch.arange(4.0) * (store.rank + 1)),
            "half": negative(torch.arange(4.0) * (store.rank + 1), torch.bfloat16),
        }
        broadcast(store, state, prefix="b.")
        found = [one.to(torch.float64).tolist() for one in state.values()]
        with _gloo(folder, here.rank, here.size):
            model = nn.Linear(3, 1, bias=False)
            ddp = DistributedDataParallel(model)
            ddp.register_comm_hook(HookState(store), allreduce_hook)
            (ddp(torch.eye(3)) * negative([[1.0], [2], [3]]) * (here.rank + 1)).sum().backward()
            assert model.weight.grad is not None
            found.append(model.weight.grad.tolist())
            del ddp, model
        return found


@contextlib.contextmanager
def _gloo(folder: str, rank: int, size: int) -> Iterator[None]:
    meeting = f"file://{folder}/meeting"
    dist.init_process_group("gloo", meeting, timedelta(seconds=30), size, rank)
    try:
        yield
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------------------- no memory


class Wrapper(torch.Tensor):
    """A tensor that stands for another, as DTensor and the tensors of torchao do."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_wrapper_subclass(cls, inner.shape, dtype=inner.dtype)

    def __init__(self, inner: torch.Tensor) -> None:
        self.inner = inner

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [one.inner if isinstance(one, Wrapper) else one for one in args]
        return function(*given, **(kwargs or {}))


class Meaning(torch.Tensor):
    """A tensor with memory, to which its class gives another meaning."""

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Any:
        return torch.Tensor._make_subclass(cls, inner)

    __torch_dispatch__ = Wrapper.__torch_dispatch__


class Harmless(torch.Tensor):
    """A subclass that only has another name."""


def _resized(tensor: torch.Tensor, nbytes: int) -> torch.Tensor:
    tensor.untyped_storage().resize_(nbytes)
    return tensor


def _fake(dtype: torch.dtype) -> torch.Tensor:
    with FakeTensorMode():
        return torch.ones(6, dtype=dtype)


def _ones(dtype: torch.dtype) -> torch.Tensor:
    return torch.ones(6, dtype=dtype)


def hopeless(dtype: torch.dtype) -> dict[str, Callable[[], Any]]:
    """Return makers of tensors that no store can read or write; the names are words of the errors."""
    lazy = nn.parameter.UninitializedParameter
    return {
        "storage of 0 bytes": lambda: _resized(_ones(dtype), 0),
        "storage of 8 bytes": lambda: _resized(_ones(dtype), 8),
        "storage of 9 bytes": lambda: _resized(_ones(dtype).repeat(3)[::3], 9),
        "a tensor with memory": lambda: _fake(dtype),
        "device meta": lambda: torch.ones(6, dtype=dtype, device="meta"),
        "the tensor that it wraps": lambda: Wrapper(_ones(dtype)),
        "__torch_dispatch__": lambda: Meaning(_ones(dtype)),
        "x.values": lambda: torch.nested.nested_tensor([_ones(dtype)], layout=torch.jagged),
        "each of its parts": lambda: torch.nested.nested_tensor([_ones(dtype)]),
        "run a batch": lambda: lazy(dtype=dtype),
        "no shape": lambda: nn.parameter.UninitializedBuffer(dtype=dtype),
        "sparse_coo.*RowSparseArray": lambda: _ones(dtype).to_sparse(),
        "sparse_csr": lambda: torch.eye(3, dtype=dtype).to_sparse_csr(),
        "to_dense": lambda: _ones(torch.float32).to_mkldnn(),
        "dequantize": lambda: torch.quantize_per_tensor(torch.ones(6), 0.1, 0, torch.quint8),
        "view_as_real": lambda: torch.ones(6, dtype=torch.complex64),
        "resolve_conj": lambda: torch.ones(6, dtype=torch.complex64).conj(),
        "float8": lambda: torch.ones(6).to(torch.float8_e4m3fn),
        "stands for another": lambda: torch._efficientzerotensor(6, dtype=dtype),
    }


def no_memory(store_name: str) -> dict[str, list[str]]:
    """Pass each of these to each verb; return the errors, after which the store is as it was."""
    torch.set_num_threads(1)
    with kv.create(store_name) as store:
        store.init("w", np.full(6, 5, np.float32))
        store.init("h", torch.full((6,), 5, dtype=torch.bfloat16))
        errors = {}
        for dtype, key in ((torch.float32, "w"), (torch.bfloat16, "h")):
            for name, make in hopeless(dtype).items():
                errors[f"{key} {name}"] = _refusals(store, key, make)
                assert shown(store, key, (6,)) == [5] * 6, name
                assert sorted(store.keys()) == ["h", "w"]
        store.barrier()
        return errors


def _refusals(store: kv.KVStore, key: str, make: Callable[[], Any]) -> list[str]:
    good = torch.ones(6, dtype=torch.float32 if key == "w" else torch.bfloat16)
    calls: list[Callable[[Any], Any]] = [
        lambda tensor: store.init("new", tensor),
        lambda tensor: store.push(key, tensor),
        lambda tensor: store.push(key, [good, tensor]),
        lambda tensor: store.pull(key, out=tensor),
        lambda tensor: store.pull(key, out=[tensor, good]),
        lambda tensor: store.pushpull(key, good, out=tensor),
        lambda tensor: store.pushpull(key, tensor),
        lambda tensor: kv.RowSparseArray(tensor, [0, 1, 2, 3, 4, 5], (6,)),
        lambda tensor: kv.RowSparseArray(np.ones(6), tensor, (6,)),
        lambda tensor: kv.RowSparseArray.from_dense(tensor),
        lambda tensor: broadcast(store, {"new": tensor}),
    ]
    if not store.type.startswith("dist"):
        calls.append(lambda tensor: store.attach(key, tensor))
    if store.type == "local":
        calls += [lambda tensor: store.bind(key, tensor, good), lambda tensor: store.bind(key, good, tensor)]
    return [_error(call, make()) for call in calls]


def _error(call: Callable[[Any], Any], tensor: Any) -> str:
    try:
        call(tensor)
    except kv.KVStoreError as error:
        return str(error)
    return "no error"


def transforms() -> dict[str, str]:
    """Use a store inside of vmap and grad."""
    found = {}
    for dtype in (torch.float32, torch.bfloat16):
        with kv.create("local") as store:
            store.init("w", torch.zeros(3, dtype=dtype))
            for verb in ("push", "pull"):

                def use(tensor: torch.Tensor, store: kv.KVStore = store, verb: str = verb) -> torch.Tensor:
                    getattr(store, verb)("w", tensor)
                    return tensor.sum()

                for name, run in (("vmap", torch.vmap), ("grad", torch.func.grad)):
                    shape = (2, 3) if name == "vmap" else (3,)
                    found[f"{name} {verb} {dtype}"] = _error(run(use), torch.ones(shape, dtype=dtype))
            assert shown(store, "w", (3,)) == [0, 0, 0]
    return found


# --------------------------------------------------------------------------------- required behaviour


def usable(store_name: str) -> None:
    """Use unusual tensors that have memory as values and outs; the memory around them stays."""
    torch.set_num_threads(1)
    with kv.create(store_name) as store, torch.inference_mode():
        frozen = torch.arange(6.0)
    with kv.create(store_name, group="second") as store:
        size = store.num_workers
        for number, make in enumerate(
            (
                lambda: torch.arange(6.0),
                lambda: frozen.clone(),
                lambda: torch.arange(6.0).requires_grad_(),
                lambda: torch.arange(6.0, requires_grad=True) * 1,
                lambda: nn.Parameter(torch.arange(6.0)),
                lambda: torch.arange(6.0).as_subclass(Harmless),
                lambda: torch.arange(6.0).share_memory_(),
                lambda: torch.arange(6.0).bfloat16().repeat_interleave(3)[::3],
                lambda: torch.arange(6.0).repeat_interleave(3)[::3],
                lambda: torch._lazy_clone(torch.arange(6.0)),
            )
        ):
            store.init(str(number), make())
            out = make()
            store.pushpull(str(number), [make(), make()], out=out)
            assert out.detach().tolist() == [2.0 * size * n for n in range(6)], number
        shared = torch.zeros(6)
        clone = torch._lazy_clone(shared)  # copies at the first write
        store.pull("0", out=clone)
        assert shared.tolist() == [0] * 6
        assert clone.tolist() == [2.0 * size * n for n in range(6)]
        for key, empty in (("none", torch.ones(0)), ("flat", torch.ones(3, 0)), ("one", torch.tensor(2.0))):
            store.init(key, empty)
            store.pushpull(key, empty)
            assert empty.shape in ((0,), (3, 0)) or empty.item() == 2 * size
        one = torch.ones(1)
        for dtype in (torch.float32, torch.bfloat16):
            for out in (one.to(dtype).expand(6), torch.zeros(20, dtype=dtype).as_strided((6,), (0,))):
                assert "several elements at one place" in _error(lambda out: store.pull("0", out=out), out)
        store.init("wide", one.expand(6))
        assert shown(store, "wide", (6,)) == [1] * 6
        store.barrier()


def memory_stays(seed: int) -> None:
    """Keep a view while its tensor gets other memory; the view still shows the old one."""
    with kv.create("local") as store:
        tensor = torch.arange(1000.0)
        view = readable_array(tensor)
        tensor.data = torch.zeros(1000)
        torch.full((1000,), float(seed))
        assert view.tolist() == list(range(1000))
        store.init("w", tensor)
        del view
        tensor.untyped_storage().resize_(0)  # a store leaves it resizable, unlike Tensor.numpy
        tensor.untyped_storage().resize_(4000)
        for dtype in (torch.float32, torch.bfloat16):
            value, out = torch.full((2000,), 2, dtype=dtype)[:1000], torch.zeros(1000, dtype=dtype)
            store.init(str(dtype), out)
            plan = store.bind(str(dtype), value, out)
            for one in (value, out):
                with contextlib.suppress(RuntimeError):
                    one.untyped_storage().resize_(0)
                    raise AssertionError("a plan reads freed memory")
            plan()
            assert out.tolist() == [2] * 1000


def modes() -> dict[str, str]:
    """Use a store under modes of torch that change what its operations do."""
    found = {}
    with kv.create("local") as store:
        store.init("w", torch.zeros(4))

        def step(tensor: torch.Tensor) -> torch.Tensor:
            twice = tensor * 2
            store.pushpull("w", twice)
            return twice

        assert torch.compile(step, backend="eager")(torch.ones(4)).tolist() == [2] * 4
        assert make_fx(step)(torch.ones(4)) is not None
        found["traced"] = _error(make_fx(step, tracing_mode="fake"), torch.ones(4))
        real, signed = torch.full((4,), 3.0), negative(torch.ones(4))
        with FakeTensorMode():
            store.push("w", real)
            found["value"] = _error(lambda tensor: store.push("w", tensor), signed)
            found["out"] = _error(lambda tensor: store.pull("w", out=tensor), signed)
        assert shown(store, "w", (4,)) == [3] * 4
        work = store.pushpull("w", signed, async_op=True)
        assert work is not None
        work.wait()
        assert signed.tolist() == [1] * 4
    return found


def drawn(seed: int, count: int) -> None:
    """Read and write views of any shape, strides, offset, type and sign: all of them and no other memory."""
    random = np.random.default_rng(seed)
    types = (*FLOATS, torch.int8, torch.uint8, torch.int32, torch.int64)
    for _ in range(count):
        dtype = types[random.integers(len(types))]
        memory = torch.arange(200, dtype=torch.float64).remainder(100).to(dtype)
        shape = tuple(int(n) for n in random.integers(0, 5, random.integers(0, 4)))
        view = _cut(memory, shape, random)
        if dtype.is_floating_point and random.integers(2):
            view = torch._neg_view(view)
        wanted = np.array(view.tolist(), np.float64).reshape(shape)
        np.testing.assert_array_equal(readable_array(view).astype(np.float64), wanted)
        before = memory.clone()
        array, deliver = writable_array(view)
        array[...] = 7
        if deliver is not None:
            deliver()
        assert (view == 7).all()
        touched = (memory != before).sum().item()
        assert touched <= view.numel()


def _cut(memory: torch.Tensor, shape: tuple[int, ...], random: np.random.Generator) -> torch.Tensor:
    """Return a view without overlap, with its dimensions in any order and gaps between elements."""
    order = random.permutation(len(shape))
    strides, step = [0] * len(shape), int(random.integers(1, 3))
    for axis in order:
        strides[axis] = step
        step *= max(1, shape[axis])
    return memory.as_strided(shape, strides, int(random.integers(0, 5)))
