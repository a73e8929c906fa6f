"""Open MPI and MPICH between hosts: an all-reduce in place, tensor by tensor and over flat memory."""

from __future__ import annotations

from bench.peers.dist.base import AllReduce
from bench.peers.shared.rival_mpi import MPIWays


class MPIGroup(MPIWays, AllReduce):
    """Between hosts."""
