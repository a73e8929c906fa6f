"""A multi-layer perceptron with ReLU and softmax cross-entropy, as plain functions on a dict of arrays."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Tensors = dict[str, Array]

#: Widths of the layers: an image of 8 x 8 pixels, and ten classes.
SIZES = (64, 128, 10)


def initial(seed: int) -> Tensors:
    """Return He-normal weights and zero biases: ``fc1.weight``, ``fc1.bias``, ``fc2.weight``, ..."""
    random = np.random.default_rng(seed)
    tensors: Tensors = {}
    for layer, (fan_in, fan_out) in enumerate(itertools.pairwise(SIZES), start=1):
        scale = np.float32(np.sqrt(2 / fan_in))
        tensors[f"fc{layer}.weight"] = scale * random.standard_normal((fan_in, fan_out), dtype=np.float32)
        tensors[f"fc{layer}.bias"] = np.zeros(fan_out, np.float32)
    return tensors


def _activations(weights: Tensors, images: Array) -> list[Array]:
    """Return the input of each layer, and the logits."""
    values = [images]
    for layer in range(1, len(SIZES)):
        values.append(values[-1] @ weights[f"fc{layer}.weight"] + weights[f"fc{layer}.bias"])
        if layer < len(SIZES) - 1:
            np.maximum(values[-1], 0, out=values[-1])
    return values


def gradients(weights: Tensors, images: Array, labels: Labels) -> Tensors:
    """Return the gradient of the sum of the cross-entropy over the images.

    Sums of the shards of a batch add up to that of the batch. The optimizer divides (``rescale_grad``).
    """
    *inputs, logits = _activations(weights, images)
    error = _softmax(logits)
    error[np.arange(len(labels)), labels] -= 1
    result: Tensors = {}
    for layer in range(len(inputs), 0, -1):
        before = inputs[layer - 1]
        result[f"fc{layer}.weight"] = before.T @ error
        result[f"fc{layer}.bias"] = error.sum(axis=0)
        if layer > 1:
            error = (error @ weights[f"fc{layer}.weight"].T) * (before > 0)
    return result


def _softmax(logits: Array) -> Array:
    powers: Array = np.exp(logits - logits.max(axis=1, keepdims=True))
    powers /= powers.sum(axis=1, keepdims=True)
    return powers


def accuracy(weights: Tensors, images: Array, labels: Labels) -> float:
    """Return the share of the images whose largest logit is at their label."""
    return float((_activations(weights, images)[-1].argmax(axis=1) == labels).mean())
