"""The house rules that can be read off the source: imports point down only, and no code comes from data."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# The higher, the more a room may know. A module stands on the floor of its first part below `kvstore`.
FLOORS = {
    "launch": 6, "trainer": 6, "torch": 6, "jax": 6, "mxnet": 6,
    "averaging": 6, "ray": 6,
    "": 5,  # kvstore/__init__.py
    "base": 4, "store": 4, "plan": 4, "checkpoint": 4,
    "backends": 3,
    "ps": 2, "optimizer": 2, "compression": 2,
    "wire": 1, "memory": 1, "devices": 1, "arrays": 1, "sparse": 1, "grouping": 1, "engine": 1, "turns": 1,
    "observe": 1,
    "files": 1, "tensor_file": 1, "pages": 1, "cluster": 1, "config": 1, "errors": 1,
    "roles": 1, "addresses": 1, "waiting": 1,
    "kernels": 0,
}  # fmt: skip

SOURCES = {
    **{path.relative_to(ROOT): "kvstore" for path in ROOT.glob("kvstore/**/*.py")},
    **{path.relative_to(ROOT): "kernels" for path in ROOT.glob("kernels/**/*.py")},
}
COMPILED = [
    path.relative_to(ROOT) for folder in ("kvstore", "kernels") for path in ROOT.glob(f"{folder}/**/*.pyx")
]


def module(path: Path) -> list[str]:
    """Parts of the module's name as installed, below `kvstore`; a package ends with an empty part."""
    parts = list(path.with_suffix("").parts)
    parts = parts[1:] if parts[0] == "kvstore" else parts
    return [*parts[:-1], ""] if parts[-1] == "__init__" else parts


def room(dotted: list[str]) -> str:
    """The floor's name for a module below `kvstore`."""
    return dotted[0] if dotted and dotted[0] in FLOORS else ""


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """Line and room of every import of our own, those inside functions too."""
    here = module(path)
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name.split(".") for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ["kvstore", *here[: -node.level]] if node.level else []
            start = base + (node.module.split(".") if node.module else [])
            names = [[*start, alias.name] for alias in node.names]
        else:
            continue
        for name in names:
            if name[0] == "kvstore":
                yield node.lineno, room(name[1:])


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_point_down_only(path: Path) -> None:
    floor = FLOORS[room(module(path))]
    for line, target in imported(path):
        assert FLOORS[target] <= floor, f"{path}:{line} imports {target or 'kvstore'}, which is above it"


def test_every_room_has_a_floor() -> None:
    for path in SOURCES:
        first = module(path)[0]
        assert first in FLOORS, f"{path}: say in FLOORS on which floor it stands"


SERIALISERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_no_code_from_data(path: Path) -> None:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Import):
            assert not {alias.name.partition(".")[0] for alias in node.names} & SERIALISERS
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.module.partition(".")[0] not in SERIALISERS
        elif isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            assert node.func.id not in {"eval", "exec", "compile"}, f"{path}:{node.lineno}"
        elif isinstance(node, ast.keyword) and node.arg == "allow_pickle":
            assert isinstance(node.value, ast.Constant)
            assert node.value.value is False


@pytest.mark.parametrize("path", COMPILED, ids=str)
def test_no_code_from_data_in_compiled_sources(path: Path) -> None:
    forbidden = rf"^\s*c?(import|from)\s+({'|'.join(SERIALISERS)})\b|\b(eval|exec)\("
    assert not re.search(forbidden, (ROOT / path).read_text(), re.MULTILINE)


def narrows(node: ast.Assert) -> bool:
    """``assert x is not None`` and ``assert isinstance(...)`` tell the type checker what is so anyway."""
    test = node.test
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_caller_errors_are_exceptions(path: Path) -> None:
    for node in ast.walk(ast.parse((ROOT / path).read_text())):
        if isinstance(node, ast.Assert):
            assert narrows(node), f"{path}:{node.lineno}: python -O removes an assert"
