"""The page for maintainers: each file and each name that it tells a maintainer to open exists."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/architecture.md").read_text()
_STORES = ROOT / "kvstore/stores"
# Where the page begins a path, and the folder that such a path is in; see the end of the page.
FOLDERS = {
    **dict.fromkeys(("kvstore", "kernels", "tests", "bench", "docs"), ROOT),
    **dict.fromkeys(("protocol", "transport", "worker", "server", "scheduler"), _STORES / "parameter_server"),
    "native": _STORES / "shared",
}
# Words in the column that are names of the user's interface, and not of code in one of the row's files.
OTHER = {"shared", "async_op", "priority", "KVSTORE_LOG", "backend.py"}


def section(heading: str) -> str:
    """The text below a heading of the second level."""
    (text,) = re.findall(rf"^## {heading}[^\n]*\n(.*?)(?=^## |\Z)", PAGE, re.DOTALL | re.MULTILINE)
    return str(text)


def rows(text: str) -> Iterator[list[str]]:
    """Cells of the rows of all tables."""
    for line in text.splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split(" | ")]
        if line.startswith("|") and not line.startswith("|---") and cells[0] not in ("to change", "on"):
            yield cells


def spans(text: str) -> list[str]:
    return re.findall(r"`([^`]+)`", text)


def is_path(word: str) -> bool:
    return "/" in word and word.split("/")[0] in FOLDERS


@functools.cache
def text_of(path: str) -> str:
    return (FOLDERS[path.split("/")[0]] / path).read_text()


def is_defined(name: str, text: str) -> bool:
    """Whether a file defines a function, class, constant, setting or macro of this name."""
    last = re.escape(name.rpartition(".")[2])
    python = rf"^\s*(?:(?:async )?def|class|cdef class|cdef \w+|cpdef) +{last}\b|^\s*{last}\b[^=\n]*[=:(,]"
    in_c = rf"^(?:static|typedef|enum|struct|#define)\b[^\n;]*\b{last}\b|^\}} {last};|\b{last} = |\"{last}\""
    return re.search(f"{python}|{in_c}", text, re.MULTILINE) is not None


def undefined(cell: str) -> Iterator[str]:
    """The names of a cell that none of its files defines."""
    words = spans(cell)
    files = [word for word in words if is_path(word) and Path(word).suffix]
    for word in words:
        named = re.fullmatch(r"[A-Za-z_][\w.]*", word) and word not in OTHER and not word.endswith(".py")
        if named and files and not any(is_defined(word, text_of(path)) for path in files):
            yield f"{word} is in none of {files}"


def named_cells() -> list[str]:
    """The cells that name files and functions: what to open, and where things exist more than once."""
    opened = [row[1] for row in rows(section("Which file to open"))]
    several = [cell for row in rows(section("What exists more than once")) for cell in row[1:]]
    return opened + several


def test_every_file_and_name_to_open_exists() -> None:
    cells = named_cells()
    assert len(cells) > 100
    assert [text for cell in cells for text in undefined(cell)] == []


def test_the_usual_way_names_functions_that_exist() -> None:
    """Each name in the steps is defined in a file that the section names."""
    steps = re.findall(
        r"^\d+\. (.*?)(?=^\d+\. |^#|\n\n)", section("The way of a usual call"), re.DOTALL | re.M
    )
    assert len(steps) > 25
    files = [path for path in spans(section("The way of a usual call")) if is_path(path)]
    files = [path for path in dict.fromkeys(files) if Path(path).suffix]
    known = "\n".join(text_of(path) for path in files)
    shortened = [*_STORES.glob("shared/*.py"), *_STORES.glob("parameter_server/native/*.h")]
    known += "\n".join(path.read_text() for path in shortened)
    names = [word for step in steps for word in spans(step) if re.fullmatch(r"[A-Za-z_][\w.]*", word)]
    names = [word for word in names if not re.search(r"\.(py|h|pxi)$", word)]
    verbs = {"push", "pull", "pushpull", "create", "init", "barrier", "join", "close"}
    assert [name for name in names if not is_defined(name, known) and name not in verbs] == []


def test_there_is_a_row_for_each_usual_task() -> None:
    tasks = [row[0] for row in rows(section("Which file to open"))]
    assert len(tasks) >= 40
    assert len(set(tasks)) == len(tasks)


@pytest.mark.parametrize(
    "task",
    [
        "membership", "fencing", "period of heartbeats", "journal", "replies", "chunks",
        "access over a stream",
        "environment variable", "element type", "becomes whole", "buckets", "payload becomes bytes",
    ],
)  # fmt: skip
def test_a_task_that_a_reader_has_missed_is_in_the_table(task: str) -> None:
    text = section("Which file to open")
    headings = re.findall(r"^### (.*)", text, re.MULTILINE)
    assert any(task in entry.lower() for entry in [*headings, *(row[0] for row in rows(text))])
