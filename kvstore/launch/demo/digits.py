"""The handwritten digits that come with scikit-learn: 1797 images of 8 x 8 pixels, nothing to download."""

from __future__ import annotations

import numpy as np
from sklearn.datasets import load_digits

from .training import Data

TEST_SHARE = 5
"""One image in five is kept for the test."""


def load() -> Data:
    """Read the images, scaled to 0..1, and split them; the split never depends on a seed of the user."""
    bunch = load_digits()
    images = np.ascontiguousarray(bunch.data / 16, dtype=np.float32)
    labels = np.asarray(bunch.target, dtype=np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    test, rest = np.split(order, [len(labels) // TEST_SHARE])
    return Data(images[rest], labels[rest], images[test], labels[test])
