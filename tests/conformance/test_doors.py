"""Each front door plays programs of users in all ways; `outcomes` has the expected results.

The weights of one process are the reference. Needs torch and jax: here, or in the environments of
$KVSTORE_TEST_TORCH and $KVSTORE_TEST_JAX.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import jobs
import numpy as np
import pytest
from conformance import crews, jax_door, torch_door, trainer_door
from conformance.outcomes import Door, Refused, Right, Unnoticed, Warned

DOORS = {"torch": torch_door.DOOR, "jax": jax_door.DOOR, "trainer": trainer_door.DOOR}
NEEDS = {"torch": ("torch",), "jax": ("jax", "optax"), "trainer": ("torch",)}
ALONE = "alone"
#: Programs that three workers play too, two of them on one host.
OF_THREE = [
    (way, program)
    for way in ("hook", "shared/default", "dist_sync/default", "hosts/default", "hosts/off")
    for program in ("plain", "clip_norm", "unused_by_each_another", "unused_by_step")
]


@cache
def python(door: str) -> str:
    """Return an interpreter that has the packages of a door, or skip."""
    variable = "KVSTORE_TEST_JAX" if door == "jax" else "KVSTORE_TEST_TORCH"
    named = os.environ.get(variable, "")
    if not named and not all(map(importlib.util.find_spec, NEEDS[door])):
        pytest.skip(
            f"{' and '.join(NEEDS[door])} not here: install, or name a python with them in {variable}"
        )
    return named or sys.executable


class Crews:
    """The crews of all ways: the crew of one process stays, and of the others only the present one."""

    def __init__(self, folders: pytest.TempPathFactory) -> None:
        self._folders = folders
        self._nurseries: dict[str, jobs.Nursery] = {}
        self._crews: dict[tuple[str, str, int], crews.Crew] = {}

    def play(self, door: str, way: str, program: str, size: int = 2) -> list[Any]:
        """Play a program of a door in a way, by so many workers."""
        if (door, way, size) not in self._crews:
            if way != ALONE:
                self._close_others(door)
            self._crews[door, way, size] = self._make(door, way, size)
        return self._crews[door, way, size].play(program)

    def _make(self, door: str, way: str, size: int) -> crews.Crew:
        module = DOORS[door].module
        if door not in self._nurseries:
            imported = [] if door == "jax" else NEEDS[door]  # JAX has threads, and workers are forked
            self._nurseries[door] = jobs.Nursery(module, *imported, python=python(door))
        settings = {"kind": ALONE} if way == ALONE else DOORS[door].ways[way]
        return crews.Crew(self._nurseries[door], self._folders.mktemp("crew"), module, settings, size)

    def _close_others(self, door: str) -> None:
        for key in [key for key in self._crews if key[1] != ALONE or key[0] != door]:
            self._crews.pop(key).close()

    def close(self) -> None:
        """End all processes."""
        for crew in self._crews.values():
            crew.close()
        for nursery in self._nurseries.values():
            nursery.close()


@pytest.fixture(scope="module")
def play(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list[Any]]]:
    made = Crews(tmp_path_factory)
    yield made.play
    made.close()


@pytest.fixture(scope="module")
def alone(play: Callable[..., list[Any]]) -> Callable[..., Any]:
    """Return the numbers of one process that computes the batches of all workers."""

    @cache
    def run(door: str, program: str, size: int = 2) -> Any:
        (found,) = play(door, ALONE, program, size)
        return found

    return run


def _cells() -> list[Any]:
    return [
        pytest.param(name, way, program, id=f"{name}-{way}-{program}")
        for name, door in DOORS.items()
        for way, program in door.cells()
    ]


@pytest.mark.parametrize(("door", "way", "program"), _cells())
def test_a_program_is_right_or_refused(
    door: str, way: str, program: str, play: Callable[..., list[Any]], alone: Callable[..., Any]
) -> None:
    wanted = DOORS[door].outcome(program, way)
    found = play(door, way, program)
    if isinstance(wanted, Refused):
        check_refused(found, wanted)
    else:
        check_right(found, alone(door, program), wanted)


@pytest.mark.parametrize(("way", "program"), OF_THREE)
def test_three_workers(
    way: str, program: str, play: Callable[..., list[Any]], alone: Callable[..., Any]
) -> None:
    check_right(play("torch", way, program, 3), alone("torch", program, 3), Right())


def check_refused(found: list[Any], wanted: Refused) -> None:
    errors = [one.get("error", "") for one in found]
    assert all(errors) if wanted.by_all else any(errors), found
    known = [any(matches(words, error) for words in wanted.words) for error in errors if error]
    assert all(known) if wanted.by_all else any(known), errors


def matches(words: str, error: str) -> bool:
    """Whether an error has these words, in order; "..." stands for any text."""
    place = 0
    for part in words.split("..."):
        place = error.find(part, place)
        if place < 0:
            return False
        place += len(part)
    return True


def check_right(found: list[Any], expected: Any, wanted: Any) -> None:
    errors = [one["error"] for one in found if "error" in one]
    assert not errors, errors
    if isinstance(wanted, Warned):
        assert all(any(wanted.words in text for text in one["warned"]) for one in found), found
    if isinstance(wanted, Unnoticed | Warned):
        assert not all(is_close(one, expected, 1e-4) for one in found), "it is right: change the table"
        return
    assert all(one["found"] == found[0]["found"] for one in found), "workers have other weights"
    assert is_close(found[0], expected, wanted.tolerance), (found[0], expected)


def is_close(mine: Any, theirs: Any, tolerance: float) -> bool:
    """Whether the numbers of two runs are the same within rounding."""
    pairs = zip(mine["found"], theirs["found"], strict=True)
    return all(np.allclose(a, b, rtol=tolerance, atol=tolerance / 10, equal_nan=True) for a, b in pairs)


@pytest.mark.parametrize("door", DOORS)
def test_the_table_has_all_programs_and_no_others(door: str) -> None:
    """The names are read from the text, because the programs need the packages of the door."""
    table: Door = DOORS[door]
    assert set(table.exceptions) <= set(table.programs())
    for program, by_way in table.exceptions.items():
        for pattern in by_way:
            patterns = pattern.split()
            assert all(any(Path(way).match(one) for way in table.ways) for one in patterns), (
                program,
                pattern,
            )
    assert table.programs().keys() == _defined(table.module)


def _defined(module: str) -> set[str]:
    import ast

    import paths

    folder = paths.BODIES / "conformance"
    name = module.partition(".")[2]
    files = folder.glob("*.py") if name == "crew" else [folder / f"{name}.py"]
    files = [path for path in files if name != "crew" or path.stem not in ("jax_crew", "trainer_crew")]
    return {
        node.name
        for path in files
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and [one.arg for one in node.args.args] == ["play"]
        and not node.name.startswith("_")
    }
