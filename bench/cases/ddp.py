"""What is measured of training in PyTorch: models, and batches."""

from __future__ import annotations

from dataclasses import dataclass

from bench.cases.base import Case


@dataclass(frozen=True)
class DdpCase(Case):
    """A model of `bench.peers.ddp`, and the share of a batch that each of two workers has."""

    name: str
    model: str
    batch: int


CASES = [
    DdpCase("digits: 64-128-10, 32 images", "digits", 32),
    DdpCase("transformer: 6 layers of 256, 4.8 M parameters, 8 x 32 tokens", "transformer", 8),
    DdpCase("perceptron: 6 layers of 2048, 25 M parameters, 32 rows", "perceptron", 32),
]
