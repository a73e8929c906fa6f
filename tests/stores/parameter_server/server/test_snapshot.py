"""States of servers as files of one process and back, and snapshots from which a server restarts."""

from __future__ import annotations

import json
import math
import os
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from shards import Beside, StoreShards

import kvstore as kv
from kvstore import atomic_files
from kvstore.optimizer import Updater, create, states
from kvstore.stores.parameter_server.protocol.optimizer_states import join_states, split_states
from kvstore.stores.parameter_server.server.payload import SlicePayload, SliceValueWrite
from kvstore.stores.parameter_server.server.store_shard import StoreShard
from kvstore.stores.parameter_server.transport.shared_buffers import SharedValues

Array = npt.NDArray[Any]

SHAPES: dict[str, tuple[tuple[int, ...], str]] = {
    "a": ((60, 70), "float32"),
    "half": ((50, 90), "float16"),
    "odd": ((3,), "float64"),
}
TABLE = (40, 6)
RULES: list[tuple[str, dict[str, Any]]] = [
    ("sgd", {}),
    ("sgd", {"momentum": 0.9, "multi_precision": True}),
    ("adam", {"multi_precision": True, "wd": 0.01}),
    ("adam", {"lazy_update": True}),
    ("dcasgd", {"momentum": 0.5}),
    ("nadam", {}),
    ("lamb", {"multi_precision": True}),
    ("groupadagrad", {}),
]
pytestmark = pytest.mark.filterwarnings("ignore:.*lose small updates")


def numbers(shape: tuple[int, ...], kind: str = "float32", seed: int = 0) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(kind)


def rows(n: int, seed: int) -> kv.RowSparseArray:
    ids = np.sort(np.random.default_rng(seed).choice(TABLE[0], n, replace=False))
    return kv.RowSparseArray(numbers((n, TABLE[1]), seed=seed), ids, TABLE)


def keys_of(name: str) -> list[str]:
    return ["a", "half"] if name == "groupadagrad" else list(SHAPES)  # which wants two dimensions


def started(name: str, servers: int) -> Beside:
    pair = Beside(servers)
    whole = name in ("lamb", "groupadagrad")
    for key in keys_of(name):
        pair.init(key, numbers(*SHAPES[key]), () if whole and servers > 1 else (1024, 3000))
    pair.init("t", rows(9, 1), () if name == "lamb" else (17,))
    return pair


def train(pair: Beside, name: str, steps: range) -> None:
    for step in steps:
        dense = [(key, [numbers(*SHAPES[key], 10 * step + r) for r in range(2)]) for key in keys_of(name)]
        pair.push(*dense, ("t", [rows(4, step), rows(3, step + 50)]))
        for key in (*keys_of(name), "t"):
            pair.check(key)


# ------------------------------------------------------------------------------------------------ states


@pytest.mark.parametrize("dump", [False, True])
@pytest.mark.parametrize("servers", [1, 2])
@pytest.mark.parametrize(("name", "settings"), RULES)
def test_servers_write_the_file_that_one_process_writes(
    name: str, settings: dict[str, Any], servers: int, dump: bool, tmp_path: Path
) -> None:
    pair = started(name, servers)
    optimizer = create(name, **settings)
    pair.set_optimizer(optimizer)
    train(pair, name, range(3))
    pair.local.save_optimizer_states(str(tmp_path / "local"), dump_optimizer=dump)
    ours = join_states(pair.shards.entries.values(), pair.shards.states(), optimizer)
    ours.save(tmp_path / "ours", dump)
    assert_same_file(tmp_path / "ours", tmp_path / "local")
    assert optimizer.num_update == 0

    # And both continue from it.
    for path in ("ours", "local"):
        there = started(name, servers)
        there.set_optimizer(create(name, **settings))
        for key in (*keys_of(name), "t"):
            value = pair.local.view(key)
            there.local._backend.assign([(key, [value])])
            there.shards.write(key, value)
        there.local.load_optimizer_states(str(tmp_path / path))
        loaded = Updater(create(name, **settings))
        loaded.load(tmp_path / path, there.local._backend.key_templates())
        there.shards.put_states(split_states(there.shards.entries.values(), loaded))
        there.shards.load_counts(loaded.optimizer)
        train(there, name, range(3, 5))


