"""torch.distributed with gloo: an all-reduce among workers, without a server, of half the bytes."""

from __future__ import annotations

import torch.distributed as dist

from bench.cases.dist import DistCase
from bench.peers.shared.rival_gloo import join, ways

from bench.peers.base import Array
from bench.peers.dist.base import DistPeer
from bench.peers.group.link import Place


class Gloo(DistPeer):
    """The sums land in the gradients' own arrays."""

    def __init__(self, place: Place) -> None:
        super().__init__(place)
        join(place)

    def prepare(self, case: DistCase) -> list[Array]:
        data = self.dense(case)
        self.variants = ways(data.values, data.flat)
        self.first()
        return data.values

    def close(self) -> None:
        dist.destroy_process_group()
