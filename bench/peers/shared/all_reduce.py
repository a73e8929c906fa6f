"""What rivals have in common that sum in place by an all-reduce, and then update in each worker."""

from __future__ import annotations

from bench.cases import shared as shared_cases
from bench.cases.shared import SharedCase
from bench.peers.base import Array, Call, all_of
from bench.peers.group.base import GroupPeer
from bench.peers.shared import fused


class AllReducePeer(GroupPeer):
    """A worker that sums in place; each way is one to do that."""

    def ways(self, values: list[Array], flat: Array) -> dict[str, Call]:
        """Name the ways to sum arrays that are cuts of flat memory."""
        raise NotImplementedError

    def prepare(self, case: SharedCase) -> list[Array]:
        data = shared_cases.inputs(case, self.place.rank)
        self.buffers = [data.flat]
        self.variants = self.ways(data.values, data.flat)
        if case.update:
            label, step = fused.stepper(case, data, self.place)
            self.variants = {f"{name}, {label}": all_of([way, step]) for name, way in self.variants.items()}
        next(iter(self.variants.values()))()
        self.calls = 1
        return data.weights if case.update else data.values