def assert_same_file(ours: Path, theirs: Path) -> None:
    one, other = states.read_states(ours), states.read_states(theirs)
    assert (one.rule, one.num_update, one.counts) == (other.rule, other.num_update, other.counts)
    assert one.states.keys() == other.states.keys()
    for key in one.states:
        assert_same_state(one.states[key], other.states[key])
    assert (one.optimizer is None) == (other.optimizer is None)
    if one.optimizer is not None and other.optimizer is not None:
        assert one.optimizer.describe() == other.optimizer.describe()


def assert_same_state(one: Any, other: Any) -> None:
    if isinstance(one, tuple):
        assert isinstance(other, tuple)
        assert len(one) == len(other)
        for part, its in zip(one, other, strict=True):
            assert_same_state(part, its)
    elif one is None:
        assert other is None
    else:
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        assert one.tobytes() == other.tobytes()


def test_states_before_the_first_update() -> None:
    pair = started("adam", 2)
    optimizer = create("adam", begin_num_update=3)
    assert pair.shards.states() == dict.fromkeys((p.id for p in pair.shards.pieces()), b"")
    pair.set_optimizer(optimizer)
    ours = join_states(pair.shards.entries.values(), pair.shards.states(), optimizer)
    assert ours.states == {}
    assert ours.optimizer.num_update == 3
    pair.shards.put_states(split_states(pair.shards.entries.values(), ours))
    train(pair, "adam", range(2))


def test_states_of_which_one_half_is_there() -> None:
    shards = StoreShards(2)
    shards.init("w", np.zeros(3000, np.float32), (1024,))
    optimizer = create("adam")
    shards.set_optimizer(optimizer)
    parts = shards.states()
    shards.push(("w", [np.ones(3000, np.float32)]))
    low, high = shards.entries["w"].slices
    mixed = {low.id: shards.states()[low.id], high.id: parts[high.id]}
    with pytest.raises(kv.KVStoreError, match="save when all rounds are complete"):
        join_states(shards.entries.values(), mixed, optimizer)


def test_states_that_do_not_fit() -> None:
    shards = StoreShards(1)
    shards.init("w", np.zeros(3000, np.float32), (1024,))
    shards.init("t", rows(9, 1), (17,))
    shards.set_optimizer(create("adam"))
    shards.push(("w", [np.ones(3000, np.float32)]), ("t", [rows(4, 2)]))
    parts = shards.states()
    low, high = shards.entries["w"].slices
    first, second = shards.entries["t"].slices
    shard = shards.shards[0]
    for piece, data in (
        (low, parts[high.id]),
        (low, parts[first.id]),
        (first, parts[low.id]),
        (low, b""),
        (low, parts[low.id][:-1]),
        (first, b"\x80\x04pickle"),
    ):
        with pytest.raises(kv.StateFileError):
            shard.put_state(piece.id, data)
    shard.put_state(low.id, parts[low.id])
    shard.put_state(second.id, parts[second.id])
    shards.set_optimizer(create("sgd", momentum=0.9))
    with pytest.raises(kv.StateFileError, match="'adam', and the store's is 'sgd'"):
        shard.put_state(low.id, parts[low.id])
    shards.install("none")
    with pytest.raises(kv.StateFileError, match="set the optimizer first"):
        shard.put_state(low.id, parts[low.id])


def test_a_table_whose_states_begin_anew_with_other_settings() -> None:
    optimizer = create("sgd")
    shards, fresh = StoreShards(1), StoreShards(1)
    for one in (shards, fresh):
        one.init("t", rows(9, 1))
    shards.set_optimizer(optimizer)
    nothing = shards.states()
    shards.push(("t", [rows(3, 1)]))
    fresh.write("t", kv.RowSparseArray(shards.pull("t"), np.arange(TABLE[0]), TABLE))
    optimizer.configure(momentum=0.9)
    shards.configure(optimizer, "momentum")
    shards.put_states(nothing)
    fresh.set_optimizer(optimizer)
    fresh.pushes = dict(shards.pushes)
    for seed in range(2, 5):
        for one in (shards, fresh):
            assert set(one.push(("t", [rows(3, seed)]))) == {None}
        np.testing.assert_array_equal(shards.pull("t"), fresh.pull("t"))


