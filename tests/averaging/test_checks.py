"""The demands of a front door on a store, and the errors without them; the doors' tests have more."""

from __future__ import annotations

import sys
import types
from pathlib import Path
from typing import Any

import pytest

import kvstore as kv
from kvstore.averaging.checks import check_size
from kvstore.settings import launchers

RECIPE = Path(__file__).parents[2] / "docs" / "how-to" / "programs" / "pytorch_spawn.py"


def test_a_store_of_all_processes_is_right() -> None:
    with kv.create("local") as store:
        check_size(store, 1)


def test_processes_that_no_launcher_has_started_are_told_what_to_set() -> None:
    with (
        kv.create("shared") as store,
        pytest.raises(
            kv.ConfigError, match=r"group has 2 .*'shared' has 1: .*torchrun.*spawn.*RANK, WORLD_SIZE"
        ),
    ):
        check_size(store, 2)


def test_processes_of_a_launcher_are_told_of_the_store_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_PORT")
    for name, value in zip(names, "020245", strict=False):
        monkeypatch.setenv(name, value)
    with (
        kv.create("local", processes=1) as store,
        pytest.raises(kv.ConfigError, match=r"'local' has 1: create 'shared'"),
    ):
        check_size(store, 2)


def test_the_variables_of_the_recipe_make_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", types.ModuleType("torch"))
    script: dict[str, Any] = {"__name__": "spawn"}
    exec(RECIPE.read_text(), script)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")  # so that the recipe's setting is undone
    script["place"](1, 2, 29500)
    found = launchers.detect_placement()
    assert (found.launcher, found.rank, found.size, found.local_size) == ("torchrun", 1, 2, 2)
    assert "29500" in found.job
