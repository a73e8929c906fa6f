"""PyTorch: chains of additions, stack and sum, foreach, key by key; its fused optimizer for updates."""

from __future__ import annotations

from typing import Any

from bench.peers.base import Unsupported
from bench.peers.device.base import LEARNING_RATE, MOMENTUM, Data, Peer, Way


class Torch(Peer):
    """Several ways, each under the name that PyTorch has for it."""

    name = "torch"

    def __init__(self) -> None:
        self._held: list[Any] = []

    def ways(self, data: Data) -> dict[str, Way]:
        op = data.case.op
        if op == "sum":
            return self._sums(data)
        if op == "update":
            return self._updates(data)
        raise Unsupported("PyTorch has no such operation")

    def _sums(self, data: Data) -> dict[str, Way]:
        torch, case = data.torch, data.case

        def chain(i: int) -> None:
            for values, out in zip(data.values[i], data.outs[i], strict=True):
                torch.add(values[0], values[1], out=out)
                for value in values[2:]:
                    out.add_(value)

        def stacked(i: int) -> None:
            for values, out in zip(data.values[i], data.outs[i], strict=True):
                torch.sum(torch.stack(values), 0, out=out)

        if len(case.sizes) == 1:
            return {"torch add chain": chain, "torch stack + sum": stacked}
        return {"torch foreach": self._foreach(data), "torch key by key": chain}

    @staticmethod
    def _foreach(data: Data) -> Way:
        torch = data.torch
        columns = [data.columns(i) for i in range(data.sets)]

        def foreach(i: int) -> None:
            first, *rest = columns[i]
            torch._foreach_copy_(data.outs[i], first)
            for column in rest:
                torch._foreach_add_(data.outs[i], column)

        return foreach

    def _updates(self, data: Data) -> dict[str, Way]:
        torch = data.torch
        sums = self._foreach(data)
        steps = []
        for i in range(data.sets):
            weights = [values[0].clone().requires_grad_() for values in data.values[i]]
            for weight, out in zip(weights, data.outs[i], strict=True):
                weight.grad = out
            made = torch.optim.SGD(weights, lr=LEARNING_RATE, momentum=MOMENTUM, fused=True)
            steps.append(made.step)
            self._held.append(weights)

        def update(i: int) -> None:
            sums(i)
            steps[i]()

        return {"torch foreach + fused SGD": update}

    def results(self, data: Data) -> list[Any] | None:
        return self._held[0] if data.case.op == "update" else data.outs[0]

    def release(self) -> None:
        self._held = []
