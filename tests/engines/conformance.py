"""The required behaviour of a store over an engine of collectives, in calls that all processes make.

    LAUNCHER python tests/engines/conformance.py ENGINE FOLDER

Every process runs every case, each on a new store, and writes what became of it to FOLDER/RANK.json. The
engine is real; results are compared with NumPy's.
"""

from __future__ import annotations

import itertools
import json
import logging
import os
import sys
import threading
import time
import traceback
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np

import kvstore as kv

DTYPES = ("float16", "bfloat16", "float32", "float64", "int8", "uint8", "int32", "int64")
#: Engines that detect different calls of workers; the others wait until the deadline.
COMPARING = ("mpi", "gloo", "nccl")
#: Engines whose operations meet by name, in any order.
BY_NAME = ("horovod", "byteps")
#: Engines that number keys as they are initialised: in one thread, so that all workers have the same numbers.
NUMBERED = ("byteps",)
#: Engines with which all workers call all stores of a process in one order.
IN_ONE_ORDER = ("nccl",)

CASES: dict[str, Callable[[Here], None]] = {}


def case(function: Callable[[Here], None]) -> Callable[[Here], None]:
    CASES[function.__name__] = function
    return function


@dataclass
class Here:
    """A process of the job, in a case."""

    engine: str
    folder: Path
    rank: int = 0
    size: int = 0
    store: Any = None
    stores: list[Any] = field(default_factory=list)

    def make(self, **options: Any) -> Any:
        """A store that is closed after the case."""
        store = kv.create(self.engine, timeout=30, **options)
        self.stores.append(store)
        return store

    @property
    def ranks(self) -> range:
        return range(self.size)


def value(rank: int, shape: Sequence[int] | int = (3, 5), dtype: Any = np.float32, salt: int = 0) -> Any:
    """The arrays that this rank pushes: small whole numbers, whose sums have no rounding in any type."""
    numbers = np.random.default_rng([salt, rank]).integers(-5, 6, shape)
    return np.asarray(numbers + 5 if np.dtype(dtype).kind == "u" else numbers).astype(dtype)


def total(here: Here, *arguments: Any, **others: Any) -> Any:
    """The sum of `value` over all ranks."""
    parts = [value(rank, *arguments, **others) for rank in here.ranks]
    return np.sum([part.astype(np.float64) for part in parts], axis=0).astype(parts[0].dtype)


def same(found: Any, expected: Any) -> None:
    """Equal in every bit, shape and type included."""
    assert found.dtype == expected.dtype, f"{found.dtype} is not {expected.dtype}"
    assert found.shape == expected.shape, f"{found.shape} is not {expected.shape}"
    if found.tobytes() != expected.tobytes():
        raise AssertionError(f"\n{found!r}\nis not\n{expected!r}")


def same_everywhere(here: Here, array: Any) -> None:
    """The same bits at all workers."""
    digests = np.zeros(here.size, np.int64)
    digests[here.rank] = zlib.crc32(np.ascontiguousarray(array).tobytes())
    store = here.make()
    store.init("digests", np.zeros(here.size, np.int64))
    store.pushpull("digests", digests)
    assert len(set(digests.tolist())) == 1, digests


def raises(
    error: type[Exception], words: str, call: Callable[..., Any], *arguments: Any, **others: Any
) -> None:
    try:
        call(*arguments, **others)
    except error as raised:
        assert words in str(raised), f"{words!r} is not in: {raised}"
        return
    raise AssertionError(f"no {error.__name__}")


# ----------------------------------------------------------------------------------------- properties


@case
def who_is_here(here: Here) -> None:
    store = here.store
    assert store.type == here.engine
    assert (store.rank, store.num_workers) == (here.rank, here.size)
    assert 0 <= store.local_rank < here.size
    assert store.is_capable("optimizer") is False
    raises(kv.ConfigError, "unknown capability", store.is_capable, "pickling")
    assert store.num_dead_nodes() == 0
    assert f"worker {here.rank} of {here.size}" in repr(store)
    ranks = np.zeros(here.size, np.int64)
    ranks[here.rank] = 1
    store.init("ranks", ranks)
    store.pushpull("ranks", ranks)
    same(ranks, np.ones(here.size, np.int64))


@case
def the_name_in_any_case(here: Here) -> None:
    with kv.create(here.engine.upper()) as store:
        assert store.type == here.engine


@case
def init_takes_the_value_of_rank_0(here: Here) -> None:
    mine = value(here.rank, salt=1)
    here.store.init("w", mine)
    found = np.empty_like(mine)
    here.store.pull("w", out=found)
    same(found, value(0, salt=1))
    mine[:] = 99  # nothing of the caller's is kept
    here.store.pull("w", out=found)
    same(found, value(0, salt=1))
    raises(kv.DuplicateKeyError, "'w'", here.store.init, "w", mine)


@case
def init_of_a_list(here: Here) -> None:
    keys = ["b", "a", "c/d e"]
    if here.rank % 2:  # dicts need not have the same order everywhere
        keys.reverse()
    shapes = {"a": (2, 2), "b": (7,), "c/d e": ()}
    here.store.init(keys, [value(here.rank, shapes[key], salt=len(key)) for key in keys])
    for key, shape in shapes.items():
        found = np.empty(shape, np.float32)
        here.store.pull(key, out=found)
        same(found, value(0, shape, salt=len(key)))


@case
def broadcast_gives_the_value_of_rank_0(here: Here) -> None:
    outs = [np.empty((3, 5), np.float32), np.empty((3, 5), np.float64)]
    mine = value(here.rank)
    here.store.broadcast("w", mine, out=outs)
    same(outs[0], value(0))
    same(outs[1], value(0).astype(np.float64))
    same(mine, value(here.rank))
    here.store.broadcast(3 * "w", mine, out=mine)
    same(mine, value(0))


