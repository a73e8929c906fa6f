"""Saving and loading states: round trips, resumed runs, the recordings, damaged and foreign files."""

import json
import os
import pickle
import stat
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from safetensors.numpy import load, save

import kvstore.optimizer as opt
from kvstore import tensor_file
from kvstore.errors import ConfigError, StateFileError
from kvstore.optimizer import registry, states
from kvstore.optimizer.lr_scheduler import FactorScheduler

DATA = Path(__file__).parents[1] / "data"
GOLDEN = np.load(DATA / "opt_states.npz")
NAMES = sorted(name for name, rule in registry._registry.items() if rule.__module__.startswith("kvstore."))
RECORDED = {"adam": {"learning_rate": 0.05}, "sgd": {"learning_rate": 0.1, "momentum": 0.9}}


def trained(name, rounds=3, keys=("w", "x/y"), **kwargs):
    updater = opt.get_updater(opt.create(name, **kwargs))
    weights = {key: np.full((2, 3), i + 1, np.float32) for i, key in enumerate(keys)}
    train(updater, weights, range(rounds))
    return updater, weights


def train(updater, weights, rounds):
    for r in rounds:
        for key, weight in weights.items():
            updater(key, np.float32(r + 1) * np.linspace(-1, 1, 6, dtype=np.float32).reshape(2, 3), weight)


def same(a, b):
    if isinstance(a, tuple):
        return isinstance(b, tuple) and len(a) == len(b) and all(map(same, a, b))
    if a is None or b is None:
        return a is b
    return a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()


# ----------------------------------------------------------------------------------------- resumed runs


