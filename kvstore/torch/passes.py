"""The passes of autograd: a callback for each complete gradient, and one at the end of each pass."""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from functools import partial
from types import FrameType
from typing import Any, Generic, TypeVar

import torch
from torch.autograd.function import BackwardCFunction

from ..errors import ArrayError, ConfigError
from .gradient_slots import GradientSlot
from .tensors import Tensor

_Owner = TypeVar("_Owner")

_engine: Any = torch.autograd.Variable._execution_engine
_task: Callable[[], int] = torch._C._current_graph_task_id


class BackwardPasses(Generic[_Owner]):
    """Hooks on the nodes of autograd that accumulate the gradients of parameters.

    These hooks run after all hooks on the tensors, as those of DistributedDataParallel do: a hook of the
    program has changed the gradient before. The end of a pass is a callback of autograd's engine, so
    ``backward`` returns after it, and raises its errors.

    Parameters
    ----------
    slots : iterable of GradientSlot
        The parameters, also those that need no gradient now.
    owner : object
        First argument of the two functions. Only a weak reference is kept.
    on_gradient : callable
        Function that is called with the owner and the slot of each gradient that a pass has accumulated.
    on_end : callable
        Function that is called with the owner at the end of each pass with such a gradient.
    """

    def __init__(
        self,
        slots: Iterable[GradientSlot],
        owner: _Owner,
        on_gradient: Callable[[_Owner, GradientSlot], None],
        on_end: Callable[[_Owner], None],
    ) -> None:
        self._hooks = [_AccumulatorHook(slot, self) for slot in slots if slot.parameter.is_floating_point()]
        self._owner, self._on_gradient, self._on_end = weakref.ref(owner), on_gradient, on_end
        #: Graph tasks of autograd that have not ended: a pass, and passes within it.
        self._tasks: set[int] = set()

    def check(self) -> None:
        """Raise ConfigError if ``model.to`` has replaced the node of a parameter, and so removed its hook."""
        for hook in self._hooks:
            hook.check()

    def close(self) -> None:
        """Remove the hooks."""
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def accumulated(self, slot: GradientSlot) -> None:
        """Report a gradient.

        At the first of a pass, request a callback of autograd at the end of the pass.
        """
        task = _task()
        if task not in self._tasks:
            self._tasks.add(task)
            _engine.queue_callback(partial(_end_pass, weakref.ref(self), task))
        owner = self._owner()
        if owner is not None:
            self._on_gradient(owner, slot)

    def end(self, task: int) -> None:
        """Report the end of a pass, unless an outer pass, which ends later, is known."""
        self._tasks.discard(task)
        if self._tasks and _in_function():
            return
        self._tasks.clear()  # also passes that an exception has ended
        owner = self._owner()
        if owner is not None:
            self._on_end(owner)


class _AccumulatorHook:
    """A hook on the node that accumulates the gradient of a parameter; the node lives as long as the hook."""

    def __init__(self, slot: GradientSlot, passes: BackwardPasses[Any]) -> None:
        self._slot, self._dtype, self._device = slot, slot.parameter.dtype, slot.parameter.device
        self._node = _accumulator_node(slot.name, slot.parameter)
        # A weak reference, because a cycle through autograd's node is never collected.
        hook = partial(_report_gradient, weakref.ref(passes), weakref.ref(slot))
        self._handle = self._node.register_hook(hook)

    def check(self) -> None:
        parameter = self._slot.parameter
        if parameter.dtype != self._dtype or parameter.device != self._device:
            raise ConfigError(
                f"parameter {self._slot.name!r} was {self._dtype} on {self._device} when the "
                f"DistributedOptimizer was created, and is {parameter.dtype} on {parameter.device} now: "
                "create the DistributedOptimizer after model.to()"
            )

    def remove(self) -> None:
        self._handle.remove()


def _accumulator_node(name: str, parameter: Tensor) -> Any:
    """Return the node of autograd that accumulates a gradient, also for a frozen parameter."""
    needs_gradient = parameter.requires_grad
    if parameter.is_inference():
        raise ArrayError(
            f"parameter {name!r} was made in inference mode and cannot have a gradient: clone it"
        )
    parameter.requires_grad_(True)
    try:
        with torch.enable_grad():
            return parameter.expand_as(parameter).grad_fn.next_functions[0][0]
    finally:
        parameter.requires_grad_(needs_gradient)


# A compiled function that calls ``backward`` would compile these hooks and all functions that they call.
@torch.compiler.disable  # type: ignore[untyped-decorator]
def _report_gradient(
    passes: weakref.ref[BackwardPasses[Any]], slot: weakref.ref[GradientSlot], *_: Any
) -> None:
    there, accumulated = passes(), slot()
    if there is not None and accumulated is not None:
        there.accumulated(accumulated)


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _end_pass(passes: weakref.ref[BackwardPasses[Any]], task: int) -> None:
    there = passes()
    if there is not None:
        there.end(task)


def _in_function() -> bool:
    """Return whether a backward function in Python is running, which started the ending pass."""
    frame: FrameType | None = sys._getframe()
    while frame is not None and frame.f_code is not BackwardCFunction.apply.__code__:
        frame = frame.f_back
    return frame is not None
