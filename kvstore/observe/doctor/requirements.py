"""The requirements in the metadata of the distribution, and the installed versions."""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

DISTRIBUTION = "kvstore-train"

#: Extras for users; the others are for developers.
EXTRAS = ("demo", "cli", "metrics", "bfloat16", "cuda", "mpi", "nccl")

_LINE = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"extra == ['\"]([^'\"]+)['\"]")
_CLAUSE = re.compile(r"(>=|<=|==|!=|<|>)\s*([0-9][0-9.]*)")
_NAMES = {">=": "ge", "<=": "le", "==": "eq", "!=": "ne", "<": "lt", ">": "gt"}  # of module operator
_NUMBERS = 8  # of a version that are compared


class Dependency(NamedTuple):
    """A required distribution, the versions that fit, and the installed version; None if it is missing."""

    name: str
    versions: str
    version: str | None

    @property
    def fits(self) -> bool:
        """Whether one of the required versions is installed."""
        return self.version is not None and is_within(self.version, self.versions)

    def __str__(self) -> str:
        return f"{self.name} {self.version}" if self.version else f"{self.name} is not installed"


def dependencies(extra: str, lines: Sequence[str] | None = None) -> list[Dependency]:
    """Return the requirements of an extra, or of the distribution itself if `extra` is empty.

    `lines` are those of the metadata, by default those of the installed distribution.
    """
    lines = metadata.requires(DISTRIBUTION) or [] if lines is None else lines
    found = []
    for match in filter(None, map(_LINE.match, lines)):
        name, versions, condition = match.groups(default="")
        of = _EXTRA.search(condition)
        if name != DISTRIBUTION and (of[1] if of else "") == extra:
            found.append(Dependency(name, versions.strip(" ()"), version_of(name)))
    return found


def version_of(name: str) -> str | None:
    """Return the version of an installed distribution; None if it is missing."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_within(version: str, versions: str) -> bool:
    """Whether a version fits all clauses, such as ``>=0.68,<0.69``; suffixes of versions are ignored."""
    return all(
        getattr(operator, _NAMES[symbol])(_numbers(version), _numbers(limit))
        for symbol, limit in _CLAUSE.findall(versions)
    )


def _numbers(version: str) -> list[int]:
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    return (numbers + [0] * _NUMBERS)[:_NUMBERS]
