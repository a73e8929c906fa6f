"""PyTorch's fused CPU optimizers: the update alone, over all tensors in one step."""

from __future__ import annotations

import torch

from bench.cases import local as cases
from bench.cases.local import LocalCase
from bench.peers.base import Array, Peer, Unsupported
from bench.runner import machine


class Torch(Peer):
    """`torch.optim` with ``fused=True``."""

    def prepare(self, case: LocalCase) -> list[Array]:
        if not (case.verb == "push" and case.k == 1 and case.update in ("sgd_momentum", "adam")):
            raise Unsupported("PyTorch has no store; only the update alone compares")
        torch.set_num_threads(len(machine.cpus()))
        data = cases.inputs(case)
        self.weights = [torch.nn.Parameter(torch.from_numpy(weight).clone()) for weight in data.weights]
        for weight, own in zip(self.weights, data.values, strict=True):
            weight.grad = torch.from_numpy(own[0]).clone()
        step = optimizer(case.update, self.weights).step
        self.variants = {"fused": step}
        step()
        return [weight.detach().numpy() for weight in self.weights]

    def release(self) -> None:
        super().release()
        self.weights = []


def optimizer(name: str, weights: list[torch.nn.Parameter]) -> torch.optim.Optimizer:
    rates = {"lr": cases.LEARNING_RATE, "weight_decay": cases.WEIGHT_DECAY}
    if name == "sgd_momentum":
        return torch.optim.SGD(weights, momentum=cases.MOMENTUM, fused=True, **rates)
    betas = (cases.BETA1, cases.BETA2)
    return torch.optim.Adam(weights, betas=betas, eps=cases.EPSILON, fused=True, **rates)
