"""Each direct dependency is on the page of licences, with the licence that its metadata state."""

from __future__ import annotations

import importlib.util
import re
import sys
from collections import defaultdict
from importlib import metadata
from pathlib import Path

import pytest

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib  # pytest requires it there

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/reference/dependencies.md"
PYPROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ROWS = re.findall(r"^\| `([\w-]+)` \| (.+) \| ([\w.-]+) \|$", PAGE.read_text(), re.MULTILINE)

_spec = importlib.util.spec_from_file_location("licences", ROOT / ".ci/licences.py")
assert _spec is not None
assert _spec.loader is not None
licences = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(licences)


def dependencies() -> dict[str, list[str]]:
    """Return the packages that need a direct dependency, as the page lists them."""
    project = PYPROJECT["project"]
    groups = {
        "the build": PYPROJECT["build-system"]["requires"],
        "the package": project["dependencies"],
        **{f"`{extra}`": lines for extra, lines in sorted(project["optional-dependencies"].items())},
    }
    found = defaultdict(list)
    for group, lines in groups.items():
        for line in lines:
            found[re.split(r"[^\w-]", line)[0]].append(group)
    del found[project["name"]]
    return found


def test_the_page_has_every_direct_dependency_and_its_dependents() -> None:
    assert {name: used.split(", ") for name, used, _ in ROWS} == dependencies()
    assert [name for name, _, _ in ROWS] == sorted((name for name, _, _ in ROWS), key=str.lower)


def test_the_page_has_the_licence_that_the_metadata_state() -> None:
    installed = {name: page for name, _, page in ROWS if licences.is_installed(name)}
    assert len(installed) > 20
    # Metadata may say BSD without the number of clauses; of several licences the first is the project's own.
    first = {name: licences.licence(name).split(" AND ")[0] for name in installed}
    assert [name for name, page in installed.items() if not page.startswith(first[name])] == []
    assert all(licences.allowed(name) for name in installed)


def test_what_is_not_installed_here_has_an_allowed_licence_too() -> None:
    assert {page for _, _, page in ROWS} <= licences.FREE | {licences.OF_FILES}


def test_all_that_is_brought_may_be_used() -> None:
    names = licences.brought()
    assert {"numpy", "pyzmq", "pluggy"} <= names, "indirect ones too"
    assert [f"{name}: {licences.licence(name)}" for name in names if not licences.allowed(name)] == []


@pytest.mark.parametrize(
    ("stated", "may"),
    [
        ("License-Expression: MIT", True),
        ("License-Expression: GPL-3.0-only OR (MIT AND BSD-3-Clause)", True),
        ("License-Expression: MIT AND GPL-3.0-only", False),
        ("License-Expression: MIT AND (GPL-3.0-only OR (ISC AND BSD-3-Clause))", True),
        ("License-Expression: GPL-3.0-only AND (MIT OR BSD-3-Clause)", False),
        ("License-Expression: (MIT OR BSD-3-Clause) AND GPL-3.0-only", False),
        ("License-Expression: AGPL-3.0-or-later", False),
        ("License: LGPL", False),
        ("License: new BSD", True),
        ("License: whoever reads this text may use it as long as the moon is full", False),
        ("Classifier: License :: OSI Approved :: MIT License", True),
        ("Classifier: License :: OSI Approved :: GNU General Public License v3 (GPLv3)", False),
        ("Classifier: License :: Other/Proprietary License", False),
        ("Summary: says nothing", False),
    ],
)
def test_metadata_are_read_in_all_their_forms(
    stated: str, may: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "made_up-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Metadata-Version: 2.4\nName: made-up\nVersion: 1.0\n{stated}\n")
    monkeypatch.syspath_prepend(tmp_path)
    assert metadata.version("made-up") == "1.0"
    assert licences.allowed("made-up") is may
