"""Stores for PyTorch: a store sums the gradients of several processes, or updates the weights.

`allreduce_hook` is a communication hook for `torch.nn.parallel.DistributedDataParallel`.
`DistributedOptimizer` wraps an optimizer and does not need torch.distributed. Both push gradients while the
backward pass still runs. They do not copy tensors in host memory.
"""

from __future__ import annotations

from ..errors import MissingBackendError

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise MissingBackendError(
        f"kvstore.torch needs PyTorch: pip install torch (without GPUs, its build for CPUs); {_error}"
    ) from _error

from .checkpoints import restore_checkpoint, save_checkpoint
from .ddp import HookState, allreduce_hook
from .optimizer import DistributedOptimizer
from .tensors import broadcast

__all__ = [
    "DistributedOptimizer",
    "HookState",
    "allreduce_hook",
    "broadcast",
    "restore_checkpoint",
    "save_checkpoint",
]