@case
def a_broadcast_that_fails_leaves_no_key(here: Here) -> None:
    wrong = np.zeros(4, np.float32)
    raises(kv.ShapeError, "'w'", here.store.broadcast, "w", value(here.rank), out=wrong)
    assert here.store.keys() == []
    here.store.init("w", value(here.rank))
    same(here.store.view("w"), value(0))


# ------------------------------------------------------------------------------------------------- sums


@case
def push_puts_the_sum_in_the_place_of_the_value(here: Here) -> None:
    here.store.init("w", np.full((3, 5), 77, np.float32))
    for salt in range(3):
        here.store.push("w", value(here.rank, salt=salt))
        found = np.empty((3, 5), np.float32)
        here.store.pull("w", out=found)
        same(found, total(here, salt=salt))


@case
def pushpull_in_place(here: Here) -> None:
    here.store.init("w", value(0))
    for salt in range(3):
        mine = value(here.rank, salt=salt)
        here.store.pushpull("w", mine)
        same(mine, total(here, salt=salt))


@case
def pushpull_with_out_leaves_the_values(here: Here) -> None:
    here.store.init("w", value(0))
    mine, outs = value(here.rank, salt=4), [np.empty((3, 5), np.float32) for _ in range(2)]
    here.store.pushpull("w", mine, out=outs)
    for out in outs:
        same(out, total(here, salt=4))
    same(mine, value(here.rank, salt=4))


@case
def several_values_of_a_worker(here: Here) -> None:
    here.store.init("w", value(0))
    values = [value(here.rank, salt=salt) for salt in range(3)]
    expected = sum(total(here, salt=salt) for salt in range(3))
    out = np.empty_like(values[0])
    here.store.pushpull("w", values, out=out)
    same(out, expected)
    here.store.pushpull("w", values)
    for one in values:
        same(one, expected)


@case
def lists_of_keys(here: Here) -> None:
    shapes = [(4,), (2, 3), (), (1, 1, 7), (100, 3)]
    keys = [f"k{i}" for i in range(len(shapes))]
    here.store.init(keys, [np.zeros(shape, np.float32) for shape in shapes])
    for turn in range(3):
        mine = [value(here.rank, shape, salt=turn + 10 * i) for i, shape in enumerate(shapes)]
        outs = [np.empty(shape, np.float32) for shape in shapes]
        here.store.pushpull(keys, mine, out=outs)
        for i, (shape, out) in enumerate(zip(shapes, outs, strict=True)):
            same(out, total(here, shape, salt=turn + 10 * i))


@case
def nested_and_repeated_keys(here: Here) -> None:
    here.store.init(["a", "b"], [np.zeros(4, np.float32), np.zeros(2, np.float64)])
    a = [value(here.rank, 4, salt=salt) for salt in range(3)]
    b = value(here.rank, 2, np.float64)
    outs = [np.empty(4, np.float32), [np.empty(2, np.float64), np.empty(2, np.float32)]]
    here.store.push(["a", ["b", "a"]], [a[:2], [b, a[2]]])
    here.store.pull(["a", "b"], out=outs)
    same(outs[0], sum(total(here, 4, salt=salt) for salt in range(3)))
    same(outs[1][0], total(here, 2, np.float64))
    same(outs[1][1], total(here, 2, np.float64).astype(np.float32))


@case
def int_keys(here: Here) -> None:
    keys = [7, -3, np.int64(2**40)]
    here.store.init(keys, [np.zeros(3, np.float32)] * 3)
    mine = [value(here.rank, 3, salt=i) for i in range(3)]
    here.store.pushpull(keys, mine)
    for i in range(3):
        same(mine[i], total(here, 3, salt=i))
    raises(kv.KeyKindError, "str", here.store.push, "7", mine[0])


@case
def many_small_keys_of_several_types(here: Here) -> None:
    kinds = [np.float32, np.float64, np.int32, np.float16, np.uint8]
    keys = list(range(200))
    here.store.init(keys, [np.zeros(key % 9, kinds[key % 5]) for key in keys])
    mine = [value(here.rank, key % 9, kinds[key % 5], salt=key) for key in keys]
    here.store.pushpull(keys, mine)
    for key in keys:
        same(mine[key], total(here, key % 9, kinds[key % 5], salt=key))


@case
def every_element_type(here: Here) -> None:
    for name in DTYPES:
        dtype = np.dtype(getattr(ml_dtypes, name, name))
        here.store.init(name, value(here.rank, (5, 3), dtype))
        found = np.empty((5, 3), dtype)
        here.store.pull(name, out=found)
        same(found, value(0, (5, 3), dtype))
        mine = value(here.rank, (5, 3), dtype, salt=2)
        here.store.pushpull(name, mine)
        same(mine, total(here, (5, 3), dtype, salt=2))


@case
def halves_are_rounded_once_for_each_worker_and_once_for_all(here: Here) -> None:
    for dtype in (np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)):
        parts = [np.random.default_rng([rank]).uniform(1, 2, (3, 1000)).astype(dtype) for rank in here.ranks]
        workers = [part.astype(np.float32).sum(0).astype(dtype) for part in parts]
        expected = np.sum([worker.astype(np.float32) for worker in workers], axis=0).astype(dtype)
        here.store.init(dtype.name, np.zeros(1000, dtype))
        out = np.empty(1000, dtype)
        here.store.pushpull(dtype.name, list(parts[here.rank]), out=out)
        same(out, expected)


