"""Every example in the README and the docs runs, and the README's two commands are what they should be.

An example is run as a reader runs it: as a file of its own, in an empty folder.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *ROOT.glob("docs/**/*.md")])


def fences(page: Path, language: str) -> list[str]:
    """Contents of the fenced blocks of one language, in order."""
    return re.findall(rf"^```{language}\n(.*?)^```$", page.read_text(), re.DOTALL | re.MULTILINE)


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


def test_each_how_to_has_an_example() -> None:
    assert set(ROOT.glob("docs/how-to/*.md")) <= set(WITH_EXAMPLES)


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
