"""Payloads as bytes, and the size from which they are passed in shared memory."""

from __future__ import annotations

from typing import Any

import numpy as np

from ...entry import Array

#: Payloads of at least this size are passed in shared memory; smaller ones cost less in a message.
SHARED_BYTES = 16 * 1024

#: Id of the first row of a reply with rows, where that row is the value of each absent row. It is sent if
#: absent rows are not zeros; a negative zero counts as no zero.
ABSENT = -1


def as_bytes(array: Array) -> memoryview:
    """View the memory of a contiguous array of any element type."""
    flat: Any = array.reshape(-1).view(np.uint8) if array.size else b""
    return memoryview(flat)
