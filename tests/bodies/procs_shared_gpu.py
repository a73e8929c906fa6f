"""The processes of jobs in the tests of the shared store with arrays on GPUs.

The driver is a fake one in each process, which runs work on a stream only when a thread waits for it, unless
the test asks for the real one. The result of a call is compared with a local store that gets the values of
all workers, on the host.
"""

from __future__ import annotations

import gc
import logging
import random
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
from fake_cuda import FakeDriver, install
from fake_torch import FakeTorch, Parameter
from jobs import hear, tell
from lazy_driver import LazyDriver, new_stream
from procs_shared import Digest, Values, sizes_of
from procs_shared_compression import Everyone
from real_gpu import RealArray
from references import Array, assert_same_bits, draw, dtype_of, total
from tested_store import create, held

import kvstore as kv
from kvstore.devices import driver

F = np.float32
MOMENTUM = {"learning_rate": 0.1, "momentum": 0.9}


class Gpu:
    """The driver of this process, with streams of the user's, and arrays on them."""

    def __init__(self, real: bool = False, seed: int = 0, count: int = 99) -> None:
        self.fake: FakeDriver | None = None if real else install()
        if self.fake is not None:
            self.fake.lazy = True
        self.count = min(count, driver.get_driver().count)
        self._random = random.Random(seed)
        self._arrays: list[RealArray] = []
        self.streams = {d: [driver.get_driver().stream(d) for _ in range(3)] for d in range(self.count)}

    def array(self, content: Any, device: int | None = None, **options: Any) -> RealArray:
        """An array on some GPU, written on some stream of it, where its owner works."""
        place = self._random.randrange(self.count) if device is None else device
        options.setdefault("stream", self._random.choice(self.streams[place]))
        self._arrays.append(RealArray(content, place, **options))
        return self._arrays[-1]

    def release(self, keep: int = 0) -> None:
        """Give the memory of all arrays back, but for the last ones."""
        old = self._arrays[: max(0, len(self._arrays) - keep)]
        for array in old:
            array.release()
        del self._arrays[: len(old)]

    def close(self) -> None:
        for device, streams in self.streams.items():
            for stream in streams:
                driver.get_driver().drop_stream(stream, device)


@contextmanager
def gpu(real: bool = False, seed: int = 0, count: int = 99) -> Iterator[Gpu]:
    """GPUs on which nothing is left: no memory, event or stream, and no page locked."""
    made = Gpu(real, seed, count)
    gc.collect()
    before = made.fake.live() if made.fake is not None else None
    yield made
    made.release()
    gc.collect()
    if made.fake is not None:
        assert made.fake.live() == before
        assert not made.fake.errors
    made.close()


@contextmanager
def said(what: str) -> Iterator[None]:
    """Let an assertion that fails say where."""
    try:
        yield
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from error


def get(array: Any) -> Array:
    return array.get() if isinstance(array, RealArray) else array


# ------------------------------------------------------------------------------------------------------ bits


class Pair:
    """The shared store with arrays of one worker's choice, and a local one with those of all workers."""

    def __init__(self, values: Values, sizes: list[int], put: Callable[[Array], Any]) -> None:
        self.store, self.local = create(), kv.create("local", processes=1)
        self.values, self.sizes, self.put = values, sizes, put
        self.keys = [f"k{n}" for n in sizes]
        zeros = [np.zeros(n, values.dtype) for n in sizes]
        self.store.init(self.keys, [put(zero) for zero in zeros])
        self.local.init(self.keys, zeros)

    def parts(self, n: int) -> tuple[list[Array], Any]:
        """The values of all workers for a key, and this worker's where it is to lie."""
        parts = self.values.next(n)
        return parts, self.put(parts[self.store.rank].copy())

    def expected(self, n: int, parts: list[Array]) -> Array:
        self.local.push(f"k{n}", parts)
        return np.array(self.local.view(f"k{n}"))

    def room(self, n: int, name: str = "") -> Any:
        return self.put(np.full(n, 77, dtype_of(name) if name else self.values.dtype))

    @contextmanager
    def putting(self, kind: type) -> Iterator[None]:
        """Let arrays lie where one of this type does."""
        put = self.put

        def alike(array: Array) -> Any:
            while not isinstance(made := put(array), kind):
                pass
            return made

        self.put = alike
        yield
        self.put = put

    def close(self) -> None:
        self.store.barrier()
        self.store.close()
        self.local.close()