@pytest.mark.parametrize("lazy", [True, False])
def test_states_of_rows_go_to_another_server(lazy: bool) -> None:
    shards, others = StoreShards(1), StoreShards(1)
    for one in (shards, others):
        one.init("t", rows(9, 1), (17,))
        one.set_optimizer(create("adam", lazy_update=lazy, wd=0.01))
    for seed in range(3):
        shards.push(("t", [rows(3, seed)]))
    others.put_states(shards.states())
    for piece in shards.entries["t"].slices:
        ids, found = shards.shards[0].read_rows(piece.id)
        payload = SlicePayload((ids, np.ascontiguousarray(found)), rows=len(ids))
        assert others.shards[0].write_values([SliceValueWrite(piece.id, payload, first=False)]) == [None]
    others.pushes = dict(shards.pushes)
    for seed in range(3, 6):
        for one in (shards, others):
            assert set(one.push(("t", [rows(3, seed)]))) == {None}
        np.testing.assert_array_equal(others.pull("t"), shards.pull("t"))


def test_states_of_rows_that_are_not_there() -> None:
    shards = StoreShards(1)
    shards.init("t", rows(9, 1))
    optimizer = create("adam")
    shards.set_optimizer(optimizer)
    shards.push(("t", [rows(4, 2)]))
    slice = shards.entries["t"].slices[0].id
    content = states.unpack_states(shards.states()[slice])
    ids, blank, tree = content.states["t"]  # type: ignore[misc]
    for wrong in (ids + 40, ids[:1], -ids, np.zeros_like(ids)):
        data = states.pack_states({"t": (wrong, blank, tree)}, optimizer, False)
        with pytest.raises(kv.StateFileError):
            shards.shards[0].put_state(slice, data)


def test_states_of_a_table_that_no_process_could_hold() -> None:
    shards = StoreShards(1)
    shape = (10**13, 8)
    shards.init("t", kv.RowSparseArray.zeros(shape))
    optimizer = create("adam")
    shards.set_optimizer(optimizer)
    shards.push(("t", [kv.RowSparseArray(np.ones((2, 8), np.float32), [5, 10**12], shape)]))
    with pytest.raises(kv.KVStoreError, match="do not fit the memory"):
        join_states(shards.entries.values(), shards.states(), optimizer)


# --------------------------------------------------------------------------------------------- snapshots


def restored(pair: Beside, folder: Path, memory: SharedValues | None = None) -> list[dict[str, Any]]:
    found = [StoreShard.restore(folder / str(shard.server), memory) for shard in pair.shards.shards]
    pair.shards.shards = [shard for shard, _ in found]
    return [rounds for _, rounds in found]


def snapshot(pair: Beside, folder: Path, rounds: dict[str, Any]) -> None:
    for shard in pair.shards.shards:
        shard.capture(folder / str(shard.server), rounds)()


@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize(("name", "settings"), [("none", {}), *RULES])
def test_a_server_goes_on_from_its_snapshot(
    name: str, settings: dict[str, Any], shared: bool, tmp_path: Path
) -> None:
    pair = started(name, 2)
    snapshot(pair, tmp_path, {})
    for step in range(3):
        if name != "none" and step == 0:
            pair.set_optimizer(create(name, **settings))
        train(pair, name, range(2 * step, 2 * step + 2))
        snapshot(pair, tmp_path, {"complete": {"7": step}, "seen": [1, 2]})
        rounds = restored(pair, tmp_path, SharedValues() if shared else None)
        assert rounds == [{"complete": {"7": step}, "seen": [1, 2]}] * 2
        for key in (*keys_of(name), "t"):
            pair.check(key)
    train(pair, name, range(6, 8))
    shard = pair.shards.shards[0]
    places = [shard.shared_location(p.id) for p in pair.shards.entries["a"].slices if p.server == 0]
    assert all((place is not None) == shared for place in places)


