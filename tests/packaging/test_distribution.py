"""The packed files: the packages are the tree, all that a build needs is packed, and no `kernels` on top."""

from __future__ import annotations

import ast
import functools
import os
import re
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
    import tomli as tomllib  # pytest requires it there

ROOT = Path(__file__).parents[2]
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SETUPTOOLS = PYPROJECT["tool"]["setuptools"]
EXTRAS = PYPROJECT["project"]["optional-dependencies"]
PACKAGES = {extra: [re.split(r"[^\w-]", line)[0] for line in lines] for extra, lines in EXTRAS.items()}


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


@functools.cache
def imported() -> set[str]:
    """Top names of all that the library imports, inside of functions too."""
    found: set[str] = set()
    for path in ROOT.glob("kvstore/**/*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
                found.add(node.module.partition(".")[0])
    return found


def test_extras_for_users_list_what_is_imported() -> None:
    names = {"scikit-learn": "sklearn", "prometheus-client": "prometheus_client"}
    for extra in ("cli", "metrics", "demo", "bfloat16", "mpi"):
        for wanted in EXTRAS[extra]:
            name = re.split(r"[<>=\[;]", wanted)[0]
            assert names.get(name, name) in imported(), f"{extra}: nothing imports {name}"


def test_bfloat16_is_an_extra_that_tests_and_benchmarks_have() -> None:
    assert EXTRAS["bfloat16"] == ["ml_dtypes>=0.4"]
    for extra in ("test", "bench"):
        first = EXTRAS[extra][0]
        assert first.startswith("kvstore-train[")
        assert "bfloat16" in first
        assert not [wanted for wanted in EXTRAS[extra] if wanted.startswith("ml_dtypes")]


@pytest.mark.parametrize("extra", ["bench", "test"])
def test_pytest_knows_its_settings_in_every_extra_that_has_it(extra: str) -> None:
    """Settings of a plugin are errors where that plugin is not."""
    plugins = [
        entry.name
        for package in PACKAGES[extra]
        if package.startswith("pytest-")
        for entry in metadata.distribution(package).entry_points.select(group="pytest11")
    ]
    options = [word for name in plugins for word in ("-p", name)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("PYTEST")}
    done = subprocess.run(
        [sys.executable, "-m", "pytest", *options, "--collect-only", "-q", "bench/bench_local.py"],
        cwd=ROOT,
        env={**clean, "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_extra_of_the_benches_has_pytest() -> None:
    assert {"bench", "test"} == {extra for extra, names in PACKAGES.items() if "pytest" in names}


def sources(folder: str, *suffixes: str) -> set[str]:
    return {path.name for path in (ROOT / folder).iterdir() if path.suffix in suffixes}


@pytest.mark.nightly
@pytest.mark.timeout(600)
def test_a_wheel_made_from_an_sdist_is_whole(tmp_path: Path) -> None:
    build = "from setuptools.build_meta import build_sdist; import sys; print(build_sdist(sys.argv[1]))"
    pip = [sys.executable, "-m", "pip"]
    tools = tmp_path / "tools"
    subprocess.run(
        [*pip, "install", "-q", "--target", tools, "setuptools>=77.0.1", "Cython>=3.1", "numpy"], check=True
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
