"""Programs that DistributedOptimizer refuses; tests/torch_door compares the words of each worker."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

import kvstore as kv
from frameworks import procs_torch
from frameworks.procs_torch import network, place, refused, weights
from kvstore.torch import DistributedOptimizer

DATA = torch.ones(1, 64)


@contextlib.contextmanager
def training(
    store_name: str, options: dict[str, Any], on_store: bool = False, rate: float = 0.1
) -> Iterator[tuple[nn.Module, Any]]:
    """Yield a model and its optimizer."""
    place()
    model = network(0)
    with kv.create(store_name) as store:
        rule: Any = kv.optimizer.SGD(learning_rate=rate)
        if not on_store:
            rule = torch.optim.SGD(model.parameters(), lr=rate)
        named = model.named_parameters()
        yield model, DistributedOptimizer(rule, named, store, update_on_kvstore=on_store, **options)


def _step(model: nn.Module, optimizer: Any) -> None:
    optimizer.zero_grad()
    model(DATA).sum().backward()
    optimizer.step()


def _first(steps: Callable[[], Any], count: int = 6) -> list[Any]:
    """Return in which repetition something is refused, and the words."""
    number = 0
    try:
        while number < count:
            steps()
            number += 1
    except kv.KVStoreError as error:
        return [number, f"{type(error).__name__}: {error}"]
    return [number, ""]


def skipped_step(store_name: str, options: dict[str, Any]) -> list[Any]:
    """Worker 1 clears its gradients instead of a step; all get an error in the next pass and later."""
    with training(store_name, options) as (model, optimizer):
        _step(model, optimizer)
        if procs_torch.RANK == 1:
            model(DATA).sum().backward()
            model.zero_grad()
        else:
            _step(model, optimizer)
        return [*_first(lambda: _step(model, optimizer)), refused(optimizer.step)]


def equal_steps(store_name: str, options: dict[str, Any], on_store: bool) -> list[Any]:
    """Compare in each step the values that must be equal."""
    with training(store_name, {"check_every": 1, **options}, on_store) as (model, optimizer):
        return _first(lambda: _step(model, optimizer))


def skipped_by_one(store_name: str, options: dict[str, Any]) -> list[Any]:
    """Worker 1 decides by its own loss against a step, after backward."""
    with training(store_name, options) as (model, optimizer):
        _step(model, optimizer)
        optimizer.zero_grad()
        model(DATA).sum().backward()
        if procs_torch.RANK == 0:
            optimizer.step()
        before = weights(model)
        found = _first(lambda: _step(model, optimizer), 2)
        assert weights(model) == before
        return found


def other_settings(store_name: str, options: dict[str, Any], when: str) -> list[Any]:
    """The rate of worker 1 differs: from the beginning, or by its own schedule."""
    rate = 0.1 + (0.1 * procs_torch.detect_placement().rank if when == "created" else 0.0)
    try:
        with training(store_name, options, rate=rate) as (model, optimizer):
            _step(model, optimizer)
            optimizer.param_groups[0]["lr"] += procs_torch.RANK
            return _first(lambda: _step(model, optimizer))
    except kv.ConfigError as error:
        return [-1, f"ConfigError: {error}"]


def other_weights(store_name: str, options: dict[str, Any]) -> list[Any]:
    """The program changes a weight of worker 1."""
    with training(store_name, options) as (model, optimizer):
        _step(model, optimizer)
        if procs_torch.RANK == 1:
            with torch.no_grad():
                model[0].weight[3, 4] += 1e-6  # type: ignore[index]
        return _first(lambda: _step(model, optimizer))


def summed_twice(store_name: str, options: dict[str, Any]) -> list[str]:
    """Sums are not divided, and a second pass, or a step without zero_grad, would sum them again."""
    with training(store_name, {"average": False, **options}) as (model, optimizer):
        model(DATA).sum().backward()
        found = [refused(model(DATA).sum().backward)]
        optimizer.close()
        optimizer = procs_torch.wrapped(model, optimizer.store, prefix="2.", average=False, **options)
        _step(model, optimizer)
        found += [refused(optimizer.step), refused(model(DATA).sum().backward)]
        optimizer.zero_grad()
        model(DATA).sum().backward()  # and is right again
        assert model[2].bias.grad.tolist() == [2.0] * 10  # type: ignore[union-attr, index]
        return found


def between_passes(store_name: str, options: dict[str, Any]) -> list[Any]:
    """Gradients that are not complete cannot be read; after synchronize they can."""
    with training(store_name, {"backward_passes_per_step": 3, **options}) as (model, optimizer):
        model(DATA).sum().backward()
        found = _readings(model, optimizer)
        optimizer.synchronize()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return found


def in_the_store(store_name: str, options: dict[str, Any]) -> list[Any]:
    """Gradients with which the store updates weights cannot be read: not before step, and not after it."""
    with training(store_name, options, on_store=True) as (model, optimizer):
        found = []
        for _ in range(2):
            optimizer.zero_grad()
            model(DATA).sum().backward()
            found += _readings(model, optimizer)
            optimizer.synchronize()
            found += _readings(model, optimizer)
            optimizer.step()
        return found


def _readings(model: nn.Module, optimizer: Any) -> list[str]:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(torch.ones(1))
    gradient: Any = model[0].weight.grad  # type: ignore[index, union-attr]
    readings: list[Callable[[], Any]] = [
        lambda: nn.utils.clip_grad_norm_(model.parameters(), 1.0),
        lambda: nn.utils.clip_grad_value_(model.parameters(), 1.0),
        lambda: scaler.unscale_(optimizer),
        lambda: scaler.step(optimizer),
        lambda: gradient.data.clamp_(-1, 1),
        lambda: gradient.add_(1.0),
        lambda: gradient.numpy(),
        lambda: torch._foreach_mul_([gradient], 2.0),
        lambda: float(gradient.norm()),
        lambda: str(gradient[0]),
    ]
    return [refused(reading) for reading in readings]


def two_passes_in_the_store(store_name: str, options: dict[str, Any]) -> list[str]:
    """Each pass is an update: a second pass, or zero_grad without step, is refused."""
    with training(store_name, options, on_store=True) as (model, optimizer):
        model(DATA).sum().backward()
        found = [refused(model(DATA).sum().backward), refused(optimizer.zero_grad)]
        optimizer.step()
        _step(model, optimizer)
        return found


def only_local_passes(store_name: str, options: dict[str, Any]) -> list[Any]:
    """A step whose gradients were not averaged."""
    with training(store_name, options) as (model, optimizer):
        with optimizer.no_sync():
            model(DATA).sum().backward()
        before = weights(model)
        found = [refused(optimizer.step)]
        assert weights(model) == before
        optimizer.synchronize()
        optimizer.step()
        assert weights(model) != before
        return found


def one_step_more(store_name: str, options: dict[str, Any], on_store: bool, joins: bool) -> list[Any]:
    """Worker 0 makes a step more; worker 1 has closed its store, with or without `join`."""
    with training(store_name, options, on_store) as (model, optimizer):
        for _ in range(2):
            _step(model, optimizer)
        if procs_torch.RANK == 1:
            if joins:
                optimizer.store.join()
            return ["", weights(model)]
        before = weights(model)
        if joins:
            _step(model, optimizer)
            _step(model, optimizer)
            assert weights(model) != before
            return ["", before]
        return [refused(lambda: _step(model, optimizer)), before if on_store else weights(model)]


def frozen_by_one(store_name: str, options: dict[str, Any], when: str) -> list[str]:
    """A parameter is frozen on worker 1 only."""
    place()
    model, rank = network(0), procs_torch.RANK
    with kv.create(store_name) as store:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        model[0].bias.requires_grad_(when == "later" or rank == 0)
        if when == "created":
            make = DistributedOptimizer
            return [refused(lambda: make(sgd, model.named_parameters(), store, **options))]
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), store, **options)
        _step(model, optimizer)
        model[0].bias.requires_grad_(rank == 0)
        return [refused(lambda: _step(model, optimizer))]


def replaced_in_the_store(store_name: str, options: dict[str, Any]) -> list[str]:
    """The program replaces a gradient that the store has."""
    with training(store_name, options, on_store=True) as (model, optimizer):
        _step(model, optimizer)
        model(DATA).sum().backward()
        model[0].weight.grad = torch.zeros_like(model[0].weight)  # type: ignore[index]
        return [refused(optimizer.step)]


def local_passes_in_the_store(store_name: str, options: dict[str, Any]) -> list[float]:
    """Gradients of a pass in no_sync count in the update of the next pass."""
    with training(store_name, options, on_store=True) as (model, optimizer):
        for _ in range(2):
            optimizer.zero_grad()
            with optimizer.no_sync():
                model(DATA).sum().backward()
            model(DATA).sum().backward()
            optimizer.step()
            model.zero_grad(set_to_none=False)
        return model[2].bias.tolist()  # type: ignore[index, union-attr]


def moved(store_name: str) -> list[str]:
    """A model that was moved after its optimizer was created has no hooks."""
    with training(store_name, {}) as (model, optimizer):
        model.double()
        model(DATA.double()).sum().backward()
        return [refused(optimizer.step), refused(optimizer.zero_grad)]


def attributes() -> list[Any]:
    """An attribute set on the wrapper is set on the wrapped optimizer, unless it replaces a method."""
    with training("local", {}) as (_, optimizer):
        inner = optimizer._optimizer
        optimizer.grad_scale, optimizer.mine = torch.ones(1), 3
        found = [inner.mine, optimizer.mine, inner.grad_scale is optimizer.grad_scale]
        del optimizer.grad_scale
        found += [hasattr(inner, "grad_scale"), hasattr(optimizer, "grad_scale")]
        calls = []
        optimizer.register_step_pre_hook(lambda *_: calls.append("before"))
        optimizer.register_step_post_hook(lambda *_: calls.append("after"))
        step = optimizer.step
        optimizer.step = lambda: [calls.append("step"), step()]
        optimizer.step()
        optimizer.param_groups = [{**group, "lr": 0.25} for group in optimizer.param_groups]
        return [*found, calls, inner.param_groups[0]["lr"]]


def gan(store_name: str, options: dict[str, Any]) -> list[float]:
    """Two models; the loss of the generator leaves gradients in the other, which the model clears."""
    place()
    torch.manual_seed(procs_torch.RANK)
    one, two = nn.Linear(4, 4), nn.Linear(4, 1)
    with kv.create(store_name) as store:
        optimizers = [
            DistributedOptimizer(
                torch.optim.SGD(model.parameters(), lr=0.1),
                model.named_parameters(),
                store,
                prefix=prefix,
                **options,
            )
            for model, prefix in ((one, "one."), (two, "two."))
        ]
        for number in range(3):
            noise = torch.full((2, 4), 1.0 + number + procs_torch.RANK)
            two.zero_grad()
            two(noise).square().sum().backward()
            two(one(noise).detach()).sum().backward()
            optimizers[1].step()
            one.zero_grad()
            two(one(noise)).sum().backward()
            optimizers[0].step()
        for optimizer in optimizers:
            optimizer.close()
        return weights(one) + weights(two)


def changed_weights(store_name: str, options: dict[str, Any]) -> list[str]:
    """The program changes weights that the store updates: before the first step, and between steps."""
    place()
    found = []
    for number, changes_first in enumerate((True, False)):
        model = network(0)
        with kv.create(store_name, group=f"{number}") as store:
            rule = kv.optimizer.SGD(learning_rate=0.1)
            optimizer = DistributedOptimizer(
                rule, model.named_parameters(), store, update_on_kvstore=True, **options
            )
            if not changes_first:
                _step(model, optimizer)
            with torch.no_grad():
                model[0].weight.clamp_(-0.01, 0.01)
            found.append(refused(lambda model=model, optimizer=optimizer: _step(model, optimizer)))
    return found


def step_in_a_hook(store_name: str, options: dict[str, Any]) -> str:
    """A hook of a gradient calls `step`, so that each gradient can be freed in the pass."""
    place()
    model = network(0)
    with kv.create(store_name) as store:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), store, **options)
        model[0].weight.register_post_accumulate_grad_hook(lambda _: optimizer.step())
        return refused(lambda: model(torch.ones(1, 64)).sum().backward())


def changed_rule(store_name: str, options: dict[str, Any]) -> list[float]:
    """The program changes settings of the rule that it gave to `DistributedOptimizer`."""
    place()
    weight = nn.Parameter(torch.zeros(1))
    with kv.create(store_name) as store:
        rule = kv.optimizer.SGD(learning_rate=1.0)
        optimizer = DistributedOptimizer(rule, [("w", weight)], store, update_on_kvstore=True, **options)
        found = []
        for change in ({}, {"learning_rate": 10.0}, {"rescale_grad": 0.5}):
            for name, value in change.items():
                setattr(rule, name, value)
            optimizer.zero_grad()
            weight.sum().backward()
            optimizer.step()
            found.append(float(weight))
        return found


def compiled_backward(store_name: str, options: dict[str, Any]) -> list[float]:
    """A compiled function calls `backward`."""
    place()
    torch.manual_seed(0)
    model = nn.Linear(3, 1)
    with kv.create(store_name) as store:
        sgd = torch.optim.SGD(model.parameters(), lr=0.1)
        optimizer = DistributedOptimizer(sgd, model.named_parameters(), store, **options)

        def run(batch: Any) -> None:
            model(batch).sum().backward()

        compiled = torch.compile(run, backend="eager")
        before = model.weight[0].tolist() + model.bias.tolist()
        for _ in range(3):
            optimizer.zero_grad()
            compiled(torch.full((1, 3), 1.0 + procs_torch.RANK))
            optimizer.step()
        after = model.weight[0].tolist() + model.bias.tolist()
        return [there - here for here, there in zip(before, after, strict=True)]


def untrained_bias() -> list[float]:
    return network(0)[2].bias.tolist()  # type: ignore[union-attr]
