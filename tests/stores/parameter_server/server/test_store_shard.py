"""The data of a server has the bits of a local store that gets the same values, however keys are cut."""

from __future__ import annotations

import json
import math
import resource
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from references import DTYPES, dtype_of
from shards import Beside, StoreShards, payload_of

import kvstore as kv
from kvstore.kernels import cpu
from kvstore.optimizer import Optimizer, create, registry
from kvstore.optimizer.settings_log import SettingsAt
from kvstore.stores.parameter_server.protocol.optimizer_states import (
    join_states,
    needs_whole_keys,
    split_states,
)
from kvstore.stores.parameter_server.server import round_updates
from kvstore.stores.parameter_server.server.payload import SlicePayload, SliceUpdate, SliceValueWrite
from kvstore.stores.parameter_server.transport.shared_buffers import PeerBuffers, SharedValues

Array = npt.NDArray[Any]

# How keys are cut, and over how many servers.
LAYOUTS = [(1, ()), (1, (7, 1024)), (2, (1024, 3000)), (3, (5, 64, 2048, 4000))]
RULES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {"wd": 0.01}),
    ("sgd", {"momentum": 0.9, "clip_gradient": 0.5, "multi_precision": True}),
    ("nag", {"momentum": 0.9, "wd": 0.01}),
    ("adam", {"wd": 0.01, "multi_precision": True}),
    ("adamw", {"wd": 0.01}),
    ("adagrad", {"wd": 0.01}),
    ("adadelta", {}),
    ("adamax", {}),
    ("nadam", {}),
    ("rmsprop", {"centered": True, "wd": 0.01}),
    ("ftrl", {}),
    ("ftml", {"wd": 0.01}),
    ("signum", {"momentum": 0.9, "wd": 0.01}),
    ("sgld", {}),
    ("dcasgd", {"momentum": 0.5, "wd": 0.01}),
    ("lamb", {"wd": 0.01, "multi_precision": True}),
    ("lars", {"momentum": 0.9}),
    ("groupadagrad", {}),
    ("test", {}),
]
WHOLE = {"lamb", "lars", "groupadagrad"}

quiet_about_halves = pytest.mark.filterwarnings("ignore:.*lose small updates")


def numbers(shape: tuple[int, ...], name: str = "float32", seed: int = 0) -> Array:
    rng = np.random.default_rng(seed)
    if name in ("int8", "uint8", "int32", "int64"):
        info = np.iinfo(name)
        return rng.integers(info.min, info.max, shape, dtype=name, endpoint=True)
    return rng.standard_normal(shape).astype(dtype_of(name))


def some_rows(shape: tuple[int, ...], n: int, seed: int, name: str = "float32") -> kv.RowSparseArray:
    ids = np.sort(np.random.default_rng(seed).choice(shape[0], n, replace=False))
    return kv.RowSparseArray(numbers((n, *shape[1:]), name, seed), ids, shape)


def test_all_rules_are_tried() -> None:
    assert {name for name, _ in RULES} == {
        name for name, rule in registry._registry.items() if rule.__module__.startswith("kvstore.")
    }
    assert {name for name, _ in RULES if needs_whole_keys(create(name))} == WHOLE


# -------------------------------------------------------------------------------------------- dense keys


@pytest.mark.parametrize(("servers", "cuts"), LAYOUTS)
@pytest.mark.parametrize("name", DTYPES)
def test_sums(servers: int, cuts: tuple[int, ...], name: str) -> None:
    pair = Beside(servers)
    shapes = {"a": (4500,), "b": (3, 5), "c": (0, 4), "d": ()}
    for i, (key, shape) in enumerate(shapes.items()):
        pair.init(key, np.asarray(numbers(shape, name, i)), cuts)
        pair.check(key)
    for workers in (1, 3, 8):
        pushed = {
            key: [np.asarray(numbers(s, name, 10 * workers + i)) for i in range(workers)]
            for key, s in shapes.items()
        }
        pair.push(*pushed.items())
        for key in shapes:
            pair.check(key)


@quiet_about_halves
@pytest.mark.parametrize(("servers", "cuts"), LAYOUTS)
@pytest.mark.parametrize(("name", "settings"), RULES)
def test_updates(servers: int, cuts: tuple[int, ...], name: str, settings: dict[str, Any]) -> None:
    if name in WHOLE and servers > 1:
        cuts = ()
    pair = Beside(servers)
    shapes = {
        "a": ((60, 70), "float32"),
        "half": ((50, 90), "float16"),
        "brain": ((2, 30), "bfloat16"),
        "double": ((4, 1500), "float64"),
    }
    for i, (key, (shape, kind)) in enumerate(shapes.items()):
        pair.init(key, numbers(shape, kind, i), cuts)
    pair.set_optimizer(
        create(
            name,
            **settings,
            lr_mult={"a": 0.5},
            **({} if name == "groupadagrad" else {"wd_mult": {"half": 2.0}}),
        )
    )
    for step in range(3):
        keys = [key for key in shapes if step != 1 or key != "a"]  # counts of keys differ
        pair.push(*((k, [numbers(*shapes[k], 100 * step + r) for r in range(3)]) for k in keys))
        for key in shapes:
            pair.check(key)


@pytest.mark.parametrize(("servers", "cuts"), LAYOUTS)
def test_a_schedule_goes_by_the_clock(servers: int, cuts: tuple[int, ...]) -> None:
    pair = Beside(servers)
    for i, key in enumerate("ab"):
        pair.init(key, numbers((4500,), seed=i), cuts)
    schedule = kv.optimizer.lr_scheduler.FactorScheduler(step=2, factor=0.5, base_lr=0.4)
    pair.set_optimizer(create("sgd", momentum=0.9, lr_scheduler=schedule))
    for step in range(7):
        pair.push(*((key, [numbers((4500,), seed=step)]) for key in ("ab" if step % 3 else "a")))
        pair.check("a")
        pair.check("b")


def halves() -> kv.optimizer.lr_scheduler.LRScheduler:
    """Return a schedule with the rate 2 for the first update, and half of that for each later one."""
    return kv.optimizer.lr_scheduler.FactorScheduler(step=1, factor=0.5, base_lr=2.0)


