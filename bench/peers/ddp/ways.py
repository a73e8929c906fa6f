"""Ways to train a model in PyTorch, each with a copy of its own, and a worker that takes turns with them."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import kvstore as kv
from bench.cases.ddp import DdpCase
from bench.peers.base import Array
from bench.peers.group.base import GroupPeer
from bench.peers.group.link import Place
from kvstore.torch import DistributedOptimizer, HookState, allreduce_hook

RATE, MOMENTUM = 0.001, 0.9
RANK = int(os.environ.get("KVSTORE_RANK", "0"))


class Training(GroupPeer):
    """Each way is a variant; a turn is some steps of one, after a barrier."""

    case_type = DdpCase

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        torch.set_num_threads(1)
        meeting = f"file://{os.getcwd()}/meeting"
        dist.init_process_group(
            "gloo", init_method=meeting, rank=RANK, world_size=2, timeout=timedelta(minutes=3)
        )
        self._stores: list[kv.KVStore] = []

    def prepare(self, case: DdpCase) -> list[Array]:
        """Make three steps in each way; there is nothing to compare with other peers."""
        data = MODELS[case.model][1](case.batch)
        ways = {"alone": alone, "gloo": gloo, "hook": hook, "optimizer": optimizer, "store": on_store}
        models = {way: _made(case.model) for way in ways}
        self.variants = {way: make(models[way], data, self._open) for way, make in ways.items()}
        for step in self.variants.values():
            for _ in range(3):
                step()
        _compare({way: model for way, model in models.items() if way != "alone"})
        return []

    def run(self, variant: str, repeats: int) -> list[float]:
        dist.barrier()
        before = time.process_time()
        times = [_timed(self.variants[variant]) for _ in range(repeats)]
        self.cpu = time.process_time() - before
        return times

    def _open(self) -> kv.KVStore:
        made = kv.create("shared", timeout=120)
        self._stores.append(made)
        return made

    def release(self) -> None:
        super().release()
        for store in self._stores:
            store.close()
        self._stores = []

    def close(self) -> None:
        dist.destroy_process_group()


def _made(name: str) -> nn.Module:
    torch.manual_seed(0)
    model: nn.Module = MODELS[name][0]()
    return model


def _compare(models: dict[str, nn.Module]) -> None:
    """Make sure that all ways have led to the same weights."""
    expected = list(models["gloo"].parameters())
    for way, model in models.items():
        for one, other in zip(model.parameters(), expected, strict=True):
            if not torch.allclose(one, other, rtol=1e-3, atol=1e-5):
                raise AssertionError(f"{way} has led to other weights than DistributedDataParallel with gloo")


def _timed(step: Callable[[], None]) -> float:
    start = time.perf_counter()
    step()
    return time.perf_counter() - start


# -------------------------------------------------------------------------------------------------- ways


def _stepper(model: nn.Module, data: tuple[Any, Any], rule: Any) -> Callable[[], None]:
    inputs, wanted = data

    def step() -> None:
        rule.zero_grad()
        nn.functional.cross_entropy(model(inputs), wanted).backward()
        rule.step()

    return step


def _sgd(model: nn.Module) -> Any:
    return torch.optim.SGD(model.parameters(), lr=RATE, momentum=MOMENTUM)


def alone(model: nn.Module, data: Any, store: Callable[[], kv.KVStore]) -> Callable[[], None]:
    return _stepper(model, data, _sgd(model))


def gloo(model: nn.Module, data: Any, store: Callable[[], kv.KVStore]) -> Callable[[], None]:
    return _stepper(DistributedDataParallel(model), data, _sgd(model))


def hook(model: nn.Module, data: Any, store: Callable[[], kv.KVStore]) -> Callable[[], None]:
    wrapped = DistributedDataParallel(model)
    wrapped.register_comm_hook(HookState(store()), allreduce_hook)
    return _stepper(wrapped, data, _sgd(model))


def optimizer(model: nn.Module, data: Any, store: Callable[[], kv.KVStore]) -> Callable[[], None]:
    return _stepper(model, data, DistributedOptimizer(_sgd(model), model.named_parameters(), store()))


def on_store(model: nn.Module, data: Any, store: Callable[[], kv.KVStore]) -> Callable[[], None]:
    rule = kv.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM)
    named = model.named_parameters()
    return _stepper(model, data, DistributedOptimizer(rule, named, store(), update_on_kvstore=True))


# ------------------------------------------------------------------------------------------------ models


def _digits() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def _perceptron() -> nn.Module:
    layers = [part for _ in range(6) for part in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


class Transformer(nn.Module):
    """An encoder of 6 layers, which classifies sequences."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(256, 4, 1024, dropout=0.0, batch_first=True)
        self.layers = nn.TransformerEncoder(layer, 6, enable_nested_tensor=False)
        self.last = nn.Linear(256, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.layers(tokens).mean(dim=1))
        return out


def _rows(*shape: int) -> Callable[[int], tuple[Any, Any]]:
    """Return what makes the inputs of this worker, and their classes."""

    def make(batch: int) -> tuple[Any, Any]:
        source = torch.Generator().manual_seed(1 + RANK)
        inputs = torch.randn(batch, *shape, generator=source)
        return inputs, torch.randint(0, 10, (batch,), generator=source)

    return make


MODELS = {
    "digits": (_digits, _rows(64)),
    "transformer": (Transformer, _rows(32, 256)),
    "perceptron": (_perceptron, _rows(2048)),
}
