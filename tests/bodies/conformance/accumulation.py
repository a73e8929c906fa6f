"""Several backward passes to a step: with and without words about it."""

from __future__ import annotations

from typing import Any

from torch import nn

from .played import Play, batch, net, numbers, sgd, square, train


class Choice(nn.Module):
    """One of several parts, as the call says."""

    def __init__(self, *parts: nn.Module) -> None:
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, data: Any, *which: int) -> Any:
        return sum(self.parts[number](data) for number in which)


def passes_without_a_word(play: Play) -> Any:
    """Each pass is averaged, and added to the ones before."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(3):
        optimizer.zero_grad()
        for number in range(3):
            play.backward(lambda rank, n=3 * step + number: square(model, n)(rank) / 3)
        optimizer.step()
    return numbers(module)


def no_sync(play: Play) -> Any:
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(3):
        optimizer.zero_grad()
        with play.no_sync(model, optimizer):
            play.backward(lambda rank, n=2 * step: square(model, n)(rank) / 2)
        play.backward(lambda rank, n=2 * step + 1: square(model, n)(rank) / 2)
        optimizer.step()
    return numbers(module)


def no_sync_with_other_parameters(play: Play) -> Any:
    """The pass that is not sent uses a part of the model that the last pass does not use."""
    both = Choice(net(play), net(play))
    model = play.model(both, find_unused_parameters=True)
    optimizer = play.optimizer(sgd(both), both)
    for step in range(3):
        optimizer.zero_grad()
        with play.no_sync(model, optimizer):
            play.backward(lambda rank, step=step: model(batch(rank, step), 0).square().mean())
        play.backward(lambda rank, step=step: model(batch(rank, step), 1).square().mean())
        optimizer.step()
    return numbers(both)


def passes_per_step(play: Play) -> Any:
    module = net(play)
    optimizer = play.optimizer(sgd(module), module, backward_passes_per_step=2)
    for step in range(3):
        optimizer.zero_grad()
        for number in range(2):
            play.backward(lambda rank, n=2 * step + number: square(module, n)(rank) / 2)
        optimizer.step()
    return numbers(module)


def passes_per_step_and_fewer(play: Play) -> Any:
    """The last step has one pass where there should be two."""
    module = net(play)
    optimizer = play.optimizer(sgd(module), module, backward_passes_per_step=2)
    for step, passes in enumerate((2, 1, 2)):
        optimizer.zero_grad()
        for number in range(passes):
            play.backward(lambda rank, n=2 * step + number: square(module, n)(rank) / 2)
        optimizer.step()
    return numbers(module)


def passes_per_step_and_more(play: Play) -> Any:
    """A step has three passes where there should be two."""
    module = net(play)
    optimizer = play.optimizer(sgd(module), module, backward_passes_per_step=2)
    for step in range(2):
        optimizer.zero_grad()
        for number in range(3):
            play.backward(lambda rank, n=3 * step + number: square(module, n)(rank) / 2)
        optimizer.step()
    return numbers(module)


def sums(play: Play) -> Any:
    """average=False: the gradients of workers are summed."""
    module = net(play)
    optimizer = play.optimizer(sgd(module, lr=0.05), module, average=False)
    for step in range(3):
        optimizer.zero_grad()
        play.backward(square(module, step), divides=False)
        optimizer.step()
    return numbers(module)


def sums_of_two_passes(play: Play) -> Any:
    module = net(play)
    optimizer = play.optimizer(sgd(module, lr=0.05), module, average=False)
    for step in range(2):
        optimizer.zero_grad()
        play.backward(square(module, 2 * step), divides=False)
        play.backward(square(module, 2 * step + 1), divides=False)
        optimizer.step()
    return numbers(module)


def sums_of_passes_per_step(play: Play) -> Any:
    module = net(play)
    optimizer = play.optimizer(sgd(module, lr=0.05), module, average=False, backward_passes_per_step=2)
    for step in range(2):
        optimizer.zero_grad()
        play.backward(square(module, 2 * step), divides=False)
        play.backward(square(module, 2 * step + 1), divides=False)
        optimizer.step()
    return numbers(module)


def whole_steps(play: Play) -> Any:
    """whole_steps=True: a step counts for all parameters or for none."""
    return numbers(train(play, whole_steps=True))


def whole_steps_and_passes(play: Play) -> Any:
    module = net(play)
    optimizer = play.optimizer(sgd(module), module, whole_steps=True)
    for step in range(3):
        optimizer.zero_grad()
        for number in range(2):
            play.backward(lambda rank, n=2 * step + number: square(module, n)(rank) / 2)
        optimizer.step()
    return numbers(module)


PROGRAMS = [
    passes_without_a_word, no_sync, no_sync_with_other_parameters, passes_per_step, passes_per_step_and_fewer,
    passes_per_step_and_more, sums, sums_of_two_passes, sums_of_passes_per_step, whole_steps,
    whole_steps_and_passes,
]  # fmt: skip
