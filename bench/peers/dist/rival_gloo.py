"""torch.distributed with gloo: an all-reduce among workers, without a server, of half the bytes."""

from __future__ import annotations

from bench.peers.dist.base import AllReduce
from bench.peers.shared.rival_gloo import GlooWays


class Gloo(GlooWays, AllReduce):
    """Between hosts, or the processes of one."""
