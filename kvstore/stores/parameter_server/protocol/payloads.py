"""Payloads: arrays as bytes, and from which size on shared memory is the better way."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...entry import Array

#: Values from this size on go through shared memory; smaller ones cost less in a message.
SHARED_BYTES = 16 * 1024

#: Id of the first row in an answer with rows of a table, if that row is what each absent one is. It is sent
#: where these are something else than zeros; a zero with a sign is.
ABSENT = -1


def as_bytes(array: Array) -> memoryview:
    """View the memory of a contiguous array, whatever its element type."""
    flat: Any = array.reshape(-1).view(np.uint8) if array.size else b""
    return memoryview(flat)
