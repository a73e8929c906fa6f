"""The processes of jobs of the shared store in the tests; `jobs.py` runs these.

Every process knows the values of all of them, computes the expected result with a store of its own, and
returns a digest of the actual one, which the test compares between processes.
"""

from __future__ import annotations

import contextlib
import hashlib
import resource
import sys
import warnings
from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest
from references import Array, assert_same_bits, draw, dtype_of, knobs, total
from tested_store import by_hosts, create, held

import kvstore as kv
from kvstore.kernels import cpu
from kvstore.store import can_divide_values, start_pushpull

F = np.float32
Pairs = Iterator[tuple[Array, Array]]
warnings.filterwarnings("ignore", message=".*float16.*")


class Digest:
    """Of everything that was received."""

    def __init__(self) -> None:
        self._hash = hashlib.blake2b(digest_size=16)

    def add(self, *arrays: Array) -> None:
        for array in arrays:
            self._hash.update(np.ascontiguousarray(array).tobytes())

    def hex(self) -> str:
        return self._hash.hexdigest()


def table(ids: Any, data: Array, shape: tuple[int, ...]) -> kv.RowSparseArray:
    return kv.RowSparseArray(data, ids, shape)


# ------------------------------------------------------------------------------------------------------ bits


def sizes_of(dtype: np.dtype[Any]) -> list[int]:
    """Elements: none, one, around 64 KB, around a chunk of 128 KB, several chunks, several MB."""
    small, chunk = 65536 // dtype.itemsize, 131072 // dtype.itemsize
    return [0, 1, 5, small - 1, small, small + 1, chunk, chunk + 1, 3 * chunk + 7, 20 * chunk + 3]


class Values:
    """The values of all workers, cut anew from a pool for every round."""

    def __init__(self, name: str, workers: int, seed: int) -> None:
        self.dtype = dtype_of(name)
        self._length = sizes_of(self.dtype)[-1]
        drawn = [draw(name, 70_001, seed + w, special=True) for w in range(workers)]
        self._pools = [np.resize(values, self._length + 999) for values in drawn]
        self._turn = 0

    def next(self, n: int) -> list[Array]:
        self._turn += 37
        return [pool[self._turn % 900 :][:n].copy() for pool in self._pools]


def sums(name: str, seed: int) -> str:
    """Every verb and every place of an array, at every size."""
    store = create()
    values, digest = Values(name, store.num_workers, seed), Digest()
    sizes = sizes_of(values.dtype)
    keys = [f"k{n}" for n in sizes]
    store.init(keys, [np.zeros(n, values.dtype) for n in sizes])
    homes = {n: store.empty(f"k{n}") for n in sizes}
    with kv.create("local", processes=1) as local:
        local.init(keys, [np.zeros(n, values.dtype) for n in sizes])

        def expected(n: int, parts: list[Array]) -> Array:
            local.push(f"k{n}", by_hosts(parts))
            out = np.empty(n, values.dtype)
            local.pull(f"k{n}", out=out)
            return out

        for n in sizes:
            for way in (in_two, private, at_home, pushed_from_home, to_outs, several, pulled_twice):
                check(f"{way.__name__}, {n} elements", way(store, values, n, homes[n], expected))
        check("together", together(store, values, sizes, homes, expected))
        for n in sizes:
            assert_same_bits(held(store, f"k{n}"), local.view(f"k{n}"))
            digest.add(held(store, f"k{n}"))
    store.barrier()
    store.close()
    return digest.hex()


def check(what: str, pairs: Pairs) -> None:
    """Each first array must be the second one."""
    try:
        for got, want in pairs:
            assert_same_bits(got, want)
    except AssertionError as error:
        raise AssertionError(f"{what}: {error}") from None


def in_two(store: Any, values: Values, n: int, home: Array, expected: Any) -> Pairs:
    parts, out = values.next(n), np.empty(n, values.dtype)
    mine = parts[store.rank].copy()
    store.push(f"k{n}", mine)
    mine[...] = 0  # a push has read its value
    store.pull(f"k{n}", out=out)
    yield out, expected(n, parts)


