"""The public names exist, are documented and annotated, and nobody has to know more than `import kvstore`."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

import pytest

import kvstore as kv


def public(owner: Any, name: str) -> Iterator[tuple[str, Any]]:
    """The object itself, then what is public inside it and was written in this package."""
    thing = getattr(owner, name)
    yield name, thing
    if isinstance(thing, types.ModuleType):
        for inner in getattr(thing, "__all__", classes(thing)):
            yield from ((f"{name}.{path}", part) for path, part in public(thing, inner))
    elif inspect.isclass(thing) and thing.__module__.startswith("kvstore"):
        for inner, member in vars(thing).items():
            if not inner.startswith("_") and (inspect.isroutine(member) or isinstance(member, property)):
                yield f"{name}.{inner}", getattr(thing, inner)


def classes(module: types.ModuleType) -> list[str]:
    """Names of the public classes that a module defines."""
    return [
        name
        for name, thing in vars(module).items()
        if inspect.isclass(thing) and thing.__module__ == module.__name__ and not name.startswith("_")
    ]


NAMES = dict(pair for name in sorted(kv.__all__) for pair in public(kv, name))
FUNCTIONS = {
    name: function
    for name, thing in NAMES.items()
    if inspect.isfunction(function := thing.fget if isinstance(thing, property) else thing)
}


def test_the_promised_names_are_there() -> None:
    promised = {"create", "KVStore", "KVStoreBase", "TestStore", "RowSparseArray", "KVStoreError"}
    assert promised | {"MissingBackendError", "optimizer", "lr_scheduler"} <= set(kv.__all__)


def test_optimizers_and_schedules_are_looked_into() -> None:
    assert {"optimizer.create", "optimizer.Optimizer.update", "lr_scheduler.CosineScheduler"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_is_documented(name: str) -> None:
    assert (inspect.getdoc(NAMES[name]) or "").strip(), f"kvstore.{name} has no docstring"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_public_function_is_annotated(name: str) -> None:
    signature = inspect.signature(FUNCTIONS[name])
    assert signature.return_annotation is not signature.empty
    named = [p for p in signature.parameters.values() if p.name not in {"self", "cls"}]
    assert all(p.annotation is not p.empty for p in named), signature


def test_dir_shows_what_is_public() -> None:
    shown = {name for name in dir(kv) if not name.startswith("__")}
    assert set(kv.__all__) <= shown
    assert not {"engine", "grouping", "importlib", "files", "pages", "Any", "_cpu", "base"} & shown
    assert {"__version__", "__doc__"} <= set(dir(kv))


def test_a_front_door_that_is_open_is_shown() -> None:
    import kvstore.trainer

    assert kvstore.trainer is kv.trainer
    assert "trainer" in dir(kv)
