"""Trainings that show the effect of compression: two tasks on scikit-learn's digits, and each codec."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from kvstore import demo
from kvstore.demo import Array, Labels, Tensors


class Batch(NamedTuple):
    """Examples and their classes."""

    examples: Array
    labels: Labels


class Task(Protocol):
    """A network and its data. Gradients are *summed* over a batch's examples."""

    name: str
    epochs: int
    batch: int
    steps: int
    learning_rate: float

    def initial(self, seed: int) -> Tensors: ...

    def epoch(self, random: np.random.Generator) -> Iterator[Batch]: ...

    def gradients(self, weights: Tensors, batch: Batch) -> Tensors: ...

    def accuracy(self, weights: Tensors) -> float: ...


class Digits:
    """The task of ``kvstore demo``, with its settings: classify a digit with one hidden layer."""

    name = "digits"
    epochs, batch, learning_rate = 30, 64, 0.1

    def __init__(self) -> None:
        self._data = demo.load_digits()
        self.steps = len(self._data.labels) // self.batch

    def initial(self, seed: int) -> Tensors:
        return demo.initial_weights(seed)

    def epoch(self, random: np.random.Generator) -> Iterator[Batch]:
        order = random.permutation(len(self._data.labels))[: self.steps * self.batch]
        for chosen in np.split(order, self.steps):
            yield Batch(self._data.images[chosen], self._data.labels[chosen])

    def gradients(self, weights: Tensors, batch: Batch) -> Tensors:
        return demo.sum_gradients(weights, *batch)

    def accuracy(self, weights: Tensors) -> float:
        return demo.label_accuracy(weights, self._data.test_images, self._data.test_labels)


class Sums:
    """Classify pairs of digits by the last digit of their sum.

    The labels do not contain the two digits. The network must read both with the same layer, and must learn
    addition modulo ten from the classes, whose order does not help. The images of the test set are not in
    the training set.
    """

    name = "sums of two digits"
    epochs, batch, steps, learning_rate = 40, 64, 128, 0.05

    #: Widths: pixels of one image, features of one image, two hidden layers, classes.
    widths = (64, 64, 128, 64, 10)
    _tests = 4000

    def __init__(self) -> None:
        data = demo.load_digits()
        self._images, self._labels = data.images, data.labels
        self._test = _pairs(np.random.default_rng(0), data.test_images, data.test_labels, self._tests)

    def initial(self, seed: int) -> Tensors:
        random = np.random.default_rng(seed)
        pixels, features, *rest = self.widths
        shapes = zip((pixels, 2 * features, *rest[:-1]), (features, *rest), strict=True)
        weights: Tensors = {}
        for name, (fan_in, fan_out) in zip(("read", "add1", "add2", "tell"), shapes, strict=True):
            drawn = random.standard_normal((fan_in, fan_out), dtype=np.float32)
            weights[f"{name}.weight"] = drawn * np.float32(np.sqrt(2 / fan_in))
            weights[f"{name}.bias"] = np.zeros(fan_out, np.float32)
        return weights

    def epoch(self, random: np.random.Generator) -> Iterator[Batch]:
        for _ in range(self.steps):
            yield _pairs(random, self._images, self._labels, self.batch)

    def gradients(self, weights: Tensors, batch: Batch) -> Tensors:
        read, *hidden, logits = _forward(weights, batch.examples)
        error = _softmax(logits)
        error[np.arange(len(error)), batch.labels] -= 1
        result: Tensors = {}
        inputs = dict(zip(("add1", "add2", "tell"), (read.reshape(len(error), -1), *hidden), strict=True))
        for name in reversed(inputs):
            result |= _layer(name, inputs[name], error)
            error = (error @ weights[f"{name}.weight"].T) * (inputs[name] > 0)
        return result | _layer("read", _images(batch.examples), error.reshape(read.shape))

    def accuracy(self, weights: Tensors) -> float:
        logits = _forward(weights, self._test.examples)[-1]
        return float((logits.argmax(axis=1) == self._test.labels).mean())


def _pairs(random: np.random.Generator, images: Array, labels: Labels, count: int) -> Batch:
    chosen = random.integers(len(labels), size=(count, 2))
    return Batch(images[chosen], labels[chosen].sum(axis=1) % 10)


def _images(pairs: Array) -> Array:
    """Split pairs into two rows each."""
    return pairs.reshape(-1, pairs.shape[-1])


def _forward(weights: Tensors, pairs: Array) -> list[Array]:
    """Return the features of each image, both hidden layers, and the logits."""
    found = [np.maximum(_images(pairs) @ weights["read.weight"] + weights["read.bias"], 0)]
    value = found[0].reshape(len(pairs), -1)
    for name in ("add1", "add2"):
        value = np.maximum(value @ weights[f"{name}.weight"] + weights[f"{name}.bias"], 0)
        found.append(value)
    return [*found, value @ weights["tell.weight"] + weights["tell.bias"]]


def _layer(name: str, inputs: Array, error: Array) -> Tensors:
    return {f"{name}.weight": inputs.T @ error, f"{name}.bias": error.sum(axis=0)}


def _softmax(logits: Array) -> npt.NDArray[np.float32]:
    powers: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    return powers / powers.sum(axis=1, keepdims=True)


#: Every task by its name.
TASKS: dict[str, type[Task]] = {"digits": Digits, "sums": Sums}


# ------------------------------------------------------------------------------------------------ codecs

#: Thresholds of 2bit and units of 1bit that are tried, in multiples of the gradients' root mean square.
MULTIPLES = (1.0, 3.0, 10.0, 30.0, 100.0)


@dataclass(frozen=True)
class Recipe:
    """The codec and scale with which gradients are sent."""

    codec: str  # `none`, or a codec's name
    #: For 2bit the threshold, for 1bit the unit that +1 and -1 stand for, in multiples of the gradients' root
    #: mean square; 0 for the others
    multiple: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.codec}, {self.multiple:g} RMS" if self.multiple else self.codec

    def params(self, rms: float) -> dict[str, Any]:
        """Return the parameters of `set_gradient_compression`. 1bit sends +1 above zero, -1 otherwise."""
        if self.codec == "2bit":
            return {"type": "2bit", "threshold": self.multiple * rms}
        return {"type": self.codec, **({"threshold": 0.0} if self.codec == "1bit" else {})}

    def unit(self, rms: float) -> float:
        """Return the divisor of gradients before the push, by which the optimizer multiplies the sums."""
        return self.multiple * rms if self.codec == "1bit" else 1.0


def recipes() -> list[Recipe]:
    """Return all recipes, in the order of the tables."""
    coarse = [Recipe(codec, multiple) for codec in ("2bit", "1bit") for multiple in MULTIPLES]
    return [Recipe("none"), Recipe("fp16"), Recipe("bf16"), *coarse]