def private(store: Any, values: Values, n: int, home: Array, expected: Any) -> Pairs:
    for _ in range(3):
        parts = values.next(n)
        mine = parts[store.rank].copy()
        store.pushpull(f"k{n}", mine)
        yield mine, expected(n, parts)


def at_home(store: Any, values: Values, n: int, home: Array, expected: Any) -> Pairs:
    for _ in range(3):
        parts = values.next(n)
        home[...] = parts[store.rank]
        store.pushpull(f"k{n}", home)
        yield home.copy(), expected(n, parts)


def pushed_from_home(store: Any, values: Values, n: int, home: Array, expected: Any) -> Pairs:
    parts, out = values.next(n), np.empty(n, values.dtype)
    home[...] = parts[store.rank]
    store.push(f"k{n}", home)
    store.pull(f"k{n}", out=out)
    yield out, expected(n, parts)
    yield home.copy(), parts[store.rank]


def to_outs(store: Any, values: Values, n: int, home: Array, expected: Any) -> Pairs:
    for source in (None, home):
        parts = values.next(n)
        mine = parts[store.rank].copy()
        if source is not None:
            source[...] = mine
            mine = source
        outs = [np.empty(n, values.dtype) for _ in range(3)]
        store.pushpull(f"k{n}", mine, out=outs)
        want = expected(n, parts)
        for out in outs:
            yield out, want
        yield mine.copy(), parts[store.rank]


def several(store: Any, values: Values, n: int, home: Array, expected: Any) -> Pairs:
    """Each worker's own values are summed, and rounded, first."""
    sets = [values.next(n) for _ in range(3)]
    want = expected(n, [total([parts[w] for parts in sets]) for w in range(store.num_workers)])
    mine = [parts[store.rank].copy() for parts in sets]
    store.pushpull(f"k{n}", mine)
    for array in mine:
        yield array, want


def pulled_twice(store: Any, values: Values, n: int, home: Array, expected: Any) -> Pairs:
    """Two pushes, one after the other, make two rounds."""
    first, second = values.next(n), values.next(n)
    out = np.empty(n, values.dtype)
    store.push(f"k{n}", first[store.rank])
    store.push(f"k{n}", second[store.rank])
    store.pull(f"k{n}", out=out)
    expected(n, first)
    yield out, expected(n, second)


def together(store: Any, values: Values, sizes: list[int], homes: dict[int, Array], expected: Any) -> Pairs:
    keys = [f"k{n}" for n in sizes]
    for _ in range(2):
        parts = {n: values.next(n) for n in sizes}
        mine = []
        for i, n in enumerate(sizes):  # every other one lives in the store
            array = homes[n] if i % 2 else parts[n][store.rank].copy()
            array[...] = parts[n][store.rank]
            mine.append(array)
        store.pushpull(keys, mine)
        for n, array in zip(sizes, mine, strict=True):
            yield array.copy(), expected(n, parts[n])
        parts = {n: values.next(n) for n in sizes}
        outs = [np.empty(n, values.dtype) for n in sizes]
        store.push(keys, [parts[n][store.rank] for n in sizes])
        store.pull(keys, out=outs)
        for n, array in zip(sizes, outs, strict=True):
            yield array, expected(n, parts[n])


# ------------------------------------------------------------------------------------------------- quotients


def quotients(on_peer_loss: str) -> str:
    """Divided values have the bits of a division before the sum, at any place and with any summing worker."""
    store = kv.create("shared", on_peer_loss=on_peer_loss)
    values, digest = Values("float32", store.num_workers, 3), Digest()
    for n in sizes_of(values.dtype):
        key = f"q{n}"
        store.init(key, np.zeros(n, F))
        home = store.empty(key)
        for level, stream, divisor in product(cpu.levels(), (0, 2**62), (2, 3, 1)):  # 1: nothing is left of 3
            for mine, waits in product((np.empty(n, F), home), (False, True)):
                parts = values.next(n)
                mine[...] = parts[store.rank]
                assert can_divide_values(store, [mine])
                with knobs(level=level, stream=stream):
                    start_pushpull(store, [key], [mine], None, divisor, waits).wait()
                with np.errstate(all="ignore"):
                    wanted = total([part / F(divisor) for part in parts])
                assert_same_bits(mine, wanted)
                assert_same_bits(held(store, key), wanted)
                digest.add(mine)
    store.barrier()
    store.close()
    return digest.hex()