@case
def integers_wrap_around_and_lose_no_digit(here: Here) -> None:
    for name in ("int8", "uint8", "int32", "int64"):
        info = np.iinfo(name)
        highest = np.full(1003, info.max, name)  # more than a vector register has: those may saturate
        with np.errstate(over="ignore"):
            expected = np.multiply(highest, here.size, dtype=name, casting="unsafe")
        here.store.init(name, np.zeros(1003, name))
        here.store.pushpull(name, highest)
        same(highest, expected)
    odd = np.array([2**53 + 1], np.int64)  # no float64 has it
    here.store.init("odd", odd)
    same(here.store.view("odd"), odd)


@case
def what_is_not_finite_stays_so(here: Here) -> None:
    mine = np.array([np.inf, -np.inf if here.rank else np.inf, np.nan, -0.0, 1e38], np.float32)
    here.store.init("w", mine)
    with np.errstate(invalid="ignore", over="ignore"):
        here.store.pushpull("w", mine)
    assert np.isposinf(mine[0])
    assert np.isnan(mine[2])
    assert np.isnan(mine[1])
    assert np.signbit(mine[3])
    same_everywhere(here, np.isnan(mine))


@case
def scalars_and_empty_arrays(here: Here) -> None:
    here.store.init(["s", "e", "f"], [np.array(3.0), np.empty((0, 4), np.float32), np.empty(0, np.int8)])
    scalar, empty = np.array(here.rank + 1.0), np.empty((0, 4), np.float32)
    here.store.pushpull(["s", "e"], [scalar, empty])
    assert scalar == sum(rank + 1 for rank in here.ranks)
    here.store.push("e", empty)
    here.store.push(["e", "f"], [empty, np.empty(0, np.int8)])
    out = np.empty((0, 4), np.float64)
    here.store.pull("e", out=out)
    here.store.barrier()


@case
def large_arrays(here: Here) -> None:
    shapes = {"odd": (1_500_001,), "flat": (1, 600_011), "wide": (777, 1001)}
    kinds = {"odd": np.float32, "flat": np.float64, "wide": np.float16}
    here.store.init(list(shapes), [value(here.rank, shapes[key], kinds[key]) for key in shapes])
    for key in shapes:
        same(here.store.view(key), value(0, shapes[key], kinds[key]))
    mine = [value(here.rank, shapes[key], kinds[key], salt=3) for key in shapes]
    here.store.pushpull(list(shapes), mine)
    for key, found in zip(shapes, mine, strict=True):
        same(found, total(here, shapes[key], kinds[key], salt=3))
    here.store.pushpull("odd", mine[0])
    same(mine[0], here.size * total(here, shapes["odd"], salt=3))


@case
def arrays_larger_than_a_message(here: Here) -> None:
    if here.engine != "mpi":
        return  # MPI counts with 31 bits; the other engines have no such limit
    from kvstore.stores.collectives.mpi import backend as mpi

    limit, mpi._MOST = mpi._MOST, 3 * 4096
    try:
        here.store.init("w", value(here.rank, 100_001, np.float64))
        same(here.store.view("w"), value(0, 100_001, np.float64))
        mine = value(here.rank, 100_001, np.float64, salt=1)
        here.store.pushpull("w", mine)
        same(mine, total(here, 100_001, np.float64, salt=1))
    finally:
        mpi._MOST = limit


@case
def all_workers_get_the_same_bits(here: Here) -> None:
    here.store.init("w", np.zeros(100_003, np.float32))
    mine = np.random.default_rng([5, here.rank]).standard_normal(100_003).astype(np.float32)
    parts = [np.random.default_rng([5, rank]).standard_normal(100_003) for rank in here.ranks]
    here.store.pushpull("w", mine)
    np.testing.assert_allclose(mine, np.sum(parts, axis=0), rtol=1e-5, atol=1e-5)
    same_everywhere(here, mine)


@case
def arrays_of_any_layout(here: Here) -> None:
    here.store.init("w", value(here.rank, (6, 4)).T.copy().T)
    same(np.array(here.store.view("w")), value(0, (6, 4)))
    plain = value(here.rank, (6, 4), salt=1)
    fixed = plain.copy()
    fixed.flags.writeable = False
    spread = np.zeros((12, 8), np.float32)[::2, ::2]
    spread[...] = plain
    for pushed in (fixed, np.asfortranarray(plain), spread, plain.astype(">f4"), memoryview(plain)):
        strided = np.full((12, 4), 9, np.float32)
        here.store.pushpull("w", pushed, out=strided[::2])
        same(strided[::2].copy(), total(here, (6, 4), salt=1))
        assert (strided[1::2] == 9).all()
    here.store.pushpull("w", spread)
    same(spread.copy(), total(here, (6, 4), salt=1))
    raises(kv.ArrayError, "read-only", here.store.pushpull, "w", fixed)
    here.store.barrier()


@case
def a_pull_converts(here: Here) -> None:
    here.store.init("w", value(0))
    here.store.push("w", value(here.rank))
    outs = [np.empty((3, 5), dtype) for dtype in (np.float64, np.int32, np.float16, ">f4")]
    here.store.pull("w", out=outs)
    for out in outs:
        same(out, total(here).astype(out.dtype))


# -------------------------------------------------------------------------------------- in the background


@case
def many_under_way_end_in_any_order(here: Here) -> None:
    sizes = [1 + (37 * i) % 5000 for i in range(60)]
    here.store.init(list(range(60)), [np.zeros(n, np.float32) for n in sizes])
    mine = [value(here.rank, n, salt=i) for i, n in enumerate(sizes)]
    works = [
        here.store.pushpull(i, mine[i], priority=(i * (here.rank + 1)) % 7, async_op=True) for i in range(60)
    ]
    for i in np.random.default_rng([here.rank]).permutation(60):
        works[i].wait()
        same(mine[i], total(here, sizes[i], salt=int(i)))
        assert works[i].done()
        assert works[i].exception() is None


