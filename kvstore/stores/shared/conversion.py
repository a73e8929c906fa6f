"""Results in another element type than the key's."""

from __future__ import annotations

import numpy as np

from ..entry import Array
from .native import _shared as shm


def convert(handle: shm.Handle, direct: list[Array], out: Array) -> None:
    """Write the result to an array of another element type.

    It is taken from an array that the round has filled, if there is one: of a small key, each worker has its
    own result sooner than the store has its.
    """
    with np.errstate(all="ignore"):
        np.copyto(out, direct[0] if direct else handle.value(), casting="unsafe")