def updates_by_quotients(updater: str) -> str:
    """Rules of C and of Python, which sum the pushed values themselves, divide them as well."""
    store, digest = kv.create("shared"), Digest()
    ranks = range(store.num_workers)
    for n in (5, 20_000, 100_003):
        store.init(f"u{n}", np.ones(n, F))
    if updater == "python":
        store.set_updater(_add)
    else:
        store.set_optimizer(kv.optimizer.SGD(learning_rate=-1.0))
    for n in (5, 20_000, 100_003):
        parts = [draw("float32", n, rank) for rank in ranks]
        for divisor in (4, 3):
            before, mine = held(store, f"u{n}").copy(), parts[store.rank].copy()
            start_pushpull(store, [f"u{n}"], [mine], None, divisor).wait()
            wanted = before + total([part / F(divisor) for part in parts])
            np.testing.assert_allclose(mine, wanted, rtol=1e-6)
            digest.add(mine)
    store.barrier()
    store.close()
    return digest.hex()


def quotients_beside_rows() -> str:
    """Python sums a round in which one worker has pushed rows, and the others arrays that count divided."""
    store, digest = kv.create("shared"), Digest()
    shape, ids = (300, 64), [3, 5, 299]
    store.init("r", np.zeros(shape, F))
    parts = [draw("float32", 300 * 64, rank).reshape(shape) for rank in range(store.num_workers)]
    for _ in range(3):
        wanted = np.zeros(shape, F)
        wanted[ids] = parts[0][ids]
        for part in parts[1:]:
            wanted += part / F(3)
        mine = parts[store.rank].copy()
        if store.rank == 0:
            store.push("r", table(ids, mine[ids], shape))
            store.pull("r", out=mine)
        else:
            start_pushpull(store, ["r"], [mine], None, 3).wait()
        np.testing.assert_array_equal(mine, wanted)
        digest.add(mine)
    store.barrier()
    store.close()
    return digest.hex()


def _add(key: Any, merged: Array, stored: Array) -> None:
    stored += merged


# --------------------------------------------------------------------------------------------------- overlaps


def in_all_ways(x: Array, y: Array) -> list[tuple[bool, list[str], list[Any], list[Any]]]:
    """Whether in one call, keys, values, outs: of memory that overlaps. `y` is of another type."""
    n = x.size * 3 // 4
    both, one, other = ["a", "b"], x[:n], x[-n:]
    values = [np.arange(n, dtype=x.dtype) % 7, np.arange(n, dtype=x.dtype) % 11]
    same = y.view(x.dtype)[:n]
    ways: list[tuple[list[str], list[Any], list[Any]]] = [
        (both, values, [one, other]),
        (["a"], values[:1], [[one, other]]),
        (both, values, [[one, y[:n], same], [other, y[-n:]]]),
        (both, values, [[y[-n:], same], [other, y[:n], x[::-1][:n]]]),
    ]
    into: list[tuple[list[str], list[Any], list[Any]]] = [
        (both, [one, other], [one, other]),
        (both, [one, other], [other, one]),
        (["a"], [one], [other]),
    ]
    return [*((fused, *way) for fused in (True, False) for way in ways), *((True, *way) for way in into)]


