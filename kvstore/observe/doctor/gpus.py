"""NVIDIA GPUs: the driver, what kvstore needs to use it, and NCCL."""

from __future__ import annotations

from pathlib import Path

from kvstore.settings.variables import process_variables

from . import children
from .findings import Finding
from .requirements import DISTRIBUTION, version_of
from .system_files import ROOT, text

_DEADLINE = 20.0


def driver_version(root: Path = ROOT) -> str | None:
    """Version of the kernel's driver; None if there is none."""
    found = text(root / "proc/driver/nvidia/version")
    if found is None:
        return None
    words = found.splitlines()[0].split()
    return next((word for word in words if word[:1].isdigit() and "." in word), "of unknown version")


def cuda(root: Path = ROOT) -> Finding:
    """Ask the driver for its GPUs, in a process of its own; no context is created."""
    version = driver_version(root)
    if version is None:
        return Finding("CUDA", "ok", "no NVIDIA driver on this machine: arrays are on the host")
    name = f"driver {version}"
    if version_of("cuda-bindings") is None:
        told = f"{name}, but cuda-bindings is not installed: kvstore cannot use arrays on GPUs"
        return Finding("CUDA", "warning", told, f"pip install '{DISTRIBUTION}[cuda]'")
    ran = children.run([*children.JOB, "gpus"], _DEADLINE)
    if ran.code != 0:
        cure = "compare with `nvidia-smi`; in a container use `docker run --gpus all`"
        return Finding("CUDA", "error", f"{name} does not work: {ran.reason}", cure)
    return Finding("CUDA", "ok", f"{name}, number of GPUs: {ran.out.strip()}")


def cuda_kernels() -> Finding:
    """Look for the folder of kernels that were compiled in advance, where one is set."""
    folder = process_variables().get("KVSTORE_CUDA_KERNELS")
    if not folder:
        return Finding("CUDA kernels", "ok", "compiled when they are needed first, and kept in the cache")
    if not Path(folder).is_dir():
        cure = 'python -m kvstore.kernels.cuda build "$KVSTORE_CUDA_KERNELS", or unset the variable'
        return Finding("CUDA kernels", "error", "KVSTORE_CUDA_KERNELS names no folder", cure)
    return Finding("CUDA kernels", "ok", "taken from the folder that KVSTORE_CUDA_KERNELS names")


def nccl(root: Path = ROOT) -> Finding:
    """Load NCCL, in a process of its own."""
    version = version_of("nccl4py")
    if version is None:
        return Finding("NCCL", "ok", "nccl4py is not installed; only the store `nccl` needs it")
    if driver_version(root) is None:
        return Finding("NCCL", "ok", f"nccl4py {version}, of no use without an NVIDIA driver")
    ran = children.run([*children.JOB, "nccl-library"], _DEADLINE)
    if ran.code != 0:
        cure = f"pip install '{DISTRIBUTION}[nccl]' (with a driver of CUDA 12, nvidia-nccl-cu12)"
        return Finding("NCCL", "warning", f"nccl4py {version}, but NCCL does not load: {ran.reason}", cure)
    return Finding("NCCL", "ok", f"nccl4py {version}, NCCL {ran.out.strip()}")
