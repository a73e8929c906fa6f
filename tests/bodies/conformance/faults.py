"""Steps that are skipped or fail, on one worker or on all, and workers that differ."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from .played import Play, batch, net, numbers, sgd, square

LAST = 1  # the rank that differs


def _loop(play: Play, skips: Callable[[int], bool], zeroes: bool = True, steps: int = 4) -> Any:
    """Train, and skip the steps after some backward passes."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(steps):
        if zeroes:
            optimizer.zero_grad()
        else:
            module.zero_grad()
        play.backward(square(model, step))
        if not skips(step):
            optimizer.step()
    return numbers(module)


def skipped_by_all(play: Play) -> Any:
    """All workers skip a step after its backward pass, as for a loss that is not a number."""
    return _loop(play, lambda step: step == 1)


def skipped_by_all_with_the_models_zero_grad(play: Play) -> Any:
    return _loop(play, lambda step: step == 1, zeroes=False)


def skipped_by_one(play: Play) -> Any:
    return _loop(play, lambda step: step == 1 and play.rank == LAST)


def skipped_by_one_with_the_models_zero_grad(play: Play) -> Any:
    return _loop(play, lambda step: step == 1 and play.rank == LAST, zeroes=False)


def pass_skipped_by_one(play: Play) -> Any:
    """One worker leaves out a whole step: pass and all."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(4):
        if step == 1 and play.rank == LAST:
            continue
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def pass_skipped_by_each_once(play: Play) -> Any:
    """Each worker leaves out another step, so that they make equally many."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(4):
        if step == 1 + play.rank:
            continue
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def step_without_pass_on_one(play: Play) -> Any:
    """One worker has no batch in a step, and calls step all the same: its gradients count as zeros."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(3):
        optimizer.zero_grad()
        if play.is_alone:
            ranks = [rank for rank in play.ranks if not (step == 1 and rank == LAST)]
            for rank in ranks:
                (square(model, step)(rank) / play.size).backward()
        elif not (step == 1 and play.rank == LAST):
            play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def more_batches_on_one(play: Play) -> Any:
    """One worker has a batch more; a program of DDP is in model.join()."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    with play.join(model):
        for step in range(3 + (play.is_alone or play.rank == 0)):
            optimizer.zero_grad()
            if play.is_alone and step == 3:
                (square(model, step)(0) / play.size).backward()
            else:
                play.backward(square(model, step))
            optimizer.step()
    return numbers(module)


def exception_before_the_step(play: Play) -> Any:
    """An exception between backward and step on all workers, which continue with the next batch."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(4):
        with contextlib.suppress(ValueError):
            optimizer.zero_grad()
            play.backward(square(model, step))
            if step == 1:
                raise ValueError("of the program")
            optimizer.step()
    return numbers(module)


class Refuse(torch.autograd.Function):
    """Raise in the backward pass."""

    @staticmethod
    def forward(context: Any, data: torch.Tensor, refuses: bool) -> torch.Tensor:
        context.refuses = refuses
        return data.clone()

    @staticmethod
    def backward(context: Any, gradient: torch.Tensor) -> Any:
        if context.refuses:
            raise ValueError("of the program, in the backward pass")
        return gradient, None


def _exceptional(play: Play, fails: Callable[[int], bool]) -> Any:
    """Raise in the middle of a backward pass, after some gradients were sent; then continue."""
    play.seed()
    module = nn.ModuleList([nn.Linear(6, 5), nn.Linear(5, 2)])

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = module

        def forward(self, data: Any, refuses: bool) -> Any:
            return self.layers[1](Refuse.apply(self.layers[0](data), refuses))

    whole = Net()
    model = play.model(whole)
    optimizer = play.optimizer(sgd(whole), whole)
    for step in range(4):
        with contextlib.suppress(ValueError):
            optimizer.zero_grad()
            play.backward(lambda rank, s=step: model(batch(rank, s), fails(s)).square().mean())
            optimizer.step()
    return numbers(whole)


def exception_in_the_pass(play: Play) -> Any:
    return _exceptional(play, lambda step: step == 1)


def exception_in_the_pass_of_one(play: Play) -> Any:
    return _exceptional(play, lambda step: step == 1 and play.rank == LAST)


def rate_differs(play: Play) -> Any:
    """The learning rate differs from worker to worker, from the beginning."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module, lr=0.1 * (1 + play.rank)), module)
    for step in range(3):
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def rate_differs_later(play: Play) -> Any:
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module, **_checked(play))
    for step in range(6):
        if step == 2:
            optimizer.param_groups[0]["lr"] = 0.1 * (1 + play.rank)
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def weights_differ_later(play: Play) -> Any:
    """One worker changes a weight by itself."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module, **_checked(play))
    for step in range(6):
        if step == 2 and play.rank == LAST:
            with torch.no_grad():
                module[0].weight[0, 0] += 1
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def _checked(play: Play) -> dict[str, Any]:
    return {"check_every": 2} if play.kind in ("optimizer", "store") else {}


def models_differ(play: Play) -> Any:
    """A layer has another size on one worker."""
    play.seed()
    module = nn.Sequential(nn.Linear(6, 5 + play.rank), nn.Tanh(), nn.Linear(5 + play.rank, 2))
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    optimizer.zero_grad()
    play.backward(square(model, 0))
    optimizer.step()
    return numbers(module)


def frozen_on_one(play: Play) -> Any:
    """A layer is frozen on one worker only."""
    module = net(play)
    if play.rank == LAST:
        module[0].requires_grad_(False)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(3):
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


PROGRAMS = [
    skipped_by_all, skipped_by_all_with_the_models_zero_grad, skipped_by_one,
    skipped_by_one_with_the_models_zero_grad, pass_skipped_by_one, pass_skipped_by_each_once,
    step_without_pass_on_one, more_batches_on_one, exception_before_the_step, exception_in_the_pass,
    exception_in_the_pass_of_one, rate_differs, rate_differs_later, weights_differ_later, models_differ,
    frozen_on_one,
]  # fmt: skip
