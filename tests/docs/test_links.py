"""Links between the pages lead to a file, and to a heading where they name one."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def pages() -> list[Path]:
    top = [ROOT / name for name in ("README.md", "CHANGELOG.md", "CONTRIBUTING.md")]
    return sorted([*top, *ROOT.glob("docs/**/*.md")])


def prose(page: Path) -> str:
    """The page without its code: fenced blocks and `inline`."""
    return re.sub(
        r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    )


@functools.cache
def anchors(page: Path) -> set[str]:
    """The names that a forge gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", text.lower()).replace(" ", "-") for text in headings}


def broken(page: Path) -> Iterator[str]:
    for link in LINK.findall(prose(page)):
        if link.startswith("https://"):
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        if not target.is_file():
            yield f"{page.relative_to(ROOT)}: {link} leads nowhere"
        elif anchor and anchor not in anchors(target):
            yield f"{page.relative_to(ROOT)}: {link}: no such heading"


def test_links_lead_somewhere() -> None:
    found = [text for page in pages() for text in broken(page)]
    assert found == [], "\n".join(found)


def test_no_page_names_a_host_of_a_package_index() -> None:
    """A page names packages; where they come from is the reader's own affair."""
    hosts = re.compile(r"--(extra-)?index-url|\bpypi\.org/simple|\bdownload\.pytorch\.org")
    files = [*pages(), ROOT / "SECURITY.md", *ROOT.glob("bench/**/*.md"), *ROOT.glob("kvstore/**/*.py")]
    assert [page.name for page in files if hosts.search(page.read_text())] == []


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


def linked(page: Path) -> set[Path]:
    """The pages that a page leads to."""
    targets = ((page.parent / link.partition("#")[0]).resolve() for link in LINK.findall(prose(page)))
    return {target for target in targets if target.suffix == ".md"}


def test_every_page_is_reached_from_the_index() -> None:
    index = ROOT / "docs" / "index.md"
    reached, new = {index}, {index}
    while new:
        new = {page for one in new if one.is_relative_to(index.parent) for page in linked(one)} - reached
        reached |= new
    missing = {page.name for page in ROOT.glob("docs/**/*.md")} - {page.name for page in reached}
    assert not missing, f"no page links them: {missing}"
