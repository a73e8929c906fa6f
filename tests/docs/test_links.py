"""Links between the pages lead to a file, and to a heading where they name one."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
TOP = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
PAGES = sorted([*TOP, *ROOT.glob("docs/**/*.md")])
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def prose(page: Path) -> str:
    """The page without its code: fenced blocks and `inline`."""
    return re.sub(
        r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    )


def anchors(page: Path) -> set[str]:
    """The names that a forge gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    for link in LINK.findall(prose(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.is_file(), f"{link} leads nowhere"
        assert not anchor or anchor in anchors(target), f"{link}: no such heading"


def test_no_page_names_a_host_of_a_package_index() -> None:
    """A page names packages; where they come from is the reader's own affair."""
    hosts = re.compile(r"--(extra-)?index-url|\bpypi\.org/simple|\bdownload\.pytorch\.org")
    pages = [*PAGES, ROOT / "SECURITY.md", *ROOT.glob("bench/**/*.md"), *ROOT.glob("kvstore/**/*.py")]
    assert [page.name for page in pages if hosts.search(page.read_text())] == []


# Where the pages for maintainers begin a path, and the folder that such a path is in.
_STORES = ROOT / "kvstore" / "stores"
_ROLES = ("protocol", "transport", "worker", "server", "scheduler")
FOLDERS = {
    **dict.fromkeys(("kvstore", "kernels", "tests", "bench", "docs", ".ci"), ROOT),
    **dict.fromkeys(_ROLES, _STORES / "parameter_server"),
    "native": _STORES / "shared",
}


@pytest.mark.parametrize("name", ["CONTRIBUTING.md", "docs/architecture.md"])
def test_paths_that_maintainers_are_told_of_are_there(name: str) -> None:
    words = [word for span in re.findall(r"`([^`\n]+)`", (ROOT / name).read_text()) for word in span.split()]
    paths = [word for word in words if "/" in word and word.split("/")[0] in FOLDERS and "NAME" not in word]
    assert len(paths) > 20
    missing = {path for path in paths if not any(FOLDERS[path.partition("/")[0]].glob(path.rstrip("/")))}
    assert not missing, f"{name} names {missing}"


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / link).resolve() for link in LINK.findall(prose(index))}
    missing = {page.name for page in ROOT.glob("docs/**/*.md") if page not in linked and page != index}
    assert not missing, f"link them in docs/index.md: {missing}"
