"""torch.distributed with gloo: in the torch wheel it is TCP over loopback on one machine."""

from __future__ import annotations

from datetime import timedelta
from functools import partial
from typing import Any

import torch
import torch.distributed as dist

from bench.cases.common import MB
from bench.peers.base import Array, Call, all_of
from bench.peers.group.link import Place, free_port, own_address
from bench.peers.shared.all_reduce import AllReducePeer

BUCKETS = (1 * MB, 25 * MB)  # DistributedDataParallel's first, and the others


class GlooWays:
    """Per tensor, asynchronous, flat, and in DistributedDataParallel's buckets (views, no copies)."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)  # type: ignore[call-arg]
        torch.set_num_threads(1)
        limit = timedelta(seconds=120)
        host, port = place.link.gather([own_address(), free_port()])[0]
        store = dist.TCPStore(host, port, place.workers, place.rank == 0, limit)
        where = {"rank": place.rank, "world_size": place.workers}
        dist.init_process_group("gloo", store=store, timeout=limit, **where)

    def ways(self, values: list[Array], memory: Array) -> dict[str, Call]:
        """Return the ways to sum arrays that are views of flat memory."""
        tensors, flat = [torch.from_numpy(value) for value in values], torch.from_numpy(memory)
        found = {"a call for each key": all_of([partial(dist.all_reduce, tensor) for tensor in tensors])}
        if len(tensors) > 1:
            found["flat"] = partial(dist.all_reduce, flat)
            found["asynchronous"] = partial(_together, tensors)
            found["buckets"] = partial(_together, _buckets(flat))
        return found

    def close(self) -> None:
        dist.destroy_process_group()


class Gloo(GlooWays, AllReducePeer):
    """Between the processes of one machine."""


def _buckets(flat: Any) -> list[Any]:
    first, rest = (size // 4 for size in BUCKETS)
    return [flat[:first], *flat[first:].split(rest)]


def _together(tensors: list[Any]) -> None:
    for work in [dist.all_reduce(tensor, async_op=True) for tensor in tensors]:
        work.wait()