@case
def one_key_s_operations_keep_their_order(here: Here) -> None:
    here.store.init("w", value(0))
    outs = [np.empty((3, 5), np.float32) for _ in range(8)]
    works = []
    for salt, out in enumerate(outs):
        here.store.push("w", value(here.rank, salt=salt), async_op=True)
        works.append(here.store.pull("w", out=out, priority=salt, async_op=True))
    found = np.empty((3, 5), np.float32)
    here.store.pull("w", out=found)
    same(found, total(here, salt=7))
    for salt, (work, out) in enumerate(zip(works, outs, strict=True)):
        work.wait()
        same(out, total(here, salt=salt))


@case
def calls_that_wait_may_come_between(here: Here) -> None:
    here.store.init(["a", "b"], [np.zeros(5, np.float32)] * 2)
    a, b = value(here.rank, 5, salt=1), value(here.rank, 5, salt=2)
    work = here.store.pushpull("a", a, async_op=True)
    here.store.pushpull("b", b)
    here.store.init("c", np.full(5, here.rank, np.float32))
    here.store.barrier()
    work.wait()
    same(a, total(here, 5, salt=1))
    same(b, total(here, 5, salt=2))
    same(here.store.view("c"), np.zeros(5, np.float32))


@case
def an_init_may_come_while_sums_are_under_way(here: Here) -> None:
    sizes = [10, 100_000]
    here.store.init(["a", "b"], [np.zeros(size, np.float32) for size in sizes])
    for late in here.ranks:
        mine = [value(here.rank, size, salt=late) for size in sizes]
        if here.rank == late:
            time.sleep(0.1)
        works = [here.store.pushpull(key, mine[i], async_op=True) for i, key in enumerate("ab")]
        if here.rank != late:
            time.sleep(0.02)
        here.store.init(f"c{late}", np.full(1000, here.rank, np.float32))
        same(here.store.view(f"c{late}"), np.zeros(1000, np.float32))
        for work, found, size in zip(works, mine, sizes, strict=True):
            work.wait()
            same(found, total(here, size, salt=late))


@case
def wait_and_close_wait_for_all(here: Here) -> None:
    here.store.init(["a", "b"], [np.zeros(5, np.float32)] * 2)
    a, b = value(here.rank, 5, salt=1), value(here.rank, 5, salt=2)
    here.store.pushpull("a", a, async_op=True)
    here.store.wait()
    same(a, total(here, 5, salt=1))
    here.store.pushpull("b", b, async_op=True)
    here.store.close()
    same(b, total(here, 5, salt=2))


@case
def errors_in_the_background_come_with_wait(here: Here) -> None:
    here.store.init("w", value(0))
    raises(kv.KeyNotFoundError, "'v'", here.store.push("v", value(0), async_op=True).wait)
    raises(kv.ShapeError, "'w'", here.store.push("w", np.zeros(2, np.float32), async_op=True).wait)
    here.store.push("w", value(here.rank, salt=1))
    same(here.store.view("w"), total(here, salt=1))


@case
def the_order_of_calls_that_run_in_the_background(here: Here) -> None:
    here.store.init(["a", "b"], [np.zeros(5, np.float32)] * 2)
    mine = {key: value(here.rank, 5, salt=ord(key)) for key in "ab"}
    order = "ba" if here.rank == 0 else "ab"
    works = {key: here.store.pushpull(key, mine[key], async_op=True) for key in order}
    for key in "ab":
        if here.engine in COMPARING:
            raises(kv.ConfigError, "other workers", works[key].wait)
            same(mine[key], value(here.rank, 5, salt=ord(key)))
        else:
            assert here.engine in BY_NAME
            works[key].wait()
            same(mine[key], total(here, 5, salt=ord(key)))


# --------------------------------------------------------------------------------------- stores together


@case
def two_stores_at_once(here: Here) -> None:
    stores = [here.make(), here.make(group="other")]
    for store in stores:
        store.init("w", np.zeros(4, np.float32))
    mine = [value(here.rank, 4, salt=i) for i in range(2)]
    order = [0, 1] if here.rank % 2 or here.engine in IN_ONE_ORDER else [1, 0]  # no order between stores
    works = {i: stores[i].pushpull("w", mine[i], async_op=True) for i in order}
    for i in reversed(order):
        works[i].wait()
        same(mine[i], total(here, 4, salt=i))


