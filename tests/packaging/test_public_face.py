"""The public names exist, are documented and annotated, and `import kvstore` gives all of them."""

from __future__ import annotations

import functools
import inspect
import types
from collections.abc import Callable, Iterator
from typing import Any

import kvstore as kv


def public(owner: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Yield the object itself, then its public members that were written in this package."""
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


@functools.cache
def names() -> dict[str, Any]:
    return dict(pair for name in sorted(kv.__all__) for pair in public(kv, name))


def functions() -> dict[str, Callable[..., Any]]:
    return {
        name: function
        for name, thing in names().items()
        if inspect.isfunction(function := thing.fget if isinstance(thing, property) else thing)
    }


def bare(signature: inspect.Signature) -> list[str]:
    """What of a signature has no annotation."""
    named = {name: p.annotation for name, p in signature.parameters.items() if name not in {"self", "cls"}}
    annotations = {**named, "return": signature.return_annotation}
    return [name for name, annotation in annotations.items() if annotation is signature.empty]


def test_the_promised_names_are_there() -> None:
    promised = {"create", "KVStore", "KVStoreBase", "TestStore", "RowSparseArray", "KVStoreError"}
    assert promised | {"MissingBackendError", "optimizer", "lr_scheduler"} <= set(kv.__all__)


def test_optimizers_and_schedules_are_looked_into() -> None:
    assert {"optimizer.create", "optimizer.Optimizer.update", "lr_scheduler.CosineScheduler"} <= set(names())


def test_public_names_are_documented() -> None:
    assert [name for name, thing in names().items() if not (inspect.getdoc(thing) or "").strip()] == []


def test_public_functions_are_annotated() -> None:
    left = {name: bare(inspect.signature(function)) for name, function in functions().items()}
    assert {name: parts for name, parts in left.items() if parts} == {}


def test_dir_shows_what_is_public() -> None:
    shown = {name for name in dir(kv) if not name.startswith("__")}
    assert set(kv.__all__) <= shown
    assert not {"engine", "grouping", "importlib", "files", "pages", "Any", "_cpu", "base"} & shown
    assert {"__version__", "__doc__"} <= set(dir(kv))


def test_a_front_door_that_is_open_is_shown() -> None:
    import kvstore.trainer

    assert kvstore.trainer is kv.trainer
    assert "trainer" in dir(kv)
