"""MPI's all-reduce, through mpi4py, in processes of mpiexec."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mpi4py
from mpi4py import MPI

from kvstore.errors import DTypeError

from .arrays import Array
from .peer import AllReducePeer, Call

_MOST = 1 << 30  # elements of a call: MPI counts them in 32 bits
_TYPES = {
    **{"float32": MPI.FLOAT, "float64": MPI.DOUBLE, "int8": MPI.INT8_T, "uint8": MPI.UINT8_T},
    **{"int32": MPI.INT32_T, "int64": MPI.INT64_T},
}


class MpiPeer(AllReducePeer):
    """``Allreduce`` in place: over one buffer, and key by key."""

    def __init__(self) -> None:
        super().__init__(MPI.COMM_WORLD.Get_rank(), MPI.COMM_WORLD.Get_size())

    def join(self, address: str) -> None:
        """Do nothing: mpiexec has brought them together."""

    def make_ways(self) -> dict[str, Call]:
        """Sum everything at once, or key by key."""
        gradients = self.gradients
        return {"one buffer": _sums(gradients.flat), "each key": _sums(gradients.values)}

    def barrier(self) -> None:
        """Wait for all, by MPI."""
        MPI.COMM_WORLD.Barrier()

    def close(self) -> None:
        """End MPI in this process."""
        MPI.Finalize()

    def versions(self) -> dict[str, str]:
        """Give the versions of mpi4py and of the MPI."""
        line = MPI.Get_library_version().strip("\0").splitlines()[0].partition(",")[0]
        return {"mpi4py": mpi4py.__version__, "MPI": " ".join(line.replace("Version:", "").split())}


def _sums(arrays: Sequence[Array]) -> Call:
    messages: list[Any] = []
    for array in arrays:
        if array.dtype.name not in _TYPES:
            raise DTypeError(f"MPI does not sum {array.dtype.name}")
        flat = array.reshape(-1)
        pieces = [flat[at : at + _MOST] for at in range(0, flat.size, _MOST)]
        messages += [[piece, _TYPES[array.dtype.name]] for piece in pieces]

    def call() -> None:
        for message in messages:
            MPI.COMM_WORLD.Allreduce(MPI.IN_PLACE, message)

    return call
