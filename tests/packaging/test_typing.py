"""What type checkers and editors know of `create`: the store's class, its names and its options."""

from __future__ import annotations

import importlib.util
import inspect
import subprocess
import sys
import typing
from dataclasses import fields
from pathlib import Path

import pytest

import kvstore as kv
from kvstore.factory import StoreName
from kvstore.settings.options import StoreConfig
from kvstore.store_kinds import STORES

ROOT = Path(__file__).parents[2]
SNIPPET = """\
import argparse
import kvstore as kv

def typed(name: str, args: argparse.Namespace) -> None:
    reveal_type(kv.create())
    reveal_type(kv.create("dist_sync", timeout=3, group="a"))
    reveal_type(kv.create(name))
    reveal_type(kv.create(args.store))
    reveal_type("w" in kv.create("shared"))
    kv.create().pussh("w", 1)
    kv.create(3)
"""


@pytest.mark.timeout(600)
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="needs mypy")
def test_a_type_checker_knows_what_create_makes(tmp_path: Path) -> None:
    installed = tmp_path / "site" / "kvstore"  # mypy cannot follow the mapping of kernels/
    installed.mkdir(parents=True)
    for path in (ROOT / "kvstore").iterdir():
        (installed / path.name).symlink_to(path)
    (installed / "kernels").symlink_to(ROOT / "kernels")
    (tmp_path / "site" / "snippet.py").write_text(SNIPPET)
    command = [
        sys.executable,
        "-m",
        "mypy",
        "--strict",
        "--follow-imports=silent",
        "--ignore-missing-imports",
    ]
    command += [
        "--ignore-missing-imports",
        "--config-file=",
        f"--cache-dir={tmp_path / 'cache'}",
        "snippet.py",
    ]
    done = subprocess.run(command, cwd=tmp_path / "site", capture_output=True, text=True)
    told = [line.partition(": ")[2] for line in done.stdout.splitlines()]
    assert told[:4] == ['note: Revealed type is "kvstore.store.KVStore"'] * 4, done.stdout + done.stderr
    assert told[4] == 'note: Revealed type is "bool"'
    assert told[5].startswith('error: "KVStore" has no attribute "pussh"')
    assert told[6].startswith('error: No overload variant of "create" matches argument type "int"')


def test_every_literal_name_is_typed_and_in_the_help() -> None:
    assert set(typing.get_args(StoreName)) == set(STORES)
    text = inspect.getdoc(kv.create) or ""
    for name in (*STORES, "teststore"):
        assert f'``"{name}"``' in text, name


def test_every_option_is_in_the_help_with_its_default() -> None:
    text = inspect.getdoc(kv.create) or ""
    for field in fields(StoreConfig):
        assert f"    {field.name} : {field.type}, default " in text, field.name


@pytest.mark.skipif(sys.version_info < (3, 11), reason="typing.get_overloads is of Python 3.11")
def test_every_option_is_typed_with_its_default() -> None:
    literal, anything = typing.get_overloads(kv.create)
    options = dict(inspect.signature(literal).parameters)
    assert options.pop("name").default == "local"
    assert {name: (p.annotation, p.default) for name, p in options.items()} == {
        field.name: (field.type, field.default) for field in fields(StoreConfig)
    }
    assert list(inspect.signature(anything).parameters) == ["name", "options"]
