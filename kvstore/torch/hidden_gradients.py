"""Gradients that a program must neither read nor change, and that raise an error on any use."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NoReturn

import torch

from ..errors import KVStoreError
from .tensors import Tensor


class UnreadableGradient(torch.Tensor):  # type: ignore[misc]
    """A view of a gradient that raises KVStoreError in any function; autograd still accumulates into it."""

    @classmethod
    def __torch_function__(
        cls, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> NoReturn:
        """Raise KVStoreError for any function of torch."""
        raise KVStoreError(_find_reason(args))

    def __repr__(self) -> str:
        return f"UnreadableGradient({self.__dict__['reason']!r})"


def hide_gradient(parameter: Tensor, reason: str, sparse: bool = False) -> None:
    """Replace a gradient by a view that raises `reason`.

    A sparse gradient has no view. With `sparse`, a tensor without its own memory replaces the gradient;
    autograd cannot accumulate into such a tensor.
    """
    gradient = parameter.grad
    if gradient is None or gradient.__class__ is UnreadableGradient:
        return
    if gradient.layout == torch.strided:
        hidden = gradient.detach()
    elif sparse:
        hidden = torch.zeros((), dtype=gradient.dtype, device=gradient.device).expand(gradient.shape)
    else:
        return
    hidden = hidden.as_subclass(UnreadableGradient)
    hidden.__dict__.update(reason=reason, gradient=gradient)
    parameter.grad = hidden


def restore_gradient(parameter: Tensor) -> None:
    """Restore the gradient."""
    hidden = parameter.grad
    if hidden.__class__ is UnreadableGradient:
        parameter.grad = hidden.__dict__["gradient"]


def _find_reason(arguments: Any) -> str:
    """Return the reason of the first hidden gradient among arguments, which may be lists of tensors."""
    for argument in arguments:
        if argument.__class__ is UnreadableGradient:
            return str(argument.__dict__["reason"])
        if isinstance(argument, (list, tuple)):
            found = _find_reason(argument)
            if found:
                return found
    return ""
