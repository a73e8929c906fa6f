"""Cases of training in PyTorch: models, batches, and the hosts of the workers."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from bench.cases.common import Case
from bench.cases.hosts import Link

#: Ways to train, in the order of the tables.
WAYS = {
    "alone": "no exchange",
    "gloo": "DDP, gloo",
    "hook": "DDP, hook",
    "optimizer": "DistributedOptimizer",
    "store": "updates in the store",
    "packed": "DistributedOptimizer, 2bit",
    "bare": "bare C",
}
#: Ways that exchange the same gradients exactly.
EXACT = ("gloo", "hook", "optimizer", "store", "bare")
EXCHANGE = " exchange"  # suffix of a way: the exchange of a step without the step


@dataclass(frozen=True)
class TrainingCase(Case):
    """A model, and how two workers train it."""

    name: str  # unique; `--only` matches it
    model: str  # A name of `bench.peers.training.models`
    batch: int  # examples of each worker in a step
    parameters: int  # parameters of the model
    hosts: int = 1  # 1: both workers are on one host. 2: each host has a worker and a server.
    gbit: float = 0.0  # speed of the links between hosts

    @property
    def job(self) -> Any:
        return self.hosts, self.gbit

    @property
    def nbytes(self) -> int:
        """Return the bytes of the gradients of a worker."""
        return 4 * self.parameters

    @property
    def needed(self) -> float:
        """Return the seconds that the wire needs; each of two hosts sends and receives the whole model."""
        return link(self).needs(self.nbytes) if self.hosts > 1 else 0.0

    @property
    def ways(self) -> tuple[str, ...]:
        """Return the ways of this case: 2bit only between hosts, and the way in C only on one host."""
        left_out = "packed" if self.hosts == 1 else "bare"
        return tuple(way for way in WAYS if way != left_out)


#: The ways with compared losses.
CURVES = ("gloo", "optimizer", "packed")


@dataclass(frozen=True)
class Curves(Case):
    """Losses of a small model over its steps, from several seeds, for each way of `CURVES` on two hosts."""

    name: str  # unique; `--only` matches it
    gbit: float = 1.0  # speed of the links
    #: Steps of a training, and trainings
    steps: int = 1000
    seeds: int = 5
    every: int = 25  # number of steps in a mean loss
    batch: int = 32  # examples of each worker in a step
    rate: float = 0.03  # the highest learning rate
    warm: int = 50  # steps until it is reached; then it falls to zero as a cosine
    multiple: float = 3.0  # 2bit's threshold, in multiples of the first gradients' root mean square

    @property
    def job(self) -> Any:
        return 2, self.gbit

    def rate_of(self, step: int) -> float:
        """Return the learning rate of a step."""
        cosine = (1 + math.cos(math.pi * step / self.steps)) / 2
        return self.rate * min(1.0, (step + 1) / self.warm) * cosine


LOSSES = Curves("2 hosts x 1, 1 Gbit/s: loss over 1,000 steps")


def link(case: TrainingCase | Curves) -> Link:
    """Return the link between the hosts of a case."""
    return Link(case.gbit)


@dataclass(frozen=True)
class Model:
    """A model, the batch of a worker, and its description in the tables."""

    name: str
    batch: int
    parameters: int
    about: str


SMALL = (
    Model("digits", 32, 9_610, "digits: 64-128-10, 32 images"),
    Model("encoder", 8, 4_741_130, "encoder: 6 layers of 256, 4.7 M parameters, 8 x 32 tokens"),
)
LARGE = (
    Model("perceptron", 32, 25_198_602, "MLP: 6 layers of 2048, 25.2 M parameters, 32 rows"),
    Model("resnet50", 8, 25_557_032, "ResNet-50: 25.6 M parameters, 8 images of 64 x 64"),
    Model("transformer", 4, 124_439_808, "transformer: 12 layers of 768, 124 M parameters, 4 x 32 tokens"),
)
#: Hosts, and the speed of their links.
PLACES = ((1, 0.0), (2, 1.0), (2, 10.0))


def all_cases() -> Iterator[TrainingCase | Curves]:
    """Make every case, in the order of the tables."""
    for hosts, gbit in PLACES:
        where = f"2 hosts x 1, {gbit:g} Gbit/s" if hosts > 1 else "1 host x 2"
        for model in LARGE if hosts > 1 else (*SMALL, *LARGE):
            name = f"{where}: {model.about}"
            yield TrainingCase(name, model.name, model.batch, model.parameters, hosts, gbit)
    yield LOSSES
