"""Front door for PyTorch: a store sums the gradients of several processes, or updates the weights.

`allreduce_hook` puts a store under `torch.nn.parallel.DistributedDataParallel`; `DistributedOptimizer` needs
nothing of torch.distributed. Both hand gradients to the store while the backward pass still runs, where they
lie: of tensors on the host nothing is copied.
"""

from __future__ import annotations

from ..errors import MissingBackendError

try:
    import torch as _torch  # noqa: F401
except ImportError as _error:
    raise MissingBackendError(
        f"kvstore.torch needs PyTorch: pip install torch (for the host alone, its build for CPUs); {_error}"
    ) from _error

from .ddp import HookState, allreduce_hook
from .optimizer import DistributedOptimizer
from .tensors import broadcast

__all__ = ["DistributedOptimizer", "HookState", "allreduce_hook", "broadcast"]
