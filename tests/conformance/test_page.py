"""The page of conformance agrees with the tables."""

from __future__ import annotations

import runpy

import paths

PAGE = paths.ROOT / "docs" / "reference" / "conformance.md"


def test_the_page_is_made_of_the_tables() -> None:
    made = runpy.run_path(str(paths.ROOT / "docs" / "conformance_page.py"))["page"]()
    assert PAGE.read_text() == made, f"run: python docs/conformance_page.py {PAGE.relative_to(paths.ROOT)}"
