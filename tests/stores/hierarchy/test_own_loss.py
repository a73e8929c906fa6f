"""A worker that was stopped and wakes up may learn of its own loss first by a round that failed with it."""

from __future__ import annotations

import pytest

from kvstore.errors import FencedError, PeerLostError
from kvstore.stores.hierarchy.backend import HierarchyBackend


def told(rank: int) -> None:
    """Have worker 1 meet the loss of a worker."""

    def meets() -> None:
        raise PeerLostError(f"worker {rank} is lost", role="worker", rank=rank)

    backend = HierarchyBackend.__new__(HierarchyBackend)
    backend.rank = 1
    backend._noting_loss(meets)


def test_its_own_loss_is_no_loss_of_a_peer() -> None:
    with pytest.raises(FencedError, match="worker 1 was declared lost"):
        told(1)
    with pytest.raises(PeerLostError, match="worker 0 is lost"):
        told(0)
