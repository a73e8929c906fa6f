"""The house as a reader finds it: each class name says one thing, and no module needs one that needs it."""

from __future__ import annotations

import ast
import shutil
import subprocess
from collections import defaultdict
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILES = [path for folder in ("kvstore", "kernels") for path in ROOT.glob(f"{folder}/**/*.py")]

# Names that two classes still have. Remove names that are gone; a new class needs another name.
TWICE = {
    "KVStore",
}


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("kvstore", *parts) if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_class_name_twice() -> None:
    found = defaultdict(list)
    for path in FILES:
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert {cls: paths for cls, paths in found.items() if len(paths) > 1 and cls not in TWICE} == {}
    assert {cls for cls in TWICE if len(found[cls]) < 2} == set(), "take these out of TWICE"


def origin(path: Path, node: ast.ImportFrom) -> str:
    """Full name of the module that something is imported from."""
    parts = name(path).split(".") if path.name == "__init__.py" else name(path).split(".")[:-1]
    start = parts[: len(parts) - node.level + 1] if node.level else []
    return ".".join([*start, *([node.module] if node.module else [])])


def imported(path: Path, names: set[str]) -> set[str]:
    """Modules of ours that a module imports, in functions too, but not for type checkers alone."""
    tree = parsed(path)
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in typing:
            base = origin(path, node)
            found |= {full if (full := f"{base}.{alias.name}") in names else base for alias in node.names}
    return found & names - {name(path)}


def test_no_cycles_of_modules() -> None:
    modules = {name(path): path for path in FILES if path.name != "__init__.py"}
    graph = {module: imported(path, set(modules)) for module, path in modules.items()}
    reached = {module: set(targets) for module, targets in graph.items()}
    grown = True
    while grown:
        sizes = {module: len(targets) for module, targets in reached.items()}
        for targets in reached.values():
            for target in list(targets):
                targets |= reached[target]
        grown = any(len(reached[module]) != size for module, size in sizes.items())
    cycles = {frozenset(b for b in reached[a] if a in reached[b]) for a in reached if a in reached[a]}
    assert not cycles, [sorted(cycle) for cycle in cycles]


# Front doors that are one file, and yet rooms of their own.
DOORS = {"kvstore.jax", "kvstore.ray"}
# Names with an underscore that another package may use.
USED_BY_OTHERS = {
    "_get_lr": "MXNet's: rules of users call it, so it is no secret",
    "_index_update_count": "the same",
    "_update_count": "the same",
    "_replace": "every NamedTuple has it",
    "_version": "every tensor of torch has it, and torch documents no other way to it",
    "_shared": "the compiled module of stores/shared/native, called as compiled modules are",
}


def package(path: Path) -> str:
    module = name(path)
    return module if path.name == "__init__.py" or module in DOORS else module.rpartition(".")[0]


def is_private(word: str) -> bool:
    return word.startswith("_") and not word.startswith("__") and word not in USED_BY_OTHERS


def given(tree: ast.AST) -> set[str]:
    """Names that a module gives to anything: functions, classes, variables, attributes."""
    stored = [node for node in ast.walk(tree) if isinstance(getattr(node, "ctx", None), ast.Store)]
    names = {word for node in stored if (word := getattr(node, "attr", getattr(node, "id", None)))}
    defined = ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef
    return names | {node.name for node in ast.walk(tree) if isinstance(node, defined)}


def test_no_package_uses_a_private_name_of_another() -> None:
    trees = {path: parsed(path) for path in FILES}
    own = defaultdict(set)
    for path, tree in trees.items():
        own[package(path)] |= given(tree)
    ours = set().union(*own.values())
    package_of = {name(path): package(path) for path in FILES}
    found = []
    for path, tree in trees.items():
        others = ours - own[package(path)]
        for node in ast.walk(tree):
            if isinstance(node, ast.Attribute) and node.attr in others and is_private(node.attr):
                if ast.unparse(node.value) in ("self", "cls", "super()"):
                    continue  # a base is there to be derived from
                found.append(f"{path.relative_to(ROOT)}:{node.lineno} {ast.unparse(node)}")
            elif isinstance(node, ast.ImportFrom) and package_of.get(origin(path, node)) != package(path):
                private = [alias.name for alias in node.names if is_private(alias.name)]
                found += [f"{path.relative_to(ROOT)}:{node.lineno} import {word}" for word in private]
    assert found == []


def narrows(test: ast.expr) -> bool:
    """Whether a condition only states a fact for a type checker: `x is not None`, `isinstance(x, y)`."""
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return isinstance(test, ast.Compare) and [type(op) for op in test.ops] == [ast.IsNot]


def test_asserts_only_narrow_types() -> None:
    """Callers get exceptions, and `python -O` leaves no check out; so the linter's S101 is off."""
    checks = [
        f"{path.relative_to(ROOT)}:{node.lineno}"
        for path in FILES
        for node in ast.walk(parsed(path))
        if isinstance(node, ast.Assert) and not narrows(node.test)
    ]
    assert checks == []


def test_no_link_is_tracked() -> None:
    """One that leads out of a folder and back in has each file twice."""
    if not (ROOT / ".git").exists() or not shutil.which("git"):
        pytest.skip("this is no clone")
    command = ["git", "-c", f"safe.directory={ROOT}", "ls-files", "--stage"]
    tracked = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert [line for line in tracked.splitlines() if line.startswith("120000")] == []
    assert "tests/packaging/test_house.py" in tracked