def in_two(pair: Pair, n: int) -> None:
    parts, mine = pair.parts(n)
    out = pair.room(n)
    pair.store.push(f"k{n}", mine)
    if isinstance(mine, RealArray):
        mine.set(np.zeros(n, pair.values.dtype))  # a push has read its value
    pair.store.pull(f"k{n}", out=out)
    assert_same_bits(get(out), pair.expected(n, parts))


def in_place(pair: Pair, n: int) -> None:
    for _ in range(3):
        parts, mine = pair.parts(n)
        pair.store.pushpull(f"k{n}", mine)
        assert_same_bits(get(mine), pair.expected(n, parts))


def to_outs(pair: Pair, n: int) -> None:
    """To several outs, on GPUs and on the host; the value stays as it is."""
    parts, mine = pair.parts(n)
    outs = [pair.room(n), pair.room(n), np.empty(n, pair.values.dtype)]
    pair.store.pushpull(f"k{n}", mine, out=outs)
    want = pair.expected(n, parts)
    for out in reversed(outs):  # all are written on the stream of the first, for which no thread has waited
        assert_same_bits(get(out), want)
    assert_same_bits(get(mine), parts[pair.store.rank])


def to_one_out(pair: Pair, n: int) -> None:
    for out in (pair.room(n), np.empty(n, pair.values.dtype)):
        parts, mine = pair.parts(n)
        pair.store.pushpull(f"k{n}", mine, out=out)
        assert_same_bits(get(out), pair.expected(n, parts))
        assert_same_bits(get(mine), parts[pair.store.rank])


def several(pair: Pair, n: int) -> None:
    """Each worker's own values are summed, and rounded, first."""
    place = pair.put(np.zeros(1, F))  # a list is of arrays in one place
    with pair.putting(type(place)):
        sets = [pair.parts(n) for _ in range(3)]
    want = pair.expected(n, [total([parts[w] for parts, _ in sets]) for w in range(pair.store.num_workers)])
    pair.store.pushpull(f"k{n}", [mine for _, mine in sets])
    for _, mine in sets:
        assert_same_bits(get(mine), want)


def two_rounds(pair: Pair, n: int) -> None:
    """Two pushes, one after the other, and then two more before the first pull's copy has been made."""
    outs, wants = [], []
    for _ in range(2):
        first, mine = pair.parts(n)
        second, too = pair.parts(n)
        pair.store.push(f"k{n}", mine)
        pair.store.push(f"k{n}", too)
        outs.append(pair.room(n))
        pair.store.pull(f"k{n}", out=outs[-1])
        pair.expected(n, first)
        wants.append(pair.expected(n, second))
    for out, want in zip(outs, wants, strict=True):
        assert_same_bits(get(out), want)


def many_pulls(pair: Pair, n: int) -> None:
    """Copies to the GPU without a waiting thread must not see the rounds that follow."""
    outs, wants = [], []
    for _ in range(6):
        parts, mine = pair.parts(n)
        pair.store.push(f"k{n}", mine)
        outs.append(pair.room(n))
        pair.store.pull(f"k{n}", out=outs[-1])
        wants.append(pair.expected(n, parts))
    for out, want in zip(outs, wants, strict=True):
        assert_same_bits(get(out), want)


