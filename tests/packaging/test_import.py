"""Importing kvstore is quick, pulls in nothing heavy, and changes nothing."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import numpy
import pace
import pytest

import kvstore

HEAVY = {
    "numba",
    "zmq",
    "torch",
    "cupy",
    "jax",
    "mxnet",
    "cuda",
    "mpi4py",
    "sklearn",
    "scipy",
    "rich",
    "click",
}
# Wanted for a warning, a file or a wrong name only, or once a store is made.
LATER = {
    "asyncio",
    "dataclasses",
    "difflib",
    "json",
    "kvstore.checkpoint",
    "kvstore.launch",
    "kvstore.optimizer.states",
    "kvstore.settings",
    "kvstore.tensor_file",
    "logging",
    "msgspec",
    "numpy.typing",
    "pathlib",
    "safetensors",
    "socket",
    "subprocess",
    "tempfile",
    "urllib",
    "uuid",
}


def python(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    # Byte code is cached under `cwd`, as it is after an installation, for any environment.
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": str(cwd), "PYTHONDONTWRITEBYTECODE": ""}
    return subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd,
        env=environment,
        capture_output=True,
        text=True,
        timeout=pace.seconds(60),
        check=True,
    )


def import_times(cwd: Path, module: str = "kvstore") -> dict[str, int]:
    """Microseconds of each module that importing `module` loads, with all that it loads itself."""
    lines = python("-X", "importtime", "-c", f"import {module}", cwd=cwd).stderr.splitlines()
    parsed = [re.match(r"import time:\s+\d+ \|\s+(\d+) \|\s+(\S+)$", line) for line in lines]
    return {match[2]: int(match[1]) for match in parsed if match}


def test_nothing_heavy_is_imported(tmp_path: Path) -> None:
    loaded = {name.partition(".")[0] for name in import_times(tmp_path)}
    assert "numpy" in loaded
    assert loaded & HEAVY == set()


ADDED = """
import sys, numpy
before = set(sys.modules)
import kvstore
print(*set(sys.modules) - before)
"""


def added_modules(tmp_path: Path) -> set[str]:
    # -S: the imports of this environment at its start would hide those of kvstore.
    paths = [str(unpacked(tmp_path / "site")), str(Path(numpy.__file__).parents[1])]
    text = python("-S", "-c", f"import sys; sys.path[:0] = {paths}\n{ADDED}", cwd=tmp_path).stdout
    return set(text.split())


def test_nothing_is_imported_before_it_is_wanted(tmp_path: Path) -> None:
    added = added_modules(tmp_path)
    assert "kvstore.store" in added
    assert added & LATER == set()


def test_little_is_imported_besides_numpy(tmp_path: Path) -> None:
    # docs/decisions/0018-wheels.md has the times next to NumPy's: here they would show how busy the machine
    # is.
    assert len(added_modules(tmp_path)) <= 100


CHANGES_NOTHING = """
import logging, os, signal, sys, threading, warnings
import numpy

def world():
    return (dict(os.environ), os.getcwd(), list(warnings.filters), logging.getLogger().handlers,
            logging.getLogger().level, [signal.getsignal(s) for s in signal.valid_signals()],
            threading.active_count(), numpy.geterr(), sys.excepthook, len(os.listdir("/proc/self/task")))

before = world()
import kvstore
assert world() == before, (before, world())
"""


def test_import_changes_nothing(tmp_path: Path) -> None:
    python("-W", "error", "-c", CHANGES_NOTHING, cwd=tmp_path)


def test_a_tree_without_its_kernels_says_what_to_do(tmp_path: Path) -> None:
    shutil.copytree(
        Path(kvstore.__file__).parent, tmp_path / "kvstore", ignore=shutil.ignore_patterns("kernels")
    )
    # -S leaves out the hook of an editable installation, which would find the kernels all the same.
    paths = [str(tmp_path), str(Path(numpy.__file__).parents[1])]
    with pytest.raises(subprocess.CalledProcessError) as failed:
        python("-S", "-c", f"import sys; sys.path[:0] = {paths}; import kvstore", cwd=tmp_path)
    assert "pip install -e ." in failed.value.stderr


FROM_THE_ROOT = """
import sys
sys.path[:0] = sys.argv[1:]
import kvstore, numpy
from kvstore.kernels import cpu
store = kvstore.create("shared")
store.init("w", numpy.ones(3))
print(kvstore.__file__, cpu.__file__, sep="\\n")
"""


def unpacked(folder: Path, version: str = kvstore.__version__) -> Path:
    """Lay out what `pip install .` leaves; links stand for copies."""
    source = Path(kvstore.__file__).parent
    (folder / "kvstore").mkdir(parents=True)
    for path in source.iterdir():
        (folder / "kvstore" / path.name).symlink_to(path)
    (folder / "kvstore" / "kernels").symlink_to(source.parent / "kernels")
    (folder / f"kvstore_train-{version}.dist-info").mkdir()
    (folder / f"kvstore_train-{version}.dist-info" / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: kvstore-train\nVersion: {version}\n"
    )
    return folder


def clone(folder: Path) -> Path:
    """Copy the sources without built files."""
    shutil.copytree(
        Path(kvstore.__file__).parent,
        folder / "kvstore",
        ignore=shutil.ignore_patterns("*.so", "__pycache__"),
    )
    return folder


def from_the_root(*path: Path) -> subprocess.CompletedProcess[str]:
    # -S: this environment's own kvstore is not seen, only the packages that it needs.
    packages = {Path(numpy.__file__).parents[1]}
    command = [sys.executable, "-S", "-c", FROM_THE_ROOT, *map(str, [*path, *packages])]
    return subprocess.run(command, capture_output=True, text=True, timeout=pace.seconds(60))


def test_in_the_root_of_a_clone_the_installed_package_serves(tmp_path: Path) -> None:
    tree, site = clone(tmp_path / "tree"), unpacked(tmp_path / "site")
    done = from_the_root(tree, site)
    assert done.returncode == 0, done.stderr
    sources, kernels = done.stdout.split()
    assert sources == str(tree / "kvstore" / "__init__.py")
    assert kernels.startswith(str(site))


@pytest.mark.parametrize("version", [None, "0.0.1"])
def test_sources_alone_or_beside_another_version_say_how_to_build(
    tmp_path: Path, version: str | None
) -> None:
    path = [clone(tmp_path / "tree")]
    if version is not None:
        path.append(unpacked(tmp_path / "site", version))
    done = from_the_root(*path)
    assert "build it in place with `pip install -e .`" in done.stderr, done
