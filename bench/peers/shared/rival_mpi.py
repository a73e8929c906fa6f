"""Open MPI and MPICH through mpi4py: ``Allreduce`` in place, tensor by tensor and over flat memory."""

from __future__ import annotations

from typing import Any

from mpi4py import MPI

from bench.cases import shared as shared_cases
from bench.cases.shared import SharedCase
from bench.peers.base import Array, Call, all_of
from bench.peers.group.base import GroupPeer
from bench.peers.shared import fused


class MPIGroup(GroupPeer):
    """Started by ``mpiexec`` of the environment that mpi4py finds."""

    def prepare(self, case: SharedCase) -> list[Array]:
        data = shared_cases.inputs(case, self.place.rank)
        self.buffers = [data.flat]
        self.variants = {"a call for each key": _reduce(data.values)}
        if len(data.values) > 1:
            self.variants["flat"] = _reduce([data.flat])
        if case.update:
            label, step = fused.stepper(case, data, self.place)
            self.variants = {f"{name}, {label}": all_of([call, step]) for name, call in self.variants.items()}
        next(iter(self.variants.values()))()
        self.calls = 1
        return data.weights if case.update else data.values

    def close(self) -> None:
        MPI.Finalize()


def _reduce(arrays: list[Array]) -> Call:
    reduce, whole = MPI.COMM_WORLD.Allreduce, MPI.IN_PLACE
    messages: list[Any] = [[array, MPI.FLOAT] for array in arrays]

    def call() -> None:
        for message in messages:
            reduce(whole, message)

    return call
