"""A program of a user, played in one of the ways in which gradients are exchanged.

All programs are written once, against `Play`: what differs between one process, DistributedDataParallel and
`DistributedOptimizer` is here, and is what a user would change.
"""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kvstore as kv
from kvstore.settings.launchers import detect_placement
from kvstore.torch import DistributedOptimizer, HookState, allreduce_hook

Tensor = torch.Tensor
#: Ways to play, as `outcomes.WAYS` says: alone, by DistributedDataParallel, or by DistributedOptimizer.
Way = dict[str, Any]


class Play:
    """One run of one program: the objects that it builds, and the place of this process."""

    def __init__(self, way: Way, size: int, store: kv.KVStore | None) -> None:
        self.way, self.size, self.store = way, size, store
        self.kind = way["kind"]
        self.rank = detect_placement().rank if self.kind != "alone" else 0
        #: The ranks whose batches this process computes.
        self.ranks = range(size) if self.kind == "alone" else range(self.rank, self.rank + 1)
        #: By how much a gradient is smaller here, before it is summed, than on a worker.
        self.scale = len(self.ranks)
        self._made: list[DistributedOptimizer] = []
        self._models = 0

    # ------------------------------------------------------------------------------------ what differs

    def seed(self, number: int = 1) -> None:
        """Let random numbers, such as first weights, differ from worker to worker."""
        torch.manual_seed(number + 1000 * self.rank)

    def model(self, module: nn.Module, **options: Any) -> Any:
        """Return what to call."""
        if self.kind not in ("ddp", "hook"):
            return module
        model = DistributedDataParallel(module, bucket_cap_mb=0.0001, **options)
        if self.kind == "hook":
            assert self.store is not None
            self._models += 1
            state = HookState(self.store, prefix=f"{self._models}.", overlap=self.way["overlap"])
            model.register_comm_hook(state, allreduce_hook)
        return model

    def optimizer(self, inner: Any, *modules: nn.Module, **options: Any) -> Any:
        """Return the optimizer of a program: of all parameters of the modules."""
        if self.kind not in ("optimizer", "store"):
            return inner
        named = [pair for module in modules for pair in module.named_parameters()]
        return self.named_optimizer(inner, named, **options)

    def named_optimizer(self, inner: Any, named: Iterable[tuple[str, Any]], **options: Any) -> Any:
        """Do the same, for parameters by name."""
        if self.kind not in ("optimizer", "store"):
            return inner
        assert self.store is not None
        settings = {"bucket_bytes": 64, "prefix": f"{len(self._made)}.", **options}
        if self.kind == "store":
            inner = _rule(inner)
            settings["update_on_kvstore"] = True
        if self.way.get("whole"):
            settings["whole_steps"] = True
        made = DistributedOptimizer(inner, named, self.store, overlap=self.way["overlap"], **settings)
        self._made.append(made)
        return made

    def backward(self, loss: Callable[[int], Tensor], divides: bool = True) -> None:
        """Compute the gradients of the mean, or sum, over the losses of all ranks."""
        for rank in self.ranks:
            (loss(rank) / (self.scale if divides else 1)).backward()

    def no_sync(self, model: Any, optimizer: Any) -> AbstractContextManager[Any]:
        """Run a pass whose gradients are not sent."""
        if self.kind in ("ddp", "hook"):
            return model.no_sync()  # type: ignore[no-any-return]
        return optimizer.no_sync() if self.kind in ("optimizer", "store") else contextlib.nullcontext()

    def join(self, model: Any) -> AbstractContextManager[Any]:
        """Be in a loop with fewer batches on some workers."""
        return model.join() if self.kind in ("ddp", "hook") else contextlib.nullcontext()

    @property
    def is_alone(self) -> bool:
        """Whether this process plays all workers."""
        return self.kind == "alone"

    def close(self) -> None:
        """Take all hooks away."""
        for made in self._made:
            made.close()


