"""Lists of keys: known networks, and files in three forms; any other file is refused, with the reason."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvstore import ConfigError
from kvstore.observe.bench.key_lists import BenchKey, load_keys


@pytest.mark.parametrize(
    ("name", "count", "size"), [("resnet50", 161, 25_557_032), ("llama-1b-shapes", 146, 1_235_814_400)]
)
def test_known_networks_have_the_parameters_that_they_have(name: str, count: int, size: int) -> None:
    found = load_keys(name)
    assert (len(found), sum(key.size for key in found)) == (count, size)
    assert {key.dtype for key in found} == {"float32"}
    assert sum(key.nbytes for key in load_keys(name, "bfloat16")) == 2 * size


def test_names_are_those_of_the_frameworks() -> None:
    resnet, llama = (
        {key.name: key.shape for key in load_keys(name)} for name in ("resnet50", "llama-1b-shapes")
    )
    assert resnet["layer2.0.conv4.weight"] == (512, 256, 1, 1)
    assert resnet["layer4.2.bn3.bias"] == (2048,)
    assert llama["layers.15.self_attn.k_proj.weight"] == (512, 2048)


FOUND = (BenchKey("a", (2, 3), "float16"), BenchKey("b", (), "float32"), BenchKey("c", (4,), "bfloat16"))


def test_a_safetensors_file(tmp_path: Path) -> None:
    bfloat16 = pytest.importorskip("ml_dtypes").bfloat16
    tensors = {"a": np.zeros((2, 3), np.float16), "b": np.zeros((), np.float32), "c": np.zeros(4, bfloat16)}
    save_file({**tensors, "empty": np.zeros((0, 2), np.float32)}, tmp_path / "model.safetensors")
    found = load_keys(str(tmp_path / "model.safetensors"))
    assert sorted(found) == list(FOUND)
    assert {key.dtype for key in load_keys(str(tmp_path / "model.safetensors"), "float64")} == {"float64"}


def test_values_of_a_safetensors_file_are_not_read(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    header = b'{"w":{"dtype":"F32","shape":[%d],"data_offsets":[0,%d]}}' % (1 << 40, 1 << 42)
    path.write_bytes(len(header).to_bytes(8, "little") + header)
    with path.open("r+b") as file:
        file.truncate(8 + len(header) + (1 << 42))  # with nothing on the disk
    assert [key.nbytes for key in load_keys(str(path))] == [1 << 42]


@pytest.mark.parametrize(
    ("text", "keys"),
    [
        ('{"a": [2, 3], "b": []}', [("a", (2, 3), "float32"), ("b", (), "float32")]),
        (' \n{"a": [5]}', [("a", (5,), "float32")]),
        ("a 2,3\n\n# a comment\nb 4x5 int8 # and one\n", [("a", (2, 3), "float32"), ("b", (4, 5), "int8")]),
        ("a 0,3\nb 2", [("b", (2,), "float32")]),
    ],
)
def test_files_of_text(tmp_path: Path, text: str, keys: list[tuple[str, tuple[int, ...], str]]) -> None:
    (tmp_path / "keys").write_text(text)
    found = load_keys(str(tmp_path / "keys"))
    assert found == [BenchKey(*key) for key in keys]
    assert all(key.size == math.prod(key.shape) for key in found)


@pytest.mark.parametrize(
    ("data", "words"),
    [
        (b"", "no key"),
        (b"{}", "no key"),
        (b"a 0,2\n", "no key"),
        (b"[1, 2]", "line 1"),
        (b"a\n", "line 1"),
        (b"a 2,3\nb 2,-3\n", "line 2"),
        (b"a 2\na 3\n", "twice"),
        (b"a 2 float33\n", "float33"),
        (b'{"a": 3}', "shape 3"),
        (b'{"a": [2, "3"]}', "a shape is a list"),
        (b'{"a": [true]}', "a shape is a list"),
        (b'{"a": [-1]}', "a shape is a list"),
        (b'{"a": [2', "no JSON"),
        (b"\xff\xfe\x00", "utf-8"),
        (b"\x40\0\0\0\0\0\0\0{" + b"x" * 80, "safetensors"),
        (b"\x40\0\0\0\0\0\0\0{", "safetensors"),
    ],
)
def test_a_file_that_is_no_list_of_keys(tmp_path: Path, data: bytes, words: str) -> None:
    (tmp_path / "keys").write_bytes(data)
    with pytest.raises(ConfigError) as raised:
        load_keys(str(tmp_path / "keys"))
    assert words in str(raised.value)
    assert str(tmp_path / "keys") in str(raised.value)


def test_a_type_that_stores_do_not_have(tmp_path: Path) -> None:
    save_file({"mask": np.zeros(3, np.bool_)}, tmp_path / "model.safetensors")
    with pytest.raises(ConfigError, match=r"BOOL.*--dtype"):
        load_keys(str(tmp_path / "model.safetensors"))
    assert load_keys(str(tmp_path / "model.safetensors"), "float32")[0].nbytes == 12


@pytest.mark.parametrize("source", ["resnet51", "."])
def test_neither_a_network_nor_a_file(source: str) -> None:
    with pytest.raises(ConfigError, match="resnet50"):
        load_keys(source)