def test_a_table_whose_state_begins_after_the_snapshot(tmp_path: Path) -> None:
    pair = Beside(1)
    pair.init("t", kv.RowSparseArray.zeros(TABLE))
    pair.set_optimizer(create("sgd", momentum=0.9))
    pair.shards.put_states({piece.id: nothing_of(pair) for piece in pair.shards.pieces()})
    snapshot(pair, tmp_path, {})
    restored(pair, tmp_path)
    for step, ids in enumerate(([0, 1], [2, 3], [1, 2])):
        pair.push(("t", [kv.RowSparseArray(numbers((2, TABLE[1]), seed=step), ids, TABLE)]))
        pair.check("t")


def nothing_of(pair: Beside) -> bytes:
    """Return the initial state of the first table."""
    shard = pair.shards.shards[0]
    return shard.fetch_state(next(iter(shard.value_bytes())))


def test_bfloat16_in_a_snapshot(tmp_path: Path) -> None:
    from ml_dtypes import bfloat16

    pair = Beside(1)
    pair.init("w", numbers((30, 4)).astype(bfloat16))
    pair.init("t", kv.RowSparseArray(numbers((3, 4)).astype(bfloat16), [1, 5, 6], (9, 4)))
    for optimizer in (create("adam"), create("adam", multi_precision=True)):
        pair.set_optimizer(optimizer)
        for step in range(3):
            row = kv.RowSparseArray(numbers((2, 4), seed=step).astype(bfloat16), [step, 7], (9, 4))
            pair.push(("w", [numbers((30, 4), seed=step).astype(bfloat16)]), ("t", [row]))
            snapshot(pair, tmp_path, {})
            restored(pair, tmp_path)
            pair.check("w")
            pair.check("t")


def test_what_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    shards = StoreShards(1)
    shards.init("large", np.ones(100_000, np.float32), (1024,))
    shards.init("small", np.zeros(3, np.float32))
    shard = shards.shards[0]
    shard.capture(tmp_path, {})()
    (first,) = tmp_path.glob("*.safetensors")
    for _ in range(3):
        shards.push(("small", [np.ones(3, np.float32)]))
        shard.capture(tmp_path, {})()
        sizes = sorted(path.stat().st_size for path in tmp_path.glob("*.safetensors"))
        assert len(sizes) == 2
        assert sizes[0] < 2000
        assert first.exists()
    shard.capture(tmp_path, {"round": 9})()  # nothing but the manifest
    assert len(list(tmp_path.iterdir())) == 3
    shard.forget_slices([piece.id for piece in shards.entries["large"].slices])
    shard.capture(tmp_path, {})()
    assert not first.exists()
    again, _ = StoreShard.restore(tmp_path)
    assert set(again.value_bytes()) == {shards.entries["small"].slices[0].id}


def test_another_folder_gets_everything(tmp_path: Path) -> None:
    shards = StoreShards(1)
    shards.init("w", np.ones(10, np.float32))
    shards.shards[0].capture(tmp_path / "one", {})()
    shards.shards[0].capture(tmp_path / "two", {})()
    again, _ = StoreShard.restore(tmp_path / "two")
    assert (again.read_value(shards.entries["w"].slices[0].id) == 1).all()


def test_settings_of_rounds_to_come_are_in_a_snapshot(tmp_path: Path) -> None:
    pair = started("adam", 1)
    rule = create("adam", lr_scheduler=kv.optimizer.lr_scheduler.FactorScheduler(2, 0.5, base_lr=0.1))
    pair.set_optimizer(rule)
    train(pair, "adam", range(3))
    rule.configure(wd=0.5)
    pair.local.update_optimizer(wd=0.5)
    pair.shards.configure(rule, "wd")
    snapshot(pair, tmp_path, {})
    restored(pair, tmp_path)
    train(pair, "adam", range(3, 6))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    pair = started("adam", 1)
    pair.set_optimizer(create("adam"))
    train(pair, "adam", range(1))
    snapshot(pair, tmp_path, {})
    train(pair, "adam", range(1, 2))
    pair.shards.init("later", np.ones(3, np.float32))
    snapshot(pair, tmp_path, {})
    return tmp_path / "0"


