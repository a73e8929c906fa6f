"""The training loop: replicas compute gradients, the store sums them and updates the weights.

The same code trains in one process or in several. Each batch is cut into ``workers * replicas`` shards in
rank order, and a store sums in that order: four replicas in one process and four processes with one replica
get the same gradients.
"""

from __future__ import annotations

import contextlib
import hashlib
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

import kvstore as kv

from . import network
from .network import Array, Labels, Tensors

#: Images of one step, over all replicas of all workers.
BATCH = 64
#: Settings for this network; other optimizers run with their defaults.
TUNED: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9},
    "nag": {"learning_rate": 0.1, "momentum": 0.9},
    "adam": {"learning_rate": 0.005},
    "lamb": {"learning_rate": 0.01},
    "lars": {"learning_rate": 10.0},
}


class Data(NamedTuple):
    """Images ``(n, 64)`` in 0..1 and labels ``(n,)`` in 0..9, for training and for the test."""

    images: Array
    labels: Labels
    test_images: Array
    test_labels: Labels


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training run; with ``lr=None`` the peak learning rate depends on the optimizer."""

    store: str = "local"
    optimizer: str = "sgd"
    replicas: int = 4
    epochs: int = 30
    seed: int = 0
    lr: float | None = None


@dataclass
class Stopwatch:
    """Seconds by name."""

    seconds: dict[str, float] = field(default_factory=dict)

    @contextlib.contextmanager
    def __call__(self, name: str) -> Iterator[None]:
        """Add the time inside the ``with`` block to `name`."""
        start = time.perf_counter()
        yield
        self.seconds[name] = self.seconds.get(name, 0.0) + time.perf_counter() - start


@dataclass(frozen=True)
class Outcome:
    """The result of a run: test accuracy in 0..1, seconds and their parts, a digest of the weights."""

    accuracy: float
    seconds: float
    parts: dict[str, float]
    weights: str


def train(
    store: kv.KVStore, settings: TrainingSettings, data: Data, show: Callable[[float], None]
) -> Outcome:
    """Train with a new store; `show` is called after each epoch with the test accuracy."""
    replicas = [network.initial(settings.seed) for _ in range(settings.replicas)]
    steps = len(data.labels) // BATCH
    store.init(list(replicas[0]), list(replicas[0].values()))
    store.set_optimizer(rule(settings, steps * settings.epochs))
    watch, accuracy, start = Stopwatch(), 0.0, time.perf_counter()
    random = np.random.default_rng(settings.seed)
    for _ in range(settings.epochs):
        order = random.permutation(len(data.labels))[: steps * BATCH]
        for batch in np.split(order, steps):
            step(store, replicas, data, batch, watch)
        with watch("evaluation"):
            accuracy = network.accuracy(replicas[0], data.test_images, data.test_labels)
        show(accuracy)
    return Outcome(accuracy, time.perf_counter() - start, watch.seconds, digest(replicas[0]))


def rule(settings: TrainingSettings, updates: int) -> kv.optimizer.Optimizer:
    """Return the optimizer with a cosine schedule: a warm-up, then down to a hundredth of the peak."""
    options = TUNED.get(settings.optimizer.lower(), {})
    if settings.lr is not None:
        options = {**options, "learning_rate": settings.lr}
    peak = kv.optimizer.create(settings.optimizer, **options).learning_rate
    schedule = kv.lr_scheduler.CosineScheduler(
        max_update=updates, base_lr=peak, final_lr=peak / 100, warmup_steps=updates // 20
    )
    return kv.optimizer.create(
        settings.optimizer, rescale_grad=1 / BATCH, **{**options, "lr_scheduler": schedule}
    )


def step(store: kv.KVStore, replicas: list[Tensors], data: Data, batch: Labels, watch: Stopwatch) -> None:
    """Train with one batch: each replica computes the gradient of its shard; push and pull all keys.

    `pull` would wait for the slowest worker too; the barrier separates that time from that of the pull.
    """
    names = list(replicas[0])
    first = store.rank * len(replicas)
    shards = np.array_split(batch, store.num_workers * len(replicas))[first : first + len(replicas)]
    with watch("forward + backward"):
        parts = [
            network.gradients(weights, data.images[shard], data.labels[shard])
            for weights, shard in zip(replicas, shards, strict=True)
        ]
    with watch("push"):
        store.push(names, [[part[name] for part in parts] for name in names])
    if store.num_workers > 1 and "async" not in store.type:  # only then rounds wait for all workers
        with watch("waiting for others"):
            store.barrier()
    with watch("pull"):
        store.pull(names, out=[[weights[name] for weights in replicas] for name in names])


def digest(weights: Tensors) -> str:
    """Return twelve hexadecimal digits that differ if one bit of the weights differs."""
    sha = hashlib.sha256()
    for name, array in sorted(weights.items()):
        sha.update(name.encode())
        sha.update(array.tobytes())
    return sha.hexdigest()[:12]
