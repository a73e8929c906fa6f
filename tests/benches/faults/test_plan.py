"""Runs are drawn from their seeds, and what cannot be is not run."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.faults.cells import FAULTS, SERVED, STORES, Cell, drawn, impossible, promise

pytestmark = pytest.mark.bench
CELLS = [Cell(store, fault) for store in STORES for fault in FAULTS if not impossible(store, fault)]


@given(st.sampled_from(CELLS), st.integers(0, 10_000), st.floats(1, 20))
def test_a_run_is_what_its_cell_allows(cell: Cell, seed: int, slowness: float) -> None:
    plan = drawn(cell, seed, "folder", promise(cell, slowness))
    assert plan == drawn(cell, seed, "folder", promise(cell, slowness))
    assert 0 <= plan.victim < (plan.servers if cell.fault.startswith("server") else plan.workers)
    assert plan.victim_is_worker or cell.store in SERVED
    if cell.fault == "stop above" and cell.store != "mpi":
        assert plan.seconds > promise(cell, slowness).dead_after
    if cell.fault == "stop below":
        assert plan.seconds < promise(cell, slowness).dead_after / 2
        assert not plan.until_told
    if cell.fault.startswith("kill") and plan.on_peer_loss == "raise":
        assert plan.until_told


def test_every_cell_is_run_or_has_a_reason() -> None:
    reasons = {(store, fault): impossible(store, fault) for store in STORES for fault in FAULTS}
    there = [fault for fault in FAULTS if not reasons["local", fault]]
    assert there == ["exception", "early exit", "memory limit"]
    assert all(not reasons[store, fault] for store in SERVED for fault in FAULTS)
    assert reasons["shared", "server killed"] == "there is no server"
