"""What the distribution requires, by its metadata, and whether it is installed in a version that fits."""

from __future__ import annotations

import itertools
import operator
import re
from collections.abc import Callable
from importlib import metadata
from typing import Any, NamedTuple

DISTRIBUTION = "kvstore-train"

#: Extras for users; the others are for developers.
EXTRAS = ("demo", "cli", "metrics", "bfloat16", "cuda", "mpi", "nccl")

_LINE = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"extra == ['\"]([^'\"]+)['\"]")
_CLAUSE = re.compile(r"(>=|<=|==|!=|<|>)\s*([0-9][0-9.]*)")
_COMPARE: dict[str, Callable[[Any, Any], bool]] = {
    ">=": operator.ge,
    "<=": operator.le,
    "==": operator.eq,
    "!=": operator.ne,
    "<": operator.lt,
    ">": operator.gt,
}


class Required(NamedTuple):
    """A distribution that is required: its name, the versions that fit, and the extra that wants it."""

    name: str
    versions: str
    extra: str


class Dependency(NamedTuple):
    """A required distribution with the version that is installed; None if it is not."""

    required: Required
    version: str | None

    @property
    def fits(self) -> bool:
        """Whether it is installed, in one of the versions that are required."""
        return self.version is not None and is_within(self.version, self.required.versions)

    def __str__(self) -> str:
        name = self.required.name
        return f"{name} {self.version}" if self.version else f"{name} is not installed"


def required(lines: list[str] | None = None) -> list[Required]:
    """Read the requirements of the installed distribution; `lines` are those of its metadata.

    Raises
    ------
    PackageNotFoundError
        The distribution is not installed.
    """
    lines = metadata.requires(DISTRIBUTION) or [] if lines is None else lines
    found = []
    for line in lines:
        match = _LINE.match(line)
        if match and match[1] != DISTRIBUTION:
            extra = _EXTRA.search(match[3] or "")
            found.append(Required(match[1], match[2].strip(" ()"), extra[1] if extra else ""))
    return found


def installed(extra: str, lines: list[str] | None = None) -> list[Dependency]:
    """Look for all that an extra requires, or the distribution itself if `extra` is empty."""
    wanted = [one for one in required(lines) if one.extra == extra]
    return [Dependency(one, version_of(one.name)) for one in wanted]


def version_of(name: str) -> str | None:
    """Version of an installed distribution; None if there is none."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def is_within(version: str, versions: str) -> bool:
    """Whether a version fits all of several limits, such as ``>=0.68,<0.69``; numbers count, no suffixes."""
    return all(_fits(version, symbol, limit) for symbol, limit in _CLAUSE.findall(versions))


def _fits(version: str, symbol: str, limit: str) -> bool:
    pairs = itertools.zip_longest(_numbers(version), _numbers(limit), fillvalue=0)
    ours, theirs = zip(*pairs, strict=True)
    return _COMPARE[symbol](ours, theirs)


def _numbers(version: str) -> list[int]:
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    return [int(part) for part in match[0].split(".")] if match else [0]
