"""The statements of the tables hold: names and states of the stores, verbs, errors, optimizers' defaults."""

from __future__ import annotations

import ast
import re
import runpy
import sys
from collections.abc import Iterator, Mapping
from dataclasses import fields
from pathlib import Path

import pytest

import kvstore as kv
from kvstore import errors
from kvstore.settings import options

ROOT = Path(__file__).parents[2]
SETTINGS = ROOT / "docs/reference/settings.md"
README, STORES, FROM_MXNET = (ROOT / name for name in ("README.md", "docs/stores.md", "docs/from-mxnet.md"))


def rows(page: Path, heading: str) -> list[list[str]]:
    """Cells of the rows of the first table below a level-two heading, without its head."""
    (text,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for line in text.splitlines() if line.startswith("|")]
    return [[cell.strip() for cell in line.strip("|").split(" | ")] for line in lines[2:]]


def code(cell: str) -> list[str]:
    """The `names` in a cell."""
    return re.findall(r"`([^`]+)`", cell)


def states(page: Path, heading: str) -> dict[str, str]:
    """Return for each store in a table its row."""
    return {name: row[-1] for row in rows(page, heading) for name in code(row[0])}


def stores(state: str) -> list[str]:
    """Names of the stores of which the table says that; there are some."""
    found = [name for name, said in states(STORES, "The stores").items() if re.match(state, said)]
    assert found
    return found


def test_readme_and_docs_agree_on_the_stores() -> None:
    assert states(README, "Stores") == states(STORES, "The stores")


def test_stores_that_work_are_made() -> None:
    names = stores("works(?! with)")
    assert [kv.create(name.upper()).type for name in names] == names


def test_stores_on_servers_are_made_where_there_are_some(
    one_server: Mapping[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    names = stores("works with servers")
    for name in names:
        with pytest.raises(kv.ConfigError, match=r"kvstore run .*-s"):
            kv.create(name)
    for variable, value in one_server.items():
        monkeypatch.setenv(variable, value)
    for name in names:
        with kv.create(name.upper()) as store:
            assert store.type == name


def test_stores_on_an_engine_say_how_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    for package in ("mpi4py", "horovod", "nccl", "byteps"):
        monkeypatch.setitem(sys.modules, package, None)
    for name in stores("works with(?! servers)"):
        with pytest.raises(kv.MissingBackendError, match=rf"store '{name}' .*pip install") as caught:
            kv.create(name)
        assert isinstance(caught.value, ImportError)


def test_every_method_is_in_the_table() -> None:
    documented = {
        re.match(r"\w+", name).group() for row in rows(STORES, "The methods") for name in code(row[0])
    }
    public = {name for name in dir(kv.KVStore) if not name.startswith("_")}
    constants = {name for name in public if name.isupper()} | {"register", "kv_registry"}
    assert public - constants - documented == set()
    assert documented - public - {"with"} == set()


def test_a_cell_of_the_stores_is_short() -> None:
    """A part of more than some sentences is a section of its own."""
    cells = [
        cell for line in STORES.read_text().splitlines() if line.startswith("|") for cell in line.split(" | ")
    ]
    assert len(cells) > 100
    assert [cell for cell in cells if len(cell) > 300] == []


def test_every_error_is_in_the_table_with_its_builtin() -> None:
    table = {name: set(code(row[1])) for row in rows(STORES, "Errors") for name in code(row[0])}
    real = {
        name: {base.__name__ for base in cls.__bases__ if base.__module__ == "builtins"}
        for name, cls in vars(errors).items()
        if isinstance(cls, type) and issubclass(cls, errors.KVStoreError) and cls is not errors.KVStoreError
    }
    assert table == real


def differences(row: list[str]) -> Iterator[str]:
    """The statements of a table row about an optimizer that are wrong."""
    (name,), (class_name,) = code(row[0]), code(row[1])
    optimizer = kv.optimizer.create(name)
    if type(optimizer) is not getattr(kv.optimizer, class_name):
        yield f"{name} makes {type(optimizer).__name__}"
    for setting in code(row[2]):
        key, _, value = setting.partition("=")
        if getattr(optimizer, key) != ast.literal_eval(value):
            yield f"{name}: {setting}, but it is {getattr(optimizer, key)}"


def test_optimizers_have_the_names_and_defaults_of_the_table() -> None:
    table = rows(FROM_MXNET, "Optimizers")
    assert table
    assert [text for row in table for text in differences(row)] == []


def test_schedules_exist() -> None:
    for _, ours in rows(FROM_MXNET, "Learning-rate schedules"):
        (name,) = code(ours)
        assert issubclass(getattr(kv.lr_scheduler, name), kv.lr_scheduler.LRScheduler)


def test_the_methods_that_mxnet_has_are_here() -> None:
    names = [
        name for row in rows(FROM_MXNET, "KVStore") for name in code(row[1]) if re.fullmatch(r"\w+", name)
    ]
    assert len(names) > 15
    for name in names:
        assert hasattr(kv.KVStore, name), name


def test_the_options_are_those_of_create() -> None:
    defaults = {field.name: field.default for field in fields(options.StoreConfig)}
    (text,) = re.findall(r"^## Stores\n(.*?)^## ", SETTINGS.read_text(), re.DOTALL | re.MULTILINE)
    told = re.findall(r"option \*\*`(\w+)`\*\*\\\n.*\\\n.*?default `([^`]+)`", text)
    assert {name: ast.literal_eval(default) for name, default in told} == defaults


def test_the_page_of_settings_is_made_from_the_definitions() -> None:
    made = runpy.run_path(str(ROOT / "docs/settings_page.py"))["page"]()
    again = f"python docs/settings_page.py {SETTINGS.relative_to(ROOT)}"
    assert SETTINGS.read_text() == made, again


def test_the_page_of_states_is_made_from_the_tables_of_the_code() -> None:
    page = "docs/reference/states.md"
    made = runpy.run_path(str(ROOT / "docs/states_page.py"))["page"]()
    assert (ROOT / page).read_text() == made, f"python docs/states_page.py {page}"


def test_the_page_of_settings_begins_with_its_use_and_fits_a_phone() -> None:
    lines = SETTINGS.read_text().splitlines()
    assert "settings_page.py" not in "".join(lines[: lines.index("## Tests and benchmarks")])
    assert [line for line in lines if line.startswith("|")] == []


def test_every_variable_that_is_read_is_documented() -> None:
    source = "".join(path.read_text() for path in ROOT.glob("kvstore/**/*.py"))
    variables = set(re.findall(r"\"((?:KVSTORE|MXNET|DMLC|PS)_[A-Z_0-9]*[A-Z0-9])\"", source))
    pages = (STORES, FROM_MXNET, SETTINGS, *ROOT.glob("docs/how-to/*.md"))
    documented = "".join(page.read_text() for page in pages)
    assert {name for name in variables if f"`{name}`" not in documented} == set()


def test_the_tests_that_the_page_of_security_names_are_there() -> None:
    named = re.findall(r"`([\w/]+\.py)::(\w+)`", (ROOT / "SECURITY.md").read_text())
    short = ROOT / "tests/stores/parameter_server"
    assert len(named) > 20
    for file, name in named:
        path = (short if file.startswith("transport/") else ROOT) / file
        assert f"def {name}(" in path.read_text(), f"{file}::{name}"