def _rule(inner: Any) -> kv.optimizer.Optimizer:
    """Return the rule of kvstore that does what an optimizer of torch does."""
    (group,) = inner.param_groups
    common = {"learning_rate": float(group["lr"]), "wd": group["weight_decay"]}
    if type(inner) is torch.optim.SGD:
        return kv.optimizer.SGD(momentum=group["momentum"], **common)
    beta1, beta2 = group["betas"]
    return kv.optimizer.Adam(beta1=beta1, beta2=beta2, epsilon=group["eps"], **common)


@contextlib.contextmanager
def played(way: Way, size: int, name: str, folder: str) -> Iterator[Play]:
    """Yield a play with a store and a process group of its own, which are gone at the end."""
    with contextlib.ExitStack() as stack:
        if way["kind"] in ("ddp", "hook"):
            stack.enter_context(_group(f"{folder}/{name}.meeting", size))
        store = None
        if way["kind"] not in ("alone", "ddp"):
            store = stack.enter_context(kv.create(way["store"], group=name))
        play = Play(way, size, store)
        stack.callback(gc.collect)  # torch may hang where a model outlives its group
        stack.callback(play.close)
        yield play


@contextlib.contextmanager
def _group(meeting: str, size: int) -> Iterator[None]:
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    patience = timedelta(seconds=float(os.environ["KVSTORE_TIMEOUT"]))
    dist.init_process_group(
        "gloo",
        init_method=f"file://{meeting}",
        rank=detect_placement().rank,
        world_size=size,
        timeout=patience,
    )
    try:
        dist.barrier()  # torch connects late: one that has left would be a broken connection
        yield
    finally:
        dist.destroy_process_group()


# ------------------------------------------------------------------------------- what programs have in common

STEPS = 3


def net(play: Play, width: int = 6) -> nn.Sequential:
    """Return a small network whose weights differ from worker to worker, until they are shared."""
    play.seed()
    return nn.Sequential(nn.Linear(width, 5), nn.Tanh(), nn.Linear(5, 2))


def batch(rank: int, step: int, *shape: int) -> Tensor:
    """Return the numbers of a rank in a step."""
    random = torch.Generator().manual_seed(1 + 1000 * step + rank)
    return torch.randn(shape or (4, 6), generator=random)


def square(model: Any, step: int) -> Callable[[int], Tensor]:
    """Return the loss of a step, by rank."""
    return lambda rank: (model(batch(rank, step)) - 1.0).square().mean()


def sgd(module: nn.Module, **options: Any) -> torch.optim.SGD:
    """Return the usual optimizer."""
    return torch.optim.SGD(module.parameters(), **{"lr": 0.2, "momentum": 0.9, **options})


def numbers(*values: Any) -> list[list[float]]:
    """Return the values to compare: the numbers of modules, tensors and numbers, exactly."""
    return [_flat(one) for one in values]


def _flat(one: Any) -> list[float]:
    if isinstance(one, nn.Module):
        return [float(x) for p in one.parameters() for x in p.detach().double().flatten()]
    if isinstance(one, (list, tuple)):
        return [x for part in one for x in _flat(part)]
    return [] if one is None else torch.as_tensor(one).detach().double().flatten().tolist()  # type: ignore[no-any-return]


def gradients(module: nn.Module) -> list[Tensor | None]:
    """Return copies of all gradients."""
    return [None if p.grad is None else p.grad.detach().clone() for p in module.parameters()]


def train(
    play: Play,
    module: nn.Module | None = None,
    make: Callable[[nn.Module], Any] = sgd,
    between: Callable[[nn.Module], None] = lambda module: None,
    loss: Callable[[Any, int], Callable[[int], Tensor]] = square,
    steps: int = STEPS,
    ddp: dict[str, Any] | None = None,
    **options: Any,
) -> nn.Module:
    """Train in the most usual loop; `between` runs after the backward pass and before the step."""
    module = net(play) if module is None else module
    model = play.model(module, **(ddp or {}))
    optimizer = play.optimizer(make(module), module, **options)
    for step in range(steps):
        optimizer.zero_grad()
        play.backward(loss(model, step))
        between(module)
        optimizer.step()
    return module
