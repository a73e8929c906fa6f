"""Models: parts that are unused, tied, frozen, sparse, of other types and layouts, checkpointed, compiled."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from .accumulation import Choice
from .played import Play, batch, net, numbers, sgd, square, train

UNUSED = {"find_unused_parameters": True}


def _chosen(
    which: Callable[[int, int], tuple[int, ...]],
) -> Callable[[Any, int], Callable[[int], torch.Tensor]]:
    """Return a loss of the parts that a rank uses in a step."""
    return lambda model, step: lambda rank: model(batch(rank, step), *which(rank, step)).square().mean()


def _parts(play: Play, which: Callable[[int, int], tuple[int, ...]], parts: int = 2) -> Any:
    """Train with weight decay, which changes each parameter with a gradient, even a gradient of zeros."""
    module = Choice(*(net(play) for _ in range(parts)))
    return numbers(train(play, module, partial(sgd, weight_decay=0.1), loss=_chosen(which), ddp=UNUSED))


def gradients_that_are_none(play: Play) -> Any:
    """A gradient is None where no worker has one, and only there."""
    seen: list[bool] = []

    def between(module: nn.Module) -> None:
        seen.extend([p.grad is None for p in module.parameters()])

    module = Choice(*(net(play) for _ in range(3)))
    loss = _chosen(lambda rank, step: (0, 1) if rank == 0 else (0,))
    train(play, module, between=between, loss=loss, ddp=UNUSED)
    return numbers(module, seen)


def unused_by_all(play: Play) -> Any:
    return _parts(play, lambda rank, step: (0,))


def unused_by_one(play: Play) -> Any:
    return _parts(play, lambda rank, step: (0, 1) if rank == 0 else (0,))


def unused_by_each_another(play: Play) -> Any:
    return _parts(play, lambda rank, step: (rank % 2,))


def unused_by_step(play: Play) -> Any:
    return _parts(play, lambda rank, step: ((rank + step) % 2, 2) if step else (2,), parts=3)


def used_in_another_order(play: Play) -> Any:
    return _parts(play, lambda rank, step: (0, 1) if rank == 0 else (1, 0))


class Twice(nn.Module):
    """A layer that is used twice, and a weight that two layers share."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.second.weight = self.first.weight

    def forward(self, data: Any) -> Any:
        return self.last(self.second(torch.tanh(self.first(torch.tanh(self.first(data))))))


def tied(play: Play) -> Any:
    play.seed()
    return numbers(train(play, Twice()))