def rates(shards: StoreShards, *keys: str) -> list[float]:
    """Return the rate with which a push of each key, one after the other, is carried out by the rule."""
    found = []
    for key in keys:
        before = shards.pull(key)
        assert shards.push((key, [np.ones(3, np.float32)])) == [None]
        (rate,) = set((before - shards.pull(key)).tolist())
        found.append(rate)
    return found


@pytest.mark.parametrize(("begin", "first"), [(0, 2.0), (3, 0.25)])
def test_the_time_of_a_schedule_begins_with_the_optimizer(begin: int, first: float) -> None:
    shards = StoreShards(1)
    for key in "abc":
        shards.init(key, np.zeros(3, np.float32))
    for _ in range(5):
        shards.push(("a", [np.zeros(3, np.float32)]))
    for _ in range(2):  # the second time, all keys have counts of the first
        shards.set_optimizer(create("sgd", lr_scheduler=halves(), begin_num_update=begin))
        found = rates(shards, *"bbac")
        assert found == [first, first / 2, first / 2, first / 2]


def test_the_time_of_a_schedule_goes_on_from_the_counts_of_a_file() -> None:
    shards = StoreShards(1)
    for key in "abc":
        shards.init(key, np.zeros(3, np.float32))
    shards.set_optimizer(create("sgd", lr_scheduler=halves()))
    assert rates(shards, *"aaab") == [2.0, 1.0, 0.5, 0.5]
    content = join_states(shards.entries.values(), shards.states(), create("sgd", lr_scheduler=halves()))
    assert rates(shards, *"bbbc") == [0.5, 0.5, 0.25, 0.25]  # the settings that are not in the file
    shards.put_states(split_states(shards.entries.values(), content))
    shards.load_counts(content.optimizer)
    assert rates(shards, *"bcba") == [0.5, 0.5, 0.5, 0.25]


def test_a_stamp_of_other_counts_says_nothing_about_the_time() -> None:
    shards = StoreShards(1)
    shards.init("w", np.zeros(3, np.float32))
    shards.set_optimizer(create("sgd", lr_scheduler=halves()))
    old = shards.stamp(7)
    shards.barrier()
    shards.set_optimizer(create("sgd", lr_scheduler=halves()))
    (piece,) = shards.entries["w"].slices
    found = []
    for round_, stamp in enumerate((old, shards.stamp(1), shards.stamp(4), old, old), 1):
        parts = [(0, payload_of(np.ones(3, np.float32), piece, False))]
        before = shards.pull("w")
        assert shards.apply([[SliceUpdate(piece.id, round_, parts, 2, stamp)]]) == [None]
        found.append(float((before - shards.pull("w"))[0]))
    assert found == [2.0, 1.0, 0.25, 0.25, 0.125]  # by its own count, unless a stamp is later


def test_slices_apart_give_what_they_give_together() -> None:
    rule = create("adam", lr_scheduler=kv.optimizer.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1))
    together, apart = StoreShards(1), StoreShards(1)
    for shards in (together, apart):
        shards.init("w", numbers((4500,)), (1024, 2048))
        shards.set_optimizer(rule)
    late: list[SliceUpdate] = []
    for step in range(4):
        values = [numbers((4500,), seed=10 * step + r) for r in range(2)]
        together.push(("w", values))
        for piece in reversed(apart.entries["w"].slices):
            parts = [(rank, payload_of(v, piece, False)) for rank, v in enumerate(values)]
            job = SliceUpdate(piece.id, step + 1, parts, 1, apart.stamp(step + 1))
            if piece.start == 0:  # the first is slow
                late.append(job)
            else:
                assert apart.apply([[job]]) == [None]
    assert apart.apply([late]) == [None] * 4  # several rounds of a slice in one call
    np.testing.assert_array_equal(apart.pull("w"), together.pull("w"))


def test_an_init_counts_once_and_an_assign_always() -> None:
    shards = StoreShards(2)
    shards.init("w", np.full(10, 1, np.float32), (5,))
    shards.write("w", np.full(10, 2, np.float32), first=True)
    assert (shards.pull("w") == 1).all()
    shards.write("w", np.full(10, 3, np.float32))
    assert (shards.pull("w") == 3).all()


@pytest.mark.parametrize("name", ["sgd", "lamb"])
def test_copies_of_16_bit_weights_follow_an_assign(name: str) -> None:
    pair = Beside(1)
    start, new = numbers((40, 50), "float16"), numbers((40, 50), "float16", 1)
    pair.init("w", start, (100,))
    pair.set_optimizer(create(name, multi_precision=True))
    pair.push(("w", [numbers((40, 50), "float16", 2)]))
    pair.local._backend.assign([("w", [new])])
    pair.shards.write("w", new)
    pair.push(("w", [numbers((40, 50), "float16", 3)]))
    pair.check("w")


def test_a_round_without_parts_changes_nothing() -> None:
    shards = StoreShards(1)
    shards.init("w", np.ones(4, np.float32))
    shards.set_optimizer(create("adam"))
    assert shards.push(("w", [])) == [None]
    assert (shards.pull("w") == 1).all()


# -------------------------------------------------------------------------------------- packed gradients


@pytest.mark.parametrize("optimizer", [None, "adam"])
@pytest.mark.parametrize("code", cpu.codings())
def test_packed_gradients(code: str, optimizer: str | None) -> None:
    coding, threshold, size, cut = cpu.coding(code), 0.3, 5003, 2048
    pair = Beside(2)
    pair.init("w", numbers((size,)), (cut,))
    if optimizer:
        pair.set_optimizer(create(optimizer))
    packed, decoded = [], []
    for seed in range(3):
        words = np.empty(cpu.encoded_bytes(coding, size), np.uint8)
        cpu.encode(coding, threshold, [numbers((size,), seed=seed)], residual_for(code, size), words)
        packed.append(words)
        decoded.append(np.empty(size, np.float32))
        cpu.decode(coding, threshold, [words], decoded[-1])
    pair.local.push("w", decoded)
    low, high = pair.shards.entries["w"].slices
    at = cpu.encoded_bytes(coding, cut)
    for piece, part in ((low, slice(0, at)), (high, slice(at, None))):
        parts = [(r, SlicePayload(bytes(words[part]), coding, threshold)) for r, words in enumerate(packed)]
        job = SliceUpdate(piece.id, 1, parts, 1, 1)
        assert pair.shards.shards[piece.server].rounds.apply_jobs([job]) == [None]
    pair.check("w")


