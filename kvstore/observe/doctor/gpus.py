"""Checks of NVIDIA GPUs: the driver, the extra that uses it, and NCCL."""

from __future__ import annotations

from pathlib import Path

from kvstore.settings.environment import process_variables

from . import children
from .checks import CheckFinding, error, ok, warning
from .installation import DISTRIBUTION, version_of
from .system_files import ROOT, text


def driver_version(root: Path = ROOT) -> str | None:
    """Return the version of the kernel's driver; None if there is none."""
    found = text(root / "proc/driver/nvidia/version")
    if found is None:
        return None
    words = found.splitlines()[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "of unknown version")


def cuda(root: Path = ROOT) -> CheckFinding:
    """Have a child process ask the driver for its GPUs."""
    version = driver_version(root)
    if version is None:
        return ok("no NVIDIA driver on this machine: arrays are on the host")
    if version_of("cuda-bindings") is None:
        missing = "but cuda-bindings is not installed: kvstore cannot use arrays on GPUs"
        return warning(f"driver {version}, {missing}", f"pip install '{DISTRIBUTION}[cuda]'")
    ran = children.run_program("gpus")
    if ran.code != 0:
        return error(f"driver {version} does not work: {ran.reason}")
    return ok(f"driver {version}, number of GPUs: {ran.out.strip()}")


def cuda_kernels() -> CheckFinding:
    """Check the folder of kernels that were compiled in advance, if one is set."""
    folder = process_variables().get("KVSTORE_CUDA_KERNELS")
    if not folder:
        return ok("compiled when they are needed first, and kept in the cache")
    if not Path(folder).is_dir():
        return error("KVSTORE_CUDA_KERNELS names no folder")
    return ok("taken from the folder that KVSTORE_CUDA_KERNELS names")


def nccl(root: Path = ROOT) -> CheckFinding:
    """Have a child process load NCCL."""
    version = version_of("nccl4py")
    if version is None:
        return ok("nccl4py is not installed; only the store `nccl` needs it")
    if driver_version(root) is None:
        return ok(f"nccl4py {version}, of no use without an NVIDIA driver")
    ran = children.run_program("nccl_library")
    if ran.code != 0:
        return warning(f"nccl4py {version}, but NCCL does not load: {ran.reason}")
    return ok(f"nccl4py {version}, NCCL {ran.out.strip()}")