def in_the_background(pair: Pair, n: int) -> None:
    works, outs, wants = [], [], []
    for i in range(4):
        parts, mine = pair.parts(n)
        outs.append(pair.room(n))
        if i % 2:
            works.append(pair.store.pushpull(f"k{n}", mine, out=outs[-1], async_op=True))
        else:
            works.append(pair.store.push(f"k{n}", mine, async_op=True))
            works.append(pair.store.pull(f"k{n}", out=outs[-1], async_op=True))
        wants.append(pair.expected(n, parts))
    for work in works:
        work.wait()
    for out, want in zip(outs, wants, strict=True):
        assert_same_bits(get(out), want)


def converted(pair: Pair, n: int) -> None:
    """Outs of another type together with one of the key's type."""
    parts, mine = pair.parts(n)
    outs = [pair.room(n, "float64"), pair.room(n), pair.room(n, "float16")]
    pair.store.push(f"k{n}", mine)
    pair.store.pull(f"k{n}", out=outs)
    want = pair.expected(n, parts)
    with np.errstate(all="ignore"):
        for out in outs:
            assert_same_bits(get(out), want.astype(out.dtype))


def together(pair: Pair, n: int) -> None:
    """All keys in one call."""
    for way in range(4):
        made = {k: pair.parts(k) for k in pair.sizes}
        mine, outs = [value for _, value in made.values()], [pair.room(k) for k in pair.sizes]
        if way == 0:
            pair.store.push(pair.keys, mine)
            pair.store.pull(pair.keys, out=outs)
        elif way == 1:
            pair.store.pushpull(pair.keys, mine, out=outs)
        elif way == 2:
            pair.store.pushpull(pair.keys, mine)
            outs = mine
        else:
            pair.store.pushpull(pair.keys, mine, out=outs, async_op=True).wait()
        for (k, (parts, _)), out in zip(made.items(), outs, strict=True):
            assert_same_bits(get(out), pair.expected(k, parts))


WAYS = [
    in_two, in_place, to_outs, to_one_out, several, two_rounds, many_pulls, in_the_background, converted,
    together,
]  # fmt: skip


def sums(name: str, places: list[str], real: bool = False) -> str:
    """Every verb at every size; each worker's arrays lie where the test says."""
    digest = Digest()
    rank = int(create(group="rank").rank)
    values = Values(name, len(places), 5)
    chance = random.Random(rank)
    with gpu(real, rank) as made:

        def put(array: Array) -> Any:
            place = places[rank] if places[rank] != "any" else chance.choice(["host", "gpu"])
            return array if place == "host" else made.array(array)

        pair = Pair(values, sizes_of(values.dtype)[:-1], put)
        for way in WAYS:
            for n in pair.sizes if way is not together else [0]:
                with said(f"{way.__name__}, {n} elements"):
                    way(pair, n)
        for key in pair.keys:
            digest.add(held(pair.store, key))
        pair.close()
    return digest.hex()


# --------------------------------------------------------------------------------------------------- updates

SIZES = {"small": 700, "edge": 16384, "large": 100_003}


def start(store: Any, made: Gpu, **options: Any) -> dict[str, Array]:
    """Initialise keys with values on GPUs."""
    values = {key: draw("float32", n, n) for key, n in SIZES.items()}
    store.init(list(SIZES), [made.array(value) for value in values.values()])
    return values


def optimizers(rule: str, real: bool = False) -> str:
    """Weights of `shared` with GPU gradients, compared with those of `local`."""
    digest = Digest()
    with gpu(real) as made:
        store, local = kv.create("shared"), kv.create("local", processes=1)
        local.init(list(SIZES), list(start(store, made).values()))
        for one in (store, local):
            one.set_optimizer(kv.optimizer.create(rule, learning_rate=0.1))
        for r in range(4):
            parts = {
                k: [draw("float32", n, 10 * r + w) for w in range(store.num_workers)]
                for k, n in SIZES.items()
            }
            grads = [made.array(own[store.rank]) for own in parts.values()]
            outs = [made.array(np.zeros(n, F)) for n in SIZES.values()]
            if r == 0:
                store.push(list(SIZES), grads)
                store.pull(list(SIZES), out=outs)
            elif r == 1:
                store.pushpull(list(SIZES), grads)
                outs = grads
            else:
                store.pushpull(list(SIZES), grads, out=outs, async_op=r == 3)
                store.wait()
            local.push(list(SIZES), list(parts.values()))
            for key, out in zip(SIZES, outs, strict=True):
                assert_same_bits(out.get(), np.array(local.view(key)))
                digest.add(out.get())
        store.barrier()
        store.close()
    return digest.hex()