def residual_for(code: str, size: int) -> Array | None:
    return np.zeros(size, np.float32) if code in ("two_bit", "one_bit") else None


def test_workers_that_pack_in_different_ways() -> None:
    size, coding = 100, cpu.coding("two_bit")
    pair = Beside(1)
    pair.init("w", np.zeros(size, np.float32))
    values = [numbers((size,), seed=r) for r in range(3)]
    parts, decoded = [(0, SlicePayload(values[0].tobytes()))], [values[0]]
    for rank, threshold in ((1, 0.25), (2, 0.5)):
        words = np.empty(cpu.encoded_bytes(coding, size), np.uint8)
        cpu.encode(coding, threshold, [values[rank]], np.zeros(size, np.float32), words)
        parts.append((rank, SlicePayload(words, coding, threshold)))
        decoded.append(np.where(values[rank] >= threshold, threshold, 0).astype(np.float32))
        decoded[-1][values[rank] <= -threshold] = -threshold
    pair.local.push("w", decoded)
    piece = pair.shards.entries["w"].slices[0]
    assert pair.shards.shards[0].rounds.apply_jobs([SliceUpdate(piece.id, 1, parts)]) == [None]
    pair.check("w")


# ------------------------------------------------------------------------------------------------ tables

TABLE_RULES = [
    *RULES,
    ("sgd", {"momentum": 0.9, "wd": 0.01, "lazy_update": True}),
    ("sgd", {"momentum": 0.9, "wd": 0.01}),
    ("adam", {"lazy_update": True, "multi_precision": True}),
    ("rmsprop", {}),
]
ROW_LAYOUTS = [(1, ()), (2, (17,)), (3, (5, 20, 30, 39))]


@pytest.mark.parametrize(("servers", "cuts"), ROW_LAYOUTS)
@pytest.mark.parametrize("name", DTYPES)
def test_sums_of_rows(servers: int, cuts: tuple[int, ...], name: str) -> None:
    pair = Beside(servers)
    shape = (40, 2, 3)
    pair.init("t", some_rows(shape, 9, 1, name), cuts)
    pair.check("t")
    for step, counts in enumerate([(4, 0, 7), (0, 0), (40,), (1, 2), (3,)]):
        pair.push(("t", [some_rows(shape, n, 10 * step + r, name) for r, n in enumerate(counts)]))
        pair.check("t")


@quiet_about_halves
@pytest.mark.parametrize(("servers", "cuts"), ROW_LAYOUTS)
@pytest.mark.parametrize("present", [40, 9, 0])
@pytest.mark.parametrize("kind", ["float32", "float16"])
@pytest.mark.parametrize(("name", "settings"), TABLE_RULES)
def test_updates_of_rows(
    name: str, settings: dict[str, Any], kind: str, present: int, servers: int, cuts: tuple[int, ...]
) -> None:
    shape = (40, 6)
    pair = Beside(servers)
    pair.init("t", some_rows(shape, present, 1, kind), () if name in ("lamb", "lars") else cuts)
    pair.set_optimizer(create(name, **settings))
    for step, counts in enumerate([(3, 0, 5), (1, 4), (0, 0), (2, 30), (6,)]):
        pair.push(("t", [some_rows(shape, n, 10 * step + r, kind) for r, n in enumerate(counts)]))
        pair.check("t")


@quiet_about_halves
@pytest.mark.parametrize(("name", "settings"), [(None, {}), *TABLE_RULES])
def test_dense_values_pushed_into_a_table(name: str | None, settings: dict[str, Any]) -> None:
    shape = (40, 6)
    pair = Beside(1 if name in ("lamb", "lars") else 2)
    pair.init("t", some_rows(shape, 9, 1), () if name in ("lamb", "lars") else (17,))
    if name is not None:
        pair.set_optimizer(create(name, **settings))
    pair.push(("t", [some_rows(shape, 4, 2)]))
    for step in range(2):
        pair.push(("t", [some_rows(shape, 5, step), numbers(shape, seed=step)]))
        pair.push(("t", [some_rows(shape, 5, step + 10)]))
        pair.check("t")


@pytest.mark.parametrize(("name", "settings"), [(None, {}), *TABLE_RULES])
def test_rows_pushed_into_a_dense_key(name: str | None, settings: dict[str, Any]) -> None:
    shape = (40, 6)
    pair = Beside(1)
    pair.init("w", numbers(shape), () if name in WHOLE else (60, 120))
    if name is not None:
        pair.set_optimizer(create(name, **settings))
    for step in range(3):
        pair.push(("w", [some_rows(shape, 4, step), some_rows(shape, 6, step + 10)]))
        pair.check("w")
        pair.push(("w", [some_rows(shape, 4, step), numbers(shape, seed=step)]))
        pair.check("w")


def test_rows_of_slices_that_cut_rows_are_lines() -> None:
    shards = StoreShards(1)
    shards.init("w", np.zeros((40, 6), np.float32), (62,))
    ids = np.array([29, 30, 33])  # of two elements each: the last of a row, and two of the two that follow
    data = np.arange(6, dtype=np.float32)
    jobs = [
        SliceUpdate(part.id, 1, [(0, SlicePayload((ids[at], data.reshape(3, 2)[at]), rows=len(ids[at])))])
        for part, at in zip(shards.entries["w"].slices, (slice(0, 2), slice(2, 3)), strict=True)
    ]
    assert shards.apply([jobs]) == [None, None]
    value = np.zeros(240, np.float32)
    value[[58, 59, 60, 61, 66, 67]] = data
    np.testing.assert_array_equal(shards.pull("w").reshape(-1), value)


def test_rows_without_elements_are_refused() -> None:
    shards = StoreShards(1)
    shards.init("w", np.zeros((40, 0), np.float32))
    results = shards.apply(
        [[SliceUpdate(shards.entries["w"].slices[0].id, 1, [(0, SlicePayload(b"", rows=0))])]]
    )
    assert isinstance(results[0], kv.ShapeError)


