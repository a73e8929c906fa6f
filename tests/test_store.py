"""Properties of the store of one process: sums, orders, and pushpull as push and pull in one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from references import DTYPES, FLOATS, assert_same_bits, draw, dtype_of, is_half, knobs, total

import kvstore as kv
from kvstore.kernels import cpu

Array = npt.NDArray[Any]


# ------------------------------------------------------------------------------------------------------- sums


@given(
    name=st.sampled_from(DTYPES),
    n=st.sampled_from([0, 1, 5, 255, 256, 257, 1000]),
    k=st.integers(1, 20),
    seed=st.integers(0, 10_000),
    special=st.booleans(),
)
def test_a_push_is_the_sum_from_left_to_right(name: str, n: int, k: int, seed: int, special: bool) -> None:
    values = [draw(name, n, seed + i, special) for i in range(k)]
    with kv.create() as store:
        store.init("w", np.zeros(n, dtype_of(name)))
        store.push("w", values)
        assert_same_bits(store.view("w"), total(values))


@given(name=st.sampled_from(FLOATS), n=st.integers(1, 300), k=st.integers(1, 20), seed=st.integers(0, 10_000))
def test_a_sum_is_within_the_rounding_bound_of_the_exact_one(name: str, n: int, k: int, seed: int) -> None:
    # Left to right: |error| <= (k-1) u sum|x| to first order, u half an epsilon (Higham, Accuracy and
    # Stability, 4.2), so (k-1) eps sum|x| holds with the higher orders. 16-bit floats: the same in float32,
    # and one rounding.
    values = [draw(name, n, seed + i) for i in range(k)]
    with kv.create() as store:
        store.init("w", np.zeros(n, dtype_of(name)))
        store.push("w", values)
        result = store.view("w").astype(np.longdouble)
    wide = np.stack([value.astype(np.longdouble) for value in values])
    exact, size = wide.sum(0), np.abs(wide).sum(0)
    eps = float(np.finfo(np.float32 if is_half(dtype_of(name)) else dtype_of(name)).eps)
    bound = (k - 1) * eps * size
    if is_half(dtype_of(name)):
        bound += {"float16": 2.0**-11, "bfloat16": 2.0**-8}[name] * np.abs(exact) * 1.01 + 2.0**-25
    assert (np.abs(result - exact) <= bound).all()


@pytest.mark.parametrize("name", DTYPES)
def test_levels_threads_and_streams_give_the_same_bits(name: str) -> None:
    n = 70_000
    values = [[draw(name, n + key, key + i, True) for i in range(3)] for key in range(3)]
    results = []
    for level in cpu.levels():
        for threads in (1, 2, 3, 4):
            for stream in (0, 2**62):
                with knobs(level, threads, stream), kv.create() as store:
                    store.init([0, 1, 2], [np.zeros_like(its[0]) for its in values])
                    outs = [np.zeros_like(its[0]) for its in values]
                    store.pushpull([0, 1, 2], values, out=outs)
                    results.append([*outs, *(store.view(key).copy() for key in range(3))])
    for result in results:
        for a, b in zip(result, results[0], strict=True):
            assert_same_bits(a, b)
    for key in range(3):
        assert_same_bits(results[0][key], total(values[key]))


# ----------------------------------------------------------------------------------------------------- orders


@given(st.permutations(range(6)), st.booleans(), st.integers(0, 100))
def test_the_order_of_a_key_list_does_not_matter(order: list[int], optimizer: bool, seed: int) -> None:
    values = [[draw("float32", 40, seed + 7 * key + i) for i in range(1 + key % 3)] for key in range(6)]
    results = []
    for keys in (list(range(6)), order):
        with kv.create() as store:
            store.init(list(range(6)), [draw("float32", 40, key) for key in range(6)])
            if optimizer:
                schedule = kv.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=0.1)
                store.set_optimizer(kv.optimizer.create("adam", lr_scheduler=schedule))
            for _ in range(2):
                store.push(keys, [values[key] for key in keys])
            results.append([store.view(key).copy() for key in range(6)])
    for a, b in zip(*results, strict=True):
        assert_same_bits(a, b)


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 50)), min_size=1, max_size=8))
def test_a_repeated_key_is_the_key_with_all_values(pairs: list[tuple[int, int]]) -> None:
    with kv.create() as one, kv.create() as two:
        for store in (one, two):
            store.init(list(range(4)), [np.zeros(9, np.float32)] * 4)
        one.push([key for key, _ in pairs], [draw("float32", 9, seed) for _, seed in pairs])
        for key in {key for key, _ in pairs}:
            two.push(key, [draw("float32", 9, seed) for k, seed in pairs if k == key])
        for key in range(4):
            assert_same_bits(one.view(key), two.view(key))


@given(st.recursive(st.integers(0, 99), lambda inner: st.lists(inner, max_size=4), max_leaves=12))
def test_any_nesting_of_keys_is_its_flat_list(keys: Any) -> None:
    def flat(tree: Any) -> list[int]:
        return [tree] if isinstance(tree, int) else [key for part in tree for key in flat(part)]

    def values(tree: Any) -> Any:
        return np.full(3, float(tree)) if isinstance(tree, int) else [values(part) for part in tree]

    with kv.create() as one, kv.create() as two:
        names = sorted(set(flat(keys)))
        for store in (one, two):
            store.init(names, [np.zeros(3)] * len(names))
        one.push(keys, values(keys))
        two.push(flat(keys), [values(key) for key in flat(keys)])
        for name in names:
            assert_same_bits(one.view(name), two.view(name))


# --------------------------------------------------------------------------- pushpull is push and then pull

SIZE = 1400
LENGTHS = (3, 100, 256, 300)  # of the keys 0, 1, 2, 3


@dataclass(frozen=True)
class Place:
    """Where an array lies in the one buffer that all arrays of a call share."""

    start: int
    step: int = 1

    def of(self, buffer: Array, n: int) -> Array:
        return buffer[self.start : self.start + n * self.step : self.step]


@st.composite
def places(draw: Any, n: int, steps: bool) -> Place:
    step = draw(st.sampled_from([1, 1, 1, 2])) if steps else 1
    start = draw(st.one_of(st.sampled_from([0, 64, 100]), st.integers(0, SIZE - n * step)))
    return Place(start, step)


@st.composite
def calls(draw: Any, steps: bool) -> Any:
    """Keys in any order, some repeated; for each its values and outs anywhere in the buffer."""
    keys = draw(st.lists(st.integers(0, 3), min_size=1, max_size=5))
    values = [draw(st.lists(places(LENGTHS[key], steps), max_size=3)) for key in keys]
    outs = [
        draw(st.lists(places(LENGTHS[key], steps) | st.sampled_from(its or [Place(0)]), max_size=3))
        for key, its in zip(keys, values, strict=True)
    ]
    return keys, values, draw(st.sampled_from([outs, None]))


def set_sum(store: kv.KVStore) -> None:
    pass


def set_momentum(store: kv.KVStore) -> None:
    store.set_optimizer(kv.optimizer.SGD(learning_rate=0.5, momentum=0.5, multi_precision=True))


def set_callable(store: kv.KVStore) -> None:
    store.set_updater(lambda key, merged, stored: np.add(stored, merged, out=stored))


def arrays_at(keys: list[int], where: list[list[Place]], buffer: Array) -> list[list[Array]]:
    return [[p.of(buffer, LENGTHS[key]) for p in its] for key, its in zip(keys, where, strict=True)]


def run(call: Any, set_up: Callable[[kv.KVStore], None], fused: bool, name: str) -> list[Array]:
    """Three rounds of a call on memory and weights of its own; returns memory and weights."""
    keys, values, outs = call
    buffer = (np.arange(SIZE) % 61 - 30).astype(dtype_of(name))
    with kv.create() as store:
        store.init([2, 0, 3, 1], [np.ones(LENGTHS[key], dtype_of(name)) for key in (2, 0, 3, 1)])
        set_up(store)
        for _ in range(3):
            pushed = arrays_at(keys, values, buffer)
            into = pushed if outs is None else arrays_at(keys, outs, buffer)
            if fused:
                store.pushpull(keys, pushed, out=None if outs is None else into)
            else:
                store.push(keys, pushed)
                store.pull(keys, out=into)
        return [buffer, *(store.view(key).copy() for key in range(4))]


@pytest.mark.parametrize("set_up", [set_sum, set_momentum, set_callable], ids=lambda f: f.__name__)
@given(call=calls(steps=False), name=st.sampled_from(["float32", "float16"]))
@example(call=([1, 0], [[Place(0)], [Place(50)]], [[Place(50)], [Place(51)]]), name="float32")
def test_pushpull_of_arrays_that_overlap_anyhow(
    set_up: Callable[[kv.KVStore], None], call: Any, name: str
) -> None:
    for a, b in zip(run(call, set_up, True, name), run(call, set_up, False, name), strict=True):
        assert_same_bits(a, b)


@given(call=calls(steps=True))
def test_pushpull_of_strided_arrays_that_overlap_anyhow(call: Any) -> None:
    for a, b in zip(
        run(call, set_momentum, True, "float32"), run(call, set_momentum, False, "float32"), strict=True
    ):
        assert_same_bits(a, b)


def in_turn(call: Any, name: str) -> list[Array]:
    """The same rounds in NumPy: all sums by ascending key, then all outs by ascending key."""
    keys, values, outs = call
    buffer = (np.arange(SIZE) % 61 - 30).astype(dtype_of(name))
    weights = [np.ones(n, dtype_of(name)) for n in LENGTHS]
    for _ in range(3):
        pushed = arrays_at(keys, values, buffer)
        into = pushed if outs is None else arrays_at(keys, outs, buffer)
        for key in sorted(set(keys)):
            srcs = [a for k, its in zip(keys, pushed, strict=True) for a in its if k == key]
            if srcs:
                weights[key] = total([a.copy() for a in srcs])
        for key in sorted(set(keys)):
            for k, its in zip(keys, into, strict=True):
                for out in its if k == key else []:
                    out[...] = weights[key]
    return [buffer, *weights]


@given(call=calls(steps=False), name=st.sampled_from(["float32", "int32"]))
@example(call=([1, 0], [[Place(0)], [Place(50)]], [[Place(50)], [Place(51)]]), name="float32")
def test_outs_of_one_call_are_written_by_ascending_key(call: Any, name: str) -> None:
    for fused in (False, True):
        for a, b in zip(run(call, set_sum, fused, name), in_turn(call, name), strict=True):
            assert_same_bits(a, b)


@pytest.mark.parametrize("shift", [-1, 0, 1, 300])
@pytest.mark.parametrize("n", [4, 300, 200_000])
def test_the_out_of_a_push_may_be_the_value_shifted(n: int, shift: int) -> None:
    buffer = np.arange(n + 600, dtype=np.float32)
    value, out = buffer[300 : 300 + n], buffer[300 + shift : 300 + shift + n]
    wanted = 2 * value
    with kv.create() as store:
        store.init("w", np.zeros(n, np.float32))
        store.pushpull("w", [value, value], out=out)
        assert_same_bits(store.view("w"), wanted)
        assert_same_bits(out.copy(), wanted)


def test_the_other_key_s_value_as_out() -> None:
    a, b = np.full(1000, 1, np.float32), np.full(1000, 2, np.float32)
    with kv.create() as store:
        store.init([1, 2], [np.zeros(1000, np.float32)] * 2)
        store.pushpull([1, 2], [a, b], out=[b, a])
        assert (a == 2).all()
        assert (b == 1).all()


# ------------------------------------------------------------------------------------------------- row-sparse


@given(
    tables=st.lists(
        st.dictionaries(st.integers(0, 7), st.integers(-5, 5), max_size=8), min_size=1, max_size=6
    ),
    wanted=st.lists(st.integers(0, 7), max_size=10),
    name=st.sampled_from(["float32", "float16", "int64"]),
    dense=st.booleans(),
)
def test_row_sparse_sums_are_dense_sums(
    tables: list[dict[int, int]], wanted: list[int], name: str, dense: bool
) -> None:
    def sparse(table: dict[int, int]) -> kv.RowSparseArray:
        data = np.array([[v, 2 * v] for v in table.values()]).reshape(-1, 2).astype(dtype_of(name))
        return kv.RowSparseArray(data, list(table), (8, 2))

    values = [sparse(table) for table in tables]
    result = total([value.todense() for value in values])
    with kv.create() as store:
        store.init("t", np.ones((8, 2), name) if dense else kv.RowSparseArray.zeros((8, 2), name))
        store.push("t", values)
        out = np.ones((8, 2), name)
        store.pull("t", out=out)
        np.testing.assert_array_equal(out, result)
        if dense:
            return
        present = sorted(set().union(*tables))
        assert store.view("t").indices.tolist() == present
        rows = kv.RowSparseArray.zeros((8, 2), name)
        store.row_sparse_pull("t", out=rows, row_ids=wanted)
        assert rows.indices.tolist() == sorted(set(wanted))
        np.testing.assert_array_equal(rows.data, result[sorted(set(wanted))])


def test_a_table_too_large_to_be_dense() -> None:
    shape = (2**58, 2)
    far = [0, 2**40, 2**58 - 1]
    with kv.create() as store:
        store.init("t", kv.RowSparseArray(np.ones((3, 2)), far, shape))
        store.push(
            "t",
            [
                kv.RowSparseArray(np.ones((2, 2)), far[:2], shape),
                kv.RowSparseArray(np.ones((2, 2)), far[1:], shape),
            ],
        )
        out = kv.RowSparseArray.zeros(shape, np.float64)
        store.row_sparse_pull("t", out=out, row_ids=[2**58 - 1, 2**40, 7])
        assert out.indices.tolist() == [7, 2**40, 2**58 - 1]
        assert out.data[:, 0].tolist() == [0, 2, 1]


@pytest.mark.parametrize("name", ["sgd", "adam", "adagrad", "ftrl", "groupadagrad"])
@pytest.mark.parametrize("weight_is_sparse", [False, True])
def test_row_sparse_gradients_of_all_rows_are_dense_gradients(name: str, weight_is_sparse: bool) -> None:
    every = list(range(6))
    start = draw("float32", 12, 1).reshape(6, 2)
    with kv.create() as one, kv.create() as two:
        one.init("t", start)
        two.init("t", kv.RowSparseArray(start, every, (6, 2)) if weight_is_sparse else start)
        for store in (one, two):
            store.set_optimizer(kv.optimizer.create(name, learning_rate=0.1))
        for step in range(3):
            gradients = [draw("float32", 12, 10 * step + i).reshape(6, 2) for i in range(2)]
            one.push("t", gradients)
            two.push("t", [kv.RowSparseArray(g, every, (6, 2)) for g in gradients])
        out = np.zeros((6, 2), np.float32)
        two.pull("t", out=out)
        np.testing.assert_array_equal(out, one.view("t"))


@pytest.mark.parametrize("name", ["local", "device", "shared"])
def test_a_key_that_no_file_can_hold(name: str) -> None:
    with kv.create(name) as store:
        for make in (store.init, lambda key, value: store.broadcast(key, value, value)):
            with pytest.raises(kv.KeyKindError, match="another name"):
                make(["w", "\ud800"], [np.zeros(2, np.float32)] * 2)
        assert store.keys() == []


FILES = ["save", "load", "save_optimizer_states", "load_optimizer_states", "save_residuals", "load_residuals"]


@pytest.mark.parametrize("verb", FILES)
@pytest.mark.parametrize(
    ("path", "error"),
    [
        (None, kv.ArgumentError),
        (1, kv.ArgumentError),
        ("a\0b", kv.StateFileError),
        (b"\0", kv.StateFileError),
        ("\ud800", kv.StateFileError),
    ],
)
def test_what_names_no_file(verb: str, path: Any, error: type[Exception]) -> None:
    with kv.create("device") as store:
        store.init("w", np.zeros(2, np.float32))
        store.set_gradient_compression({"type": "fp16"})
        store.set_optimizer(kv.optimizer.SGD())
        with pytest.raises(error, match="file"):
            getattr(store, verb)(path)


@pytest.mark.parametrize("name", ["local", "device", "shared"])
def test_seconds_after_which_a_process_counts_as_dead(name: str) -> None:
    with kv.create(name) as store:
        for timeout in ("x", None, [], True):
            with pytest.raises(kv.ArgumentError, match="seconds"):
                store.num_dead_nodes(timeout)  # type: ignore[arg-type]
        for timeout in (-1, float("nan")):
            with pytest.raises(kv.ConfigError, match="seconds"):
                store.num_dead_nodes(timeout)
        for timeout in (60, np.float32(1), float("inf"), 10**400):
            assert store.num_dead_nodes(timeout) == 0