def test_no_snapshot(tmp_path: Path) -> None:
    with pytest.raises(kv.StateFileError, match="no snapshot in this folder"):
        StoreShard.restore(tmp_path)


@pytest.mark.parametrize("damage", ["cut", "flip", "empty", "gone"])
def test_a_damaged_snapshot(folder: Path, damage: str) -> None:
    for path in folder.iterdir():
        whole = path.read_bytes()
        if damage == "gone" and path.name == "manifest.json":
            continue
        if damage == "cut":
            path.write_bytes(whole[:-5])
        elif damage == "flip":
            path.write_bytes(whole[:-5] + bytes([whole[-5] ^ 64]) + whole[-4:])
        elif damage == "empty":
            path.write_bytes(b"")
        else:
            path.unlink()
        with pytest.raises(kv.StateFileError):
            StoreShard.restore(folder)
        path.write_bytes(whole)
    StoreShard.restore(folder)


@pytest.mark.parametrize(
    "change",
    [
        {"format": "something"},
        {"version": 1},
        {"entries": []},
        {"slices": {"100": ["../../etc/passwd", {}]}, "files": {"../../etc/passwd": "0"}},
        {"slices": {"99999": ["1.safetensors", {}]}},
        {"files": {}},
        {"files": {"1.safetensors": "00000000"}},
        {"rules": [{}]},
        {"rules": [{"version": 1, "era": 1, "text": '{"name": "nobody", "config": {}}', "base": 0}]},
    ],
)
def test_a_foreign_manifest(folder: Path, change: dict[str, Any]) -> None:
    path = folder / "manifest.json"
    good = json.loads(atomic_files.read_with_checksum(path))
    atomic_files.write_with_checksum(path, json.dumps({**good, **change}).encode())
    with pytest.raises(kv.KVStoreError):
        StoreShard.restore(folder)


def test_a_manifest_with_a_name_that_is_no_text(folder: Path) -> None:
    path = folder / "manifest.json"
    text = atomic_files.read_with_checksum(path)
    atomic_files.write_with_checksum(path, text.replace(b".safetensors", b"\xce.safetensors"))
    with pytest.raises(kv.StateFileError, match="damaged or no manifest"):
        StoreShard.restore(folder)


def test_a_manifest_of_the_version_before_is_refused_by_name(folder: Path) -> None:
    path = folder / "manifest.json"
    path.write_bytes(atomic_files.read_with_checksum(path))
    with pytest.raises(kv.StateFileError, match="an earlier version of kvstore has written it without one"):
        StoreShard.restore(folder)


def test_a_file_that_is_whole_and_not_the_one_that_the_manifest_names(folder: Path, tmp_path: Path) -> None:
    shards = StoreShards(1)
    shards.init("w", np.ones(100, np.float32), (50,))
    for name, step in (("one", 0), ("other", 1)):
        shards.push(("w", [np.full(100, step, np.float32)]))
        shards.shards[0].capture(tmp_path / name, {})()
    StoreShard.restore(tmp_path / "one")
    shutil.copy(tmp_path / "other" / "1.safetensors", tmp_path / "one" / "1.safetensors")
    with pytest.raises(kv.StateFileError, match="another file than the one that was written"):
        StoreShard.restore(tmp_path / "one")


