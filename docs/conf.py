"""Build the pages as HTML: ``sphinx-build -W docs docs/_build`` in an environment with the extra `docs`."""

import os
import re
from pathlib import Path

import click

import kvstore
from kvstore.launch.cli import main

DOCS = Path(__file__).parent

project = "kvstore"
author = copyright = "The kvstore authors"
version = release = kvstore.__version__
html_title = f"{project} {version}"
html_theme = "furo"
html_static_path = ["_static"]
html_css_files = ["kvstore.css"]
exclude_patterns = ["_build", "examples/*.ipynb"]
extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "sphinx.ext.viewcode"]

myst_heading_anchors = 3
default_role = "py:obj"  # `name` in a docstring is a link where there is such a name, and code elsewhere
autodoc_member_order = "bysource"
autodoc_class_signature = "mixed"
autodoc_typehints = "none"  # docstrings have the types
autodoc_mock_imports = ["jax", "mxnet", "ray", "torch"]  # the pages need no framework
napoleon_google_docstring = False
napoleon_use_rtype = False
python_maximum_signature_line_length = 88
toc_object_entries_show_parents = "hide"

# Pages with their text elsewhere in the repository, where its readers look for it.
ELSEWHERE = {
    "changelog": DOCS.parent / "CHANGELOG.md",
    "contributing": DOCS.parent / "CONTRIBUTING.md",
    "security": DOCS.parent / "SECURITY.md",
    "benchmarks/method": DOCS.parent / "bench/README.md",
    **{f"benchmarks/{page.stem}": page for page in sorted(DOCS.parent.glob("bench/results/*.md"))},
}
PAGES = {path: DOCS / f"{name}.md" for name, path in ELSEWHERE.items()}
PAGES[DOCS.parent / "README.md"] = DOCS / "install.md"
LINK = re.compile(r"(?<=\]\()([^)#\s:]+)(?=[)#])")


def _relinked(text, source, page):
    """Have links of a text that stands at `source` lead where the site has it, as seen from `page`."""

    def lead(link):
        target = (source.parent / link[0]).resolve()
        if not target.is_file():
            return link[0]
        target = PAGES.get(target, target)
        is_page = target.is_relative_to(DOCS) or target.suffix != ".md"
        return ("" if is_page else "path:") + os.path.relpath(target, page.parent)

    return LINK.sub(lead, text)


def _commands():
    """Write the help text of each command."""
    for name, command in main.commands.items():
        context = click.Context(command, info_name=f"kvstore {name}", terminal_width=88, max_content_width=88)
        yield f"\n## kvstore {name}\n\n```text\n{command.get_help(context)}\n```\n"


def _read(app, name, content):
    """Put the text of a page in the place of its stub."""
    page = DOCS / f"{name}.md"
    source = ELSEWHERE.get(name, page)
    content[0] = _relinked(source.read_text(), source, page)
    if name == "reference/command":
        content[0] += "".join(_commands())


def setup(app):
    """Have Sphinx call `_read` for each page."""
    app.connect("source-read", _read)