@pytest.mark.parametrize("dump", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_resumed_run_is_the_unbroken_one(name, dump, tmp_path):
    unbroken, want = trained(name, 6)
    first, weights = trained(name, 3)
    first.save(tmp_path / "s", dump_optimizer=dump)
    second = opt.get_updater(opt.create(name))
    second.load(tmp_path / "s")
    assert second.optimizer.num_update == 3
    train(second, weights, range(3, 6))
    for key, weight in weights.items():
        assert same(weight, want[key])
        assert same(second.states[key], unbroken.states[key])


@pytest.mark.parametrize("name", RECORDED)
@pytest.mark.parametrize("dump", [0, 1])
def test_recorded_runs(name, dump):
    """MXNet's dump 0 loses Adam's counts; here they are always kept, so both give its dump 1."""
    grads, w = GOLDEN["grads"], GOLDEN["w0"].copy()
    updater = opt.get_updater(opt.create(name, **RECORDED[name]))
    for grad in grads[:3]:
        updater("w", grad, w)
    close = {"rtol": 1e-5, "atol": 1e-7}
    np.testing.assert_allclose(w, GOLDEN[f"{name}_w_after3"], **close)
    state = updater.states["w"]
    for path, array in [("v", state)] if name == "sgd" else [("0", state[0]), ("1", state[1])]:
        np.testing.assert_allclose(array, GOLDEN[f"{name}_state_after3_{path}"], **close)
    resumed = opt.get_updater(opt.create(name, **RECORDED[name]))
    resumed.set_states(updater.get_states(dump_optimizer=bool(dump)))
    for grad in grads[3:]:
        resumed("w", grad, w)
    np.testing.assert_allclose(w, GOLDEN[f"{name}_w_after6"], **close)
    np.testing.assert_allclose(w, GOLDEN[f"{name}_w_after6_resumed_dump1"], **close)


def test_the_recorded_loss_of_counts_is_real():
    gap = abs(GOLDEN["adam_w_after6_resumed_dump0"] - GOLDEN["adam_w_after6"]).max()
    assert gap > 0.01
    np.testing.assert_array_equal(GOLDEN["sgd_w_after6_resumed_dump0"], GOLDEN["sgd_w_after6"])


# ------------------------------------------------------------------------------------------ round trips


def test_a_dumped_optimizer_replaces_the_one_in_place():
    first, _ = trained(
        "sgd", momentum=0.5, lr_scheduler=FactorScheduler(2, 0.5, base_lr=0.4), lr_mult={"w": 2.0}
    )
    second = opt.get_updater(opt.SGD())
    mine = second.optimizer
    second.set_states(first.get_states(dump_optimizer=True))
    assert second.optimizer is not mine
    assert second.optimizer.describe() == first.optimizer.describe()
    assert second.optimizer._index_update_count == {"w": 3, "x/y": 3}
    assert second.optimizer.learning_rate == first.optimizer.learning_rate


def test_without_one_the_users_optimizer_stays():
    first, _ = trained("sgd", momentum=0.5)
    optimizer = opt.SGD(learning_rate=7.0, momentum=0.5)
    second = opt.get_updater(optimizer)
    second.set_states(first.get_states())
    assert second.optimizer is optimizer
    assert optimizer.learning_rate == 7
    assert optimizer.num_update == 3


def test_states_of_an_unregistered_rule_without_its_configuration():
    class Own(opt.Optimizer):
        def create_state(self, index, weight):
            return ((np.arange(3), None), ())

    updater = opt.get_updater(Own())
    updater.states[7] = updater.optimizer.create_state(7, None)
    again = opt.get_updater(Own())
    again.set_states(updater.get_states())
    assert same(again.states[7], updater.states[7])
    with pytest.raises(ConfigError, match="not registered"):
        updater.get_states(dump_optimizer=True)


def test_loaded_arrays_are_the_updaters_own():
    first, _ = trained("sgd", momentum=0.5)
    data = first.get_states()
    second = opt.get_updater(opt.SGD(momentum=0.5))
    second.set_states(bytearray(data))
    state = second.states["w"]
    assert state.flags.writeable
    assert state.flags.aligned
    assert state.flags.c_contiguous
    assert not np.shares_memory(state, first.states["w"])


DTYPES = st.sampled_from(["float16", "float32", "float64", "int8", "uint8", "int32", "int64", "bool"])
ARRAYS = DTYPES.flatmap(lambda d: hnp.arrays(d, hnp.array_shapes(min_dims=0, min_side=0, max_side=4)))
STATES = st.recursive(st.none() | ARRAYS, lambda inner: st.lists(inner, max_size=3).map(tuple), max_leaves=5)
INTS, TEXTS = st.integers(-(2**62), 2**62), st.text(max_size=8)


@given(
    held=st.dictionaries(INTS, STATES, max_size=4) | st.dictionaries(TEXTS, STATES, max_size=4),
    counts=st.lists(st.integers(0, 2**40), max_size=4),
    dump=st.booleans(),
)
@settings(max_examples=60, deadline=None)
def test_any_states_come_back(held, counts, dump):
    optimizer = opt.Adam(wd=0.25)
    optimizer._index_update_count = dict(zip(held, counts, strict=False))
    optimizer.num_update = max(counts, default=0)
    content = states.unpack_states(states.pack_states(held, optimizer, dump))
    assert list(content.states) == list(held)
    assert all(same(content.states[key], state) for key, state in held.items())
    assert content.counts == optimizer._index_update_count
    assert content.num_update == optimizer.num_update
    assert (content.optimizer is not None) == dump


def test_bfloat16():
    ml_dtypes = pytest.importorskip("ml_dtypes")
    array = np.arange(6).astype(ml_dtypes.bfloat16).reshape(2, 3)
    content = states.unpack_states(states.pack_states({"w": (array, None)}, opt.SGD(), False))
    assert same(content.states["w"], (array, None))


def test_odd_arrays_are_written_by_value():
    array = np.arange(12, dtype=">f4").reshape(3, 4).T
    content = states.unpack_states(states.pack_states({"w": array}, opt.SGD(), False))
    np.testing.assert_array_equal(content.states["w"], array)


@pytest.mark.parametrize("wrong", [3.0, [np.zeros(2)], {"a": 1}, np.array(["x"]), np.zeros(2, complex)])
def test_states_of_anything_else_are_refused(wrong):
    with pytest.raises(ConfigError, match="only None, arrays of numbers and tuples"):
        states.pack_states({"w": wrong}, opt.SGD(), False)


def test_keys_of_two_kinds_are_refused():
    with pytest.raises(ConfigError, match="all int or all str"):
        states.pack_states({"w": None, 1: None}, opt.SGD(), False)


def test_layout_of_the_file():
    updater, _ = trained("adam", multi_precision=True)
    data = updater.get_states(dump_optimizer=True)
    assert set(load(data)) == {f"state/{i}/{key}" for i in (0, 1) for key in ("w", "x/y")}
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    assert header["format"] == "kvstore.optimizer_states"
    assert header["version"] == "1"
    content = json.loads(header["content"])
    assert content["key_type"] == "str"
    assert content["counts"] == [["w", 3], ["x/y", 3]]
    assert content["optimizer"]["name"] == "adam"


# -------------------------------------------------------------------------------------- damage and misuse


def refuses(updater, data, word=None):
    """The states are refused, and the updater is as it was."""
    before = (updater.optimizer, dict(updater.states), updater.snapshot_counts())
    with pytest.raises(StateFileError, match=word) as caught:
        updater.set_states(data)
    assert (updater.optimizer, updater.states, updater.snapshot_counts()) == before
    return str(caught.value)


@pytest.fixture(scope="module")
def sound():
    return trained("adam")[0].get_states(dump_optimizer=True)


def test_a_pickle_is_refused_and_not_run(tmp_path):
    class Bomb:
        def __reduce__(self):
            return (os.mkdir, (str(tmp_path / "boom"),))

    updater = opt.get_updater(opt.SGD())
    for protocol in (2, 3, 4, 5):
        text = refuses(updater, pickle.dumps({"w": Bomb()}, protocol), "pickle")
        assert "MXNet" in text
        assert "updater.states" in text
    refuses(updater, pickle.dumps({"w": None}, 0))
    assert not (tmp_path / "boom").exists()


@pytest.mark.parametrize(
    ("data", "word"),
    [
        (b"", "empty"),
        (b"PK\3\4 a zip file", "another format"),
        (save({"x": np.zeros(2)}), "not a file of kvstore.optimizer_states"),
        (save({"x": np.zeros(2)}, {"format": "pt"}), r"not a file of .*format 'pt'"),
        (save({}, {"format": "kvstore.optimizer_states", "version": "2"}), "reads '1'"),
        (save({}, {"format": "kvstore.optimizer_states", "version": "1"}), "damaged or no file"),
        ((2**63).to_bytes(8, "little") + b"{}", "cut short"),
        ((2).to_bytes(8, "little") + b"{}", "not a file of"),
        ((200_000).to_bytes(8, "little") + b"{" + b"[" * 199_999, "damaged or no file"),
    ],
    ids=lambda one: one if isinstance(one, str) else str(len(one)),  # bytes differ from run to run
)
def test_foreign_bytes(data, word):
    refuses(opt.get_updater(opt.SGD()), data, word)


def test_every_truncation(sound):
    updater = trained("adam")[0]
    for n in range(0, len(sound), 7):
        refuses(updater, sound[:n])
    refuses(updater, sound[:-1])
    refuses(updater, sound + b"x")


def test_every_flipped_byte(sound):
    updater = trained("adam")[0]
    for i in range(0, len(sound), 3):
        damaged = bytearray(sound)
        damaged[i] ^= 0x15
        refuses(updater, bytes(damaged))


@given(noise=st.binary(max_size=60), at=st.integers(0, 10_000))
@settings(max_examples=100, deadline=None)
def test_noise_is_refused(sound, noise, at):
    data = sound[:at] + noise + sound[at + len(noise) :]
    if data != sound:
        refuses(opt.get_updater(opt.SGD()), data)


def forged(**changes):
    """A file with a right checksum and wrong content."""
    updater, _ = trained("adam", keys=("w",))
    data = updater.get_states()
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])["__metadata__"]
    tensors = load(data)
    content = {**json.loads(header["content"]), **changes}
    text = json.dumps(content)
    return save(tensors, {**header, "content": text, "checksum": tensor_file.checksum(text, tensors)})


