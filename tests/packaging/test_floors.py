"""The house rules that can be read off the source: imports point down only, and no code comes from data."""

from __future__ import annotations

import ast
import functools
import re
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]

# From the ground up: a room may import what stands on its own floor and below. A module stands where
# the longest name says that it begins with.
_FLOORS = (
    "kernels",
    "errors source_tree atomic_files tensor_file waiting key_locks engine arrays settings devices observe",
    "optimizer compression",
    "stores",  # the common parts of all stores
    "stores.local",
    "stores.device",
    "stores.parameter_server.protocol stores.shared.native",
    "stores.parameter_server.native",
    "stores.parameter_server.transport",
    "stores.parameter_server.worker stores.parameter_server.server stores.parameter_server.scheduler",
    "stores.parameter_server stores.shared stores.collectives",
    "stores.hierarchy",  # made of two of these
    "collective",  # on any of them
    "backends base factory store store_kinds plan step recorded_store checkpoint roles",
    "kvstore",  # kvstore/__init__.py
    # With the tools of the command, some of which start jobs.
    "averaging demo launch trainer torch jax mxnet ray __main__ observe.doctor observe.bench observe.top "
    "observe.timeline.job",
)
FLOORS = {room: number for number, rooms in enumerate(_FLOORS) for room in rooms.split()}

# Rooms of one house that know nothing of each other; what two of them need is a floor below.
APART = [
    {"stores.shared", "stores.parameter_server", "stores.collectives"},
    {f"stores.parameter_server.{role}" for role in ("worker", "server", "scheduler")},
]


@functools.cache
def sources(suffix: str = ".py") -> list[Path]:
    """All files of the library with that suffix, from the root of the tree."""
    found = (path for folder in ("kvstore", "kernels") for path in ROOT.glob(f"{folder}/**/*{suffix}"))
    return [path.relative_to(ROOT) for path in found]


@functools.cache
def tree(path: Path) -> ast.Module:
    return ast.parse((ROOT / path).read_text())


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
    for node in ast.walk(tree(path)):
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


def test_imports_point_down_only() -> None:
    up = [
        f"{path}:{line} imports {room(target)}, which is above it"
        for path in sources()
        for line, target in imported(path)
        if FLOORS[room(target)] > FLOORS[room(module(path))]
    ]
    assert up == [], "\n".join(up)


# The imports of the command alone; the bench shares what the doctor knows of the machine.
TOOLS = {"observe.doctor", "observe.bench", "observe.top", "observe.timeline.job"}


def test_only_the_command_imports_its_tools() -> None:
    using = {
        str(path)
        for path in sources()
        for _, target in imported(path)
        if within(target, TOOLS) and not within(module(path), TOOLS)
    }
    assert using == {"kvstore/launch/cli.py"}


def test_nothing_imports_the_benches_of_developers() -> None:
    """They are not installed."""
    text = re.compile(r"^\s*(from|import) bench\b", re.MULTILINE)
    assert [str(path) for path in sources() if text.search((ROOT / path).read_text())] == []


def within(dotted: list[str], rooms: set[str]) -> set[str]:
    return {name for name in rooms if [*dotted, ""][: name.count(".") + 1] == name.split(".")}


# Engines of collectives find each other by the sockets of the parameter server.
_SHARED_SOCKETS = ["stores", "parameter_server", "transport"]


def across(path: Path) -> Iterator[str]:
    """Imports by which a module knows of a room that is apart from its own."""
    for rooms in APART:
        here = within(module(path), rooms)
        for line, target in imported(path):
            there = within(target, rooms)
            if here and there and target[:3] != _SHARED_SOCKETS and here != there:
                yield f"{path}:{line}: {here} imports {there}"


def test_stores_and_roles_know_nothing_of_each_other() -> None:
    found = [text for path in sources() for text in across(path)]
    assert found == [], "\n".join(found)


# Events and the time are the input, actions the output: else the simulator could not repeat a seed.
_SERVERS = Path("kvstore/stores/parameter_server")
_PARTS = {Path("kvstore/settings/definitions.py"), Path("kvstore/errors.py")}
_PARTS |= {Path("kvstore/optimizer", name) for name in ("settings_log.py", "descriptions.py")}  # texts only
MACHINES = ["scheduler/machine.py", "server/machine.py", "worker/state_machine/machine.py"]
PURE = {"__future__", "bisect", "builtins", "collections", "dataclasses", "difflib", "enum", "functools"}
PURE |= {"heapq", "itertools", "json", "math", "msgspec", "numpy", "typing"}
PURE_C = {"stdatomic.h", "stdint.h", "stdlib.h", "string.h", "pthread.h"}  # locks; no threads


