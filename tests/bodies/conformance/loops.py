"""Loops: the order of the calls in a step, and which passes belong to it."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from .played import Play, batch, gradients, net, numbers, sgd, square, train


def plain(play: Play) -> Any:
    return numbers(train(play))


def zero_grad_to_zeros(play: Play) -> Any:
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(3):
        optimizer.zero_grad(set_to_none=False)
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def zero_grad_of_the_model(play: Play) -> Any:
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(3):
        model.zero_grad(set_to_none=step == 1)
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def gradients_set_to_none(play: Play) -> Any:
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(3):
        for parameter in module.parameters():
            parameter.grad = None
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def zero_grad_after_the_step(play: Play) -> Any:
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(3):
        play.backward(square(model, step))
        optimizer.step()
        optimizer.zero_grad()
    return numbers(module)


def zero_grad_after_the_forward(play: Play) -> Any:
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(3):
        losses = [square(model, step)(rank) / play.scale for rank in play.ranks]
        optimizer.zero_grad()
        sum(losses[1:], losses[0]).backward()
        optimizer.step()
    return numbers(module)


def no_zero_grad(play: Play) -> Any:
    """Gradients add up from step to step."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module, lr=0.05), module)
    for step in range(3):
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def two_steps_of_one_gradient(play: Play) -> Any:
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(2):
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
        optimizer.step()
    return numbers(module)


def steps_without_gradients(play: Play) -> Any:
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module, weight_decay=0.1), module)
    optimizer.step()
    optimizer.zero_grad()
    play.backward(square(model, 0))
    optimizer.step()
    optimizer.zero_grad()
    optimizer.step()
    return numbers(module)


def two_losses(play: Play) -> Any:
    """Two losses, each with a forward and a backward pass of its own."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(3):
        optimizer.zero_grad()
        play.backward(square(model, 2 * step))
        play.backward(lambda rank, step=step: model(batch(rank, 2 * step + 1)).abs().mean())
        optimizer.step()
    return numbers(module)


def two_forwards_one_backward(play: Play) -> Any:
    return numbers(
        train(play, loss=lambda model, step: lambda r: square(model, step)(r) + square(model, step + 9)(r))
    )


def retained_graph(play: Play) -> Any:
    """Two losses of one forward pass, with a backward pass each."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(3):
        optimizer.zero_grad()
        for rank in play.ranks:
            out = model(batch(rank, step))
            (out.square().mean() / play.scale).backward(retain_graph=True)
            (out.abs().mean() / play.scale).backward()
        optimizer.step()
    return numbers(module)


def gradient_penalty(play: Play) -> Any:
    """The loss has a gradient in it: autograd.grad with create_graph."""

    def loss(model: Any, step: int) -> Any:
        def of(rank: int) -> Any:
            data = batch(rank, step).requires_grad_()
            out = model(data)
            (slope,) = torch.autograd.grad(out.sum(), data, create_graph=True)
            return out.square().mean() + (slope.norm(dim=1) - 1).square().mean()

        return of

    return numbers(train(play, loss=loss, ddp={"broadcast_buffers": False}))


def autograd_grad_by_hand(play: Play) -> Any:
    """Gradients are computed by autograd.grad and written to .grad by the program: no hook sees them."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    parameters = list(module.parameters())
    for step in range(3):
        losses = [square(model, step)(rank) / play.scale for rank in play.ranks]
        found = torch.autograd.grad(sum(losses[1:], losses[0]), parameters)
        for parameter, gradient in zip(parameters, found, strict=True):
            parameter.grad = gradient
        optimizer.step()
    return numbers(module)


def create_graph(play: Play) -> Any:
    """backward(create_graph=True): gradients that have a graph themselves."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(3):
        optimizer.zero_grad()
        for rank in play.ranks:
            (square(model, step)(rank) / play.scale).backward(create_graph=True)
        for parameter in module.parameters():
            if parameter.grad is not None:
                parameter.grad = parameter.grad.detach()
        optimizer.step()
    return numbers(module)


def gradients_read(play: Play) -> Any:
    """A norm is logged between backward and step."""
    seen: list[Any] = []
    module = train(play, between=lambda module: seen.extend(gradients(module)))
    return numbers(module, seen)


def evaluated_between(play: Play) -> Any:
    """Forward passes without a backward pass, in train mode and in eval mode."""

    def between(module: nn.Module) -> None:
        with torch.no_grad():
            module(batch(0, 77))
        module.eval()
        module(batch(0, 78))
        module.train()

    return numbers(train(play, between=between))


def synchronized_by_hand(play: Play) -> Any:
    """The recipe of earlier versions: synchronize, clip, step."""
    module = net(play)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(3):
        optimizer.zero_grad()
        play.backward(square(module, step))
        if not play.is_alone:
            optimizer.synchronize()
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
    return numbers(module)


def loader_with_processes(play: Play) -> Any:
    """A DataLoader whose processes are forked while the store is open."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    loaders = [
        DataLoader(TensorDataset(batch(rank, 0, 8, 6)), batch_size=4, num_workers=1) for rank in play.ranks
    ]
    for parts in zip(*loaders, strict=True):
        optimizer.zero_grad()
        by_rank = dict(zip(play.ranks, parts, strict=True))
        play.backward(lambda rank, by_rank=by_rank: model(by_rank[rank][0]).square().mean())
        optimizer.step()
    return numbers(module)


def copied_model(play: Play) -> Any:
    """A teacher is copied in the middle of training."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    teacher = copy.deepcopy(module)
    for step in range(3):
        optimizer.zero_grad()
        play.backward(
            lambda rank, step=step, t=teacher: (
                (model(batch(rank, step)) - t(batch(rank, step))).square().mean() + square(model, step)(rank)
            )
        )
        optimizer.step()
        teacher = copy.deepcopy(module).requires_grad_(False)
    return numbers(module, teacher)


PROGRAMS = [
    plain, zero_grad_to_zeros, zero_grad_of_the_model, gradients_set_to_none, zero_grad_after_the_step,
    zero_grad_after_the_forward, no_zero_grad, two_steps_of_one_gradient, steps_without_gradients, two_losses,
    two_forwards_one_backward, retained_graph, gradient_penalty, autograd_grad_by_hand, create_graph,
    gradients_read, evaluated_between, synchronized_by_hand, loader_with_processes, copied_model,
]  # fmt: skip