def overlapping(store: Any, size: int, way: int, parts: int) -> list[Array]:
    """Arrays and keys after two such calls; a store of one process gets the values of all workers."""
    x, y = np.arange(size, dtype=np.float32) % 13, np.zeros(size, np.float64)
    fused, names, values, outs = in_all_ways(x, y)[way]
    keys = [f"{size} {way} {name}" for name in names]
    store.init(keys, [np.zeros_like(value) for value in values])
    for _ in range(2):
        pushed = [[value, *(value.copy() for _ in range(1, parts))] for value in values]
        if fused:
            store.pushpull(keys, pushed, out=outs)
        else:
            store.push(keys, pushed)
            store.pull(keys, out=outs)
    stored = [np.empty_like(value) for value in values]
    store.pull(keys, out=stored)
    return [x, y, *stored]


def overlaps() -> str:
    """Arrays of one call that overlap end as in a store of one process, and nothing stored is spoiled."""
    digest = Digest()
    with create() as store, kv.create("local", processes=1) as local:
        for size in (16, 20_000, 300_000):
            for way in range(11):
                want = overlapping(local, size, way, store.num_workers)
                for got, wanted in zip(overlapping(store, size, way, 1), want, strict=True):
                    assert_same_bits(got, wanted)
                    digest.add(got)
    return digest.hex()


# ------------------------------------------------------------------------------------------------- optimizers

OPTIMIZERS: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9, "wd": 0.01}),
    ("sgd", {"momentum": 0.9, "multi_precision": True, "clip_gradient": 0.5}),
    ("nag", {"momentum": 0.9}),
    ("adam", {}),
    ("adam", {"multi_precision": True, "wd": 0.01}),
    ("adamw", {"wd": 0.01}),
    ("adagrad", {}),
    ("adadelta", {}),
    ("adamax", {}),
    ("nadam", {}),
    ("rmsprop", {}),
    ("rmsprop", {"momentum": 0.5, "centered": True}),
    ("ftrl", {}),
    ("ftml", {}),
    ("signum", {"momentum": 0.9}),
    ("sgld", {}),
    ("dcasgd", {"momentum": 0.5}),
    ("lamb", {"wd": 0.01}),
    ("lamb", {"multi_precision": True}),
    ("lars", {"momentum": 0.9}),
    ("groupadagrad", {}),
    ("test", {}),
]

SHAPES: list[tuple[str, tuple[int, ...], str]] = [
    ("scalar", (1, 1), "float32"),
    ("small", (30, 7), "float32"),
    ("half", (50, 20), "float16"),
    ("large", (290, 301), "float32"),
    ("large half", (90, 1001), "float16"),
    ("double", (40, 501), "float64"),
]


def start_of(shape: tuple[int, ...], name: str, seed: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(dtype_of(name))


def optimizers(rounds: int = 3, every: int = 1) -> str:
    """Optimizers on keys of each kind, compared with a local store that gets the values by rank."""
    digest = Digest()
    for name, settings in OPTIMIZERS[::every]:
        with create() as store, kv.create("local", processes=1) as local:
            for made in (store, local):
                made.init(
                    [key for key, _, _ in SHAPES],
                    [start_of(shape, kind, i) for i, (_, shape, kind) in enumerate(SHAPES)],
                )
                made.set_optimizer(kv.optimizer.create(name, **settings))
            train(store, local, name, rounds, digest)
            store.barrier()
    return digest.hex()


def schedules() -> str:
    """The schedule of each optimizer begins with it, without regard to earlier pushes."""
    digest = Digest()
    with create() as store, kv.create("local", processes=1) as local:
        for made in (store, local):
            made.init([key for key, _, _ in SHAPES], [start_of(shape, kind, 1) for _, shape, kind in SHAPES])
        train(store, local, "nothing", 2, digest)
        for begin in (0, 1):
            for made in (store, local):
                schedule = kv.optimizer.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=1.0)
                rule = kv.optimizer.SGD(lr_scheduler=schedule, begin_num_update=begin)
                made.set_optimizer(rule)
            train(store, local, f"a schedule from {begin} on", 3, digest)
        store.barrier()
    return digest.hex()


