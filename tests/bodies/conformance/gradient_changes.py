"""Gradients that the program changes: clipped, scaled, with noise, by hooks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn

from .played import Play, batch, net, numbers, sgd, square, train


def clip_norm(play: Play) -> Any:
    return numbers(train(play, between=lambda module: _clip(module)))


def _clip(module: nn.Module) -> None:
    nn.utils.clip_grad_norm_(module.parameters(), 0.1)


def clip_value(play: Play) -> Any:
    return numbers(train(play, between=lambda m: nn.utils.clip_grad_value_(m.parameters(), 0.02)))


def clamp_data(play: Play) -> Any:
    def between(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.grad.data.clamp_(-0.02, 0.02)  # type: ignore[union-attr]

    return numbers(train(play, between=between))


def noise(play: Play) -> Any:
    def between(module: nn.Module) -> None:
        random = torch.Generator().manual_seed(5)
        for parameter in module.parameters():
            parameter.grad.add_(torch.randn(parameter.shape, generator=random))  # type: ignore[union-attr]

    return numbers(train(play, between=between))


def other_tensor(play: Play) -> Any:
    """The gradient is replaced by another tensor."""

    def between(module: nn.Module) -> None:
        for parameter in module.parameters():
            parameter.grad = parameter.grad * 0.5  # type: ignore[operator]

    return numbers(train(play, between=between))


def some_dropped(play: Play) -> Any:
    """The program drops some gradients, so that their weights do not move."""

    def between(module: Any) -> None:
        module[0].weight.grad = None

    return numbers(train(play, make=partial(sgd, weight_decay=0.1), between=between))


# ------------------------------------------------------------------------------------------------ scalers


def scaled(
    play: Play,
    make: Callable[[nn.Module], Any] = sgd,
    between: Callable[[nn.Module], None] | None = None,
    overflow: int | None = None,
    autocast: bool = False,
) -> Any:
    """Train with a GradScaler; in step 1 this rank has an overflow."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(make(module), module)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)

    def loss(step: int, rank: int) -> torch.Tensor:
        factor = 3e38 if step == 1 and rank == overflow else 1.0
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            found = model(batch(rank, step))
        return scaler.scale((found.float() - 1).square().mean() * factor)

    for step in range(4):
        optimizer.zero_grad()
        play.backward(partial(loss, step))
        if between is not None:
            scaler.unscale_(optimizer)
            between(module)
        scaler.step(optimizer)
        scaler.update()
    return numbers(module, scaler.get_scale())


def scaler(play: Play) -> Any:
    return scaled(play)


def scaler_and_clip(play: Play) -> Any:
    return scaled(play, between=_clip)


def scaler_fused_sgd(play: Play) -> Any:
    return scaled(play, make=partial(sgd, fused=True))


def scaler_fused_adam(play: Play) -> Any:
    return scaled(play, make=lambda m: torch.optim.Adam(m.parameters(), lr=0.01, fused=True))


def scaler_fused_and_clip(play: Play) -> Any:
    return scaled(play, make=partial(sgd, fused=True), between=_clip)


def overflow_on_one(play: Play) -> Any:
    return scaled(play, overflow=1)


def overflow_on_one_fused(play: Play) -> Any:
    return scaled(play, make=partial(sgd, fused=True), overflow=1)


def overflow_on_one_and_clip(play: Play) -> Any:
    return scaled(play, between=_clip, overflow=0)


def autocast(play: Play) -> Any:
    def loss(model: Any, step: int) -> Callable[[int], torch.Tensor]:
        def of(rank: int) -> torch.Tensor:
            with torch.autocast("cpu", torch.bfloat16):
                found = model(batch(rank, step))
            return (found.float() - 1).square().mean()

        return of

    return numbers(train(play, loss=loss))


def autocast_scaler_and_clip(play: Play) -> Any:
    return scaled(play, between=_clip, autocast=True)


# -------------------------------------------------------------------------------------------------- hooks


def tensor_hook(play: Play) -> Any:
    """A hook clips the gradient of each worker before the workers' are averaged."""
    module = net(play)
    for parameter in module.parameters():
        parameter.register_hook(partial(_clamped, play.scale))
    return numbers(train(play, module))


def tensor_hook_added_later(play: Play) -> Any:
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for parameter in module.parameters():
        parameter.register_hook(partial(_clamped, play.scale))
    for step in range(3):
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def _clamped(scale: int, gradient: torch.Tensor) -> torch.Tensor:
    return (gradient * scale).clamp(-0.03, 0.03) / scale


def post_accumulate_hook(play: Play) -> Any:
    """A hook after the accumulation, from before the optimizer was made."""
    module = net(play)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(partial(_double, play))
    return numbers(train(play, module))


def post_accumulate_hook_added_later(play: Play) -> Any:
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for parameter in module.parameters():
        parameter.register_post_accumulate_grad_hook(partial(_double, play))
    for step in range(3):
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def _double(play: Play, parameter: torch.Tensor) -> None:
    """Add a number to each worker's gradient: alone, its part of the mean, for each of the passes."""
    assert parameter.grad is not None
    parameter.grad.add_(0.25 / play.scale)


def backward_hook_of_a_module(play: Play) -> Any:
    module = net(play)
    module[2].register_full_backward_hook(
        lambda m, into, out: tuple(None if g is None else 2 * g for g in into)
    )
    return numbers(train(play, module))


PROGRAMS = [
    clip_norm, clip_value, clamp_data, noise, other_tensor, some_dropped,
    scaler, scaler_and_clip, scaler_fused_sgd, scaler_fused_adam, scaler_fused_and_clip,
    overflow_on_one, overflow_on_one_fused, overflow_on_one_and_clip, autocast, autocast_scaler_and_clip,
    tensor_hook, tensor_hook_added_later, post_accumulate_hook, post_accumulate_hook_added_later,
    backward_hook_of_a_module,
]  # fmt: skip
