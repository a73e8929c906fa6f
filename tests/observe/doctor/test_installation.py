"""Compiled modules, levels, dependencies and frameworks that are missing, too old or slow."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from observation.checks import finding

from kvstore.observe.doctor import installation
from kvstore.observe.doctor.installation import RequiredDistribution

BLOCKED = "kvstore.stores.parameter_server.transport.native._streams"
BLOCK = f"""
import sys
class Finder:
    def find_spec(self, name, path, target=None):
        if name == {BLOCKED!r}:
            raise ImportError("blocked by the test")
sys.meta_path.insert(0, Finder())
"""


def test_a_compiled_module_that_is_missing_is_an_error(doctor: Callable[..., Any]) -> None:
    report = doctor("--no-tests", before=BLOCK)
    found = report.found["compiled modules"]
    assert report.code == 1
    assert found["level"] == "error"
    assert f"{BLOCKED} (blocked by the test)" in found["text"]
    assert "_shared" not in found["text"]
    assert "pip install" in found["cure"]


def test_all_compiled_modules_are_looked_for() -> None:
    folder = Path(installation.kvstore.__path__[0])
    sources = [path.relative_to(folder).with_suffix("") for path in folder.glob("**/*.pyx")]
    names = {".".join(["kvstore", *path.parts]) for path in sources}
    assert names - {"kvstore.kernels._cpu"} == set(installation.COMPILED)


@pytest.mark.parametrize(
    ("machine", "levels", "level"),
    [
        ("x86_64", ["baseline"], "warning"),
        ("x86_64", ["baseline", "x86-64-v3"], "ok"),
        ("aarch64", ["baseline"], "ok"),
    ],
)
def test_a_processor_without_avx2_is_a_warning(machine: str, levels: list[str], level: str) -> None:
    assert finding(installation.instruction_set, machine, levels).level == level


def test_dependencies_that_do_not_fit_are_an_error_with_the_command() -> None:
    found = finding(
        installation.dependencies,
        [RequiredDistribution("numpy", ">=1.26", "1.20.3"), RequiredDistribution("pyzmq", ">=26.0", None)],
    )
    assert found.level == "error"
    assert found.text == "numpy 1.20.3, pyzmq is not installed"
    assert found.cure == "pip install 'numpy>=1.26' 'pyzmq>=26.0'"
    assert finding(installation.dependencies, [RequiredDistribution("numpy", ">=1.26", "2.1")]).level == "ok"


@pytest.mark.parametrize(
    ("numba", "core", "level"),
    [
        (None, None, "ok"),
        ("0.60", None, "ok"),  # of another package
        ("0.68.1", "1.2", "ok"),
        ("0.60", "1.2", "warning"),
    ],
)
def test_versions_of_an_extra_count_if_all_of_it_is_there(
    numba: str | None, core: str | None, level: str
) -> None:
    wanted = [
        RequiredDistribution("numba", ">=0.68,<0.69", numba),
        RequiredDistribution("cuda-core", ">=1.0", core),
    ]
    found = installation.extra("cuda", wanted)
    assert found.level == level
    assert bool(found.cure) is (level == "warning")
    assert "kvstore-train[cuda]" in found.text + found.cure or numba


def test_frameworks_are_listed_and_not_imported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "byteps").mkdir()
    (tmp_path / "byteps/__init__.py").write_text("raise SystemExit('imported')")
    (tmp_path / "byteps-7.8.9.dist-info").mkdir()
    (tmp_path / "byteps-7.8.9.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: byteps\nVersion: 7.8.9\n"
    )
    monkeypatch.delitem(sys.modules, "byteps", raising=False)
    monkeypatch.syspath_prepend(str(tmp_path))
    importlib.invalidate_caches()
    assert "byteps 7.8.9" in finding(installation.frameworks).text
    assert "byteps" not in sys.modules


def test_another_version_that_is_installed_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    assert finding(installation.package).level == "ok"
    monkeypatch.setattr(installation, "version_of", lambda name: "0.0.1")
    assert "0.0.1" in finding(installation.package).text
    assert finding(installation.package).level == "warning"
    monkeypatch.setattr(installation, "version_of", lambda name: None)
    assert finding(installation.package).cure == "pip install ."
