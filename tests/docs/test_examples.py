"""Every example in the README and the docs runs, and the README's two commands are right.

An example is run as a reader runs it: as a file of its own, in an empty folder. One that cannot be run has a
comment before it, ``<!-- not run: why -->``; of its commands at least the options of kvstore are looked at.
"""

from __future__ import annotations

import importlib.util
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

from kvstore.launch.cli import main

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])
FENCE = re.compile(
    r"^(?:<!-- not run: (.+) -->\n)?```(\S*)\n((?:(?!^```).*\n)*)^```$", re.MULTILINE
)  # fmt: skip


class Fence(NamedTuple):
    """A fenced block, and why it is not run."""

    why: str
    language: str
    code: str


def blocks(page: Path) -> list[Fence]:
    return [Fence(*found) for found in FENCE.findall(page.read_text())]


def fences(page: Path, language: str) -> list[str]:
    """Contents of the fenced blocks of one language that are not marked, in order."""
    return [block.code for block in blocks(page) if block.language == language and not block.why]


def section(page: Path, heading: str) -> str:
    """Text between a level-two heading and the next one."""
    (text,) = re.findall(rf"^## {heading}\n(.*?)(?=^## |\Z)", page.read_text(), re.DOTALL | re.MULTILINE)
    return text


PATIENCE = 660  # seconds: what examples start may take 600
pytestmark = pytest.mark.timeout(6 * PATIENCE)


def execute(code: str, folder: Path) -> str:
    script = folder / "example.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=folder, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


WITH_EXAMPLES = [page for page in PAGES if fences(page, "python")]


@pytest.mark.parametrize("page", WITH_EXAMPLES, ids=lambda page: page.stem)
def test_examples_run_alone_and_without_a_warning(page: Path, tmp_path: Path) -> None:
    for code in fences(page, "python"):
        execute(code, tmp_path)


def test_the_first_example_prints_what_the_readme_says(tmp_path: Path) -> None:
    (code,), (printed,) = fences(ROOT / "README.md", "python"), fences(ROOT / "README.md", "text")
    assert execute(code, tmp_path) == printed


WRITE = """
with kv.create("local") as store:
    store.init("w", np.zeros(4, np.float32))
    statistics = StatisticsWriter(store, write, every=10)
    for batch in range(20):
        store.pushpull("w", np.ones(4, np.float32))
        statistics()
writer.close()
"""


def test_tensorboard_gets_the_statistics_of_a_store(tmp_path: Path) -> None:
    """With a writer of theirs, which may warn of anything."""
    has = {name for name in ("torch", "tensorboard", "tensorboardX") if importlib.util.find_spec(name)}
    if not ({"torch", "tensorboard"} <= has or "tensorboardX" in has):
        pytest.skip("needs tensorboardX, or PyTorch and TensorBoard")
    recipe, writer, _ = (
        block.code for block in blocks(ROOT / "docs/how-to/metrics.md") if block.language == "python"
    )
    (tmp_path / "train.py").write_text(recipe + writer + WRITE)
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    (events,) = (tmp_path / "runs/first").glob("events*")
    assert events.read_bytes().count(b"kvstore/pushes_per_second") == 2


@pytest.mark.parametrize("command", fences(ROOT / "docs/quick-start.md", "bash"), ids=str.strip)
def test_the_commands_of_the_quick_start_run_its_program(command: str, tmp_path: Path) -> None:
    program = fences(ROOT / "docs/quick-start.md", "python")[1]
    servers = "-s" in command.split()
    (tmp_path / "train.py").write_text(program.replace('"shared"', '"dist_sync"') if servers else program)
    done = subprocess.run(
        [sys.executable, "-m", *command.split()],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("of 4: [10. 10. 10. 10.]") == 4


#: For commands of pages: it trains on the existing store, with any options.
TRAIN = """
import os, sys
import numpy as np
import kvstore as kv
with kv.create("dist_sync" if "KVSTORE_SCHEDULER" in os.environ else "shared") as store:
    total = np.ones(3, np.float32)
    store.init("w", total)
    store.pushpull("w", total)
    print("trained", *total, *sys.argv[1:])
"""


def commands() -> Iterator[tuple[Path, str]]:
    """Commands of pages that are run, but for the quick start's, which run its own program."""
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        if page.stem != "quick-start":
            yield from ((page, code) for code in fences(page, "bash"))


@pytest.mark.parametrize("command", [pytest.param(code, id=page.stem) for page, code in commands()])
def test_the_commands_of_the_pages_run(command: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAIN)
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        ["bash", "-euo", "pipefail", "-c", command],
        cwd=tmp_path, env={**os.environ, "PATH": path}, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    workers = int(command.split("-n ")[1].split()[0])
    assert done.stdout.count("trained " + " ".join([f"{workers:.1f}"] * 3)) == workers


def test_there_are_commands_that_run_and_each_other_says_why_not() -> None:
    assert len(list(commands())) >= 2
    for page in (*PAGES, ROOT / "CONTRIBUTING.md"):
        text = page.read_text()
        assert len(re.findall(r"^ *```", text, re.MULTILINE)) == 2 * len(blocks(page)), page
        assert text.count("<!-- not run") == sum(bool(block.why) for block in blocks(page)), page
        for block in blocks(page):
            assert block.language in {"python", "bash", "text", "diff", "{eval-rst}", "{toctree}"}, page
            assert not block.why or block.language in {"python", "bash"}, page


def typed(code: str) -> Iterator[list[str]]:
    """Words of the commands of kvstore in a block, also behind variables and other launchers."""
    for line in re.split(r"\n| && ", code):
        words = shlex.split(line, comments=True)
        places = [at for at, word in enumerate(words) if Path(word).name == "kvstore"]
        yield from (words[at + 1 :] for at in places[:1])


TYPED = [
    pytest.param(words, id=f"{page.stem}: {' '.join(words)}")
    for page in (*PAGES, ROOT / "CONTRIBUTING.md")
    for block in blocks(page)
    if block.language == "bash"
    for words in typed(block.code)
]


@pytest.mark.parametrize("words", TYPED)
def test_what_is_typed_is_understood(words: list[str]) -> None:
    name, *options = words
    with main.commands[name].make_context(name, options):
        pass


def test_each_how_to_has_an_example() -> None:
    with_programs = {page for page in PAGES if re.search(r"not run: (here|lines of)", page.read_text())}
    assert set(ROOT.glob("docs/how-to/*.md")) <= {*WITH_EXAMPLES, *with_programs}


@pytest.mark.parametrize(
    ("heading", "end"),
    [("Run it", ".venv/bin/kvstore demo"), ("Test it", ".venv/bin/pytest -n 4 --dist worksteal")],
)
def test_the_readme_has_one_command_of_one_line(heading: str, end: str) -> None:
    blocks = re.findall(
        r"^```\w*\n(.*?)^```$", section(ROOT / "README.md", heading), re.DOTALL | re.MULTILINE
    )
    assert len(blocks) == 1
    steps = blocks[0].removesuffix("\n").split(" && ")
    assert "\n" not in blocks[0].removesuffix("\n")
    assert steps[0] == "python3 -m venv .venv"
    assert steps[1].startswith(".venv/bin/pip install ")
    assert steps[2:] == [end]