def test_a_huge_table_costs_the_rows_that_are_touched() -> None:
    shape, width = (10**9, 8), 8 * 4
    shards = StoreShards(2)
    shards.init("t", kv.RowSparseArray.zeros(shape), (5 * 10**8,))
    shards.set_optimizer(create("adam", wd=0.01))  # absent rows have a part in each update
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for step in range(4):
        ids = np.arange(step, 10**9, 20_000, dtype=np.int64)
        shards.push(("t", [kv.RowSparseArray(numbers((len(ids), 8), seed=step), ids, shape)]))
    held = 4 * 50_000
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024
    assert grown < 20 * held * width  # weight and two states, their smaller versions, gradients, ids
    assert sum(shards.shards[0].value_bytes().values()) < 4 * held * width
    piece = shards.entries["t"].slices[1]
    ids, rows = shards.shards[piece.server].read_rows(piece.id)
    assert len(ids) == held // 2
    assert ids[0] >= piece.start
    assert rows.shape == (held // 2, 8)


@pytest.mark.parametrize("lazy", [True, False])
def test_an_assigned_table_keeps_its_states(lazy: bool) -> None:
    shape = (40, 6)
    pair = Beside(2)
    pair.init("t", some_rows(shape, 9, 1, "float16"), (17,))
    pair.set_optimizer(create("adam", lazy_update=lazy, multi_precision=True))
    pair.push(("t", [some_rows(shape, 20, 2, "float16")]))
    for seed, n in ((3, 12), (4, 40)):
        new = some_rows(shape, n, seed, "float16")
        pair.local._backend.assign([("t", [new])])
        pair.shards.write("t", new)
        pair.check("t")
        pair.push(("t", [some_rows(shape, 5, 10 + seed, "float16")]))
        pair.check("t")


# --------------------------------------------------------------------------------------------- own rules


class Oldest(Optimizer):
    """Steps against the gradient, and counts how often in a state that is no array of the weight's shape."""

    def create_state(self, index: Any, weight: Array) -> Any:
        return np.zeros(2)

    def update(self, index: Any, weight: Array, grad: Any, state: Any) -> None:
        self._update_count(index)
        weight -= self._get_lr(index) * np.asarray(grad) * (1 + np.abs(weight).max())
        state += 1
        if weight.shape[0] == 13:
            raise RuntimeError("thirteen")


@pytest.fixture
def own_rule() -> Any:
    registry.register(Oldest)
    yield Oldest
    del registry._registry["oldest"]


def test_an_own_rule_sees_whole_keys(own_rule: Callable[..., Optimizer]) -> None:
    pair = Beside(1)
    pair.init("w", numbers((30, 40)), (100, 300))
    pair.init("t", some_rows((20, 3), 5, 1))
    pair.set_optimizer(own_rule(learning_rate=0.1))
    for step in range(3):
        pair.push(("w", [numbers((30, 40), seed=step)]), ("t", [some_rows((20, 3), 4, step)]))
        pair.check("w")
        pair.check("t")


def test_an_own_rule_that_raises_changes_nothing(own_rule: Callable[..., Optimizer]) -> None:
    shards = StoreShards(1)
    start = numbers((13, 40))
    shards.init("w", start, (100, 300))
    shards.init("t", some_rows((13, 4), 5, 1))
    shards.init("good", np.zeros(3, np.float32))
    shards.set_optimizer(own_rule(learning_rate=0.1))
    table = shards.pull("t")
    for _ in range(2):
        results = shards.push(
            ("w", [np.ones_like(start)]),
            ("good", [np.ones(3, np.float32)]),
            ("t", [some_rows((13, 4), 4, 2)]),
        )
        assert [type(error) for error in results] == [kv.UpdaterError] * 3 + [type(None), kv.UpdaterError]
        assert "Oldest raised RuntimeError on key 'w' (server 0): thirteen" in str(results[0])
        np.testing.assert_array_equal(shards.pull("w"), start)
        np.testing.assert_array_equal(shards.pull("t"), table)
    assert (shards.pull("good") != 0).all()


def test_a_whole_key_waits_for_all_its_slices() -> None:
    shards = StoreShards(1)
    shards.init("w", numbers((3000,)), (1024, 2048))
    shards.init("v", numbers((30,)))
    shard = shards.shards[0]
    value = np.ones(3000, np.float32)
    jobs = [
        SliceUpdate(p.id, 1, [(0, payload_of(value, p, False))], 1, 1) for p in shards.entries["w"].slices
    ]
    assert shard.rounds.applicable_jobs(jobs) == jobs  # nothing but sums
    shards.set_optimizer(create("lamb"))
    assert shard.rounds.applicable_jobs(jobs[:1]) == []
    other = SliceUpdate(
        shards.entries["v"].slices[0].id, 1, [(0, SlicePayload(np.ones(30, np.float32)))], 1, 1
    )
    assert shard.rounds.applicable_jobs([jobs[2], other]) == [other]
    assert sorted(job.slice for job in shard.rounds.applicable_jobs([jobs[1]])) == [job.slice for job in jobs]


def test_a_payload_that_cannot_be_read_fails_the_whole_key() -> None:
    shards = StoreShards(1)
    start = numbers((3000,))
    shards.init("w", start, (1024, 2048))
    shards.set_optimizer(create("lamb"))
    good = np.ones(3000, np.float32)
    jobs = [SliceUpdate(p.id, 1, [(0, payload_of(good, p, False))], 1, 1) for p in shards.entries["w"].slices]
    jobs[1] = jobs[1]._replace(parts=[(0, SlicePayload(kv.ProtocolError("gone")))])
    assert [str(error) for error in shards.apply([jobs])] == ["gone"] * 3
    np.testing.assert_array_equal(shards.pull("w"), start)
    assert set(shards.push(("w", [good]))) == {None}


@pytest.mark.parametrize("key", "wt")
def test_a_rule_for_whole_keys_and_a_key_in_parts(key: str) -> None:
    start = numbers((3000,)) if key == "w" else some_rows((40, 3), 5, 1)
    shards, cuts = StoreShards(2), (20,)
    shards.init(key, start, cuts)
    with pytest.raises(kv.ConfigError, match=rf"LAMB needs whole tensors, and key '{key}' is spread"):
        shards.set_optimizer(create("lamb"))
    before = shards.pull(key)
    shards = StoreShards(2)
    shards.set_optimizer(create("lamb"))
    shards.init(key, start, cuts)
    results = shards.push((key, [start]))
    assert [type(error) for error in results] == [kv.ConfigError] * 2
    np.testing.assert_array_equal(shards.pull(key), before)
    one = StoreShards(1)
    one.init("w", numbers((3000,)), (1024,))
    one.set_optimizer(create("lamb"))


# ------------------------------------------------------------------------------------------------ errors


@pytest.mark.parametrize(
    ("payload", "error"),
    [
        (SlicePayload(b""), kv.ShapeError),
        (SlicePayload(bytes(39)), kv.ShapeError),
        (SlicePayload(bytes(44)), kv.ShapeError),
        (SlicePayload(bytes(40), coding=99), kv.DTypeError),
        (SlicePayload(bytes(40), coding=cpu.DIVIDED), kv.DTypeError),
        (SlicePayload(bytes(39), coding=cpu.DIVIDED, threshold=2.0), kv.ShapeError),
        (SlicePayload(kv.ProtocolError("gone")), kv.ProtocolError),
        (SlicePayload(bytes(40), coding=cpu.coding("two_bit"), threshold=0.5), kv.ShapeError),
    ],
)
def test_a_wrong_payload_spoils_its_own_round_only(payload: SlicePayload, error: type[Exception]) -> None:
    shards = StoreShards(1)
    for key in "ab":
        shards.init(key, np.zeros(10, np.float32))
    (a,), (b,) = shards.entries["a"].slices, shards.entries["b"].slices
    good = SlicePayload(np.ones(10, np.float32))
    results = shards.shards[0].rounds.apply_jobs(
        [SliceUpdate(a.id, 1, [(0, good), (1, payload)]), SliceUpdate(b.id, 1, [(0, good)])]
    )
    assert isinstance(results[0], error)
    assert results[1] is None
    assert (shards.pull("a") == 0).all()
    assert (shards.pull("b") == 1).all()


def test_values_that_count_divided() -> None:
    shards = StoreShards(1)
    shards.init("w", np.zeros(10, np.float32))
    ten = np.arange(10, dtype=np.float32)
    for round_, (one, other) in enumerate([(2.0, 2.0), (3.0, 3.0), (3.0, 4.0), (2.0, 0.0)], 1):
        parts = [
            (rank, SlicePayload(bytes(ten + rank), cpu.DIVIDED if divisor else 0, divisor))
            for rank, divisor in enumerate((one, other))
        ]
        assert shards.shards[0].rounds.apply_jobs(
            [SliceUpdate(shards.entries["w"].slices[0].id, round_, parts)]
        ) == [None]
        wanted = ten / np.float32(one) + (ten + 1) / np.float32(other or 1)
        assert shards.pull("w").tobytes() == wanted.tobytes()


def test_signalling_nans_that_count_divided_give_no_warning() -> None:
    shards = StoreShards(1)
    shards.init("w", np.zeros(2, np.float32))
    signalling = np.array([0x7F800001, 0x3F800000], np.uint32).tobytes()
    parts = [(0, SlicePayload(signalling, cpu.DIVIDED, 2.0)), (1, SlicePayload(bytes(8), cpu.DIVIDED, 3.0))]
    with np.errstate(all="raise"):
        results = shards.shards[0].rounds.apply_jobs(
            [SliceUpdate(shards.entries["w"].slices[0].id, 1, parts)]
        )
    assert results == [None]
    assert np.isnan(shards.pull("w")[0])
    assert shards.pull("w")[1] == 0.5


@pytest.mark.parametrize("coding", [cpu.coding("two_bit"), cpu.DIVIDED])
def test_coded_values_of_other_types_are_refused(coding: int) -> None:
    shards = StoreShards(1)
    shards.init("w", np.zeros(32, np.float64))
    payload = SlicePayload(bytes(8), coding, 0.5)
    results = shards.shards[0].rounds.apply_jobs(
        [SliceUpdate(shards.entries["w"].slices[0].id, 1, [(0, payload)])]
    )
    assert isinstance(results[0], kv.DTypeError)


@pytest.mark.parametrize(
    ("ids", "nbytes", "error"),
    [
        ([20, 30], 0, kv.ShapeError),
        ([30, 20], 24, kv.RowIndexError),
        ([20, 20], 24, kv.RowIndexError),
        ([19, 20], 24, kv.RowIndexError),
        ([20, 40], 24, kv.RowIndexError),
        ([-(2**63), 20], 24, kv.RowIndexError),
        ([20, 2**63 - 1], 24, kv.RowIndexError),
    ],
)
@pytest.mark.parametrize("optimizer", [None, "sgd"])
def test_wrong_rows(ids: list[int], nbytes: int, error: type[Exception], optimizer: str | None) -> None:
    shards = StoreShards(2)
    shards.init("t", some_rows((40, 3), 5, 1), (20,))
    if optimizer:
        shards.set_optimizer(create(optimizer))
    piece = shards.entries["t"].slices[1]
    before = shards.pull("t")
    payload = SlicePayload((np.array(ids, np.int64), bytes(nbytes)), rows=2)
    (found,) = shards.shards[1].rounds.apply_jobs([SliceUpdate(piece.id, 1, [(0, payload)], 1, 1)])
    assert isinstance(found, error)
    np.testing.assert_array_equal(shards.pull("t"), before)
    if nbytes:
        with pytest.raises(kv.RowIndexError, match=r"\[20, 40\)"):
            shards.shards[1].read_rows(piece.id, np.array(ids, np.int64))


def test_integers_have_no_gradient() -> None:
    shards = StoreShards(1)
    shards.init("w", np.zeros(10, np.int32))
    shards.init("t", some_rows((40, 3), 5, 1, "int64"))
    shards.set_optimizer(create("sgd"))
    results = shards.push(("w", [np.ones(10, np.int32)]), ("t", [some_rows((40, 3), 5, 1, "int64")]))
    assert [str(error) for error in results] == [
        f"key {key!r} holds {kind}; SGD updates floating-point weights only"
        for key, kind in (("w", "int32"), ("t", "int64"))
    ]
    assert all(isinstance(error, kv.DTypeError) for error in results)


class Stops(kv.optimizer.lr_scheduler.LRScheduler):
    """Gives no rate for the third update."""

    def __call__(self, num_update: int) -> float:
        if num_update == 3:
            raise ZeroDivisionError("no rate")
        return self.base_lr


def test_a_schedule_that_raises_counts_no_update() -> None:
    kv.optimizer.lr_scheduler.register(Stops)
    shards, other = StoreShards(1), StoreShards(1)
    for one in (shards, other):
        one.init("w", np.zeros(10, np.float32))
        one.init("t", kv.RowSparseArray.zeros((40, 3)))
    shards.set_optimizer(create("adam", lr_scheduler=Stops(base_lr=0.1)))
    other.set_optimizer(create("adam", learning_rate=0.1))
    for step in range(4):
        pushed = [("w", [np.ones(10, np.float32)]), ("t", [some_rows((40, 3), 5, step)])]
        results = shards.push(*pushed)
        if step == 2:
            assert all(isinstance(error, kv.UpdaterError) for error in results)
            assert "Adam raised ZeroDivisionError on key 'w' (server 0): no rate" in str(results[0])
            piece = shards.entries["t"].slices[0]
            assert len(shards.shards[0].read_rows(piece.id)[0]) == len(other.shards[0].read_rows(piece.id)[0])
        else:
            other.push(*pushed)
        for key in "wt":
            np.testing.assert_array_equal(shards.pull(key), other.pull(key))


def test_what_is_not_here() -> None:
    shards = StoreShards(1)
    shards.init("w", np.zeros(10, np.float32))
    shards.init("t", kv.RowSparseArray.zeros((40, 3)))
    shard = shards.shards[0]
    dense, table = (shards.entries[key].slices[0].id for key in "wt")
    with pytest.raises(kv.KeyNotFoundError, match="no slice 7 of store 0"):
        shard.read_value(7)
    assert isinstance(
        shard.rounds.apply_jobs([SliceUpdate(7, 1, [(0, SlicePayload(b""))])])[0], kv.KeyNotFoundError
    )
    with pytest.raises(kv.DTypeError, match="read by rows"):
        shard.read_value(table)
    with pytest.raises(kv.DTypeError, match="is dense"):
        shard.read_rows(dense)
    wrong = [
        (dense, SlicePayload(bytes(48), rows=2)),
        (dense, SlicePayload(bytes(41))),
        (7, SlicePayload(bytes(40))),
    ]
    good = dense, SlicePayload(np.ones(10, np.float32))
    errors = shard.write_values([SliceValueWrite(*one, first=False) for one in (*wrong, good)])
    assert [type(one) for one in errors] == [kv.DTypeError, kv.ShapeError, kv.KeyNotFoundError, type(None)]
    assert "cannot be set by rows" in str(errors[0])
    assert (shard.read_value(dense) == 1).all()


def test_no_rows_of_a_table() -> None:
    shards = StoreShards(1)
    shards.init("t", kv.RowSparseArray.zeros((40, 2, 3)))
    slice = shards.entries["t"].slices[0].id
    for wanted in (None, np.empty(0, np.int64)):
        ids, found = shards.shards[0].read_rows(slice, wanted)
        assert len(ids) == 0
        assert found.shape == (0, 6)


@pytest.mark.parametrize("name", ["adam", "lamb"])
def test_a_state_of_a_slice_without_a_value(name: str) -> None:
    shards = StoreShards(1)
    shards.init("v", np.zeros(4, np.float32))
    shards.set_optimizer(create(name))
    shards.push(("v", [np.ones(4, np.float32)]))
    state = shards.states()[shards.entries["v"].slices[0].id]
    shard = shards.shards[0]
    shard.forget_slices([shards.entries["v"].slices[0].id])
    shard.define_slices([kv_entry("v", 50)])
    with pytest.raises(kv.KeyNotFoundError, match="no value yet"):
        shard.put_state(50, state)


def test_a_state_of_an_optimizer_that_was_replaced_changes_nothing() -> None:
    shards = StoreShards(1)
    shards.init("v", np.zeros(4, np.float32))
    shards.set_optimizer(create("adam"))
    shards.push(("v", [np.ones(4, np.float32)]))
    slice = shards.entries["v"].slices[0].id
    state = shards.states()[slice]
    shards.install("none")
    shards.shards[0].put_state(slice, state, 1)
    assert shards.states()[slice] == b""
    with pytest.raises(kv.errors.StateFileError, match="set the optimizer first"):
        shards.shards[0].put_state(slice, state, 2)


def test_a_slice_without_a_value() -> None:
    shards = StoreShards(1)
    shards.init("w", np.zeros(10, np.float32))
    shard = shards.shards[0]
    shard.define_slices([kv_entry("v", 50)])
    with pytest.raises(kv.KeyNotFoundError, match="no value yet"):
        shard.read_value(50)
    assert isinstance(
        shard.rounds.apply_jobs([SliceUpdate(50, 1, [(0, SlicePayload(bytes(16)))])])[0], kv.KeyNotFoundError
    )
    assert set(shard.value_bytes()) == {shards.entries["w"].slices[0].id}


def kv_entry(key: str, slice: int) -> Any:
    from kvstore.stores.parameter_server.protocol.messages import KeyEntry, KeySpec, Slice

    return KeyEntry(KeySpec(key, (4,), "float32"), 9, (Slice(slice, 0, 0, 4),), False)


# ---------------------------------------------------------------------------------------------- settings


def test_a_round_has_the_settings_of_its_pushes() -> None:
    shards = StoreShards(1)
    shards.init("w", np.zeros(4, np.float32))
    rule = create("test", learning_rate=1.0)
    shards.set_optimizer(rule)
    rule.set_learning_rate(10.0)
    shards.barrier()
    shards.configure(rule, "learning_rate")
    shard, slice = shards.shards[0], shards.entries["w"].slices[0].id
    one = [(0, SlicePayload(np.ones(4, np.float32)))]
    for version, value in ((0, 1), (1, 0), (2, -10), (1, -20), (9, -30)):  # never back to older ones
        assert shard.rounds.apply_jobs([SliceUpdate(slice, 1, one, version, 1)]) == [None]
        assert (shard.read_value(slice) == value).all(), version
    assert shard.rounds.apply_jobs([SliceUpdate(slice, 1, one, 0, 1)]) == [None]
    assert (shard.read_value(slice) == -40).all()


def test_other_settings_keep_states_and_another_optimizer_does_not() -> None:
    pair = Beside(2)
    pair.init("w", numbers((4500,)), (1024,))
    pair.init("t", some_rows((40, 3), 5, 1), (20,))

    def push(step: int) -> None:
        pair.push(("w", [numbers((4500,), seed=step)]), ("t", [some_rows((40, 3), 5, step)]))
        pair.check("w")
        pair.check("t")

    rule = create("adam")
    pair.set_optimizer(rule)
    for step in range(3):
        push(step)
        rule.configure(learning_rate=0.1 / (step + 1), wd=0.01)
        pair.local.update_optimizer(learning_rate=0.1 / (step + 1), wd=0.01)
        pair.shards.configure(rule, "learning_rate", "wd")
    pair.set_optimizer(rule)
    for step in range(3, 5):
        push(step)
    pair.local.set_updater(None)
    pair.shards.install("none")
    push(5)


def test_settings_replace_those_of_their_version() -> None:
    shards = StoreShards(1)
    shards.init("w", np.zeros(4, np.float32))
    shards.set_optimizer(create("adam"))
    shard, (piece,) = shards.shards[0], shards.entries["w"].slices
    described = shards.log.newest
    shard.install_settings(1, SettingsAt(2, json.dumps(create("test", learning_rate=3.0).describe()), 2))
    shard.install_settings(
        1, described._replace(text=json.dumps(create("sgd", learning_rate=2.0).describe()))
    )
    assert [one.version for one in shard._optimizers.all_versions()] == [0, 1]
    shards.push(("w", [np.ones(4, np.float32)]))
    assert (shards.pull("w") == -2).all()
    assert shard.fetch_state(piece.id) != b""


def test_settings_of_an_earlier_version_hold_up_to_the_next() -> None:
    shards = StoreShards(1)
    shards.init("w", np.zeros(4, np.float32))
    shard, (piece,) = shards.shards[0], shards.entries["w"].slices
    for version in (9, 3, 6):
        text = json.dumps(create("sgd", learning_rate=float(version)).describe())
        shard.install_settings(version, SettingsAt(1, text, 1))
    assert [one.version for one in shard._optimizers.all_versions()] == [0, 3, 6, 9]
    found = []
    for version in (2, 3, 5, 6, 8, 9, 20):
        before = shards.pull("w")
        parts = [(0, SlicePayload(np.ones(4, np.float32)))]
        assert shard.rounds.apply_jobs([SliceUpdate(piece.id, 1, parts, version, 1)]) == [None]
        found.append(float((before - shards.pull("w"))[0]))
    assert found == [-1, 3, 3, 6, 6, 9, 9]  # at first the sum is the value


def test_settings_that_another_change_replaces_keep_states() -> None:
    shards = StoreShards(1)
    shards.init("w", np.zeros(4, np.float32))
    rule = create("sgd", learning_rate=1.0, momentum=0.5)
    shards.set_optimizer(rule)
    shards.push(("w", [np.ones(4, np.float32)]))
    rule.configure(learning_rate=2.0)
    for name in ("learning_rate", "wd"):
        shards.configure(rule, name)
    shards.push(("w", [np.ones(4, np.float32)]))
    assert (shards.pull("w") == -1 - 2.5).all()


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("optimizer", "{", "describe no optimizer"),
        ("optimizer", "[]", "describe no optimizer"),
        ("optimizer", '{"name": "adm", "config": {}}', "adm"),
        ("optimizer", '{"name": "adam", "config": {"foo": 1}}', "foo"),
        ("optimizer", '{"name": "Mine", "config": null}', "register its class"),
        ("configure", '{"betas": 3}', "betas"),
        ("configure", '{"learning_rate": "fast"}', "learning_rate"),
        ("configure", '"wd"', "not a change of an optimizer"),
        ("configure", "{", "not a change of an optimizer"),
        ("configure", "[" * 100_000, "not a change of an optimizer"),
    ],
)
def test_settings_that_are_none(kind: str, text: str, words: str) -> None:
    shards = StoreShards(2)
    shards.init("w", np.zeros(4, np.float32), (2,))
    shards.set_optimizer(create("sgd", learning_rate=1.0))
    with pytest.raises(kv.ConfigError, match=words):
        shards.install(kind, text)
    shards.push(("w", [np.ones(4, np.float32)]))
    assert (shards.pull("w") == -1).all()


