"""The version of this package: the installed one, also if an unbuilt source tree precedes it on the path."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path

NAME = "kvstore-train"


def package_version() -> str:
    """Return the version of the package, which contains this module and is imported already."""
    return str(sys.modules[__name__.partition(".")[0]].__version__)


def installed_package(version: str, tree: str) -> str | None:
    """Return the folder of the package that is installed.

    Python looks in the current directory first, so in the root of a clone ``import kvstore`` finds the
    sources, which have no compiled kernels.

    Parameters
    ----------
    version : str
        The version that the installed package must have.
    tree : str
        Folder of the sources.

    Returns
    -------
    str or None
        The folder; None if this version is not installed, or is an editable install of these sources.
    """
    for found in metadata.distributions(name=NAME):
        package = Path(str(found.locate_file("kvstore")))
        if found.version == version and (package / "kernels").is_dir() and not package.samefile(tree):
            return str(package)
    return None