def train(store: Any, local: Any, name: str, rounds: int, digest: Digest) -> None:
    """Some rounds by different verbs; the weights must be those of `local`."""
    for i in range(rounds):
        for k, (key, shape, kind) in enumerate(SHAPES):
            parts = [start_of(shape, kind, 1000 * i + 10 * k + w) for w in range(store.num_workers)]
            out = np.empty_like(parts[0])
            mine = parts[store.rank].copy()
            local.push(key, by_hosts(parts))
            if i % 3 == 0:
                store.push(key, mine)
                store.pull(key, out=out)
            elif i % 3 == 1:
                store.pushpull(key, mine, out=out)
                assert_same_bits(mine, parts[store.rank])
            else:
                home = store.empty(key)
                home[...] = mine
                store.pushpull(key, home)
                out[...] = home
            check(f"{name}, key {key!r}, round {i}", iter([(out, local.view(key))]))
            digest.add(out)


class Momentous(kv.optimizer.Optimizer):
    """A rule of the test's own, with a state."""

    def create_state(self, index: Any, weight: Array) -> Any:
        return np.zeros_like(weight)

    def update(self, index: Any, weight: Array, grad: Any, state: Any) -> None:
        self._update_count(index)
        state += grad
        weight -= F(self._get_lr(index)) * state


def own_rule() -> str:
    """A rule that is registered, and one that is not, and a plain callable."""
    kv.optimizer.register(Momentous)
    digest = Digest()

    class Unregistered(Momentous):
        pass

    def rule(key: Any, merged: Array, stored: Array) -> None:
        stored *= F(0.5)
        stored += merged

    def prepare(store: Any, what: Any) -> None:
        store.init([key for key, _, _ in SHAPES], [start_of(s, kind, 1) for _, s, kind in SHAPES])
        if isinstance(what, type):
            store.set_optimizer(what(learning_rate=0.1))
        else:
            store.set_updater(what)

    for what in (Momentous, Unregistered, rule):
        with create() as store, kv.create("local", processes=1) as local:
            prepare(store, what)
            prepare(local, what)
            train(store, local, what.__name__, 4, digest)
            store.barrier()
    return digest.hex()


# ----------------------------------------------------------------------------------------------------- golden


def golden_sums(path: str) -> str:
    """The recorded values, dealt out to the workers in order; MXNet's `device` adds in that order."""
    recorded, digest = np.load(path), Digest()
    store = create()
    n, rank = store.num_workers, store.rank
    for name in ("float32", "float64", "int32", "int64", "int8", "uint8"):
        values = recorded[f"{name}_values"]
        store.init(name, np.zeros_like(values[0]))
        out = np.empty_like(values[0])
        store.pushpull(name, values[rank], out=out)
        np.testing.assert_array_equal(out.view(np.uint8), recorded[f"{name}_device_sum{n}"].view(np.uint8))
        digest.add(out)
        if "int" in name:  # exact in any order: all eight, several to each worker
            share = 8 // n
            store.pushpull(name, list(values[rank * share : (rank + 1) * share]), out=out)
            np.testing.assert_array_equal(out, recorded[f"{name}_device_sum8"])
            digest.add(out)
    special = [recorded["special_a"], recorded["special_b"]]
    store.init("special", np.zeros_like(special[0]))
    if n == 2:
        store.push("special", special[rank])
        np.testing.assert_array_equal(held(store, "special"), recorded["special_sum"])
    store.barrier()
    store.close()
    return digest.hex()


def golden_rows(path: str) -> str:
    """The recorded row-sparse values, one after the other to the workers."""
    recorded, digest = np.load(path), Digest()
    ids: list[list[int]] = [[1, 3], [0, 3, 5], [3], [1, 5], []]
    values = [
        table(rows, dense[rows], (6, 4))
        for dense, rows in zip(recorded["rsp_dense_inputs"], ids, strict=True)
    ]
    with create() as store:
        store.init("w", kv.RowSparseArray.zeros((6, 4)))
        last = store.rank == store.num_workers - 1
        store.push("w", values[store.rank :] if last else values[store.rank])
        result = held(store, "w")
        np.testing.assert_array_equal(result.indices, recorded["rsp_device_idx"])
        np.testing.assert_allclose(result.data, recorded["rsp_device_data"], rtol=1e-6)
        digest.add(result.data)
        store.barrier()
    return digest.hex()


