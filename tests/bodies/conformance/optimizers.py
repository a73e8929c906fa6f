"""Optimizers of torch: kinds, groups, several of them, closures, schedules, states, hooks, averages."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from .played import Play, batch, net, numbers, sgd, square, train


def _of(kind: Any, **options: Any) -> Callable[[nn.Module], Any]:
    return lambda module: kind(module.parameters(), **options)


def adam(play: Play) -> Any:
    return numbers(train(play, make=_of(torch.optim.Adam, lr=0.01)))


def kinds(play: Play) -> Any:
    """Optimizers of torch of many kinds, one after the other."""
    common = {"lr": 0.01, "weight_decay": 0.01}
    names = ["Adadelta", "Adagrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop", "Rprop"]
    makes = [_of(getattr(torch.optim, n), **(common if n != "Rprop" else {"lr": 0.01})) for n in names]
    return numbers(*(train(play, make=one) for one in makes))


def foreach(play: Play) -> Any:
    one = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW]
    return numbers(*(train(play, make=_of(kind, lr=0.01, foreach=True)) for kind in one))


def fused(play: Play) -> Any:
    one = [torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.Adagrad]
    return numbers(*(train(play, make=_of(kind, lr=0.01, fused=True)) for kind in one))


def tensor_rate(play: Play) -> Any:
    """The learning rate is a tensor."""
    return numbers(train(play, make=_of(torch.optim.Adam, lr=torch.tensor(0.01), foreach=False)))


def variants(play: Play) -> Any:
    """Nesterov, maximize, amsgrad, decoupled weight decay."""
    makes = [
        _of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True),
        _of(torch.optim.SGD, lr=0.1, maximize=True),
        _of(torch.optim.Adam, lr=0.01, amsgrad=True),
        _of(torch.optim.AdamW, lr=0.01, weight_decay=0.1),
    ]
    return numbers(*(train(play, make=one) for one in makes))


def named_groups(play: Play) -> Any:
    """The optimizer itself has names: SGD(model.named_parameters())."""
    return numbers(train(play, make=lambda m: torch.optim.SGD(m.named_parameters(), lr=0.2)))


def groups(play: Play) -> Any:
    def make(module: Any) -> Any:
        first = {"params": module[0].parameters(), "lr": 0.05, "weight_decay": 0.1}
        return torch.optim.SGD([first, {"params": module[2].parameters()}], lr=0.2, momentum=0.9)

    return numbers(train(play, make=make))


def two_optimizers(play: Play) -> Any:
    """Each optimizer has a part of one model."""
    module = net(play)
    model = play.model(module)
    first = play.optimizer(sgd(module[0]), module)
    second = play.optimizer(torch.optim.Adam(module[2].parameters(), lr=0.01), module)
    for step in range(3):
        first.zero_grad()
        second.zero_grad()
        play.backward(square(model, step))
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        first.step()
        second.step()
    return numbers(module)


def two_optimizers_in_turn(play: Play) -> Any:
    """Both have gradients in each step, and one of them makes its step; model.zero_grad drops the rest."""
    module = net(play)
    model = play.model(module)
    both = [
        play.optimizer(sgd(module[0]), module),
        play.optimizer(torch.optim.Adam(module[2].parameters(), lr=0.01), module),
    ]
    for step in range(4):
        module.zero_grad()
        play.backward(square(model, step))
        both[step % 2].step()
    return numbers(module)


def _gan(play: Play, zero: Callable[[Any, Any, Any, Any], None], detached: bool) -> Any:
    """Train a generator and a discriminator; the generator's loss has gradients for both."""
    generator = net(play)
    discriminator = net(play, width=2)
    shown, judged = play.model(generator), play.model(discriminator)
    first = play.optimizer(sgd(generator, lr=0.05), generator)
    second = play.optimizer(sgd(discriminator, lr=0.05), discriminator)

    def loss_of_discriminator(step: int, rank: int) -> torch.Tensor:
        made = shown(batch(rank, step))
        made = made.detach() if detached else made
        both = judged(torch.cat([batch(rank, step + 50, 4, 2), made]))
        return both[:4].square().mean() - both[4:].tanh().mean()

    for step in range(3):
        zero(generator, discriminator, first, second)
        play.backward(partial(loss_of_discriminator, step))
        second.step()
        zero(generator, discriminator, first, second)
        play.backward(lambda rank, step=step: judged(shown(batch(rank, step + 9))).tanh().mean())
        first.step()
    return numbers(generator, discriminator)


def gan(play: Play) -> Any:
    """Gradients are cleared by the zero_grad of both optimizers."""

    def zero(generator: Any, discriminator: Any, first: Any, second: Any) -> None:
        first.zero_grad()
        second.zero_grad()

    return _gan(play, zero, detached=True)


def gan_by_models(play: Play) -> Any:
    """Gradients are cleared by the zero_grad of the models."""

    def zero(generator: Any, discriminator: Any, first: Any, second: Any) -> None:
        generator.zero_grad()
        discriminator.zero_grad()

    return _gan(play, zero, detached=True)


def gan_without_detach(play: Play) -> Any:
    """The discriminator's loss gives the generator gradients too, which are dropped."""

    def zero(generator: Any, discriminator: Any, first: Any, second: Any) -> None:
        generator.zero_grad()
        discriminator.zero_grad()

    return _gan(play, zero, detached=False)


