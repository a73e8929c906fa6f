"""The origin of compiled kernels: the text of this package, and the tools that compile it."""

from __future__ import annotations

import contextlib
import hashlib
from functools import lru_cache
from importlib import metadata
from pathlib import Path

_TOOLS = (
    "numba-cuda",
    "numba",
    "llvmlite",
    "nvidia-nvvm",
    "nvidia-cuda-nvcc",
    "nvidia-nvjitlink",
    "cuda-core",
)


@lru_cache(maxsize=1)
def source_key() -> str:
    """Hash of the text of all modules of this package."""
    digest = hashlib.sha256()
    here = Path(__file__).parent
    for path in sorted(here.rglob("*.py")):
        digest.update(path.relative_to(here).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


@lru_cache(maxsize=1)
def toolchain_versions() -> str:
    """Return the versions of all tools that take part in compiling, without importing them."""
    found = []
    for name in _TOOLS:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found.append(f"{name} {metadata.version(name)}")
    return ", ".join(found)