@pytest.mark.parametrize("step", ["write", "replace"])
def test_a_server_that_is_killed_while_it_writes(tmp_path: Path, step: str) -> None:
    shards = StoreShards(1)
    shards.init("w", np.ones(100, np.float32), (50,))
    shard, slice = shards.shards[0], shards.entries["w"].slices[0].id
    shard.capture(tmp_path, {"round": 1})()
    pid = os.fork()
    if pid == 0:
        shards.push(("w", [np.full(100, 2, np.float32)]))
        replace, calls = os.replace, iter(range(10))

        def killed(*paths: Any) -> None:
            if next(calls) == (step == "replace"):  # before the data, or before the manifest, is in place
                os.kill(os.getpid(), signal.SIGKILL)
            replace(*paths)

        os.replace = killed
        shard.capture(tmp_path, {"round": 2})()
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == -signal.SIGKILL
    assert len(list(tmp_path.iterdir())) > 2
    again, rounds = StoreShard.restore(tmp_path)
    assert rounds == {"round": 1}
    assert (again.read_value(slice) == 1).all()
    again.capture(tmp_path, {"round": 3})()
    assert len(list(tmp_path.iterdir())) == 2
    assert StoreShard.restore(tmp_path)[1] == {"round": 3}


def test_a_full_disk_leaves_the_last_snapshot(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = StoreShards(1)
    shards.init("w", np.ones(100, np.float32))
    shard = shards.shards[0]
    shard.capture(tmp_path, {"round": 1})()
    shards.push(("w", [np.full(100, 2, np.float32)]))

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(OSError, match="No space"):
            shard.capture(tmp_path, {"round": 2})()
    assert StoreShard.restore(tmp_path)[1] == {"round": 1}
    shard.capture(tmp_path, {"round": 3})()
    again, rounds = StoreShard.restore(tmp_path)
    assert rounds == {"round": 3}
    assert math.fsum(again.read_value(shards.entries["w"].slices[0].id)) == 200


def test_a_snapshot_whose_folder_was_not_synchronised_is_not_written_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shards = StoreShards(1)
    shards.init("w", np.ones(100, np.float32))
    shard, slice = shards.shards[0], shards.entries["w"].slices[0].id
    shard.capture(tmp_path, {"round": 1})()
    sync, replace = atomic_files._sync_folder, os.replace

    def not_synchronised(path: Any) -> None:
        sync(path)
        if Path(path).name == "manifest.json":
            error: Any = kv.StateFileError("on demand")
            error.has_new_content = True
            raise error

    def full(*paths: Any) -> None:
        if Path(paths[1]).name == "manifest.json":
            raise OSError(28, "No space left on device")
        replace(*paths)

    for round_, (where, name, fault) in enumerate(
        [(atomic_files, "_sync_folder", not_synchronised), (os, "replace", full)], 2
    ):
        shards.push(("w", [np.full(100, round_, np.float32)]))
        with monkeypatch.context() as patch, pytest.raises(kv.StateFileError):
            patch.setattr(where, name, fault)
            shard.capture(tmp_path, {"round": round_})()
    again, rounds = StoreShard.restore(tmp_path)
    assert rounds == {"round": 2}
    assert (again.read_value(slice) == 2).all()


def test_a_snapshot_that_is_written_while_training_goes_on(tmp_path: Path) -> None:
    pair = started("adam", 1)
    pair.set_optimizer(create("adam"))
    train(pair, "adam", range(2))
    shard = pair.shards.shards[0]
    write = shard.capture(tmp_path, {"round": 2})
    before = {key: pair.shards.pull(key) for key in (*keys_of("adam"), "t")}
    train(pair, "adam", range(2, 4))
    write()
    pair.shards.shards[0], rounds = StoreShard.restore(tmp_path)
    assert rounds == {"round": 2}
    for key, value in before.items():
        np.testing.assert_array_equal(pair.shards.pull(key), value)
    shard.capture(tmp_path, {"round": 4})()  # the changes since then
    pair.shards.shards[0], _ = StoreShard.restore(tmp_path)
    train(pair, "adam", range(4, 5))


def test_a_folder_that_was_moved(folder: Path, tmp_path: Path) -> None:
    shutil.move(folder, tmp_path / "elsewhere")
    shard, _ = StoreShard.restore(tmp_path / "elsewhere")
    assert len(shard.value_bytes()) > 3
