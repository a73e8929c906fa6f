"""Which server holds which part of which key."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Sequence

from ..protocol.messages import KeySpec

#: Cuts of a key fall on multiples of this many elements.
GRAIN = 1024

#: Bytes of a row-sparse key from which on its rows are spread over all servers.
_MANY_ROWS = 1 << 20


def count(spec: KeySpec, itemsize: int, slice_bytes: int) -> int:
    """At least as many slices as a dense key is cut into; found without cutting it."""
    return math.prod(spec.shape) // _step(itemsize, slice_bytes) + 1


def _step(itemsize: int, slice_bytes: int) -> int:
    return max(GRAIN, slice_bytes // itemsize // GRAIN * GRAIN)


def sizes(spec: KeySpec, itemsize: int, slice_bytes: int, servers: int) -> list[tuple[int, int, int]]:
    """Cut one key: (start, stop, bytes), in elements, or in rows of a row-sparse key."""
    if spec.sparse:
        return _rows(spec, itemsize, servers)
    elements = math.prod(spec.shape)
    step = _step(itemsize, slice_bytes)
    starts = range(0, elements, step) if elements else (0,)
    return [(at, min(at + step, elements), (min(at + step, elements) - at) * itemsize) for at in starts]


def _rows(spec: KeySpec, itemsize: int, servers: int) -> list[tuple[int, int, int]]:
    rows, width = spec.shape[0], math.prod(spec.shape[1:]) * itemsize
    parts = servers if rows * width > _MANY_ROWS and rows >= servers else 1
    edges = [rows * at // parts for at in range(parts + 1)]
    return [(start, stop, (stop - start) * width) for start, stop in itertools.pairwise(edges)]


def place(sizes: Sequence[int], loads: list[int], allowed: Sequence[int]) -> list[int]:
    """Give each part to the server with the fewest bytes, the largest part first; `loads` are added to.

    Deterministic: among equals the earlier part and the lower server come first.
    """
    servers = [-1] * len(sizes)
    for part in sorted(range(len(sizes)), key=lambda at: (-sizes[at], at)):
        server = min(allowed, key=lambda one: (loads[one], one))
        servers[part] = server
        loads[server] += sizes[part]
    return servers


def release(parts: Iterable[tuple[int, int]], loads: list[int]) -> None:
    """Take (server, bytes) back from the loads."""
    for server, size in parts:
        loads[server] -= size
