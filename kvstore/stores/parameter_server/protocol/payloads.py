"""Payloads: arrays as bytes, and from which size on shared memory is the better way."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...entry import Array

#: Values from this size on go through shared memory; smaller ones cost less in a message.
SHARED_BYTES = 16 * 1024

#: The id, in an answer with the rows of a table, of a row that stands for all that are absent. It comes first, and only
#: where absent rows are something else than zeros (of which one sign is another).
ABSENT = -1


def as_bytes(array: Array) -> memoryview:
    """View the memory of a contiguous array, whatever its element type."""
    flat: Any = array.reshape(-1).view(np.uint8) if array.size else b""
    return memoryview(flat)