def empty_and_scalar(play: Play) -> Any:
    """Parameters without elements, and without dimensions."""

    class Scaled(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.scale, self.nothing, self.inner = (
                nn.Parameter(torch.tensor(2.0)),
                nn.Linear(6, 0),
                nn.Linear(6, 2),
            )

        def forward(self, data: Any) -> Any:
            return self.inner(data) * self.scale + self.nothing(data).sum()

    play.seed()
    return numbers(train(play, Scaled()))


def frozen(play: Play) -> Any:
    module = net(play)
    module[0].requires_grad_(False)
    return numbers(train(play, module))


def frozen_in_the_middle(play: Play) -> Any:
    module = net(play)
    model = play.model(module, **UNUSED)
    optimizer = play.optimizer(sgd(module, momentum=0.0), module)
    for step in range(4):
        if step == 2:
            module[0].requires_grad_(False)
        optimizer.zero_grad()
        play.backward(square(model, step))
        optimizer.step()
    return numbers(module)


def unfrozen_in_the_middle(play: Play) -> Any:
    module = net(play)
    module[0].requires_grad_(False)
    optimizer = play.optimizer(sgd(module, momentum=0.0), module)
    for step in range(4):
        if step == 2:
            module[0].requires_grad_(True)
        optimizer.zero_grad()
        play.backward(square(module, step))
        optimizer.step()
    return numbers(module)


def unfrozen_by_a_group(play: Play) -> Any:
    module = net(play)
    module[0].requires_grad_(False)
    inner = torch.optim.SGD(module[2].parameters(), lr=0.2)
    optimizer = play.optimizer(inner, module)
    for step in range(4):
        if step == 2:
            module[0].requires_grad_(True)
            optimizer.add_param_group({"params": list(module[0].parameters()), "lr": 0.1})
        optimizer.zero_grad()
        play.backward(square(module, step))
        optimizer.step()
    return numbers(module)


class Words(nn.Module):
    """An embedding with sparse gradients, and a dense layer."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.last = nn.Embedding(12, 4, sparse=True), nn.Linear(4, 2)

    def forward(self, ids: Any) -> Any:
        return self.last(self.table(ids))


def sparse(play: Play) -> Any:
    """Embeddings with sparse gradients; ids are repeated, and differ from worker to worker."""
    play.seed()
    module = Words()
    model = play.model(module)
    inner = torch.optim.SGD(module.parameters(), lr=0.2)
    optimizer = play.optimizer(inner, module, sparse=["table.weight"])
    for step in range(3):
        optimizer.zero_grad()
        play.backward(lambda rank, step=step: model(_ids(rank, step)).square().mean())
        optimizer.step()
    return numbers(module)


def sparse_without_a_word(play: Play) -> Any:
    """The same, and the program does not say which parameters are sparse."""
    play.seed()
    module = Words()
    optimizer = play.optimizer(torch.optim.SGD(module.parameters(), lr=0.2), module)
    for step in range(3):
        optimizer.zero_grad()
        play.backward(lambda rank, step=step: module(_ids(rank, step)).square().mean())
        optimizer.step()
    return numbers(module)


def _ids(rank: int, step: int) -> torch.Tensor:
    random = torch.Generator().manual_seed(1000 * step + rank)
    return torch.randint(0, 12, (5,), generator=random)


class Mixed(nn.Module):
    """Layers of three types."""

    def __init__(self, *types: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(6, 6).to(one) for one in types)

    def forward(self, data: Any) -> Any:
        for layer in self.layers:
            data = torch.tanh(layer(data.to(layer.weight.dtype)))
        return data.double()


def types(play: Play) -> Any:
    play.seed()
    return numbers(train(play, Mixed(torch.float32, torch.float64)))


def half_types(play: Play) -> Any:
    """16-bit floats with other types: right within the rounding of their type."""
    play.seed()
    return numbers(train(play, Mixed(torch.float16, torch.float32, torch.bfloat16, torch.float64)))


def complex_numbers(play: Play) -> Any:
    class Complex(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(6, 2, dtype=torch.complex64))

        def forward(self, data: Any) -> Any:
            return torch.view_as_real(data.to(torch.complex64) @ self.weight)

    play.seed()
    module = train(play, Complex(), partial(sgd, momentum=0.0))
    return numbers([torch.view_as_real(p.detach()) for p in module.parameters()])


def channels_last(play: Play) -> Any:
    play.seed()
    module = nn.Sequential(nn.Conv2d(3, 4, 3), nn.ReLU(), nn.Conv2d(4, 2, 1)).to(
        memory_format=torch.channels_last
    )

    def loss(model: Any, step: int) -> Callable[[int], torch.Tensor]:
        return lambda rank: (
            model(batch(rank, step, 2, 3, 5, 5).contiguous(memory_format=torch.channels_last)).square().mean()
        )

    return numbers(train(play, module, loss=loss))


def strided(play: Play) -> Any:
    """A weight that is the transpose of its memory."""
    module = net(play)
    module[0].weight = nn.Parameter(module[0].weight.detach().t().contiguous().t())
    return numbers(train(play, module))


def lazy(play: Play) -> Any:
    """A layer whose weights have no shape yet."""
    play.seed()
    return numbers(train(play, nn.Sequential(nn.LazyLinear(4), nn.Linear(4, 2))))


def batch_norm(play: Play) -> Any:
    """Each worker normalizes its own batch; the weights are those of one process that does the same."""
    play.seed()
    module = nn.Sequential(nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2))
    return numbers(train(play, module))


def weight_norm(play: Play) -> Any:
    """A weight is computed from two parameters."""
    module = net(play)
    nn.utils.parametrizations.weight_norm(module[0])
    return numbers(train(play, module))


def reversed_names(play: Play) -> Any:
    """named_parameters in another order than that of use."""
    module = net(play)
    optimizer = play.named_optimizer(sgd(module), list(module.named_parameters())[::-1])
    for step in range(3):
        optimizer.zero_grad()
        play.backward(square(module, step))
        optimizer.step()
    return numbers(module)


class Checkpointed(nn.Module):
    """Layers whose results are computed again in the backward pass, the second one of them twice."""

    def __init__(self, reentrant: bool, times: int) -> None:
        super().__init__()
        self.first, self.again, self.last = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 2)
        self.reentrant, self.times = reentrant, times

    def forward(self, data: Any) -> Any:
        data = torch.tanh(self.first(data))
        for _ in range(self.times):
            data = checkpoint(self._layer, data, use_reentrant=self.reentrant)
        return self.last(data)

    def _layer(self, data: Any) -> Any:
        return torch.tanh(self.again(data))


def checkpointed(play: Play) -> Any:
    play.seed()
    return numbers(train(play, Checkpointed(False, 1)))


def checkpointed_twice(play: Play) -> Any:
    play.seed()
    return numbers(train(play, Checkpointed(False, 2)))


def checkpointed_reentrant(play: Play) -> Any:
    play.seed()
    return numbers(train(play, Checkpointed(True, 1)))


def checkpointed_reentrant_twice(play: Play) -> Any:
    """The gradient of a layer is computed twice in one backward pass."""
    play.seed()
    return numbers(train(play, Checkpointed(True, 2)))


def checkpointed_reentrant_and_clipped(play: Play) -> Any:
    play.seed()
    module = Checkpointed(True, 1)
    return numbers(train(play, module, between=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1)))


def compiled(play: Play) -> Any:
    """torch.compile, without a compiler of C++."""
    module = net(play)
    torch._dynamo.config.optimize_ddp = False  # it wants larger buckets
    model = torch.compile(play.model(module), backend="aot_eager")
    optimizer = play.optimizer(sgd(module), module)
    for step in range(3):
        optimizer.zero_grad()
        play.backward(square(model, step))
        nn.utils.clip_grad_norm_(module.parameters(), 0.1)
        optimizer.step()
    return numbers(module)


def many_parameters(play: Play) -> Any:
    """Sixty layers: many buckets, some of one parameter."""
    play.seed()
    module = nn.Sequential(*(nn.Linear(6, 6) for _ in range(60)))
    return numbers(
        train(play, module, between=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.1), bucket_bytes=500)
    )


PROGRAMS = [
    gradients_that_are_none, unused_by_all, unused_by_one, unused_by_each_another, unused_by_step,
    used_in_another_order, tied, empty_and_scalar, frozen, frozen_in_the_middle, unfrozen_in_the_middle,
    unfrozen_by_a_group, sparse, sparse_without_a_word, types, half_types, complex_numbers,
    channels_last, strided, lazy, batch_norm, weight_norm, reversed_names, checkpointed,
    checkpointed_twice, checkpointed_reentrant, checkpointed_reentrant_twice,
    checkpointed_reentrant_and_clipped, compiled, many_parameters,
]  # fmt: skip