def test_settings_that_change_all_the_time_do_not_pile_up() -> None:
    shards = StoreShards(1)
    shards.set_optimizer(create("sgd"))
    for _ in range(3000):
        shards.install("counts")
        shards.barrier()
    assert len(shards.shards[0]._optimizers.all_versions()) == 1024


# ------------------------------------------------------------------------------------------ shared memory


@pytest.mark.parametrize("name", ["sgd", "lamb"])
def test_values_that_workers_of_this_machine_read(name: str) -> None:
    memory = SharedValues()
    pair = Beside(1, memory)
    pair.init("w", numbers((300, 100)), (8192, 16384))
    pair.init("t", some_rows((40, 3), 5, 1))
    pair.set_optimizer(create(name))
    inbox = PeerBuffers.open(memory.handle())
    assert inbox is not None
    shard = pair.shards.shards[0]
    old = None
    for step in range(3):
        pair.push(("w", [numbers((300, 100), seed=step)]))
        found = []
        for piece in pair.shards.entries["w"].slices:
            place = shard.shared_location(piece.id)
            assert place is not None
            out = np.empty(place.nbytes // 4, np.float32)
            assert inbox.copy_block(*place[:3], place.seqlock, out)
            if old is not None:
                assert not inbox.copy_block(*place[:3], old[piece.id], out)
            found.append(out)
        old = {p.id: shard.shared_location(p.id).seqlock for p in pair.shards.entries["w"].slices}
        np.testing.assert_array_equal(np.concatenate(found), pair.local.view("w").reshape(-1))
    assert shard.shared_location(pair.shards.entries["t"].slices[0].id) is None
    used = memory.nbytes
    for _ in range(5):  # dropped entries free memory
        shard.forget_slices([piece.id for piece in pair.shards.entries.pop("w").slices])
        pair.shards.init("w", numbers((300, 100)), (8192, 16384))
    assert memory.nbytes == used


def test_without_room_for_others_values_are_private() -> None:
    shards = StoreShards(1, SharedValues(limit=2**22))
    shards.init("small", np.zeros(1000, np.float32))
    shards.init("large", np.ones(2**21, np.float32))
    shard = shards.shards[0]
    small, large = (shards.entries[key].slices[0].id for key in ("small", "large"))
    assert shard.shared_location(small) is not None
    assert shard.shared_location(large) is None
    assert math.fsum(shard.read_value(large)) == 2**21


def test_forgotten_slices_are_gone() -> None:
    shards = StoreShards(2)
    shards.init("w", np.zeros(3000, np.float32), (1024,))
    shards.init("t", some_rows((40, 3), 5, 1), (20,))
    for shard in shards.shards:
        shard.forget_slices([piece.id for piece in shards.pieces()] + [12345])
        assert shard.value_bytes() == {}
        shard.close()
    with pytest.raises(kv.KeyNotFoundError):
        shards.pull("w")


@quiet_about_halves
@pytest.mark.parametrize(("name", "settings"), [("", {}), *RULES])
@pytest.mark.parametrize(("servers", "cuts"), [(1, (7, 1024)), (2, (1024, 3000))])
@pytest.mark.parametrize("sparse", [False, True])
def test_what_was_there_a_round_ago_is_kept(
    name: str, settings: dict[str, Any], servers: int, cuts: tuple[int, ...], sparse: bool
) -> None:
    if sparse:
        cuts = ()
    if name in WHOLE:
        servers = 1
    shards, n = StoreShards(servers), 50
    first = kv.RowSparseArray(numbers((5, 80)), np.arange(0, n, 10), (n, 80)) if sparse else numbers((n, 80))
    shards.init("w", first, cuts)
    if name:
        shards.set_optimizer(create(name, **settings))
    for round_ in range(1, 5):
        before = shards.pull("w")
        ids = [np.arange(rank, n, 7 + round_) for rank in range(2)]
        parts = [
            kv.RowSparseArray(numbers((len(one), 80), seed=round_), one, (n, 80))
            if sparse
            else numbers((n, 80), seed=round_)
            for one in ids
        ]
        assert not any(shards.push(("w", parts)))
        assert not np.array_equal(before, shards.pull("w"))
        assert np.array_equal(before, past(shards, "w", round_ - 1))
        with pytest.raises(kv.KVStoreError, match=f"after round {round_ + 1} is not kept"):
            past(shards, "w", round_ + 1)
    assert not any(shards.push(("w", parts[:1])))  # there is no other worker that could be lost
    with pytest.raises(kv.KVStoreError, match="is not kept"):
        past(shards, "w", 4)


def test_what_was_there_is_kept_though_a_round_of_rows_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*arguments: object) -> None:
        raise MemoryError("no memory for an update")

    shards, n = StoreShards(1), 50
    shards.init("w", kv.RowSparseArray(numbers((5, 80)), np.arange(0, n, 10), (n, 80)))
    shards.set_optimizer(create("adam", lazy_update=True))
    for round_ in range(1, 5):
        before = shards.pull("w")
        ids = [np.arange(rank, n, 7 + round_) for rank in range(2)]
        parts = [kv.RowSparseArray(numbers((len(one), 80), seed=round_), one, (n, 80)) for one in ids]
        with monkeypatch.context() as patch:
            if round_ == 3:
                patch.setattr(cpu, "update_rows", fails)
            (error,) = shards.push(("w", parts))
        assert (error is not None) == (round_ == 3)
        assert np.array_equal(before, past(shards, "w", round_ - 1))
        assert np.array_equal(before, shards.pull("w")) == (round_ == 3)


