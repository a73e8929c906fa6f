"""The description on a package index: the README, whose links lead to the repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from email.parser import Parser
from pathlib import Path

import pace
import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it there

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")
#: The variables set by the runner that builds a release.
RELEASE = {
    "GITHUB_SERVER_URL": "https://forge.example",
    "GITHUB_REPOSITORY": "owner/kvstore",
    "GITHUB_REF_NAME": "v1.2.3",
}
AT = "https://forge.example/owner/kvstore/blob/v1.2.3/"
METADATA = "from setuptools.build_meta import prepare_metadata_for_build_wheel as make; make('out')"


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Copy what metadata need: no module is compiled."""
    built = shutil.ignore_patterns("__pycache__", "*.so", "*.c")
    for folder in ("kernels", "kvstore"):
        shutil.copytree(ROOT / folder, tmp_path / folder, ignore=built)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path / name)
    (tmp_path / "out").mkdir()
    return tmp_path


def description(tree: Path, release: dict[str, str]) -> str:
    """Return the description in the metadata of a wheel."""
    env = {name: value for name, value in os.environ.items() if name not in RELEASE}
    subprocess.run(
        [sys.executable, "-c", METADATA], cwd=tree, env=env | release, check=True, timeout=pace.seconds(120)
    )
    (metadata,) = tree.glob("out/*.dist-info/METADATA")
    message = Parser().parsestr(metadata.read_text())
    assert message["Description-Content-Type"] == "text/markdown"
    return str(message.get_payload())


def test_links_of_a_release_lead_to_the_files_of_its_tag(tree: Path) -> None:
    text = description(tree, RELEASE)
    links = LINK.findall(text)
    assert [link for link in links if not link.startswith("https://")] == []
    paths = [link.removeprefix(AT).partition("#")[0] for link in links if link.startswith(AT)]
    assert len(paths) > 20
    assert [path for path in paths if not (ROOT / path).is_file()] == []
    assert text.replace(AT, "").strip() == (ROOT / "README.md").read_text().strip()


def test_a_build_elsewhere_has_paths_in_place_of_links(tree: Path) -> None:
    text = description(tree, {})
    assert [link for link in LINK.findall(text) if not link.startswith("https://")] == []
    assert "changelog (`CHANGELOG.md`)" in text


def test_the_container_of_the_wheels_gets_what_names_the_repository() -> None:
    tools = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]
    assert set(tools["cibuildwheel"]["linux"]["environment-pass"]) == set(RELEASE)
