"""Print requirements that pin each dependency to the least version that pyproject.toml allows here.

``pins.py build`` is for a build, ``pins.py run [EXTRA...]`` for the package with these extras.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

PYPROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())
PROJECT = PYPROJECT["project"]


def flat(lines: Iterable[str]) -> Iterator[Requirement]:
    """Yield what is required here, with the extras of our own in place of their names."""
    for line in lines:
        wanted = Requirement(line)
        if wanted.marker and not wanted.marker.evaluate():
            continue
        if wanted.name == PROJECT["name"]:
            for extra in sorted(wanted.extras):
                yield from flat(PROJECT["optional-dependencies"][extra])
        else:
            yield wanted


def least(wanted: Requirement) -> Version:
    """Return the lower bound; a requirement has exactly one."""
    (bound,) = (part.version for part in wanted.specifier if part.operator == ">=")
    return Version(bound)


def pins(lines: Iterable[str]) -> list[str]:
    """Return one line for each distribution; of several bounds the highest holds."""
    bounds: dict[str, Version] = {}
    extras: dict[str, set[str]] = {}
    for wanted in flat(lines):
        name = re.sub(r"[-_.]+", "-", wanted.name).lower()
        bounds[name] = max(least(wanted), bounds.get(name, Version("0")))
        extras.setdefault(name, set()).update(wanted.extras)
    return [
        f"{name}{'[' + ','.join(sorted(extras[name])) + ']' if extras[name] else ''}=={bounds[name]}"
        for name in sorted(bounds)
    ]


def main(what: str, *extras: str) -> None:
    """Write the pins to standard output."""
    if what == "build":
        lines = PYPROJECT["build-system"]["requires"]
    else:
        optional = PROJECT["optional-dependencies"]
        lines = [*PROJECT["dependencies"], *(line for extra in extras for line in optional[extra])]
    sys.stdout.writelines(f"{pin}\n" for pin in pins(lines))


if __name__ == "__main__":
    main(*sys.argv[1:])