def updater() -> str:
    """A callable gets arrays of the host, wherever the gradients are."""
    seen = []

    def rule(key: Any, merged: Array, stored: Array) -> None:
        seen.append((type(merged), type(stored)))
        stored -= F(0.5) * merged

    digest = Digest()
    with gpu() as made:
        store = kv.create("shared")
        want = start(store, made)
        store.set_updater(rule)
        for r in range(3):
            out = made.array(np.zeros(SIZES["large"], F))
            parts = [draw("float32", SIZES["large"], 10 * r + w) for w in range(store.num_workers)]
            store.pushpull("large", made.array(parts[store.rank]), out=out)
            want["large"] -= F(0.5) * total(parts)
            assert_same_bits(out.get(), want["large"])
            digest.add(out.get())
        store.barrier()
        assert set(seen) <= {(np.ndarray, np.ndarray)}
        store.close()
    return digest.hex()


def compressed(codec: dict[str, Any], verb: str) -> str:
    digest = Digest()
    with gpu() as made:
        store, local = kv.create("shared"), kv.create("local", processes=1)
        local.init(list(SIZES), list(start(store, made).values()))
        store.set_gradient_compression(codec)
        everyone = Everyone([codec] * store.num_workers)
        for r in range(3):
            for key, n in SIZES.items():
                parts = [
                    np.clip(draw("float32", n, 10 * r + w), -2, 2).astype(F) for w in range(store.num_workers)
                ]
                grad, out = made.array(parts[store.rank]), made.array(np.zeros(n, F))
                if verb == "push":
                    store.push(key, grad)
                    store.pull(key, out=out)
                else:
                    store.pushpull(key, grad, out=out)
                assert_same_bits(out.get(), everyone(key, parts))
                digest.add(out.get())
        store.barrier()
        store.close()
    return digest.hex()


class LockingDriver(LazyDriver):
    """A lazy driver that locks pages: it reads the source of a copy to the GPU when the copy runs."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.locked: dict[int, int] = {}

    def register(self, address: int, nbytes: int) -> None:
        assert not any(at < address + nbytes and address < at + n for at, n in self.locked.items())
        self.locked[address] = nbytes

    def unregister(self, address: int) -> None:
        del self.locked[address]

    def _copy(self, target: int, source: int, nbytes: int, stream: int, device: int) -> None:
        if any(at <= source < at + n for at, n in self.locked.items()):
            self._put(device, stream, lambda: self._move(target, source, nbytes))
        else:
            super()._copy(target, source, nbytes, stream, device)


def tensors(seed: int) -> str:
    """PyTorch's tensors on its current stream, strided ones too, while streams take turns at random."""
    made = LockingDriver(seed=seed)
    before, sys.modules["torch"] = driver.replace_driver(made), FakeTorch(made)
    torch: Any = sys.modules["torch"]
    store, digest, shape = kv.create("shared"), Digest(), (331, 101)
    store.init(["w", "b"], [torch.tensor(np.zeros(shape, F)), torch.tensor(np.zeros(5, F))])
    streams, outs, wants = [(0, new_stream()) for _ in range(3)], [], []
    for r in range(12):
        parts = [draw("float32", shape[0] * shape[1], 10 * r + w).reshape(shape) for w in range(2)]
        with torch.cuda.stream(streams[r % 3]):
            mine = Parameter(torch, parts[store.rank], requires_grad=True, transposed=r % 2 == 1)
            small = torch.tensor(np.full(5, r + store.rank, F))
            room = [torch.tensor(np.zeros(shape, F), transposed=r % 4 < 2), torch.tensor(np.zeros(5, F))]
            if r % 3 == 0:
                store.push(["w", "b"], [mine, small])
                store.pull(["w", "b"], out=room)
            else:
                store.pushpull(["w", "b"], [mine, small], out=room, async_op=r % 3 == 1)
                store.wait()
        outs.append((r, room))
        wants.append((total(parts), np.full(5, 2 * r + 1, F)))
    for (r, room), want in zip(outs, wants, strict=True):
        with torch.cuda.stream(streams[r % 3]):
            for out, expected in zip(room, want, strict=True):
                assert_same_bits(out.get(), expected)
                digest.add(out.get())
    store.barrier()
    store.close()
    assert made.locked == {}
    assert made.leftovers()["events"] == 0
    made.assert_sound()
    driver.replace_driver(before)
    return digest.hex()


