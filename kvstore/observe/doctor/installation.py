"""Python, kvstore and what it needs or can use, as installed."""

from __future__ import annotations

import importlib
import importlib.util
import platform
import sys
from collections.abc import Sequence

import kvstore
from kvstore.kernels import cpu

from .findings import Finding
from .requirements import DISTRIBUTION, EXTRAS, Dependency, installed, version_of

#: Without the one of the kernels kvstore cannot be imported, which says so.
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


def python() -> Finding:
    """Name the interpreter."""
    text = f"{platform.python_implementation()} {platform.python_version()} on {platform.machine()}"
    if not getattr(sys, "_is_gil_enabled", lambda: True)():
        cure = "use the usual build of Python (python3.13, not python3.13t)"
        return Finding("Python", "warning", f"{text}, free-threaded: kvstore was never tried on it", cure)
    return Finding("Python", "ok", text)


def package() -> Finding:
    """Compare the version that is imported with the one that is installed."""
    text = f"{kvstore.__version__} in {kvstore.__path__[0]}"
    found = version_of(DISTRIBUTION)
    if found is None:
        return Finding("kvstore", "warning", f"{text}, not installed by pip", "pip install .")
    if found != kvstore.__version__:
        cure = f"pip uninstall {DISTRIBUTION}, and install one of them; look at PYTHONPATH too"
        return Finding("kvstore", "warning", f"{text}, but version {found} is installed", cure)
    return Finding("kvstore", "ok", text)


def compiled_modules(names: Sequence[str] = COMPILED) -> Finding:
    """Import the compiled modules of the stores."""
    failed = [f"{name} ({error})" for name in names if (error := _import_error(name))]
    if failed:
        text = f"cannot be imported: {', '.join(failed)}"
        cure = f"pip install --force-reinstall --no-deps {DISTRIBUTION}; in a source tree: pip install -e ."
        return Finding("compiled modules", "error", text, cure)
    return Finding("compiled modules", "ok", f"all {len(names) + 1} can be imported")


def _import_error(name: str) -> ImportError | None:
    try:
        importlib.import_module(name)
    except ImportError as error:
        return error
    return None


def compiler() -> Finding:
    """Say that there is nothing to look for."""
    return Finding("compiler", "ok", "none is needed to run kvstore, only to build it from its source")


def instruction_set(machine: str | None = None, levels: Sequence[str] | None = None) -> Finding:
    """Name the level that the kernels use, and those that this processor could use."""
    machine, levels = machine or platform.machine(), levels or cpu.levels()
    text = f"{cpu.level()} of {', '.join(levels)}"
    if machine == "x86_64" and len(levels) == 1:
        text += ": the processor has no AVX2 and FMA, or a virtual machine hides them; sums are slower"
        cure = "let the virtual machine have the processor of its host (QEMU: -cpu host)"
        return Finding("instruction set", "warning", text, cure)
    return Finding("instruction set", "ok", text)


def dependencies(found: list[Dependency] | None = None) -> Finding:
    """Compare what kvstore always needs with what is installed."""
    found = installed("") if found is None else found
    text = ", ".join(map(str, found))
    wrong = [one.required for one in found if not one.fits]
    if wrong:
        wanted = " ".join(f"'{one.name}{one.versions}'" for one in wrong)
        return Finding("dependencies", "error", text, f"pip install {wanted}")
    return Finding("dependencies", "ok", text)


def extras() -> list[Finding]:
    """Say of each extra what is installed of it."""
    return [extra(name, installed(name)) for name in EXTRAS]


def extra(name: str, found: list[Dependency]) -> Finding:
    """Judge one extra: it is in use if all of it is there, and then its versions must fit."""
    install = f"pip install '{DISTRIBUTION}[{name}]'"
    if not any(one.version for one in found):
        return Finding(f"extra {name}", "ok", f"not installed ({install})")
    text = ", ".join(map(str, found))
    wrong = [f"{one.required.name}{one.required.versions}" for one in found if one.version and not one.fits]
    if wrong and all(one.version for one in found):
        return Finding(f"extra {name}", "warning", f"{text}, but needed: {', '.join(wrong)}", install)
    return Finding(f"extra {name}", "ok", text)


def frameworks() -> Finding:
    """List frameworks that are installed; none of them is imported."""
    found = []
    for module, names in FRAMEWORKS.items():
        if importlib.util.find_spec(module) is not None:
            version = next(filter(None, map(version_of, names)), "of unknown version")
            found.append(f"{module} {version}")
    return Finding("frameworks", "ok", ", ".join(found) or "none installed; none is needed")
