"""The contents of the site: a page for each public name, and for each table of the benches."""

from __future__ import annotations

import importlib
import re
from pathlib import Path

import pytest

import kvstore

DOCS = Path(__file__).parents[2] / "docs"
API = "".join(page.read_text() for page in sorted(DOCS.glob("api/*.md")))
MODULES = re.findall(r"automodule:: (\S+)", API)
NAMES = set(re.findall(r"auto(?:class|function):: (\w+)", API))


def test_every_public_name_has_an_entry() -> None:
    whole = {name.rpartition(".")[2] for name in [*MODULES, "kvstore.optimizer"]}
    assert set(kvstore.__all__) - NAMES - whole - set(dir(kvstore.errors)) == set()
    assert set(kvstore.optimizer.__all__) - NAMES - {"lr_scheduler"} == set()


@pytest.mark.parametrize("name", ["backends", "compression", "errors", "roles", "trainer"])
def test_every_public_module_has_an_entry(name: str) -> None:
    assert importlib.import_module(f"kvstore.{name}").__name__ in MODULES


def test_modules_of_frameworks_have_an_entry() -> None:
    assert {f"kvstore.{name}" for name in ("jax", "mxnet", "ray", "torch")} <= set(MODULES)


def test_every_table_of_the_benches_has_a_page_with_its_title() -> None:
    tables = {page.name: page for page in DOCS.parent.glob("bench/results/*.md")}
    pages = {page.name: page for page in DOCS.glob("benchmarks/*.md")}
    assert set(tables) == set(pages) - {"index.md", "method.md"}
    for name, table in tables.items():
        assert table.read_text().splitlines()[0] == pages[name].read_text().splitlines()[0]