def broadcast() -> None:
    """Rank 0's value counts; a broadcast that fails leaves the keys to be initialised."""
    with gpu() as made, kv.create("shared") as store:
        want = draw("float32", 1000, 1)
        own, out = made.array(want if store.rank == 0 else np.zeros(1000, F)), made.array(np.zeros(1000, F))
        store.broadcast("w", own, out=out)
        assert_same_bits(out.get(), want)
        with pytest.raises(kv.DuplicateKeyError):
            store.init("w", own)
        with pytest.raises(kv.ShapeError):
            store.broadcast("v", own, out=made.array(np.zeros(3, F)))
        store.broadcast("v", own, out=out)
        assert_same_bits(out.get(), want)
        store.barrier()
        store.close()


# ------------------------------------------------------------------------------------- order, memory, errors


def orders() -> list[float]:
    """Asynchronous operations that the workers begin in different orders end all the same."""
    with gpu() as made, kv.create("shared") as store:
        start(store, made)
        names = list(SIZES) if store.rank == 0 else list(SIZES)[::-1]
        seen: dict[str, float] = {}
        for r in range(1, 6):
            values = {key: made.array(np.full(SIZES[key], r * (store.rank + 1), F)) for key in names}
            works = [store.pushpull(key, value, async_op=True) for key, value in values.items()]
            for work in works:
                work.wait()
            for key, value in values.items():
                found = value.get()
                assert (found == found[0]).all()
                seen[key] = float(found[0])
        store.barrier()
        store.close()
    return [seen[key] for key in SIZES]


def ahead_of_a_peer() -> None:
    """Two pushes before the other worker's first push: the value that it has to read is kept."""
    with gpu(count=1) as made, kv.create("shared") as store:
        start(store, made)
        stream, n = made.streams[0][0], SIZES["large"]
        parts = [[draw("float32", n, 10 * r + w) for w in range(2)] for r in range(2)]
        if store.rank == 0:
            for own in parts:
                store.push("large", made.array(own[0], stream=stream))
        store.barrier()
        if store.rank == 1:
            for own in parts:
                out = made.array(np.zeros(n, F))
                store.pushpull("large", made.array(own[1]), out=out)
                assert_same_bits(out.get(), total(own))
        store.barrier()
        store.close()


def bounded() -> None:
    """Repeated rounds need no more memory, whether a thread waits for the copies or not."""
    with gpu() as made, kv.create("shared") as store:
        assert made.fake is not None
        start(store, made)
        grads = [made.array(np.ones(n, F)) for n in SIZES.values()]
        outs = [made.array(np.zeros(n, F)) for n in SIZES.values()]
        before = made.fake.live()
        for _ in range(60):
            store.pushpull(list(SIZES), grads, out=outs)
            store.push(list(SIZES), grads)
            store.pull(list(SIZES), out=outs)
        live = made.fake.live()
        assert live.registered - before.registered <= 1 + 3  # the block of small keys, and large buffers
        assert live.events - before.events <= 3 * len(SIZES) * made.count
        for out in outs:
            assert (out.get() == store.num_workers).all()
        store.barrier()
        store.close()


