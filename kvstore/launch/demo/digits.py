"""The handwritten digits of scikit-learn: 1797 images of 8 x 8 pixels."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from .training import Data

TEST_SHARE = 5  # one image in five is for the test

_FILE = "datasets/data/digits.csv.gz"
_sklearn = find_spec("sklearn")
if _sklearn is None:
    raise ModuleNotFoundError("No module named 'sklearn'", name="sklearn")
_FOLDERS = [Path(folder) for folder in _sklearn.submodule_search_locations or ()]


def load() -> Data:
    """Return the images, scaled to 0..1, in a split that does not depend on the seed of the user."""
    numbers = _numbers()
    images = np.ascontiguousarray(numbers[:, :-1] / 16, dtype=np.float32)
    labels = np.asarray(numbers[:, -1], dtype=np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    test, rest = np.split(order, [len(labels) // TEST_SHARE])
    return Data(images[rest], labels[rest], images[test], labels[test])


def _numbers() -> npt.NDArray[Any]:
    """Return pixels and label of each image, from the file: the import of scikit-learn needs a second."""
    for folder in _FOLDERS:
        if (folder / _FILE).exists():
            return np.loadtxt(folder / _FILE, delimiter=",")

    from sklearn.datasets import load_digits

    bunch = load_digits()
    return np.column_stack([bunch.data, bunch.target])
