"""Ways to train a model in PyTorch: each has a step, and the exchange of a step alone."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kvstore as kv
from bench.cases.training import EXACT, WAYS
from bench.peers.base import Call
from bench.peers.group.link import Place
from bench.peers.training.bare import Averaging
from bench.peers.training.models import Batch
from kvstore.torch import DistributedOptimizer, HookState, allreduce_hook

MOMENTUM = 0.9

Open = Callable[[], kv.KVStore]


@dataclass
class Way:
    """A step, which returns its loss; the optimizer; the exchange, without passes through the model."""

    step: Callable[[], Any]
    rule: Any
    exchange: Call | None = None


@dataclass
class Bucket:
    """A bucket that DistributedDataParallel passes to a hook, kept for calls without a backward pass."""

    number: int
    last: bool
    memory: torch.Tensor
    tensors: list[torch.Tensor]

    def index(self) -> int:
        return self.number

    def is_last(self) -> bool:
        return self.last

    def buffer(self) -> torch.Tensor:
        return self.memory

    def parameters(self) -> list[torch.Tensor]:
        return self.tensors


class Ways:
    """Makes the ways; all that use DistributedDataParallel have buckets of the same size.

    Parameters
    ----------
    batches : callable
        Returns the inputs of the next step, and their classes.
    open_store : callable
        Returns a store of its own for each way.
    rate : float
        The learning rate.
    threshold : float
        Of 2bit.
    place : Place, optional
        The place of this worker; for the way in C.
    """

    def __init__(
        self,
        batches: Callable[[], Batch],
        open_store: Open,
        rate: float = 0.001,
        threshold: float = 0.01,
        place: Place | None = None,
    ) -> None:
        self._batches, self._open, self._place = batches, open_store, place
        self._rate, self._threshold = rate, threshold
        self._buckets: list[Bucket] = []
        self._momenta: list[torch.Tensor] = []

    def make(self, way: str, model: nn.Module) -> Way:
        """Make a way of `bench.cases.training.WAYS`, with a model of its own."""
        made: Way = getattr(self, f"_{way}")(model)
        return made

    def _alone(self, model: nn.Module) -> Way:
        return self._way(model, self._sgd(model))

    def _bare(self, model: nn.Module) -> Way:
        assert self._place is not None
        rule = Averaging(self._sgd(model), self._place)
        return self._way(model, rule, rule.exchange)

    def _gloo(self, model: nn.Module) -> Way:
        return self._way(_parallel(model), self._sgd(model), self._all_reduce)

    def _hook(self, model: nn.Module) -> Way:
        wrapped, state = _parallel(model), HookState(self._open())
        wrapped.register_comm_hook(state, lambda state, bucket: self._noted(state, bucket))
        return self._way(wrapped, self._sgd(model), lambda: self._call_hook(state))

    def _optimizer(self, model: nn.Module) -> Way:
        return self._distributed(model, self._open())

    def _packed(self, model: nn.Module) -> Way:
        store = self._open()
        store.set_gradient_compression({"type": "2bit", "threshold": self._threshold})
        return self._distributed(model, store)

    def _store(self, model: nn.Module) -> Way:
        rule = kv.optimizer.SGD(learning_rate=self._rate, momentum=MOMENTUM)
        way = self._distributed(model, self._open(), rule)
        # Other ways also change the model; the store keeps the weights of this way.
        note = way.rule.note_weights
        return Way(_after(note, way.step), way.rule, _after(note, way.exchange))

    def _distributed(self, model: nn.Module, store: kv.KVStore, rule: Any = None) -> Way:
        inner, named = rule or self._sgd(model), model.named_parameters()
        # Not compared: ways share the weights, which differ by worker after the way without exchange.
        options = {"update_on_kvstore": rule is not None, "check_every": 0}
        outer = DistributedOptimizer(inner, named, store, **options)
        return self._way(model, outer, lambda: _synchronize(model, outer))

    def _sgd(self, model: nn.Module) -> Any:
        """Make torch's SGD; all ways share the memory of its states."""
        parameters = list(model.parameters())
        self._momenta = self._momenta or [torch.zeros_like(parameter) for parameter in parameters]
        rule = torch.optim.SGD(parameters, lr=self._rate, momentum=MOMENTUM)
        for parameter, momentum in zip(parameters, self._momenta, strict=True):
            rule.state[parameter]["momentum_buffer"] = momentum.zero_()
        return rule

    def _way(self, model: nn.Module, rule: Any, exchange: Call | None = None) -> Way:
        def step() -> Any:
            inputs, wanted = self._batches()
            rule.zero_grad()
            loss = nn.functional.cross_entropy(model(inputs), wanted)
            loss.backward()
            rule.step()
            return loss.detach()

        return Way(step, rule, exchange)

    def _noted(self, state: HookState, bucket: Any) -> Any:
        """Run as the hook, and keep the buckets of the newest step."""
        if bucket.index() == 0:
            self._buckets = []
        kept = Bucket(bucket.index(), bucket.is_last(), bucket.buffer(), bucket.parameters())
        self._buckets.append(kept)
        return allreduce_hook(state, bucket)

    def _call_hook(self, state: HookState) -> None:
        for bucket in self._buckets:
            allreduce_hook(state, bucket)

    def _all_reduce(self) -> None:
        """Average as DistributedDataParallel does, in the memory of its buckets."""
        works = []
        for bucket in self._buckets:
            bucket.memory.div_(dist.get_world_size())
            works.append(dist.all_reduce(bucket.memory, async_op=True))
        for work in works:
            work.wait()


def _parallel(model: nn.Module) -> Any:
    """Wrap a model with the fastest options: gradients are views of buckets, and only they are sent."""
    return DistributedDataParallel(model, forward_sync_buffers=False, gradient_as_bucket_view=True)


def _after(first: Call, call: Call | None) -> Call:
    """Return a call that makes another one before it."""
    assert call is not None

    def both() -> Any:
        first()
        return call()

    return both


def _synchronize(model: nn.Module, rule: DistributedOptimizer) -> None:
    """Exchange the gradients of the previous step again."""
    gradients = [parameter.grad for parameter in model.parameters()]
    rule.zero_grad()
    for parameter, gradient in zip(model.parameters(), gradients, strict=True):
        parameter.grad = gradient
    rule.synchronize()


def sample(model: nn.Module) -> torch.Tensor:
    """Return a copy of about a million weights, of all tensors."""
    tensors = list(model.parameters())
    every = max(1, sum(tensor.numel() for tensor in tensors) >> 20)
    return torch.cat([tensor.detach().flatten()[::every].clone() for tensor in tensors])


def compare(way: str, change: torch.Tensor, expected: torch.Tensor, tolerance: float) -> None:
    """Check that a way has changed the weights as DistributedDataParallel with gloo has.

    Raises
    ------
    AssertionError
        The changes differ by more than this share.
    """
    share = float((change - expected).norm() / expected.norm())
    if way in EXACT and not share <= tolerance:
        raise AssertionError(f"{WAYS[way]} has other changes of weights than {WAYS['gloo']}: by {share:.2g}")