@pytest.mark.parametrize(
    "changes",
    [
        {"key_type": "float"},
        {"key_type": "int"},
        {"structure": []},
        {"structure": [["w", ["float32", "float32", "float32"]]]},
        {"structure": [["w", ["float32", "float64"]]]},
        {"structure": [["w", {"a": 1}]]},
        {"structure": 3},
        {"structure": [["w", ["float32", "float32"]], ["w", ["float32", "float32"]]]},
        {"counts": [["w", -1]]},
        {"counts": [["w", True]]},
        {"counts": [["w", 1.5]]},
        {"counts": None},
        {"num_update": "3"},
        {"optimizer": {"name": "nope", "config": {}}},
        {"optimizer": {"name": "adam", "config": {"beta1": 3}}},
        {"optimizer": {"name": "adam", "config": {"unknown": 3}}},
        {"optimizer": {"name": "adam"}},
        {"optimizer": []},
        {"rule": "sgd"},
        {"rule": None},
    ],
)
def test_forged_content(changes):
    updater = opt.get_updater(opt.Adam())
    updater.set_states(forged())  # the forger's tools work
    refuses(updater, forged(**changes))


def test_states_of_another_optimizer():
    adam, _ = trained("adam")
    refuses(opt.get_updater(opt.SGD()), adam.get_states(), "'adam'.*'sgd'")


def test_a_dumped_optimizer_may_be_another():
    adam, _ = trained("adam")
    updater = opt.get_updater(opt.SGD())
    updater.set_states(adam.get_states(dump_optimizer=True))
    assert type(updater.optimizer) is opt.Adam


# ---------------------------------------------------------------------------------------------- files


def test_errors_name_the_file(tmp_path):
    path = tmp_path / "old.states"
    path.write_bytes(pickle.dumps({}))
    with pytest.raises(StateFileError, match=r"old\.states: this is a pickle"):
        opt.get_updater(opt.SGD()).load(path)
    with pytest.raises(StateFileError, match="/none cannot be read: No such file or directory") as caught:
        opt.get_updater(opt.SGD()).load(tmp_path / "none")
    assert isinstance(caught.value, FileNotFoundError)


def test_a_write_that_fails_leaves_the_old_file(tmp_path, monkeypatch):
    path = tmp_path / "s"
    states.write_states(path, b"old")

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space"):
        states.write_states(path, b"new")
    assert path.read_bytes() == b"old"
    assert os.listdir(tmp_path) == ["s"]


def test_a_write_keeps_links_and_the_umask(tmp_path):
    (tmp_path / "real").write_bytes(b"old")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    states.write_states(tmp_path / "link", b"new")
    assert (tmp_path / "link").is_symlink()
    assert (tmp_path / "real").read_bytes() == b"new"
    umask = os.umask(0)
    os.umask(umask)
    assert stat.S_IMODE((tmp_path / "real").stat().st_mode) == 0o666 & ~umask
    assert sorted(os.listdir(tmp_path)) == ["link", "real"]


def test_a_missing_folder(tmp_path):
    with pytest.raises(FileNotFoundError):
        opt.get_updater(opt.SGD()).save(tmp_path / "no" / "s")
