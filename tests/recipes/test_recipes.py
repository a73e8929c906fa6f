"""The recipes of CONTRIBUTING.md work: from outside, and as changes to a copy of the tree."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT, HERE = Path(__file__).parents[2], Path(__file__).parent
PATIENCE = 660
# How many sources of the package a recipe may touch; and some tests of the copy that cover the addition.
SOURCES = {"optimizer": 4, "codec": 5, "dtype": 4}
SEE_IT = {
    "tests/kernels/test_rules.py": "lion or every_rule",
    "tests/kernels/cuda/test_updates.py": "lion",
    "tests/kernels/test_sums.py": "uint32",
    "tests/kernels/cuda/test_sums.py": "uint32",
    "tests/optimizer/test_updater.py": "lion",
    "tests/arrays/test_host.py": "element_types",
}
pytestmark = pytest.mark.timeout(6 * PATIENCE)


def sections() -> dict[str, str]:
    text = (ROOT / "CONTRIBUTING.md").read_text()
    return dict(re.findall(r"^## ([^\n]+)\n(.*?)(?=^## |\Z)", text, re.DOTALL | re.MULTILINE))


def examples(text: str) -> list[str]:
    return re.findall(r"^```python\n(.*?)^```$", text, re.DOTALL | re.MULTILINE)


@pytest.mark.parametrize("thing", ["A codec", "A store", "An engine of collectives"])
def test_a_recipe_from_outside_runs_as_it_stands(thing: str, tmp_path: Path) -> None:
    (code,) = examples(sections()[thing])
    script = tmp_path / "recipe.py"
    script.write_text(code)
    done = subprocess.run(
        [sys.executable, "-W", "error", str(script)],
        cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_the_recipe_for_an_optimizer_is_a_page_whose_example_runs() -> None:
    assert "docs/how-to/own-optimizer.md" in sections()["An optimizer"]  # by tests/docs/test_examples.py
    assert "register" in examples((ROOT / "docs/how-to/own-optimizer.md").read_text())[0]


def apply(recipe: str, tree: Path) -> None:
    command = ["git", "apply", "--verbose", str(HERE / f"{recipe}.diff")]
    outside = {**os.environ, "GIT_CEILING_DIRECTORIES": str(tree.parent)}
    done = subprocess.run(command, cwd=tree, env=outside, capture_output=True, text=True)
    assert done.returncode == 0, f"{done.stderr}\nwrite tests/recipes/{recipe}.diff anew"


def copied(to: Path) -> Path:
    for folder in ("kernels", "kvstore", "tests"):
        left_out = shutil.ignore_patterns("__pycache__", "*.so", "_cpu.c", "_shared.c")
        shutil.copytree(ROOT / folder, to / folder, ignore=left_out)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, to / name)
    return to


@pytest.mark.skipif(shutil.which("git") is None, reason="recipes are applied by git")
@pytest.mark.parametrize("recipe", SOURCES)
def test_a_recipe_fits_the_tree_and_touches_few_sources(recipe: str, tmp_path: Path) -> None:
    touched = re.findall(r"^\+\+\+ b/(\S+)", (HERE / f"{recipe}.diff").read_text(), re.MULTILINE)
    sources = [path for path in touched if not path.startswith("tests/")]
    assert len(sources) <= SOURCES[recipe]
    for path in touched:
        if (ROOT / path).exists():
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / path, tmp_path / path)
    apply(recipe, tmp_path)
    (said,) = [text for text in sections().values() if f"(tests/recipes/{recipe}.diff)" in text]
    called = [path if (ROOT / path).exists() else f"{Path(path).parent}/NAME.py" for path in sources]
    assert [path for path in called if f"`{path}`" not in said] == []


@pytest.mark.nightly
def test_what_the_recipes_add_is_there_after_a_build(tmp_path: Path) -> None:
    tree, package = copied(tmp_path / "tree"), tmp_path / "package"
    for recipe in SOURCES:
        apply(recipe, tree)
    pip = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", str(package), str(tree)]
    subprocess.run(pip, check=True, timeout=3 * PATIENCE)
    there = {**os.environ, "PYTHONPATH": str(package)}
    use = [sys.executable, str(tree / "tests/recipes/use_what_was_added.py"), str(package)]
    subprocess.run(use, cwd=tmp_path, env=there, check=True, timeout=PATIENCE)
    # As a module it would put the tree before the package.
    pytest_ = str(Path(sys.executable).parent / "pytest")
    for file, words in SEE_IT.items():
        see = [pytest_, "-q", "-p", "no:cacheprovider", file, "-k", words]
        subprocess.run(see, cwd=tree, env=there, check=True, timeout=PATIENCE)
