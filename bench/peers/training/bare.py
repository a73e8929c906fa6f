"""The limit of an exchange on one host: two workers average their gradients in C, after the backward pass."""

from __future__ import annotations

import ctypes
from itertools import accumulate
from typing import Any

import torch

from bench.cases.common import KB
from bench.peers.base import fields
from bench.peers.group.link import Place
from bench.peers.shared.limit import common

GATE = 1024  # its place in the group's shared page, behind the barrier
_BLOCK, _SLOTS = 64 * KB, 3  # numbers of a block; blocks of which a worker has half in shared memory


class _Pair(ctypes.Structure):
    _fields_ = fields(
        ("gate", ctypes.c_void_p),
        ("rank", ctypes.c_int),
        ("tensors numbers block", ctypes.c_ssize_t),
        ("arrays ends shared", ctypes.c_void_p),
    )


class Averaging:
    """An optimizer of torch that averages the gradients of two workers before its step."""

    def __init__(self, rule: Any, place: Place) -> None:
        self._rule = rule
        self._parameters = [parameter for group in rule.param_groups for parameter in group["params"]]
        ends = list(accumulate(parameter.numel() for parameter in self._parameters))
        self._ends = (ctypes.c_ssize_t * len(ends))(*ends)
        self._arrays = (ctypes.c_void_p * len(ends))()
        (self._shared,) = common(place, 1, _SLOTS * _BLOCK)
        self._pair = _Pair(place.gate.address + GATE, place.rank, len(ends), ends[-1], _BLOCK)
        self._pair.arrays, self._pair.ends = ctypes.addressof(self._arrays), ctypes.addressof(self._ends)
        self._pair.shared = self._shared.ctypes.data
        self._code = ctypes.CDLL(place.limits)
        self.zero_grad = rule.zero_grad

    def exchange(self) -> None:
        """Average the gradients in place.

        Raises
        ------
        TimeoutError
            The other worker has ended.
        """
        gradients = [_of(parameter) for parameter in self._parameters]
        self._arrays[:] = [gradient.data_ptr() for gradient in gradients]
        if self._code.pair_average(ctypes.byref(self._pair)):
            raise TimeoutError("the other worker has ended")

    def step(self) -> None:
        self.exchange()
        self._rule.step()


def _of(parameter: torch.Tensor) -> torch.Tensor:
    gradient = parameter.grad
    if gradient is None or not gradient.is_contiguous() or gradient.dtype != torch.float32:
        raise AssertionError("gradients must be contiguous float32")
    return gradient
