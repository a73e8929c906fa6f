"""Open MPI and MPICH between hosts: an all-reduce in place, tensor by tensor and over flat memory."""

from __future__ import annotations

from mpi4py import MPI

from bench.cases.dist import DistCase
from bench.peers.shared.rival_mpi import all_reduce

from bench.peers.base import Array
from bench.peers.dist.base import DistPeer


class MPIGroup(DistPeer):
    """The sums land in the gradients' own arrays."""

    def prepare(self, case: DistCase) -> list[Array]:
        data = self.dense(case)
        self.variants = {"a call for each key": all_reduce(data.values)}
        if len(data.values) > 1:
            self.variants["flat"] = all_reduce([data.flat])
        self.first()
        return data.values

    def close(self) -> None:
        MPI.Finalize()
