"""Stores for PyTorch: a store sums the gradients of several processes, or updates the weights.

`allreduce_hook` is a communication hook for `torch.nn.parallel.DistributedDataParallel`.
`DistributedOptimizer` wraps an optimizer and does not need torch.distributed. Both push gradients while the
backward pass still runs. They do not copy tensors in host memory. `all_reduce`, `broadcast_object` and
`all_gather_object` are for other data: metrics, counts, settings.
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
from .collective import all_gather_object, all_reduce, broadcast_object
from .ddp import HookState, allreduce_hook
from .optimizer import DistributedOptimizer
from .tensors import broadcast

__all__ = [
    "DistributedOptimizer",
    "HookState",
    "all_gather_object",
    "all_reduce",
    "allreduce_hook",
    "broadcast",
    "broadcast_object",
    "restore_checkpoint",
    "save_checkpoint",
]
