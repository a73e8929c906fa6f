"""Values as a file: round trips of anything a store can hold, and files that are damaged or foreign."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from references import DTYPES, assert_same_bits, dtype_of
from safetensors import SafetensorError
from safetensors.numpy import save_file

import kvstore as kv

Array = npt.NDArray[Any]


def stored(keys: Any, values: Any) -> kv.KVStore:
    store = kv.create()
    store.init(keys, values)
    return store


def assert_same_values(one: kv.KVStore, two: kv.KVStore) -> None:
    assert set(one.keys()) == set(two.keys())
    for key in one.keys():  # noqa: SIM118 - a store is no dict
        a, b = one.view(key), two.view(key)
        assert type(a) is type(b)
        if isinstance(a, kv.RowSparseArray):
            assert a.shape == b.shape
            np.testing.assert_array_equal(a.indices, b.indices)
            a, b = a.data, b.data
        assert_same_bits(a, b)


@st.composite
def values(draw: Any) -> Any:
    """A dense array or a row-sparse one, of any type and any bits."""
    dtype = dtype_of(draw(st.sampled_from(DTYPES)))
    shape = draw(hnp.array_shapes(min_dims=0, max_dims=3, min_side=0, max_side=4))
    raw = draw(hnp.arrays(np.uint8, (*shape, dtype.itemsize)))
    dense = np.ascontiguousarray(raw).view(dtype).reshape(shape)
    if not shape or draw(st.booleans()):
        return dense
    ids = sorted(draw(st.sets(st.integers(0, shape[0] - 1)))) if shape[0] else []
    return kv.RowSparseArray(np.ascontiguousarray(dense[ids]), ids, shape)


any_keys = st.one_of(
    st.dictionaries(st.integers(-(2**63), 2**63 - 1), values(), max_size=5),
    st.dictionaries(st.text(max_size=8), values(), max_size=5),
)


@given(any_keys)
def test_anything_comes_back(tmp_path_factory: pytest.TempPathFactory, content: dict[Any, Any]) -> None:
    path = tmp_path_factory.mktemp("values") / "file"
    with stored(list(content), list(content.values())) as one, kv.create() as two:
        one.save(path)
        two.load(path)
        assert two.keys() == list(content)
        assert_same_values(one, two)
        two.load(path)  # over the existing values
        assert_same_values(one, two)


def test_known_keys_are_overwritten_in_place_and_others_stay(tmp_path: Path) -> None:
    with (
        stored(["a", "b"], [np.ones(3), np.ones(3)]) as one,
        stored(["a", "c"], [np.zeros(3), np.zeros(3)]) as two,
    ):
        one.save(tmp_path / "f")
        view = two.view("a")
        two.load(tmp_path / "f")
        assert two.keys() == ["a", "c", "b"]
        assert (view == 1).all()
        assert not two.view("c").any()


def test_a_loaded_value_is_no_file(tmp_path: Path) -> None:
    with stored("a", np.ones(3)) as one, kv.create() as two:
        one.save(tmp_path / "f")
        two.load(tmp_path / "f")
        (tmp_path / "f").write_bytes(b"")
        two.push("a", [np.ones(3), np.ones(3)])
        assert (two.view("a") == 2).all()


def test_paths(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with stored("a", np.ones(3)) as store:
        for path in ("f", Path("f"), tmp_path / "ä b"):
            store.save(path)
            store.load(path)
        with pytest.raises(FileNotFoundError) as missing:
            store.load("nowhere")
        assert isinstance(missing.value, kv.StateFileError)
        assert str(missing.value).startswith("nowhere cannot be read: No such file or directory. Nothing")
        assert (missing.value.errno, missing.value.filename) == (errno.ENOENT, "nowhere")
        with pytest.raises(FileNotFoundError, match=r"no/such/folder"):
            store.save("no/such/folder/f")
        with pytest.raises(IsADirectoryError) as folder:
            store.load(tmp_path)
        assert isinstance(folder.value, kv.StateFileError)
        (tmp_path / "link").symlink_to("target")
        store.save("link")
        assert (tmp_path / "link").is_symlink()
        store.load("target")
    assert sorted(os.listdir(tmp_path)) == ["f", "link", "target", "ä b"]


# ---------------------------------------------------------------------------------------- what does not fit


@pytest.mark.parametrize(
    "there",
    [
        np.ones(4, np.float32),
        np.ones((3, 1), np.float32),
        np.ones(3, np.float64),
        np.ones(3, ml_dtypes.bfloat16),
        kv.RowSparseArray.zeros((3,)),
    ],
    ids=str,
)
def test_a_key_of_another_kind_changes_nothing(tmp_path: Path, there: Any) -> None:
    with stored(["a", "b", "new"], [np.ones(3, np.float32), there, np.ones(3)]) as one:
        one.save(tmp_path / "f")
    with stored(["a", "b"], [np.zeros(3, np.float32)] * 2) as two:
        with pytest.raises(kv.StateFileError, match="key 'b' is"):
            two.load(tmp_path / "f")
        assert two.keys() == ["a", "b"]
        assert not two.view("a").any()


def test_keys_of_the_other_kind(tmp_path: Path) -> None:
    with stored([1, 2], [np.ones(3)] * 2) as one, stored("1", np.zeros(3)) as two:
        one.save(tmp_path / "f")
        with pytest.raises(kv.StateFileError, match="int"):
            two.load(tmp_path / "f")
        assert two.keys() == ["1"]
        assert not two.view("1").any()


# ------------------------------------------------------------------------------------------------ bad files


def header(**changes: Any) -> dict[str, str]:
    entry = {"key": "a", "dtype": "float64", "shape": [3], "parts": ["value"]}
    good = {"format": "kvstore.values", "version": "1", "keys": json.dumps([entry])}
    return {**good, **changes}


def entry(**changes: Any) -> dict[str, str]:
    good = {"key": "a", "dtype": "float64", "shape": [3], "parts": ["value"]}
    return header(keys=json.dumps([{**good, **changes}]))


FOREIGN = [
    header(format="kvstore.optimizer_states"),
    header(version="2"),
    {},
    header(keys="no json"),
    header(keys="{}"),
    header(keys="[3]"),
    header(keys='[{"key": "a"}]'),
    entry(key="b"),
    entry(key=True),
    entry(key=1.5),
    entry(key=["a"]),
    entry(dtype="float32"),
    entry(dtype="object"),
    entry(dtype=None),
    entry(shape=[4]),
    entry(shape="3"),
    entry(shape=None),
    entry(shape=[-3]),
    entry(parts=["table"]),
    entry(parts=["rows", "ids"]),
    entry(parts=[]),
    entry(parts="value"),
    header(keys=json.dumps([{"key": 1}, {"key": "a"}])),
]


@pytest.mark.parametrize("metadata", FOREIGN, ids=str)
def test_files_that_are_not_ours(tmp_path: Path, metadata: dict[str, str]) -> None:
    save_file({"value/a": np.ones(3)}, tmp_path / "f", metadata)
    with stored("z", np.zeros(3)) as store:
        with pytest.raises(kv.StateFileError) as caught:
            store.load(tmp_path / "f")
        assert str(tmp_path / "f") in str(caught.value)
        assert store.keys() == ["z"]


ROWS = {"key": "a", "dtype": "float64", "shape": [4, 1], "parts": ["rows", "ids"]}


@pytest.mark.parametrize("ids", [[0, 4], [-1, 0], [0], [0.5, 1.5], [[0], [1]]])
def test_ids_that_do_not_fit_their_table(tmp_path: Path, ids: Any) -> None:
    tensors = {"rows/a": np.ones((2, 1)), "ids/a": np.array(ids)}
    save_file(tensors, tmp_path / "f", header(keys=json.dumps([ROWS])))
    with kv.create() as store:
        with pytest.raises(kv.StateFileError):
            store.load(tmp_path / "f")
        assert store.keys() == []


def truncated(data: bytes) -> bytes:
    return data[:-1]


def lengthened(data: bytes) -> bytes:
    return data + b"\0"


def spoilt_header(data: bytes) -> bytes:
    return data[:40] + b"\xff" + data[41:]


def endless_header(data: bytes) -> bytes:
    return b"\xff" * 8 + data[8:]


def pickled(data: bytes) -> bytes:
    return b"\x80\x04\x95\x00\x00\x00\x00\x00\x00\x00\x00."


@pytest.mark.parametrize(
    "spoil",
    [
        truncated,
        lengthened,
        spoilt_header,
        endless_header,
        pickled,
        lambda _: b"",
        lambda _: b"{",
        lambda d: d[:9],
    ],
)
def test_damaged_files(tmp_path: Path, spoil: Callable[[bytes], bytes]) -> None:
    path = tmp_path / "f"
    with stored(["a", "b"], [np.ones(3), np.ones(5)]) as store:
        store.save(path)
        path.write_bytes(spoil(path.read_bytes()))
        store.push(["a", "b"], [np.zeros(3), np.zeros(5)])
        with pytest.raises(kv.StateFileError, match=r"f (is|holds)|f:"):
            store.load(path)
        assert not store.view("a").any()


@given(st.binary(max_size=200))
def test_no_bytes_do_harm(tmp_path_factory: pytest.TempPathFactory, data: bytes) -> None:
    path = tmp_path_factory.mktemp("bytes") / "f"
    path.write_bytes(data)
    with kv.create() as store, pytest.raises(kv.StateFileError):
        store.load(path)


# ---------------------------------------------------------------------------------------- in one step or not


def test_a_save_that_fails_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "f"
    with stored("a", np.ones(3)) as store:
        store.save(path)
        before = path.read_bytes()

        def fail(*_: Any, **__: Any) -> None:
            raise OSError("disk full")

        for name in ("safetensors.numpy.save_file", "os.replace", "os.fsync"):
            store.push("a", np.zeros(3))
            with monkeypatch.context() as patch, pytest.raises(OSError, match="disk full"):
                patch.setattr(name, fail)
                store.save(path)
            assert path.read_bytes() == before
            assert os.listdir(tmp_path) == ["f"]


def test_a_save_waits_for_what_is_under_way(tmp_path: Path) -> None:
    with stored("a", np.zeros(50_000)) as store, kv.create() as again:
        store.set_updater(lambda key, merged, stored: np.add(stored, merged, out=stored))
        for _ in range(20):
            store.push("a", np.ones(50_000), async_op=True)
        store.save(tmp_path / "f")
        again.load(tmp_path / "f")
        assert (again.view("a") == 20).all()


@pytest.mark.parametrize(
    "text",
    [
        "I/O error: No space left on device (os error 28)",
        'IoError(Os { code: 28, kind: StorageFull, message: "No space left on device" })',
    ],
    ids=["safetensors 0.6", "safetensors 0.4"],
)
def test_a_full_disk_is_told_in_the_systems_words(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    def full(*_: object) -> None:
        raise SafetensorError(f"Error while serializing: {text}")

    monkeypatch.setattr("safetensors.numpy.save_file", full)
    with stored("a", np.zeros(3)) as store, pytest.raises(kv.StateFileError, match="free space") as caught:
        store.save(tmp_path / "f")
    assert caught.value.errno == errno.ENOSPC