def past(shards: StoreShards, key: str, round_: int) -> Array:
    """Return a key as it was after a round; of a table also its rows, asked for all together."""
    spec, found = shards.entries[key].spec, []
    for piece in shards.entries[key].slices:
        shard = shards.shards[piece.server]
        if not spec.sparse:
            found.append(shard.past_value(piece.id, round_))
            continue
        every = np.arange(piece.start, piece.stop, dtype=np.int64)
        rows = shard.past_value(piece.id, round_, every)[1]
        ids, some = shard.past_value(piece.id, round_)
        assert np.array_equal(rows[ids - piece.start], some)
        found.append(rows)
    return np.concatenate(found).reshape(spec.shape)


@pytest.mark.parametrize("shared", [False, True])
def test_sums_and_rules_in_turn_give_the_same_with_what_was_there_kept(
    shared: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = []
    for keeps in (True, False):
        memory = SharedValues() if shared else None
        shards = StoreShards(1, memory)
        if not keeps:
            monkeypatch.setattr(round_updates, "_may_be_undone", lambda job: False)
        shards.init("w", numbers((50, 80)), (7, 1024))
        for turn, rule in enumerate(("", "lamb", "none", "sgd", "none", "lamb")):
            if rule == "none":
                shards.install("none")
            elif rule:
                shards.set_optimizer(create(rule))
            for round_ in range(3):
                before = shards.pull("w")
                parts = [numbers((50, 80), seed=10 * turn + round_ + rank) for rank in range(2)]
                assert not any(shards.push(("w", parts)))
                assert not keeps or np.array_equal(before, past(shards, "w", shards.pushes["w"] - 1))
                found.append(shards.pull("w"))
        for shard in shards.shards:
            shard.close()
        if memory is not None:
            memory.close()
    assert all(map(np.array_equal, found[: len(found) // 2], found[len(found) // 2 :]))
