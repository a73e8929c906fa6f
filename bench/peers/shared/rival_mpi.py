"""Open MPI and MPICH through mpi4py: ``Allreduce`` in place, tensor by tensor and over flat memory."""

from __future__ import annotations

from functools import partial
from typing import Any

from mpi4py import MPI

from bench.peers.base import Array, Call
from bench.peers.shared.all_reduce import AllReducePeer


class MPIWays:
    """The ways of a worker that ``mpiexec`` of the environment of mpi4py has started."""

    def ways(self, values: list[Array], flat: Array) -> dict[str, Call]:
        """Return the ways to sum arrays that are views of flat memory."""
        found = {"a call for each key": partial(_reduce, [[value, MPI.FLOAT] for value in values])}
        return found | ({"flat": partial(_reduce, [[flat, MPI.FLOAT]])} if len(values) > 1 else {})

    def close(self) -> None:
        MPI.Finalize()


def _reduce(messages: list[Any]) -> None:
    for message in messages:
        MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, message)


class MPIGroup(MPIWays, AllReducePeer):
    """Between the processes of one machine."""
