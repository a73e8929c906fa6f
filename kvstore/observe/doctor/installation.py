"""Checks of Python, of kvstore, and of the distributions that it needs or can use, as installed."""

from __future__ import annotations

import importlib
import importlib.util
import operator
import platform
import re
import sys
from collections.abc import Sequence
from importlib import metadata
from typing import NamedTuple

import kvstore
from kvstore.kernels import cpu

from .checks import CheckFinding, error, ok, warning

DISTRIBUTION = "kvstore-train"

#: Extras for users; the others are for developers.
EXTRAS = ("demo", "cli", "metrics", "bfloat16", "cuda", "mpi", "nccl")

_LINE = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)(?:;(.*))?")
_EXTRA = re.compile(r"extra == ['\"]([^'\"]+)['\"]")
_CLAUSE = re.compile(r"(>=|<=|==|!=|<|>)\s*([0-9][0-9.]*)")
_COMPARE = {
    **{">=": operator.ge, "<=": operator.le, "==": operator.eq},
    **{"!=": operator.ne, "<": operator.lt, ">": operator.gt},
}
_NUMBERS = 8  # of a version that are compared

#: The compiled modules but that of the kernels: without it kvstore cannot be imported, and the error says so.
COMPILED = (
    "kvstore.stores.shared.native._shared",
    "kvstore.observe.native._observe",
    "kvstore.stores.parameter_server.native._native",
    "kvstore.stores.parameter_server.transport.native._streams",
)
#: Libraries that kvstore works with: module -> names of the distributions that have it.
FRAMEWORKS = {
    "torch": ("torch",),
    "jax": ("jax",),
    "mxnet": ("mxnet",),
    "cupy": ("cupy", "cupy-cuda13x", "cupy-cuda12x", "cupy-cuda11x"),
    "ray": ("ray",),
    "horovod": ("horovod",),
    "byteps": ("byteps",),
}


def python() -> CheckFinding:
    """Name the interpreter."""
    text = f"{platform.python_implementation()} {platform.python_version()} on {platform.machine()}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        return warning(f"{text}, free-threaded: kvstore was never tried on it")
    return ok(text)


def package() -> CheckFinding:
    """Compare the imported version with the installed version."""
    text = f"{kvstore.__version__} in {kvstore.__path__[0]}"
    found = version_of(DISTRIBUTION)
    if found is None:
        return warning(f"{text}, not installed by pip", "pip install .")
    if found != kvstore.__version__:
        return warning(f"{text}, but version {found} is installed")
    return ok(text)


def compiled_modules(names: Sequence[str] = COMPILED) -> CheckFinding:
    """Import the compiled modules of the stores."""
    failed = [f"{name} ({missing})" for name in names if (missing := _import_error(name))]
    if failed:
        return error(f"cannot be imported: {', '.join(failed)}")
    return ok(f"all {len(names) + 1} can be imported")


def _import_error(name: str) -> ImportError | None:
    try:
        importlib.import_module(name)
    except ImportError as missing:
        return missing
    return None


def instruction_set(machine: str | None = None, levels: Sequence[str] | None = None) -> CheckFinding:
    """Name the level that the kernels use, and those that this processor could use."""
    machine, levels = machine or platform.machine(), levels or cpu.levels()
    text = f"{cpu.level()} of {', '.join(levels)}"
    if machine == "x86_64" and len(levels) == 1:
        hidden = "the processor has no AVX2 and FMA, or a virtual machine hides them; sums are slower"
        return warning(f"{text}: {hidden}")
    return ok(text)


def dependencies(found: list[RequiredDistribution] | None = None) -> CheckFinding:
    """Compare the installed versions with those that kvstore always needs."""
    found = required_distributions("") if found is None else found
    text = ", ".join(map(str, found))
    wrong = [f"'{one.name}{one.versions}'" for one in found if not one.fits]
    return error(text, f"pip install {' '.join(wrong)}") if wrong else ok(text)


def extra(name: str, found: list[RequiredDistribution] | None = None) -> CheckFinding:
    """Check one extra: if all of its distributions are installed, their versions must fit."""
    found = required_distributions(name) if found is None else found
    install = f"pip install '{DISTRIBUTION}[{name}]'"
    if not any(one.version for one in found):
        return ok(f"not installed ({install})")
    text = ", ".join(map(str, found))
    wrong = [f"{one.name}{one.versions}" for one in found if not one.fits]
    if wrong and all(one.version for one in found):
        return warning(f"{text}, but needed: {', '.join(wrong)}", install)
    return ok(text)


def frameworks() -> CheckFinding:
    """List the frameworks that are installed; none is imported."""
    found = []
    for module, names in FRAMEWORKS.items():
        if importlib.util.find_spec(module) is not None:
            version = next(filter(None, map(version_of, names)), "of unknown version")
            found.append(f"{module} {version}")
    return ok(", ".join(found) or "none installed; none is needed")


class RequiredDistribution(NamedTuple):
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


def required_distributions(extra: str, lines: Sequence[str] | None = None) -> list[RequiredDistribution]:
    """Return the requirements of an extra, or of the distribution itself if `extra` is empty.

    `lines` are those of the metadata, by default those of the installed distribution.
    """
    lines = metadata.requires(DISTRIBUTION) or [] if lines is None else lines
    found = []
    for match in filter(None, map(_LINE.match, lines)):
        name, versions, condition = match.groups(default="")
        of = _EXTRA.search(condition)
        if name != DISTRIBUTION and (of[1] if of else "") == extra:
            found.append(RequiredDistribution(name, versions.strip(" ()"), version_of(name)))
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
        _COMPARE[symbol](_version_numbers(version), _version_numbers(limit))
        for symbol, limit in _CLAUSE.findall(versions)
    )


def _version_numbers(version: str) -> list[int]:
    match = re.match(r"[0-9]+(?:\.[0-9]+)*", version)
    numbers = [int(part) for part in match[0].split(".")] if match else []
    return (numbers + [0] * _NUMBERS)[:_NUMBERS]
