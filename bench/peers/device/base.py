"""The interface of a peer on a GPU, and the tensors of all peers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from bench.cases.device import DeviceCase
from bench.peers import base

#: A way to compute a case: a function of the number of the set of tensors.
Way = Callable[[int], None]

LEARNING_RATE, MOMENTUM, THRESHOLD = 0.1, 0.9, 0.5
#: Sets of tensors alternate; together they have at least this size, larger than any cache.
ROTATED_BYTES = 512 << 20


class Data:
    """Tensors of a case.

    Attributes
    ----------
    torch : module
    device : str
        ``"cuda"``, or ``"cpu"`` for a trial without a GPU.
    values : list
        For each set and key the values, a list of `Case.k` tensors.
    outs : list
        For each set and key a tensor for the result.
    """

    def __init__(self, case: DeviceCase, torch: Any, device: str) -> None:
        self.case, self.torch, self.device = case, torch, device
        self.dtype = getattr(torch, case.dtype)
        self.sets = max(1, min(8, -(-ROTATED_BYTES // max(1, int(case.nbytes)))))
        torch.manual_seed(0)
        made = [[self._values(size) for size in case.sizes] for _ in range(self.sets)]
        self.values = made
        self.outs = [[self.empty(size) for size in case.sizes] for _ in range(self.sets)]

    def _values(self, size: int) -> list[Any]:
        draw = {"dtype": self.torch.float32, "device": self.device}
        return [self.torch.randn(size, **draw).to(self.dtype) for _ in range(self.case.k)]

    def empty(self, size: int) -> Any:
        """Make an uninitialised tensor."""
        return self.torch.full((size,), float("nan"), dtype=self.dtype, device=self.device)

    def columns(self, number: int) -> list[list[Any]]:
        """Return the tensors of a set by place in the list of values, each a list over the keys."""
        return [list(column) for column in zip(*self.values[number], strict=True)]


class Peer(base.Peer):
    """A peer that runs in the process of the bench, and is timed by the GPU."""

    name = ""

    def ways(self, data: Data) -> dict[str, Way]:
        """Return the ways of this peer for the case, by name.

        Raises
        ------
        bench.peers.base.Unsupported
        """
        raise NotImplementedError

    def results(self, data: Data) -> list[Any] | None:
        """Return the results of the first set, for the comparison; None if there are none."""
        return data.outs[0]

    def release(self) -> None:
        """Free all tensors."""
