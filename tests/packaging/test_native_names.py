"""Each extension module has one list of the names that Python code uses: its .pyi file."""

from __future__ import annotations

import ast
import importlib
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[2]
LISTS = sorted(path for folder in ("kvstore", "kernels") for path in ROOT.glob(f"{folder}/**/_*.pyi"))
CODE = [
    path for folder in ("kvstore", "kernels", "tests", "bench") for path in ROOT.glob(f"{folder}/**/*.py")
]

# Extension modules with a second name: `kvstore.kernels.cpu` is `_cpu`.
_ALIASES = {"cpu": "_cpu"}


@cache
def source(path: Path) -> str:
    return path.read_text()


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(ast.parse(source(path))))


def parsed(path: Path) -> ast.Module:
    return ast.parse(source(path))


def targets(node: ast.stmt) -> list[str]:
    """Return the names that a statement of a list defines."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    return []


def listed(path: Path) -> dict[str, ast.stmt]:
    """Return the names of a list, without the type aliases, which exist for type checkers only."""
    return {name: node for node in parsed(path).body for name in targets(node)}


def aliases(path: Path) -> set[str]:
    """Return the type aliases of a list."""
    assigned = [node for node in parsed(path).body if isinstance(node, ast.Assign)]
    return {target.id for node in assigned for target in node.targets if isinstance(target, ast.Name)}


def used(path: Path, name: str) -> Iterator[str]:
    """Yield the names of the extension module `name` that a file uses."""
    if not any(known in source(path) for known in (name, *_ALIASES)):
        return
    modules = set()
    for node in nodes(path):
        if not isinstance(node, ast.ImportFrom):
            continue
        if (node.module or "").split(".")[-1] == name:
            yield from (alias.name for alias in node.names)
        for alias in node.names:
            if _ALIASES.get(alias.name, alias.name) == name:
                modules.add(alias.asname or alias.name)
    for node in nodes(path):
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in modules:
            yield node.attr


def compiled(path: Path) -> ModuleType:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return importlib.import_module(".".join(parts if parts[0] == "kvstore" else ("kvstore", *parts)))


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_python_code_uses_no_other_names(path: Path) -> None:
    allowed = listed(path).keys() | aliases(path)
    found = {(str(file.relative_to(ROOT)), name) for file in CODE for name in used(file, path.stem)}
    assert found, "no file uses the module: does `used` still see its imports?"
    unlisted = {(file, name) for file, name in found if name not in allowed and not name.startswith("__")}
    assert unlisted == set(), f"add these to {path.name}"


@pytest.mark.parametrize("path", LISTS, ids=lambda path: path.stem)
def test_each_name_of_a_list_exists_and_is_used(path: Path) -> None:
    cython = [file for end in ("pyx", "pxi") for file in ROOT.glob(f"kvstore/**/*.{end}")]
    users = [*CODE, *(file for file in cython if file.parent != path.parent)]
    module, text = compiled(path), [source(file) for file in users]
    in_signatures = {node.id for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Name)}
    for name, node in listed(path).items():
        assert hasattr(module, name), f"{path.name} lists {name}, which the module does not have"
        is_used = name in in_signatures or any(name in one for one in text)
        assert is_used, f"nothing uses {name} of {path.name}"
        for member in node.body if isinstance(node, ast.ClassDef) else ():
            for attribute in (one for one in targets(member) if not one.startswith("__")):
                owner = getattr(module, name)
                assert hasattr(owner, attribute), f"{path.name} lists {name}.{attribute}, which is missing"
