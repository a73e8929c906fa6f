"""Where kernels are found, and what counts as absent."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pace
import pytest

from kvstore.kernels.cuda import KernelSpec, cache
from kvstore.kernels.cuda.cubin import KernelCubin
from kvstore.kernels.cuda.provenance import source_key

SPEC = KernelSpec("sum", "float32", 2)
HOPPER = (9, 0)


def cubin(arch: str = "sm_90", code: bytes = b"\x7fELF code", spec: KernelSpec = SPEC) -> KernelCubin:
    return KernelCubin(spec.name, arch, spec.entry, code, 32, source=source_key())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The cache's folder of this test."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    return cache.cache_folder()


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Compile nothing; note what would have been."""
    compile = pytest.importorskip("kvstore.kernels.cuda.compile")
    asked: list[str] = []

    def instead(spec: KernelSpec, arch: str) -> KernelCubin:
        asked.append(f"{spec.name} {arch}")
        return cubin(arch, b"\x7fELF compiled", spec)

    monkeypatch.setattr(compile, "compile_spec", instead)
    return asked


def test_a_file_is_what_was_written(tmp_path: Path) -> None:
    path = cache.write_kernel(tmp_path / "new" / "folder", SPEC, cubin())
    assert cache.read_kernel(path, SPEC, "sm_90", own=True) == cubin()
    assert os.listdir(path.parent) == [path.name]
    assert (path.stat().st_mode & 0o777, path.parent.stat().st_mode & 0o777) == (0o600, 0o700)


def test_a_kernel_is_compiled_once(folder: Path, compiles: list[str]) -> None:
    first = cache.find_kernel(SPEC, HOPPER)
    assert cache.find_kernel(SPEC, HOPPER) == first
    assert compiles == ["sum_float32_k2 sm_90"]
    assert len(list(folder.iterdir())) == 1
    cache.find_kernel(SPEC, (8, 0))
    assert compiles[1:] == ["sum_float32_k2 sm_80"]


@pytest.mark.parametrize("damage", ["cut", "bit", "empty", "text", "other kernel", "old source"])
def test_what_is_damaged_is_made_again(folder: Path, compiles: list[str], damage: str) -> None:
    path = cache.write_kernel(folder, SPEC, cubin())
    content = path.read_bytes()
    other = KernelSpec("sum", "float32", 3)
    replaced = {
        "cut": content[:-1],
        "bit": content[:-1] + bytes([content[-1] ^ 1]),
        "empty": b"",
        "text": b"[1, 2]\n" + content,
        "other kernel": cubin(spec=other).to_bytes(),
        "old source": content.replace(source_key().encode(), b"0" * 64),
    }
    path.write_bytes(replaced[damage])
    assert cache.find_kernel(SPEC, HOPPER).code == b"\x7fELF compiled"
    assert cache.read_kernel(path, SPEC, "sm_90", own=True) is not None


def test_what_others_may_write_is_not_used(folder: Path, compiles: list[str]) -> None:
    path = cache.write_kernel(folder, SPEC, cubin())
    path.chmod(0o666)
    assert cache.find_kernel(SPEC, HOPPER).code == b"\x7fELF compiled"
    if os.getuid() == 0:
        path.chmod(0o600)
        os.chown(path, 12345, 12345)
        assert cache.find_kernel(SPEC, HOPPER).code == b"\x7fELF compiled"
        assert len(compiles) == 2


def test_a_cache_that_cannot_be_written_is_no_error(
    tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = tmp_path / "no folder"
    file.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(file))
    monkeypatch.delenv(cache.VARIABLE, raising=False)
    assert cache.find_kernel(SPEC, HOPPER).code == b"\x7fELF compiled"
    assert "cannot keep the CUDA kernel sum_float32_k2" in caplog.text


def test_a_folder_made_ahead_comes_first(folder: Path, tmp_path: Path, compiles: list[str]) -> None:
    ahead = tmp_path / "ahead"
    cache.write_kernel(ahead, SPEC, cubin("sm_80", b"for 8.0"))
    cache.write_kernel(ahead, SPEC, cubin("sm_86", b"for 8.6"))
    for capability, code in (((8, 0), b"for 8.0"), ((8, 6), b"for 8.6"), ((8, 9), b"for 8.6")):
        assert cache.find_kernel(SPEC, capability, str(ahead)).code == code
    assert cache.find_kernel(SPEC, HOPPER, str(ahead)).code == b"\x7fELF compiled"
    assert not (ahead / cache.file_name(SPEC, "sm_90")).exists()


def test_the_variable_names_the_folder(
    folder: Path, tmp_path: Path, compiles: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cache.write_kernel(tmp_path / "ahead", SPEC, cubin(code=b"ahead"))
    monkeypatch.setenv(cache.VARIABLE, str(tmp_path / "ahead"))
    assert cache.find_kernel(SPEC, HOPPER).code == b"ahead"


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
from kvstore.kernels.cuda import KernelSpec, cache
found = cache.find_kernel(KernelSpec("sum", "float32", 2), (9, 0))
assert found.code == b"\\x7fELF code", found
try:
    cache.find_kernel(KernelSpec("sum", "float32", 3), (9, 0))
except ImportError as error:
    assert "sum_float32_k3" in str(error) and "kvstore-train[cuda]" in str(error), error
else:
    raise SystemExit("a kernel came out of nothing")
"""


def test_a_process_that_finds_its_kernels_needs_no_numba(folder: Path) -> None:
    cache.write_kernel(folder, SPEC, cubin())
    subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], check=True, timeout=pace.seconds(60))


def test_importing_the_package_imports_nothing_heavy() -> None:
    heavy = "{'numba', 'cuda', 'llvmlite', 'click'}"
    code = f"import sys, kvstore.kernels.cuda; assert not {heavy} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=pace.seconds(60))