def waits_of_the_host() -> None:
    """The host waits for each gradient that is copied to it, and for no copy to the GPU."""
    with gpu(count=1) as made, kv.create("shared") as store:
        assert made.fake is not None
        start(store, made)
        keys, outs = list(SIZES), [made.array(np.zeros(n, F)) for n in SIZES.values()]
        store.pull(keys, out=outs)
        names = ("cuStreamSynchronize", "cuEventSynchronize", "cuCtxSynchronize")
        before = [made.fake.calls(name) for name in names]
        for _ in range(2):
            store.pull(keys, out=outs)
        assert [made.fake.calls(name) for name in names] == before
        store.pushpull(keys, [made.array(np.ones(n, F)) for n in SIZES.values()], out=outs)
        assert [made.fake.calls(name) for name in names] == [before[0], before[1] + len(keys), before[2]]
        store.barrier()
        store.close()


def closed_early() -> None:
    """A copy to the GPU that is in flight when the store is closed arrives."""
    with gpu() as made:
        store = kv.create("shared")
        start(store, made)
        grad, out = made.array(np.ones(SIZES["large"], F)), made.array(np.zeros(SIZES["large"], F))
        store.pushpull("large", grad, out=out)
        store.barrier()
        store.close()
        assert (out.get() == store.num_workers).all()


def dropped() -> None:
    """A store that is never closed locks no page once it is deleted."""
    with gpu() as made:
        store = kv.create("shared")
        start(store, made)
        grad = made.array(np.ones(SIZES["large"], F))
        store.pushpull("large", grad)
        store.barrier()
        assert (grad.get() == store.num_workers).all()
        del store


def pageable(after: int) -> list[str]:
    """A driver that does not lock pages, at all or no more of them; the log says so."""
    lines: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())  # type: ignore[method-assign]
    handler.addFilter(lambda record: "store 'shared'" not in record.getMessage())  # made, set, and closed
    log = logging.getLogger("kvstore.shared")
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    with gpu() as made, kv.create("shared") as store:
        assert made.fake is not None
        made.fake.fail("cuMemHostRegister_v2", 801, after)
        start(store, made)
        for r in range(1, 4):
            grads = [made.array(np.full(n, r, F)) for n in SIZES.values()]
            outs = [made.array(np.zeros(n, F)) for n in SIZES.values()]
            store.pushpull(list(SIZES), grads, out=outs)
            for out in outs:
                assert (out.get() == r * store.num_workers).all()
        store.barrier()
        store.close()
    return lines


def refused() -> list[float]:
    """What cannot be meant raises, and has changed nothing."""
    with gpu() as made, kv.create("shared") as store:
        start(store, made)
        n = SIZES["large"]
        good, out = made.array(np.full(n, 2, F)), made.array(np.zeros(n, F))
        store.init("table", kv.RowSparseArray.zeros((5, 3)))
        for error, call, *arguments in (
            (kv.ArrayError, store.push, "large", [good, np.ones(n, F)]),
            (kv.ShapeError, store.push, ["large", "edge"], [good, good]),
            (kv.ShapeError, store.pushpull, "large", good, made.array(np.zeros(3, F))),
            (kv.DTypeError, store.push, "large", made.array(np.zeros(n))),
            (kv.DTypeError, store.push, "large", made.array(np.zeros(n, np.complex64))),
            (kv.ArrayError, store.pull, "large", made.array(np.zeros(n, F), readonly=True)),
            (kv.CapabilityError, store.push, "table", made.array(np.zeros((5, 3), F))),
            (kv.CapabilityError, store.pull, "table", made.array(np.zeros((5, 3), F))),
        ):
            with pytest.raises(error):
                call(*arguments)
        store.pushpull("large", good, out=out)
        found = out.get()
        assert (found == 2 * store.num_workers).all()
        assert_same_bits(good.get(), np.full(n, 2, F))
        store.barrier()
        store.close()
    return found[:3].tolist()


