"""Open MPI and MPICH through mpi4py: ``Allreduce`` in place, tensor by tensor and over flat memory."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from bench.peers.base import Array, Call
from bench.peers.shared.all_reduce import AllReducePeer


class MPIGroup(AllReducePeer):
    """Started by ``mpiexec`` of the environment that mpi4py finds."""

    def reduce(self, arrays: list[Array]) -> Call:
        return all_reduce(arrays)

    def close(self) -> None:
        MPI.Finalize()


def all_reduce(arrays: list[Array]) -> Call:
    """Return what sums each of the arrays over all workers, in place."""
    reduce, whole = MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE
    messages: list[Any] = [[array, MPI.FLOAT] for array in arrays]

    def call() -> None:
        for message in messages:
            reduce(whole, message)

    return call
