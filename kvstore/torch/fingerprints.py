"""Settings of an optimizer as a text and weights as an integer, which workers compare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from .gradient_slots import GradientSlot
from .tensors import Tensor, in_memory_order

#: Settings of a group that choose the implementation of a step, and do not change its result.
_HOW = frozenset({"params", "param_names", "foreach", "fused", "capturable", "differentiable"})

_INTEGERS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def describe_settings(groups: Iterable[dict[str, Any]]) -> str:
    """Return the settings of all parameter groups as a text."""
    return "; ".join(
        ", ".join(
            [f"{len(group['params'])} parameters"]
            + [f"{name}={_plain_value(group[name])!r}" for name in sorted(group) if name not in _HOW]
        )
        for group in groups
    )


def _plain_value(value: Any) -> Any:
    return value.tolist() if isinstance(value, torch.Tensor) else value


def sum_bits(slots: Iterable[GradientSlot]) -> int:
    """Return a sum over the bits of all weights, as an integer of 63 bits."""
    sums = [_sum_integers(in_memory_order(slot.parameter, slot.order)) for slot in slots]
    total = sum((2 * place + 1) * value.item() for place, value in enumerate(sums))
    return int(total % 2**63)


def _sum_integers(weight: Tensor) -> Tensor:
    return weight.contiguous().view(_INTEGERS[weight.element_size()]).sum(dtype=torch.int64)
