"""The house rules that can be read off the source: imports point down only, and no code comes from data."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

# From the ground up: a room may import what stands on its own floor and below. A module stands where
# the longest name says that it begins with.
_FLOORS = (
    "kernels",
    "errors files tensor_file waiting turns engine arrays settings devices",
    "optimizer compression",
    "stores",  # what all stores have in common
    "stores.local",
    "stores.device",
    "stores.parameter_server.protocol stores.shared.native",
    "stores.parameter_server.transport",
    "stores.parameter_server.worker stores.parameter_server.server stores.parameter_server.scheduler",
    "stores.parameter_server stores.shared stores.collectives",
    "base factory store store_kinds plan checkpoint roles",
    "kvstore",  # kvstore/__init__.py
    "averaging launch trainer torch jax mxnet ray",
)
FLOORS = {room: number for number, rooms in enumerate(_FLOORS) for room in rooms.split()}

# Rooms of one house that know nothing of each other; what two of them need is a floor below.
APART = [
    {"stores.shared", "stores.parameter_server", "stores.collectives"},
    {f"stores.parameter_server.{role}" for role in ("worker", "server", "scheduler")},
]

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
    """Name of the room where a module below `kvstore` is."""
    begins = (".".join(dotted[:n]) for n in range(len(dotted), 0, -1))
    return next((name for name in begins if name in FLOORS), "kvstore")


def imported(path: Path) -> Iterator[tuple[int, list[str]]]:
    """Line and name below `kvstore` of every import of our own, those inside functions too."""
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
                yield node.lineno, name[1:]


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_imports_point_down_only(path: Path) -> None:
    floor = FLOORS[room(module(path))]
    for line, target in imported(path):
        assert FLOORS[room(target)] <= floor, f"{path}:{line} imports {room(target)}, which is above it"


def within(dotted: list[str], rooms: set[str]) -> set[str]:
    return {name for name in rooms if [*dotted, ""][: name.count(".") + 1] == name.split(".")}


# Engines of collectives find each other by the sockets of the parameter server.
_SHARED_SOCKETS = ["stores", "parameter_server", "transport"]


@pytest.mark.parametrize("path", SOURCES, ids=str)
def test_stores_and_roles_know_nothing_of_each_other(path: Path) -> None:
    for rooms in APART:
        here = within(module(path), rooms)
        for line, target in imported(path):
            there = within(target, rooms)
            if here and there and target[:3] != _SHARED_SOCKETS:
                assert here == there, f"{path}:{line}: {here} imports {there}"


def test_every_room_has_a_floor() -> None:
    for path in SOURCES:
        first = module(path)[0] or "kvstore"
        assert first in FLOORS, f"{path}: say in FLOORS on which floor it stands"


def test_no_folder_is_too_full() -> None:
    """A stranger reads the names of twenty files, not of sixty."""
    tests = (path.relative_to(ROOT) for path in ROOT.glob("tests/**/*.py"))
    full = Counter(path.parent for path in (*SOURCES, *tests) if path.name != "__init__.py")
    assert {folder: n for folder, n in full.items() if n > 20} == {}


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