def source(dotted: list[str]) -> Path:
    """File of a module below `kvstore`, or of the module that has this name in it."""
    paths = (Path("kvstore", *dotted[:n]).with_suffix(".py") for n in range(len(dotted), 0, -1))
    return next(path for path in paths if path in sources())


def reached(path: Path) -> set[Path]:
    """A module of ours, and all that it needs."""
    found, left = set(), {path}
    while left:
        found |= left
        targets = [target for one in left for _, target in imported(one)]
        # Kernels only compute; `test_c_of_state_machines_has_no_clock_and_no_socket` is about the other
        # modules.
        left = {source(one) for one in targets if one[0] != "kernels" and "native" not in one} - found
    return found


def impure(machine: str) -> Iterator[str]:
    """The imports that a machine reaches and must not."""
    rooms = {_SERVERS / machine.partition("/")[0], _SERVERS / "protocol"}
    for path in reached(_SERVERS / machine):
        if path not in _PARTS and not rooms & set(path.parents):
            yield f"{machine} needs {path}, which is no part of it"
        for node in ast.walk(ast.parse((ROOT / path).read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and not node.level:
                names = [node.module or ""]
            yield from (f"{path} imports {name}" for name in names if name.partition(".")[0] not in PURE)


def test_state_machines_have_no_clock_no_socket_and_no_chance() -> None:
    found = [text for machine in MACHINES for text in impure(machine)]
    assert found == [], "\n".join(found)


def test_c_of_state_machines_has_no_clock_and_no_socket() -> None:
    headers = list((ROOT / _SERVERS / "native").glob("*.h"))
    assert headers
    for path in headers:
        text = path.read_text()
        assert set(re.findall(r"#include <(.*)>", text)) <= PURE_C, path
        assert "pthread_create" not in text, path


def test_every_room_has_a_floor() -> None:
    without = [str(path) for path in sources() if (module(path)[0] or "kvstore") not in FLOORS]
    assert without == [], "say in FLOORS on which floor they stand"


def test_no_folder_is_too_full() -> None:
    """A stranger reads the names of twenty files, not of sixty."""
    tests = (path.relative_to(ROOT) for path in ROOT.glob("tests/**/*.py"))
    full = Counter(path.parent for path in (*sources(), *tests) if path.name != "__init__.py")
    assert {folder: n for folder, n in full.items() if n > 20} == {}


SERIALISERS = {"pickle", "cPickle", "_pickle", "marshal", "shelve", "dill", "cloudpickle", "joblib"}


def makes_code(node: ast.AST) -> bool:
    """Whether that is a serialiser's import, a call that compiles, or a pickle that is allowed."""
    if isinstance(node, ast.Import):
        return bool({alias.name.partition(".")[0] for alias in node.names} & SERIALISERS)
    if isinstance(node, ast.ImportFrom):
        return (node.module or "").partition(".")[0] in SERIALISERS
    if isinstance(node, ast.Call):
        return isinstance(node.func, ast.Name) and node.func.id in {"eval", "exec", "compile"}
    if isinstance(node, ast.keyword) and node.arg == "allow_pickle":
        return not (isinstance(node.value, ast.Constant) and node.value.value is False)
    return False


def test_no_code_from_data() -> None:
    found = [
        f"{path}:{node.lineno}" for path in sources() for node in ast.walk(tree(path)) if makes_code(node)
    ]
    assert found == []


def test_no_code_from_data_in_compiled_sources() -> None:
    forbidden = rf"^\s*c?(import|from)\s+({'|'.join(SERIALISERS)})\b|\b(eval|exec)\("
    compiled = sources(".pyx")
    assert compiled
    assert [path for path in compiled if re.search(forbidden, (ROOT / path).read_text(), re.MULTILINE)] == []


def narrows(node: ast.Assert) -> bool:
    """``assert x is not None`` and ``assert isinstance(...)`` state a known fact to the type checker."""
    test = node.test
    if isinstance(test, ast.Call):
        return isinstance(test.func, ast.Name) and test.func.id == "isinstance"
    return isinstance(test, ast.Compare) and isinstance(test.ops[0], ast.IsNot)


def test_caller_errors_are_exceptions() -> None:
    removed = [
        f"{path}:{node.lineno}"
        for path in sources()
        for node in ast.walk(tree(path))
        if isinstance(node, ast.Assert) and not narrows(node)
    ]
    assert removed == [], "python -O removes an assert"
