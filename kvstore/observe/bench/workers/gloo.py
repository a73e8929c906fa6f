"""The all-reduce of torch.distributed on the CPU, by gloo: what DistributedDataParallel uses there."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from kvstore.settings import launchers
from kvstore.settings.addresses import loopback

from .arrays import Array
from .peer import AllReducePeer, Call

_BUCKETS = (1 << 20, 25 << 20)  # bytes of DistributedDataParallel's first bucket, and of the others
_LIMIT = timedelta(seconds=120)


class GlooPeer(AllReducePeer):
    """Over one buffer, over DistributedDataParallel's buckets, and key by key; the last two at once."""

    def __init__(self) -> None:
        place = launchers.detect()
        super().__init__(place.rank, place.size)
        torch.set_num_threads(1)
        self._store: Any = None
        if self.rank == 0:
            self._store = dist.TCPStore(loopback(), 0, self.size, True, _LIMIT, wait_for_workers=False)
            self.address = str(self._store.port)

    def join(self, address: str) -> None:
        """Make the process group; `address` is the port of rank 0."""
        store = self._store or dist.TCPStore(loopback(), int(address), self.size, False, _LIMIT)
        dist.init_process_group("gloo", store=store, rank=self.rank, world_size=self.size, timeout=_LIMIT)

    def make_ways(self) -> dict[str, Call]:
        """Sum everything at once, bucket by bucket, or key by key."""
        flat = [_tensor(array) for array in self.gradients.flat]
        buckets = [piece for tensor in flat for piece in _cut(tensor)]
        ways = {"one buffer": flat, "DDP's buckets": buckets, "each key": map(_tensor, self.gradients.values)}
        return {name: _sums(list(tensors)) for name, tensors in ways.items()}

    def barrier(self) -> None:
        """Wait for all, by gloo."""
        dist.barrier()

    def close(self) -> None:
        """Leave the process group."""
        dist.destroy_process_group()

    def versions(self) -> dict[str, str]:
        """Give the version of PyTorch, which has gloo in it."""
        return {"torch": str(torch.__version__)}


def _tensor(array: Array) -> Any:
    """View an array as a tensor; PyTorch takes bfloat16 from NumPy as its bits only."""
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("int16")).view(torch.bfloat16)
    return torch.from_numpy(array)


def _cut(tensor: Any) -> Sequence[Any]:
    first, rest = (nbytes // tensor.element_size() for nbytes in _BUCKETS)
    return [tensor[:first], *tensor[first:].split(rest)] if len(tensor) > first else [tensor]


def _sums(tensors: Sequence[Any]) -> Call:
    def call() -> None:
        for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
            work.wait()

    return call