def golden_optimizers(folder: str) -> str:
    """Recorded gradients, an equal part from each worker: their sum is exact."""
    sys.path.insert(0, folder)
    import test_golden as recorded

    digest = Digest()
    for name in sorted(set(recorded.DENSE) - set(recorded.DIFFERS)):
        with create() as store:
            for key in "ab":
                store.init(key, recorded.GOLDEN[f"w0_{key}"])
            store.set_optimizer(recorded.make(name))

            def step(key: str, grad: Array, weight: Array, store: Any = store) -> None:
                store.push(key, grad / F(store.num_workers))
                store.pull(key, out=weight)

            ours = recorded.dense_run(name, step)
            for key in "ab":
                gap = recorded.distance(ours[key], recorded.GOLDEN[f"{name}_{key}"])
                assert gap <= recorded.LIMIT, (name, key, gap)
                digest.add(*ours[key])
            store.barrier()
    return digest.hex()


# ------------------------------------------------------------------------------------------------------- rows


def random_rows(shape: tuple[int, ...], seed: int, kind: str = "float32") -> kv.RowSparseArray:
    rng = np.random.default_rng(seed)
    ids = np.flatnonzero(rng.random(shape[0]) < rng.choice([0.0, 0.1, 0.5, 1.0]))
    return table(ids, rng.standard_normal((len(ids), *shape[1:])).astype(dtype_of(kind)), shape)


def same_rows(one: kv.RowSparseArray, other: kv.RowSparseArray) -> None:
    np.testing.assert_array_equal(one.indices, other.indices)
    assert_same_bits(np.ascontiguousarray(one.data), np.ascontiguousarray(other.data))


ROW_RULES: list[tuple[str, dict[str, Any]] | None] = [
    None,
    ("sgd", {"momentum": 0.9, "wd": 0.01}),
    ("sgd", {"momentum": 0.9, "lazy_update": True}),
    ("adam", {"lazy_update": True}),
    ("adam", {}),
    ("adagrad", {}),
    ("ftrl", {}),
    ("groupadagrad", {}),
]


def rows() -> str:
    """Row-sparse pushes into row-sparse and dense keys, with and without an optimizer."""
    digest, shape = Digest(), (60, 5)
    for rule in ROW_RULES:
        with create() as store, kv.create("local", processes=1) as local:
            for made in (store, local):
                made.init(["rows", "some", "dense"], [
                    table(np.arange(shape[0]), start_of(shape, "float32", 1), shape),
                    random_rows(shape, 5),
                    start_of(shape, "float32", 2),
                ])  # fmt: skip
                if rule is not None:
                    made.set_optimizer(kv.optimizer.create(rule[0], **rule[1]))
            for i in range(6):
                for k, key in enumerate(("rows", "some", "dense")):
                    push_rows(store, local, key, shape, 100 * i + 10 * k)
                    check_rows(store, local, key, shape, digest)
            store.barrier()
    return digest.hex()


HUGE_RULES: list[Any] = [
    None,
    ("sgd", {"momentum": 0.9, "lazy_update": True}),
    ("adam", {"wd": 0.01}),
    ("groupadagrad", {}),
]


