"""Checks of Python, of kvstore, and of the distributions that it needs or can use, as installed."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from collections.abc import Sequence

import kvstore
from kvstore.kernels import cpu

from . import requirements
from .checks import CheckFinding, error, ok, warning
from .requirements import DISTRIBUTION, Dependency, version_of

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


def dependencies(found: list[Dependency] | None = None) -> CheckFinding:
    """Compare the installed versions with those that kvstore always needs."""
    found = requirements.dependencies("") if found is None else found
    text = ", ".join(map(str, found))
    wrong = [f"'{one.name}{one.versions}'" for one in found if not one.fits]
    return error(text, f"pip install {' '.join(wrong)}") if wrong else ok(text)


def extra(name: str, found: list[Dependency] | None = None) -> CheckFinding:
    """Check one extra: if all of its distributions are installed, their versions must fit."""
    found = requirements.dependencies(name) if found is None else found
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
