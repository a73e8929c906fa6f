"""The house as a stranger finds it: each class name says one thing, and no module needs one that needs it."""

from __future__ import annotations

import ast
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).parents[2]
FILES = [path for folder in ("kvstore", "kernels") for path in ROOT.glob(f"{folder}/**/*.py")]

# Names that two classes still have. Take away what is gone; whoever adds one finds a better name.
TWICE = {
    "Answer",
    "Apply",
    "Barrier",
    "Batch",
    "Codec",
    "End",
    "Hello",
    "KVStore",
    "Keys",
    "Lease",
    "Loss",
    "Member",
    "Memory",
    "Operation",
    "Ping",
    "Process",
    "Pushed",
    "Ready",
    "Refused",
    "Request",
    "Rows",
    "Settings",
    "Start",
    "State",
    "Table",
    "Work",
}


def name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    parts = ("kvstore", *parts) if parts[0] == "kernels" else parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def test_no_class_name_twice() -> None:
    found = defaultdict(list)
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                found[node.name].append(str(path.relative_to(ROOT)))
    assert {cls: paths for cls, paths in found.items() if len(paths) > 1 and cls not in TWICE} == {}
    assert {cls for cls in TWICE if len(found[cls]) < 2} == set(), "take these out of TWICE"


def imported(path: Path, names: set[str]) -> set[str]:
    """Modules of ours that a module imports, in functions too, but not for type checkers alone."""
    tree = ast.parse(path.read_text())
    typing = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    }
    package = name(path).split(".")
    package = package if path.name == "__init__.py" else package[:-1]
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and id(node) not in typing:
            start = package[: len(package) - node.level + 1] if node.level else []
            base = ".".join([*start, *([node.module] if node.module else [])])
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
