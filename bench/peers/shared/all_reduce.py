"""Code of the rivals that sum in place by an all-reduce, and then update in each worker."""

from __future__ import annotations

import ctypes
import importlib.util
from typing import Any

import numpy as np

from bench.cases import local as cases
from bench.cases import shared as shared_cases
from bench.cases.shared import Inputs, SharedCase
from bench.peers.base import Array, Call, all_of
from bench.peers.group.base import GroupPeer
from bench.peers.group.link import Place
from bench.peers.local.plain import corrected_rate


class AllReducePeer(GroupPeer):
    """A worker that sums in place, in several ways."""

    def ways(self, values: list[Array], flat: Array) -> dict[str, Call]:
        """Return the ways to sum arrays that are views of flat memory."""
        raise NotImplementedError

    def prepare(self, case: SharedCase) -> list[Array]:
        data = shared_cases.inputs(case, self.place.rank)
        self.buffers = [data.flat]
        self.variants = self.ways(data.values, data.flat)
        if case.update:
            label, step = stepper(case, data, self.place)
            self.variants = {f"{name}, {label}": all_of([way, step]) for name, way in self.variants.items()}
        next(iter(self.variants.values()))()
        self.calls = 1
        return data.weights if case.update else data.values


def stepper(case: SharedCase, data: Inputs, place: Place) -> tuple[str, Call]:
    """Return the name and the function of the step that updates ``data.weights`` with ``data.values``."""
    if importlib.util.find_spec("torch") is None:
        return "then C loops", _compiled(case, data, place)
    return "then torch fused", _torch(case, data)


def _torch(case: SharedCase, data: Inputs) -> Call:
    import torch

    from bench.peers.local.rival_torch import optimizer

    torch.set_num_threads(1)  # there is a process for each core
    weights = [torch.nn.Parameter(torch.from_numpy(weight)) for weight in data.weights]
    for weight, value in zip(weights, data.values, strict=True):
        weight.grad = torch.from_numpy(value)
    step: Call = optimizer(case.update, weights).step
    return step


def _compiled(case: SharedCase, data: Inputs, place: Place) -> Call:
    """Return a step over all tensors at once, which favours the rival."""
    code, steps = place.gate.code, [0]
    states = [np.zeros_like(data.flat_weights) for _ in range(2)]
    names = ("LEARNING_RATE", "MOMENTUM", "WEIGHT_DECAY", "BETA1", "BETA2", "EPSILON")
    lr, mu, wd, b1, b2, eps = (ctypes.c_float(getattr(cases, name)) for name in names)
    arrays = [data.flat_weights, *states, data.flat]
    n = ctypes.c_ssize_t(data.flat.size)

    def momentum() -> None:
        w, v, _, g = map(_pointer, arrays)
        code.sgd_momentum(w, v, g, n, lr, mu, wd)

    def adam() -> None:
        steps[0] += 1
        code.adam(*map(_pointer, arrays), n, ctypes.c_float(corrected_rate(steps[0])), wd, b1, b2, eps)

    return momentum if case.update == "sgd_momentum" else adam


def _pointer(array: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)
