"""The files of compiled kernels: a folder made ahead of time, or the user's cache; and the search for one.

A file is valid for one text of the kernels, and in the cache for one version of the compilers, too: after an
upgrade they are compiled again. A damaged file, or a file of another user in the cache, counts as absent.
 A cache that cannot be written is no error: the kernel is then compiled in each process.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import tempfile
from pathlib import Path

from .cubin import KernelCubin
from .provenance import source_key, toolchain_versions
from .spec import KernelSpec

log = logging.getLogger("kvstore.kernels.cuda")

#: Names a folder that ``python -m kvstore.kernels.cuda build`` made.
VARIABLE = "KVSTORE_CUDA_KERNELS"
_MOST_BYTES = 16 << 20  # a cubin has some ten thousand


def file_name(spec: KernelSpec, arch: str) -> str:
    """Name of a kernel's file."""
    return f"{spec.name}.{arch}.{source_key()[:16]}.cubin"


def read_kernel(path: Path, spec: KernelSpec, arch: str, own: bool) -> KernelCubin | None:
    """Read a kernel's file; None if it is absent, incomplete, or belongs to another user and `own` is set."""
    try:
        with path.open("rb") as file:
            status = os.fstat(file.fileno())
            if own and (status.st_uid != os.getuid() or status.st_mode & 0o022):
                log.warning("%s belongs to another user or may be written by others: not used", path)
                return None
            cubin = KernelCubin.from_bytes(file.read(_MOST_BYTES))
    except OSError:
        return None
    except ValueError:
        log.warning("%s is damaged: not used", path)
        return None
    fits = (cubin.name, cubin.arch, cubin.source) == (spec.name, arch, source_key())
    return cubin if fits else None


def write_kernel(folder: Path, spec: KernelSpec, cubin: KernelCubin, private: bool = True) -> Path:
    """Write a kernel to a folder, completely or not at all; `private`: other users may not read it.

    Raises OSError if it cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True, mode=0o700 if private else 0o755)
    path = folder / file_name(spec, cubin.arch)
    descriptor, temporary = tempfile.mkstemp(dir=folder, prefix=path.name)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(cubin.to_bytes())
            os.fchmod(file.fileno(), 0o600 if private else 0o644)
        os.replace(temporary, path)
    except BaseException:
        with contextlib.suppress(OSError):
            os.unlink(temporary)
        raise
    return path


def cache_folder() -> Path:
    """Folder of the user's cache for the installed tools."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    tools = hashlib.sha256(toolchain_versions().encode()).hexdigest()[:16]
    return Path(base) / "kvstore" / "cuda" / tools


def find_kernel(spec: KernelSpec, capability: tuple[int, int], directory: str | None = None) -> KernelCubin:
    """Return a kernel for a device, from a folder made ahead, else from the cache, else compiled.

    Parameters
    ----------
    spec : Spec
    capability : (int, int)
        Compute capability of the device.
    directory : str or None
        Folder made ahead of time; None takes the one that KVSTORE_CUDA_KERNELS names, if any.

    Raises
    ------
    ImportError
        It must be compiled, and numba-cuda is not installed.
    """
    ahead = directory or os.environ.get(VARIABLE)
    if ahead:
        found = _find_prebuilt(Path(ahead), spec, capability)
        if found:
            return found
        log.info("%s is not in %s for sm_%d%d", spec.name, ahead, *capability)
    arch = f"sm_{capability[0]}{capability[1]}"
    folder = cache_folder()
    cached = read_kernel(folder / file_name(spec, arch), spec, arch, own=True)
    return cached or _compile_into(folder, spec, arch, ahead)


def _find_prebuilt(folder: Path, spec: KernelSpec, capability: tuple[int, int]) -> KernelCubin | None:
    """Look for a kernel for the device's major capability and at most its minor one."""
    major, minor = capability
    for lower in range(minor, -1, -1):
        arch = f"sm_{major}{lower}"
        found = read_kernel(folder / file_name(spec, arch), spec, arch, own=False)
        if found:
            return found
    return None


def _compile_into(folder: Path, spec: KernelSpec, arch: str, ahead: str | None) -> KernelCubin:
    try:
        from .compile import compile_spec
    except ImportError as error:
        where = f"neither in {ahead} nor in {folder}" if ahead else f"not in {folder}"
        raise ImportError(
            f"the CUDA kernel {spec.name} for {arch} is {where}, and cannot be compiled here ({error});"
            f" install kvstore-train[cuda], or set {VARIABLE} to a folder that"
            " `python -m kvstore.kernels.cuda build` made"
        ) from error
    log.info("compiling %s for %s", spec.name, arch)
    cubin = compile_spec(spec, arch)
    try:
        write_kernel(folder, spec, cubin)
    except OSError as error:
        log.warning(
            "cannot keep the CUDA kernel %s in %s: %s; it will be made again", spec.name, folder, error
        )
    return cubin
