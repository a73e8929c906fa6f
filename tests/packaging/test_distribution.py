"""What is packed: the packages are the tree, all that a build needs travels, and no `kernels` on top."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from importlib import metadata
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # comes with pytest there

ROOT = Path(__file__).parents[2]
SETUPTOOLS = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]


def packages(top: str) -> list[Path]:
    return [path.parent.relative_to(ROOT) for path in ROOT.glob(f"{top}/**/__init__.py")]


def test_the_list_of_packages_is_the_tree() -> None:
    kernels = {("kvstore", *folder.parts) for folder in packages("kernels")}
    in_tree = {".".join(parts) for parts in {folder.parts for folder in packages("kvstore")} | kernels}
    assert set(SETUPTOOLS["packages"]) == in_tree
    assert SETUPTOOLS["package-dir"] == {"kvstore": "kvstore", "kvstore.kernels": "kernels"}


def test_the_command_is_installed() -> None:
    (script,) = metadata.entry_points(group="console_scripts", name="kvstore")
    assert script.dist is not None
    assert script.dist.name == "kvstore-train"
    assert script.value == "kvstore.launch.cli:main"


def sources(folder: str, *suffixes: str) -> set[str]:
    return {path.name for path in (ROOT / folder).iterdir() if path.suffix in suffixes}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_wheel_made_from_an_sdist_is_whole(tmp_path: Path) -> None:
    build = "from setuptools.build_meta import build_sdist; import sys; print(build_sdist(sys.argv[1]))"
    pip = [sys.executable, "-m", "pip"]
    tools = tmp_path / "tools"
    subprocess.run(
        [*pip, "install", "-q", "--target", tools, "setuptools>=77", "Cython>=3.1", "numpy"], check=True
    )
    subprocess.run(
        [sys.executable, "-c", build, tmp_path], cwd=ROOT, env={"PYTHONPATH": str(tools)}, check=True
    )
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        packed = {Path(name).name for name in archive.getnames() if "/kernels/" in name}
    assert sources("kernels", ".h", ".pyx", ".pyi", ".py") <= packed

    subprocess.run([*pip, "wheel", "-q", "--no-deps", "-w", tmp_path, sdist], check=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        names = archive.namelist()
    assert {name.partition("/")[0].partition("-")[0] for name in names} == {"kvstore", "kvstore_train"}
    assert "kvstore/py.typed" in names
    inside = {Path(name).name for name in names if name.startswith("kvstore/kernels/")}
    assert sources("kernels", ".h", ".pyx", ".pyi", ".py") <= inside
    assert any(name.endswith(".so") for name in inside)