def gan_with_requires_grad(play: Play) -> Any:
    """The part that does not learn is frozen while the other one does, as in Horovod's test."""
    generator = net(play)
    discriminator = net(play, width=2)
    shown = play.model(generator, find_unused_parameters=True)
    judged = play.model(discriminator, find_unused_parameters=True)
    first = play.optimizer(sgd(generator, lr=0.05), generator)
    second = play.optimizer(sgd(discriminator, lr=0.05), discriminator)
    for step in range(4):
        generator.requires_grad_(step % 2 == 0)
        discriminator.requires_grad_(step % 2 == 1)
        first.zero_grad()
        second.zero_grad()
        play.backward(lambda rank, step=step: judged(shown(batch(rank, step))).tanh().mean())
        (first, second)[step % 2].step()
    return numbers(generator, discriminator)


def closure(play: Play) -> Any:
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    for step in range(3):

        def again(step: int = step) -> float:
            optimizer.zero_grad()
            play.backward(square(model, step))
            nn.utils.clip_grad_norm_(module.parameters(), 0.1)
            return 0.0

        optimizer.step(again)
    return numbers(module)


def lbfgs(play: Play) -> Any:
    """LBFGS calls its closure several times; the loss it sees is that of all workers."""
    module = net(play)
    model = play.model(module)
    inner = torch.optim.LBFGS(module.parameters(), lr=0.1, max_iter=3)
    optimizer = play.optimizer(inner, module)
    for step in range(2):

        def again(step: int = step) -> float:
            optimizer.zero_grad()
            play.backward(square(model, step))
            return 1.0

        optimizer.step(again)
    return numbers(module)


def _scheduled(play: Play, make: Callable[[Any], Any], *steps: Any, **options: Any) -> Any:
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module, **options), module)
    schedule = make(optimizer)
    for step in range(4):
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
        schedule.step(*steps)
    return numbers(module, schedule.get_last_lr())


def step_schedule(play: Play) -> Any:
    return _scheduled(play, partial(torch.optim.lr_scheduler.StepLR, step_size=2, gamma=0.1), momentum=0.0)


def one_cycle(play: Play) -> Any:
    """OneCycleLR changes the momentum too."""
    return _scheduled(play, partial(torch.optim.lr_scheduler.OneCycleLR, max_lr=0.3, total_steps=8))


def plateau(play: Play) -> Any:
    make = partial(torch.optim.lr_scheduler.ReduceLROnPlateau, patience=0, factor=0.5)
    return _scheduled(play, make, 1.0, momentum=0.0)


def rate_by_hand(play: Play) -> Any:
    """The program writes the learning rate to param_groups."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module, momentum=0.0), module)
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.3 / (step + 1)
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def resumed(play: Play) -> Any:
    """States are saved, and loaded into a new optimizer of a new model."""
    make = _of(torch.optim.Adam, lr=0.01)
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(make(module), module)
    for step in range(4):
        if step == 2:
            saved = copy.deepcopy((module.state_dict(), optimizer.state_dict()))
            module = net(play)
            module.load_state_dict(saved[0])
            model = play.model(module)
            optimizer = play.optimizer(make(module), module)
            optimizer.load_state_dict(saved[1])
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def loaded_between(play: Play) -> Any:
    """A state is loaded into an optimizer in use, with another rate."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 0.05
    for step in range(3):
        if step == 1:
            optimizer.load_state_dict(saved)
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def step_hooks(play: Play) -> Any:
    """A hook before the step scales the gradients, one after the step counts."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    calls: list[int] = []

    def before(optimizer: Any, arguments: Any, options: Any) -> None:
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad.mul_(0.5)

    optimizer.register_step_pre_hook(before)
    optimizer.register_step_post_hook(lambda *_: calls.append(1))
    for step in range(3):
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module, len(calls))


def ema(play: Play) -> Any:
    """An exponential mean of the weights, with AveragedModel."""
    module = net(play)
    model = play.model(module)
    optimizer = play.optimizer(sgd(module), module)
    mean = AveragedModel(module, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    for step in range(3):
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
        mean.update_parameters(module)
    return numbers(module, mean.module)


def attributes_of_the_wrapper(play: Play) -> Any:
    """An attribute that the program sets reaches the optimizer, as those of GradScaler must."""
    module = net(play)
    model = play.model(module)
    inner = torch.optim.SGD(module.parameters(), lr=0.2, fused=True)
    optimizer = play.optimizer(inner, module)
    for step in range(2):
        optimizer.zero_grad()
        play.backward(lambda rank, step=step: square(model, step)(rank) * 8)
        optimizer.grad_scale = torch.tensor(8.0)
        optimizer.found_inf = torch.tensor(0.0)
        optimizer.step()
    return numbers(module)


def models_of_one_store(play: Play) -> Any:
    """Two models, each with its own optimizer and prefix, in one loop."""
    modules = [net(play), net(play)]
    models = [play.model(one) for one in modules]
    optimizers = [play.optimizer(sgd(one), one) for one in modules]
    for step in range(3):
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            play.backward(square(model, step))
            optimizer.step()
    return numbers(*modules)


PROGRAMS = [
    adam, kinds, foreach, fused, tensor_rate, variants, named_groups, groups, two_optimizers,
    two_optimizers_in_turn, gan, gan_by_models, gan_without_detach, gan_with_requires_grad, closure, lbfgs,
    step_schedule, one_cycle, plateau, rate_by_hand, resumed, loaded_between, step_hooks, ema,
    attributes_of_the_wrapper, models_of_one_store,
]  # fmt: skip
