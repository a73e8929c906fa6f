"""Models and their batches: generated numbers, as the time does not depend on them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

Batch = tuple[Any, Any]


def make(name: str, seed: int = 0) -> nn.Module:
    """Make a model; alike on all workers."""
    torch.manual_seed(seed)
    model: nn.Module = MODELS[name][0]()
    return model


def twin(name: str, model: nn.Module) -> nn.Module:
    """Make a second model whose weights are in the same memory."""
    with torch.device("meta"):
        other: nn.Module = MODELS[name][0]()
    other.load_state_dict(model.state_dict(), assign=True)
    return other


def batch(name: str, size: int, rank: int) -> Batch:
    """Make the examples of a worker, and their classes."""
    return MODELS[name][1](size, torch.Generator().manual_seed(1 + rank))


def _digits() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def _perceptron() -> nn.Module:
    layers = [part for _ in range(6) for part in (nn.Linear(2048, 2048), nn.ReLU())]
    return nn.Sequential(*layers, nn.Linear(2048, 10))


def _layers(count: int, width: int, heads: int, **more: Any) -> nn.Module:
    layer = nn.TransformerEncoderLayer(width, heads, 4 * width, dropout=0.0, batch_first=True, **more)
    return nn.TransformerEncoder(layer, count, enable_nested_tensor=False)


class Encoder(nn.Module):
    """An encoder of 6 layers, which classifies sequences."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = _layers(6, 256, 4)
        self.last = nn.Linear(256, 10)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.last(self.layers(tokens).mean(dim=1))
        return out


class Transformer(nn.Module):
    """A decoder that predicts the next token; the output layer is the embedding."""

    def __init__(self, layers: int, width: int, heads: int, tokens: int, length: int) -> None:
        super().__init__()
        self.tokens, self.places = nn.Embedding(tokens, width), nn.Embedding(length, width)
        self.layers = _layers(layers, width, heads, norm_first=True, activation="gelu")
        self.norm = nn.LayerNorm(width)
        for table in (self.tokens, self.places):
            nn.init.normal_(table.weight, std=0.02)  # because it is also the output layer

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        later = torch.ones(length, length, dtype=torch.bool).triu(1)
        found = self.tokens(ids) + self.places.weight[:length]
        found = self.norm(self.layers(found, mask=later, is_causal=True))
        return (found @ self.tokens.weight.T).flatten(0, 1)


class Bottleneck(nn.Module):
    """Three convolutions and a shortcut; the parameters are in ResNet-50's order."""

    def __init__(self, width: int, inner: int, stride: int, first: bool) -> None:
        super().__init__()
        self.one = _convolution(width, inner, 1)
        self.three = _convolution(inner, inner, 3, stride)
        self.out = _convolution(inner, 4 * inner, 1)
        self.shortcut = _convolution(width, 4 * inner, 1, stride) if first else nn.Identity()

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        found = self.three(self.one(images).relu()).relu()
        return torch.relu(self.out(found) + self.shortcut(images))


def _convolution(width: int, inner: int, size: int, stride: int = 1) -> nn.Module:
    found = nn.Conv2d(width, inner, size, stride, size // 2, bias=False)
    return nn.Sequential(found, nn.BatchNorm2d(inner))


def _resnet50() -> nn.Module:
    layers: list[nn.Module] = [_convolution(3, 64, 7, 2), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    width = 64
    for blocks, inner, stride in ((3, 64, 1), (4, 128, 2), (6, 256, 2), (3, 512, 2)):
        for block in range(blocks):
            layers.append(Bottleneck(width, inner, 1 if block else stride, block == 0))
            width = 4 * inner
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))


def _rows(*shape: int, classes: int = 10) -> Callable[[int, torch.Generator], Batch]:
    def made(size: int, source: torch.Generator) -> Batch:
        inputs = torch.randn(size, *shape, generator=source)
        return inputs, torch.randint(0, classes, (size,), generator=source)

    return made


def _texts(tokens: int, length: int) -> Callable[[int, torch.Generator], Batch]:
    def made(size: int, source: torch.Generator) -> Batch:
        ids = torch.randint(0, tokens, (size, length + 1), generator=source)
        return ids[:, :-1], ids[:, 1:].flatten()

    return made


#: The constructor of each model, and its batches. The names are those of `bench.cases.training`.
MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[int, torch.Generator], Batch]]] = {
    "digits": (_digits, _rows(64)),
    "encoder": (Encoder, _rows(32, 256)),
    "perceptron": (_perceptron, _rows(2048)),
    "resnet50": (_resnet50, _rows(3, 64, 64, classes=1000)),
    "transformer": (lambda: Transformer(12, 768, 12, 50257, 1024), _texts(50257, 32)),
}