def huge_rows() -> str:
    """A table that no machine could hold, of which each push touches other rows."""
    digest, shape = Digest(), (10**13, 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for rule in HUGE_RULES:
        with create() as store, kv.create("local", processes=1) as local:
            for made in (store, local):
                made.init("rows", kv.RowSparseArray.zeros(shape))
                if rule is not None:
                    made.set_optimizer(kv.optimizer.create(rule[0], **rule[1]))
            for i in range(6):
                parts = [huge_part(shape, 10 * i + w) for w in range(store.num_workers)]
                local.push("rows", parts)
                store.push("rows", parts[store.rank])
                pair = [kv.RowSparseArray.zeros(shape) for _ in range(2)]
                for made, out in zip((store, local), pair, strict=True):
                    made.row_sparse_pull("rows", out=out, row_ids=[0, *parts[0].indices, shape[0] - 1])
                same_rows(*pair)
                same_rows(store.view("rows"), local.view("rows"))
                digest.add(pair[0].data)
            assert store.placement()["rows"][0][1] < 2**20
            store.barrier()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**16  # KB
    return digest.hex()


class Refuses(kv.optimizer.Optimizer):
    """Adds the gradient to the weight, and raises in two of three rounds."""

    calls = 0

    def update(self, index: Any, weight: Array, grad: Any, state: Any) -> None:
        self._update_count(index)
        weight += np.asarray(grad)
        Refuses.calls += 1
        if Refuses.calls % 3:
            raise RuntimeError("not this one")


def rows_that_fail() -> str:
    """Rounds of rows fail, with a schedule, an own rule and a function: no part of them stays."""
    digest, shape = Digest(), (60_000, 8)
    with create() as store:
        store.init("rows", kv.RowSparseArray.zeros(shape))
        store.set_optimizer(kv.optimizer.SGD(learning_rate=1, momentum=0.5, lazy_update=True))
        part = table(np.arange(10), np.ones((10, 8), F), shape)
        store.push("rows", part)
        before = store.view("rows")
        if store.num_workers == 1:
            store.set_optimizer(Refuses())
            sizes, outcomes = [], []
            for i in range(12):
                with contextlib.suppress(kv.UpdaterError):
                    store.push("rows", table(np.arange(20) + 30 * i, np.ones((20, 8), F), shape))
                    store.wait()
                sizes.append(store._backend._job.reserved())
                outcomes.append(float(store.view("rows").todense().sum()))
            assert sizes[-1] == sizes[5], sizes
            assert outcomes[:6] == [outcomes[0]] * 2 + [outcomes[2]] * 3 + [outcomes[5]], outcomes
            assert outcomes[2] == outcomes[0] + 160
        digest.add(before.data, before.indices)
    return digest.hex()


def huge_files(folder: str) -> str:
    """Values of a huge table are saved and loaded; operations that need all rows are refused."""
    digest, shape = Digest(), (10**13, 4)
    for loads in (False, True):
        with create() as store, kv.create("local", processes=1) as local:
            for made in (store, local):
                made.init("rows", kv.RowSparseArray.zeros(shape))
                if loads:
                    made.load(f"{folder}/values-{store.rank}")
                made.set_optimizer(kv.optimizer.SGD(learning_rate=0.5, momentum=0.5, lazy_update=True))
            push_huge(store, local, shape, 7 + loads)
            with pytest.raises(kv.KVStoreError, match="states of table 'rows' with all its"):
                store.save_optimizer_states(f"{folder}/states-{store.rank}")
            store.barrier()  # the setting of one worker holds for all
            store.set_optimizer(kv.optimizer.LAMB())
            with pytest.raises(
                kv.UpdaterError, match=r"holds \d+ of 10000000000000 rows.* needs all of them"
            ):
                store.push("rows", huge_part(shape, 3))
                store.view("rows")
            same_rows(store.view("rows"), local.view("rows"))
            store.save(f"{folder}/values-{store.rank}")
            store.barrier()
            for made in (store, local):
                made.set_optimizer(kv.optimizer.Adam(lazy_update=True))
            push_huge(store, local, shape, 20)
            digest.add(store.view("rows").data, store.view("rows").indices)
            store.barrier()
    return digest.hex()


def push_huge(store: Any, local: Any, shape: tuple[int, ...], seed: int) -> None:
    parts = [huge_part(shape, seed + w) for w in range(store.num_workers)]
    local.push("rows", parts)
    store.push("rows", parts[store.rank])
    same_rows(store.view("rows"), local.view("rows"))


def huge_part(shape: tuple[int, ...], seed: int) -> kv.RowSparseArray:
    rng = np.random.default_rng(seed)
    ids = np.unique(np.concatenate([np.arange(10), rng.integers(0, shape[0], 300 * (1 + seed % 5))]))
    return table(ids, rng.standard_normal((len(ids), shape[1])).astype(F), shape)


ASSIGNED_RULES: list[Any] = [
    ("sgd", {"momentum": 0.9, "lazy_update": True, "multi_precision": True}),
    ("adam", {"multi_precision": True}),
]


def assigned_rows(folder: str) -> str:
    """Values and states are loaded between pushes; those of 16 bits have float32 copies."""
    digest, shape = Digest(), (40, 3)
    for rule in ASSIGNED_RULES:
        with create() as store, kv.create("local", processes=1) as local:
            for made in (store, local):
                made.init("rows", random_rows(shape, 3, "float16"))
                made.set_optimizer(kv.optimizer.create(rule[0], **rule[1]))
            for i in range(8):
                if i in (2, 3, 6):  # values of another order of rows, twice in turn
                    new = random_rows(shape, 900 + i, "float16")
                    local._backend.assign([("rows", [new])])
                    store.barrier()
                    if store.rank == 0:
                        store._backend.assign([("rows", [new])])
                    store.barrier()
                if i == 4:
                    there = f"{folder}/{rule[0]}-{store.rank}"
                    store.save_optimizer_states(there)
                    local.load_optimizer_states(there)
                    store.load_optimizer_states(there)
                push_rows16(store, local, shape, 50 * i)
                pair = [np.empty(shape, np.float16) for _ in range(2)]
                for made, out in zip((store, local), pair, strict=True):
                    made.pull("rows", out=out)
                check("rows", iter([(pair[0], pair[1])]))
                digest.add(pair[0])
            store.barrier()
    return digest.hex()


def push_rows16(store: Any, local: Any, shape: tuple[int, ...], seed: int) -> None:
    parts = [random_rows(shape, seed + w, "float16") for w in range(store.num_workers)]
    local.push("rows", parts)
    store.push("rows", parts[store.rank])


def push_rows(store: Any, local: Any, key: str, shape: tuple[int, ...], seed: int) -> None:
    parts: list[Any] = [random_rows(shape, seed + w) for w in range(store.num_workers)]
    if key != "dense" and seed % 200 == 0:  # a dense push into a row-sparse key, of one worker
        parts[-1] = start_of(shape, "float32", seed)
    local.push(key, [with_rows(part) for part in parts] if key != "dense" else parts)
    if seed % 300 == 100:
        halves = split(parts[store.rank])
        store.push(key, halves)
    else:
        store.push(key, parts[store.rank])


def with_rows(part: Any) -> kv.RowSparseArray:
    if isinstance(part, kv.RowSparseArray):
        return part
    return table(np.arange(len(part)), part, part.shape)


def split(part: Any) -> list[kv.RowSparseArray]:
    """Two values with no row in common, whose sum is `part`."""
    part = with_rows(part)
    n = len(part.indices) // 2
    return [
        table(part.indices[:n], part.data[:n], part.shape),
        table(part.indices[n:], part.data[n:], part.shape),
    ]


def check_rows(store: Any, local: Any, key: str, shape: tuple[int, ...], digest: Digest) -> None:
    got, want = np.empty(shape, F), np.empty(shape, F)
    store.pull(key, out=got)
    local.pull(key, out=want)
    check(f"key {key!r}", iter([(got, want)]))
    digest.add(got)
    if key == "dense":
        return
    pair = [kv.RowSparseArray.zeros(shape) for _ in range(2)]
    for made, out in zip((store, local), pair, strict=True):
        made.row_sparse_pull(key, out=out, row_ids=np.array([3, 3, 59, 0, 17 + store.rank]))
    same_rows(*pair)
    for made, out in zip((store, local), pair, strict=True):
        made.pull(key, out=out, ignore_sparse=False)
    same_rows(*pair)