@case
def two_threads_with_a_store_each(here: Here) -> None:
    if here.engine in IN_ONE_ORDER:
        return
    stores, problems = [here.make(), here.make()], []
    if here.engine in NUMBERED:
        for store in stores:
            store.init("w", np.zeros(1000, np.float32))

    def train(index: int) -> None:
        try:
            store = stores[index]
            if here.engine not in NUMBERED:
                store.init("w", np.zeros(1000, np.float32))
            for turn in range(20):
                mine = value(here.rank, 1000, salt=100 * index + turn)
                store.pushpull("w", mine)
                same(mine, total(here, 1000, salt=100 * index + turn))
        except BaseException:
            problems.append(traceback.format_exc())

    threads = [threading.Thread(target=train, args=(index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not problems, "\n".join(problems)


@case
def keys_that_a_second_thread_initialises(here: Here) -> None:
    """Refused where they are numbered, and the store stays as it was."""
    if here.engine not in NUMBERED:
        return
    refused = []

    def start() -> None:
        refused.append(raises(kv.ConfigError, "in that thread", here.store.init, "w", value(0)))

    thread = threading.Thread(target=start)
    thread.start()
    thread.join()
    assert len(refused) == 1
    assert here.store.keys() == []
    mine = value(here.rank, 4)
    here.store.init("w", mine)
    here.store.pushpull("w", mine)
    same(mine, total(here, 4))


@case
def a_barrier_waits_for_all(here: Here) -> None:
    (here.folder / f"arrived.{here.rank}").unlink(missing_ok=True)
    here.store.barrier()
    time.sleep(0.05 * here.rank)
    (here.folder / f"arrived.{here.rank}").touch()
    here.store.barrier()
    assert all((here.folder / f"arrived.{rank}").exists() for rank in here.ranks)
    here.store.barrier()


@case
def stores_are_closed_when_it_suits(here: Here) -> None:
    store = here.make()
    store.init("w", value(0))
    mine = value(here.rank)
    store.pushpull("w", mine)
    if here.rank:
        time.sleep(0.2)
        same(store.view("w"), total(here))
    store.close()
    store.close()
    for call in (
        lambda: store.push("w", mine),
        lambda: store.pull("w", out=mine),
        lambda: store.init("v", mine),
        lambda: store.pushpull("w", mine, async_op=True),
        store.barrier,
        store.keys,
    ):
        raises(kv.ClosedError, here.engine, call)
    same(mine, total(here))
    here.store.init("w", mine)  # other stores do not mind
    here.store.pushpull("w", mine)
    same(mine, here.size * total(here))


# ---------------------------------------------------------------------------------------------- mistakes


@case
def mistakes_of_one_worker_are_its_own(here: Here) -> None:
    here.store.init("w", value(0))
    if here.rank == here.size - 1:
        fit = value(0)
        raises(kv.KeyNotFoundError, "'v'", here.store.push, "v", fit)
        raises(kv.KeyNotFoundError, "'v'", here.store.pull, "v", out=fit)
        raises(kv.ShapeError, "'w'", here.store.push, "w", np.zeros(4, np.float32))
        raises(kv.ShapeError, "'w'", here.store.pushpull, "w", fit, out=np.zeros(4, np.float32))
        raises(kv.ShapeError, "'w'", here.store.pull, "w", out=np.zeros(4, np.float32))
        raises(kv.DTypeError, "'w'", here.store.push, "w", fit.astype(np.float64))
        raises(kv.KeyNotFoundError, "'v'", here.store.push, ["w", "v"], [fit, fit])
        raises(kv.ArrayError, "", here.store.push, "w", "text")
        raises(kv.KeyKindError, "", here.store.push, True, fit)
        raises(kv.DuplicateKeyError, "'w'", here.store.init, "w", fit)
    mine = value(here.rank, salt=1)
    here.store.pushpull("w", mine)
    same(mine, total(here, salt=1))


# ------------------------------------------------------------------------- keys that were never initialised


@case
def a_key_that_was_never_initialised_is_summed(here: Here) -> None:
    for turn in range(3):
        mine, out = value(here.rank, salt=turn), np.zeros((3, 5), np.float64)
        here.store.pushpull("v", mine, out=out)
        same(mine, value(here.rank, salt=turn))
        same(out, total(here, salt=turn).astype(np.float64))
        here.store.pushpull("v", mine)
        same(mine, total(here, salt=turn))
    assert here.store.keys() == []
    raises(kv.KeyNotFoundError, "'v'", here.store.pull, "v", out=mine)
    raises(kv.KeyNotFoundError, "'v'", here.store.push, "v", mine)
    here.store.init("v", value(here.rank, 2, salt=7))  # of another shape: nothing was kept
    same(here.store.view("v"), value(0, 2, salt=7))
    mine = value(here.rank, 2, salt=8)
    here.store.pushpull("v", mine)
    same(mine, total(here, 2, salt=8))


@case
def uninitialised_keys_of_all_types_shapes_and_lists(here: Here) -> None:
    shapes = [(), (7,), (3, 0, 2), (2, 3), (300, 200)]
    for number, dtype in enumerate((*DTYPES, "float32")):
        element = np.dtype(getattr(ml_dtypes, dtype, dtype))
        keys: list[Any] = [number * 10 + i for i in range(len(shapes))]
        mine = [[value(here.rank, shape, element), value(here.rank, shape, element)] for shape in shapes]
        here.store.pushpull(keys, mine)
        for shape, pair in zip(shapes, mine, strict=True):
            for found in pair:
                same(found, (2 * total(here, shape, element)).astype(element))
    assert here.store.keys() == []


@case
def uninitialised_keys_in_the_background(here: Here) -> None:
    here.store.init("w", np.zeros(5, np.float32))
    mine = {key: value(here.rank, 5, salt=ord(key)) for key in "wab"}
    works = [here.store.pushpull(key, array, async_op=True) for key, array in mine.items()]
    for work, (key, array) in zip(works, mine.items(), strict=True):
        work.wait()
        same(array, total(here, 5, salt=ord(key)))
    assert here.store.keys() == ["w"]


@case
def names_of_uninitialised_keys_are_nobody_elses(here: Here) -> None:
    """Any name that the store gives a key in front of the engine: a key may have this name, too."""
    names = ["v", "uninitialised v", "uninitialised 'v' (4,) float32", "uninitialised uninitialised v"]
    for name in names[1:]:
        here.store.init(name, np.zeros(4, np.float32))
    mine = [value(here.rank, 4, salt=i) for i in range(len(names))]
    order = names[::-1] if here.engine in BY_NAME and here.engine not in NUMBERED and here.rank else names
    works = [here.store.pushpull(name, mine[names.index(name)], async_op=True) for name in order]
    for work in works:
        work.wait()
    for i, array in enumerate(mine):
        same(array, total(here, 4, salt=i))


@case
def uninitialised_keys_that_differ_are_an_error_for_all(here: Here) -> None:
    if here.engine in BY_NAME and here.engine not in NUMBERED:
        return  # they wait for each other, until the deadline
    last = here.rank == here.size - 1
    pairs: list[tuple[Any, Any]] = [
        (("a", np.ones((2, 3), np.float32)), ("a", np.ones((3, 2), np.float32))),
        (("a", np.ones(6, np.float32)), ("a", np.ones(5, np.float32))),
        (("a", np.ones(6, np.float32)), ("b", np.ones(6, np.float32))),
        (("a", np.ones(6, np.float32)), ("a", np.ones(6, np.float16))),
        (("1", np.ones(6, np.float32)), (1, np.ones(6, np.float32))),
    ]
    for one, other in pairs:
        key, mine = other if last else one
        raises(kv.ConfigError, "other", here.store.pushpull, key, mine)
        assert (mine == 1).all()
    store = here.make()
    if here.engine in COMPARING:  # known here, unknown there
        store.init("w", np.ones(6, np.float32))
        key, mine = ("v" if last else "w"), np.ones(6, np.float32)
        raises(kv.ConfigError, "other", store.pushpull, key, mine)
        assert (store.view("w") == 1).all()
    mine = value(here.rank)
    store.pushpull("after", mine)
    same(mine, total(here))


@case
def mistakes_with_uninitialised_keys_are_their_worker_s_own(here: Here) -> None:
    here.store.init("w", value(0))
    if here.rank == here.size - 1:
        fit, other = value(0), np.zeros(4, np.float32)
        raises(kv.KeyNotFoundError, "'v'", here.store.pushpull, ["w", "v"], [fit, fit])
        raises(kv.ShapeError, "'v'", here.store.pushpull, "v", [fit, other])
        raises(kv.DTypeError, "'v'", here.store.pushpull, "v", [fit, fit.astype(np.float64)])
        raises(kv.ShapeError, "'v'", here.store.pushpull, "v", fit, out=other)
        raises(kv.KeyKindError, "", here.store.pushpull, 3, fit)
        raises(kv.DTypeError, "", here.store.pushpull, "v", np.zeros(3, np.int16))
        raises(kv.ArrayError, "", here.store.pushpull, "v", "text")
        raises(kv.KeyNotFoundError, "'v'", here.store.pushpull, "v", [])
        rows = kv.RowSparseArray(np.zeros((1, 3), np.float32), np.array([0]), (3, 3))
        raises(kv.CapabilityError, "row-sparse", here.store.pushpull, "v", rows)
    mine = value(here.rank, salt=1)
    here.store.pushpull("v", mine)
    same(mine, total(here, salt=1))


@case
def element_types_that_no_store_has(here: Here) -> None:
    for dtype in ("bool", "int16", "uint16", "uint32", "uint64", "complex64", "M8[s]"):
        raises(kv.DTypeError, "", here.store.init, dtype, np.zeros(3, dtype))
    assert here.store.keys() == []
    here.store.init("w", value(0))


@case
def an_init_that_differs_is_an_error_for_all(here: Here) -> None:
    shape = 4 if here.rank == 0 else 5
    raises(kv.ConfigError, "other keys, shapes or types", here.store.init, "w", np.zeros(shape, np.float32))
    dtype = np.float64 if here.rank == here.size - 1 else np.float32
    raises(kv.ConfigError, "other keys, shapes or types", here.store.init, "w", np.zeros(4, dtype))
    names = ["w", "v"] if here.rank == 0 else ["w", "u"]
    raises(kv.ConfigError, "other keys", here.store.init, names, [np.zeros(4, np.float32)] * 2)
    assert here.store.keys() == []
    mine = value(here.rank, 4)
    here.store.init("w", mine)
    here.store.pushpull("w", mine)
    same(mine, total(here, 4))


@case
def stores_of_two_groups_do_not_meet(here: Here) -> None:
    if here.engine in (*BY_NAME, *IN_ONE_ORDER):
        return  # they wait for their own until the deadline
    groups = ["a", "b"] if here.rank else ["b", "a"]
    for name in groups:  # in two orders, and once they are refused
        raises(kv.ConfigError, f"group {name!r}, and other workers", here.make, group=name)
    stores = [here.make(group=name) for name in sorted(groups)]
    for store in stores:
        store.init("w", value(0))
        mine = value(here.rank)
        store.pushpull("w", mine)
        same(mine, total(here))


@case
def a_push_that_differs_is_an_error_for_all(here: Here) -> None:
    if here.engine not in COMPARING:
        return  # faults.py: it ends at the deadline
    here.store.init(["a", "b", "c"], [value(0), value(0), np.zeros(70_000, np.float32)])
    last = here.rank == here.size - 1
    for keys in (["b" if last else "a"], ["c" if last else "b"], ["a", "c"] if last else ["a", "b"]):
        mine = [value(here.rank, 70_000 if key == "c" else (3, 5)) for key in keys]
        raises(kv.ConfigError, "other workers", here.store.pushpull, keys, mine)
        for key, array in zip(keys, mine, strict=True):
            same(array, value(here.rank, array.shape))
            same(here.store.view(key)[:1].copy(), (value(0) if key != "c" else np.zeros(1, np.float32))[:1])
    mine = value(here.rank)
    here.store.pushpull("a", mine)
    same(mine, total(here))


@case
def another_call_than_the_others_is_an_error_for_all(here: Here) -> None:
    """One worker initialises, loads, waits at a barrier or pushes while the others do something else."""
    if here.engine not in COMPARING:
        return  # they meet by name, and wait for theirs until the deadline
    store, path = here.store, here.folder / f"one.{here.rank}"
    store.init(["a", "b"], [np.zeros(4, np.float32), np.zeros(70_000, np.float32)])
    with kv.create("local", processes=1) as alone:
        alone.init("b", np.full(70_000, 7, np.float32))
        alone.save(path)
    calls = {
        "init": lambda: store.init("c", np.ones(3, np.float32)),
        "push": lambda: store.push("a", np.ones(4, np.float32)),
        "large push": lambda: store.pushpull(
            ["b", "a"], [np.ones(70_000, np.float32), np.ones(4, np.float32)]
        ),
        "later": lambda: store.push("a", np.ones(4, np.float32), async_op=True).wait(),
        "load": lambda: store.load(path),
        "barrier": store.barrier,
    }
    for one, others in itertools.permutations(calls, 2):
        if {one, others} == {"push", "later"}:
            continue
        for odd in (0, here.size - 1):
            call = calls[one if here.rank == odd else others]
            raises(kv.ConfigError, "other workers begin another operation", call)
            assert store.keys() == ["a", "b"]
            for key in "ab":
                assert not np.any(store.view(key)), f"{one} against {others}: {key} has changed"
            mine = value(here.rank, 70_000)
            out = np.empty_like(mine)
            store.pushpull("b", mine, out=out)
            same(out, total(here, 70_000))
            store.push("b", np.zeros(70_000, np.float32))
    store.barrier()


@case
def another_call_in_the_background(here: Here) -> None:
    """Several sums are in flight when one worker calls another operation."""
    if here.engine not in COMPARING:
        return
    store = here.store
    store.init(["a", "b"], [np.zeros(5, np.float32)] * 2)
    mine = {key: value(here.rank, 5, salt=ord(key)) for key in "ab"}
    first = store.pushpull("a", mine["a"], async_op=True)
    if here.rank == here.size - 1:
        raises(kv.ConfigError, "a barrier", store.barrier)
    else:
        raises(
            kv.ConfigError, "the sum of key b", store.push("b", np.ones(5, np.float32), async_op=True).wait
        )
    last = store.pushpull("b", mine["b"], async_op=True)
    for work, key in ((last, "b"), (first, "a")):
        work.wait()
        same(mine[key], total(here, 5, salt=ord(key)))


@case
def sums_and_objects_without_a_key(here: Here) -> None:
    store = here.store
    for count in (3, 70_000):
        for later in (False, True):
            mine = value(here.rank, count)
            work = store.all_reduce(mine, async_op=later)
            if work is not None:
                work.wait()
            same(mine, total(here, count))
    mean = np.full(3, here.rank, np.float64)
    store.all_reduce(mean, average=True)
    assert np.allclose(mean, sum(here.ranks) / here.size), mean
    everything = store.all_gather_object({"rank": here.rank, "text": "x" * 3000 * here.rank})
    assert [one["rank"] for one in everything] == list(here.ranks)
    last = here.size - 1
    found = store.broadcast_object(value(last, 7) if here.rank == last else None, root=last)
    same(found, value(last, 7))
    assert store.keys() == []


@case
def a_sum_without_a_key_that_differs_is_an_error_for_all(here: Here) -> None:
    odd = here.rank == here.size - 1
    for shapes in ((3, 4), (3, 70_000), (70_000, 3), (70_000, 80_000)):
        mine = value(here.rank, shapes[odd])
        raises(kv.ShapeError, "all workers make the same calls", here.store.all_reduce, mine)
        same(mine, value(here.rank, shapes[odd]))
    mine = value(here.rank)
    here.store.all_reduce(mine)
    same(mine, total(here))


@case
def keys_of_any_text(here: Here) -> None:
    keys = ["\\ud800", "a\0b", "ключ 😀", "", "é", "\\xe9", "w" * 10_000, "kvstore.init"]
    here.store.init(keys, [value(here.rank, 3 + i) for i in range(len(keys))])
    mine = [value(here.rank, 3 + i, salt=i) for i in range(len(keys))]
    here.store.pushpull(keys, mine)
    for i, key in enumerate(keys):
        same(mine[i], total(here, 3 + i, salt=i))
        same(here.store.view(key), mine[i])
        here.store.push(key, value(here.rank, 3 + i, salt=2 * i))
        same(here.store.view(key), total(here, 3 + i, salt=2 * i))
    here.store.init("and another", np.ones(2, np.float32))
    strange = here.make(group="\ud800 \0")
    strange.init("w", value(0))
    strange.barrier()


@case
def engines_compare_shapes_by_themselves(here: Here) -> None:
    """Below the store, which has compared them at init: under the same names, at another place of a list."""
    if here.engine == "byteps":
        return  # it cannot
    engine = here.store._backend.engine
    for odd in (0, 1):
        arrays = [np.ones(3 + (here.rank if i == odd else 0), np.float32) for i in range(2)]
        if here.engine in COMPARING:
            finish = engine.allreduce([(f"{odd}{i}", array) for i, array in enumerate(arrays)])
            raises(kv.ConfigError, "other workers", finish)
        else:  # in a list they would wait for each other
            raises(kv.ConfigError, "Mismatched", engine.allreduce([(f"{odd}", arrays[odd])]))
    here.store.init("w", value(0))
    here.store.pushpull("w", value(here.rank))


@case
def options_that_have_no_meaning_here(here: Here) -> None:
    raises(kv.ConfigError, "on_peer_loss", kv.create, here.engine, on_peer_loss="continue")
    raises(kv.ConfigError, "unknown option", kv.create, here.engine, tension=3)


# ------------------------------------------------------------------------------------------- refusals


class Lines(logging.Handler):
    """The lines that were logged in a block."""

    def __enter__(self) -> list[str]:
        self.lines: list[str] = []
        logging.getLogger("kvstore").addHandler(self)
        return self.lines

    def __exit__(self, *error: object) -> None:
        logging.getLogger("kvstore").removeHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@case
def optimizers(here: Here) -> None:
    store, sgd, path = here.store, kv.optimizer.SGD(learning_rate=0.5), str(here.folder / f"s{here.rank}")
    store.init("w", value(0))
    calls = [
        (store.set_optimizer, (sgd,)),
        (store.save_optimizer_states, (path,)),
        (store.load_optimizer_states, (path,)),
    ]
    with Lines() as lines:
        for call, arguments in 2 * calls:
            if here.engine == "horovod":
                call(*arguments)
            else:
                raises(kv.CapabilityError, here.engine, call, *arguments)
                raises(NotImplementedError, here.engine, call, *arguments)
    if here.engine == "horovod":  # as in MXNet, but not in silence
        assert sorted(line.split()[0] for line in lines) == sorted(call.__name__ for call, _ in calls)
    assert not Path(path).exists()
    raises(kv.ArgumentError, "Optimizer", store.set_optimizer, "sgd")
    raises(kv.CapabilityError, here.engine, store.set_learning_rate, 0.1)
    raises(kv.CapabilityError, here.engine, store.update_optimizer, wd=0.1)
    raises(kv.CapabilityError, "updaters", store.set_updater, lambda key, merged, stored: None)
    store.set_updater(None)
    mine = value(here.rank)
    store.pushpull("w", mine)
    same(mine, total(here))


@case
def rows_compression_and_the_rest(here: Here) -> None:
    store = here.store
    rows = kv.RowSparseArray(np.ones((2, 3), np.float32), np.array([0, 4]), (6, 3))
    raises(kv.CapabilityError, "row-sparse", store.init, "t", rows)
    store.init("w", np.zeros((6, 3), np.float32))
    raises(kv.CapabilityError, "row-sparse", store.push, "w", rows)
    raises(kv.ArrayError, "dense", store.row_sparse_pull, "w", out=rows, row_ids=np.array([0]))
    raises(
        kv.CapabilityError, "'shared' and 'dist_sync' do", store.set_gradient_compression, {"type": "2bit"}
    )
    raises(kv.CapabilityError, "'shared' and 'dist_sync' do", store.save_residuals, "f")
    raises(kv.CapabilityError, "join", store.join)
    raises(kv.CapabilityError, "not support bind", store.bind, "w", value(0, (6, 3)))
    store.send_command_to_servers(0, "nobody is there")
    store.pull("w", out=rows)  # left alone, as in every store
    same(rows.data, np.ones((2, 3), np.float32))


@case
def views_and_numbers(here: Here) -> None:
    here.store.init("w", value(0))
    view = here.store.view("w")
    assert not view.flags.writeable
    before = view.copy()
    here.store.push("w", value(here.rank, salt=1))
    same(here.store.view("w"), total(here, salt=1))
    same(view.copy(), before)  # good until the push, and never torn
    assert here.store.placement() == {"w": [(f"worker {here.rank}", 60)]}
    numbers = here.store.statistics()
    assert (numbers.keys, numbers.nbytes, numbers.pushes) == (1, 60, 1)
    raises(kv.ShapeError, "'w'", here.store.push, "w", np.zeros(99, np.float32))
    assert here.store.statistics() == numbers, "what raised does not count"
    assert "w" in here.store
    assert "v" not in here.store
    assert len(here.store) == 1
    home = here.store.attach("w", value(here.rank, salt=2))
    here.store.pushpull("w", home)
    same(home, total(here, salt=2))


@case
def save_and_load(here: Here) -> None:
    path = here.folder / f"values.{here.rank}"
    with kv.create("local", processes=1) as alone:  # a file of its own for each worker: rank 0's counts
        alone.init(["known", "new"], [value(here.rank, salt=1), value(here.rank, 7, salt=2)])
        alone.save(path)
    here.store.init("known", value(0))
    here.store.load(path)
    same(here.store.view("known").copy(), value(0, salt=1))
    same(here.store.view("new").copy(), value(0, 7, salt=2))
    here.store.save(path)
    with kv.create("local", processes=1) as alone:
        alone.load(path)
        same(alone.view("new").copy(), value(0, 7, salt=2))


# ----------------------------------------------------------------------------------------------- the run


def prepare(engine: str) -> None:
    """Make ``kv.create(engine)`` find engines that only the tests have."""
    if engine == "gloo":
        import gloo

        gloo.register()
    if "KVSTORE_TEST_HOROVOD_CORE" in os.environ:
        import horovod_core

        horovod_core.install()
    if "KVSTORE_TEST_FAKE_BYTEPS" in os.environ:
        sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
        import fake_byteps

        fake_byteps.install()
    if "KVSTORE_TEST_FAKE_NCCL" in os.environ:
        sys.path.insert(0, str(Path(__file__).parents[1] / "support"))
        import fake_cuda
        import fake_nccl

        fake_cuda.install()
        fake_nccl.install()
        os.environ.setdefault("KVSTORE_JOB", os.environ["GLOO_FILE"])  # names the job, and nothing else
        if len(os.environ["GLOO_FILE"]) < 90:  # the folder and the files of killed jobs are removed
            os.environ["FAKE_NCCL_FOLDER"] = str(Path(os.environ["GLOO_FILE"]).parent)


def run(engine: str, folder: Path) -> dict[str, Any]:
    prepare(engine)
    with kv.create(engine) as first:
        here = Here(engine, folder, first.rank, first.num_workers)
        versions = {"numpy": np.__version__, **first._backend.engine.versions()}
    outcomes = {name: outcome(function, here) for name, function in CASES.items()}
    return {"rank": here.rank, "size": here.size, "versions": versions, "outcomes": outcomes}


def outcome(function: Callable[[Here], None], here: Here) -> str:
    """Empty if all was well."""
    try:
        here.store = here.make()
        function(here)
        for store in here.stores:
            store.close()
    except Exception:
        return traceback.format_exc()
    finally:
        here.stores = []
    return ""


def main() -> None:
    engine, folder = sys.argv[1], Path(sys.argv[2])
    found = run(engine, folder)
    unfinished = folder / f"{found['rank']}.part"
    unfinished.write_text(json.dumps(found))
    unfinished.rename(folder / f"{found['rank']}.json")


if __name__ == "__main__":
    main()