def broken_once(call: str) -> None:
    """An error of the driver before a worker has arrived: it is quoted, and the round can continue."""
    with gpu() as made, kv.create("shared") as store:
        assert made.fake is not None
        start(store, made)
        value = made.array(np.ones(SIZES["large"], F))
        store.pushpull("large", value)
        value.set(np.ones(SIZES["large"], F))
        made.fake.fail(call, 700)
        with pytest.raises(kv.KVStoreError, match="the CUDA driver says"):
            store.push("large", value)
        store.pushpull("large", value)
        assert (value.get() == store.num_workers).all()
        store.barrier()
        store.close()


def nothing_of_cuda() -> list[str]:
    """Modules that a process has imported that never meets an array of a GPU."""
    with kv.create("shared") as store:
        store.init(list(SIZES), [np.zeros(n, F) for n in SIZES.values()])
        store.set_optimizer(kv.optimizer.SGD())
        values = [np.ones(n, F) for n in SIZES.values()]
        store.pushpull(list(SIZES), values)
        store.pull("small", out=np.zeros(SIZES["small"], np.float64))
        store.push("small", memoryview(values[0]))
        store.barrier()
    return [
        name
        for name in sys.modules
        if name.split(".")[0] in ("cuda", "numba") or name.startswith("kvstore.stores.shared.staging")
    ]


# --------------------------------------------------------------------------------------------------- deaths


def until_lost(seed: int, rule: str | None) -> dict[str, Any]:
    """Rounds until another worker is gone; then the possible reads, and the remaining resources."""
    with gpu(seed=seed) as made:
        store = kv.create("shared")
        store.init(list(SIZES), [made.array(np.zeros(n, F)) for n in SIZES.values()])
        if rule is not None:
            store.set_optimizer(kv.optimizer.create(rule, **MOMENTUM))
        outs = [made.array(np.zeros(n, F)) for n in SIZES.values()]
        tell("ready")
        lost, noticed, t = None, 0.0, 0
        while lost is None:
            t += 1
            grads = [made.array(np.full(n, t * (store.rank + 1), F)) for n in SIZES.values()]
            try:
                move(store, t, grads, outs, list(SIZES))
            except kv.PeerLostError as error:
                lost, noticed = error.rank, time.monotonic()
        tell("lost")
        assert hear() == "read"  # by now, no worker arrives in a round any more
        values = []
        for key, n in SIZES.items():
            out = made.array(np.full(n, 77, F))
            store.pull(key, out=out)
            found = out.get()
            assert_same_bits(found, np.array(store.view(key)))
            assert (found == found[0]).all()
            values.append(float(found[0]))
        with pytest.raises(kv.PeerLostError):
            store.push("small", grads[0])
        store.close()
    return {"rank": lost, "noticed": noticed, "values": values}


def move(store: Any, t: int, grads: list[Any], outs: list[Any], keys: list[str]) -> None:
    if t % 3 == 0:
        store.push(keys, grads)
        store.pull(keys, out=outs)
    elif t % 3 == 1:
        store.pushpull(keys, grads)
    else:
        for work in [store.pushpull(k, g, async_op=True) for k, g in zip(keys, grads, strict=True)]:
            work.wait()


def going_on() -> dict[str, float]:
    """Rounds that continue without a worker, until the test ends them."""
    with gpu() as made:
        store = kv.create("shared", on_peer_loss="continue")
        store.init(["stop", *SIZES], [np.zeros(1, F), *(made.array(np.zeros(n, F)) for n in SIZES.values())])
        tell("working")
        stop, last, told = np.zeros(1, F), {}, False
        while not stop[0]:
            if store.rank == 0 and not told:
                told = hear_now() == "stop"
            store.pushpull("stop", np.full(1, told and store.rank == 0, F), out=stop)
            for key, n in SIZES.items():
                value = made.array(np.full(n, 10**store.rank, F))
                store.pushpull(key, value)
                found = value.get()
                assert (found == found[0]).all()
                last[key] = float(found[0])
        store.close()
    return last


def hear_now() -> str:
    try:
        return hear(0)
    except TimeoutError:
        return ""
