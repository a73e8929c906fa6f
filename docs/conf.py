"""Build the pages as HTML: ``sphinx-build docs docs/_build`` in an environment with the extra `docs`."""

project = "kvstore"
author = "The kvstore authors"
extensions = ["myst_parser"]
exclude_patterns = ["_build"]
html_theme = "furo"
html_title = project
myst_heading_anchors = 3
