"""Costs that explain the measurements."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from benches.scale.sample_costs import COSTS
from hypothesis import given
from hypothesis import strategies as st

from bench.cases.common import MB
from bench.scale import calibrate
from bench.scale.costs import Costs
from bench.scale.real import Found, RealCase

costs = st.floats(1e-10, 1e-3)


def found_of(case: RealCase, paid: Costs) -> Found:
    """Return the time of a job with these costs."""
    worker = [paid.worker_call, paid.worker_message, paid.worker_request, paid.worker_push, paid.worker_pull]
    server = [paid.server_message, paid.server_request, paid.server_push, paid.server_pull]
    per_worker = sum(a * b for a, b in zip(worker, calibrate._of_worker(case), strict=True))
    per_worker += paid.worker_pack * case.nbytes * bool(case.codec)
    at_server = sum(a * b for a, b in zip(server, calibrate._of_server(case), strict=True))
    at_server += paid.server_unpack * case.nbytes * case.workers * bool(case.codec)
    seconds, scheduler = 1.0, 0.0
    if case.way == "barrier":
        scheduler = 4 * case.workers * paid.control_message
    elif case.way == "idle":
        scheduler = paid.idle + 2 * paid.beat * (case.workers + case.servers)
    elif case.mode == "shared":
        seconds = paid.host_sum * case.nbytes
    return Found(seconds, per_worker, at_server, scheduler, 0.0, 0.0, 0.0, 0.0)


def test_costs_are_found_again() -> None:
    made = calibrate.fit([(case, found_of(case, COSTS)) for case in calibrate.cases()])
    known = ("control_encode", "control_decode", "control_copy", "names_encode", "names_decode")
    for name, value in COSTS.to_json().items():
        if name not in known:
            assert getattr(made, name) == pytest.approx(value, rel=1e-3), name
    assert all(getattr(made, name) > 0 for name in known)


@given(wanted=st.lists(costs, min_size=3, max_size=3))
def test_no_cost_is_below_nothing(wanted: list[float]) -> None:
    found = calibrate._solve([[1.0, 2.0], [1.0, 4.0], [1.0, 8.0]], wanted)
    assert min(found) >= 0


def test_messages_and_requests_of_a_call_are_counted() -> None:
    large: Any = RealCase(2, 1, (MB,))
    assert (calibrate.messages(large), calibrate.requests(large)) == (4, 4)
    many = replace(large, sizes=(1024,) * 300)
    assert (calibrate.messages(many), calibrate.requests(many)) == (2, 300)


def test_costs_can_be_written_and_read() -> None:
    assert Costs.from_json(COSTS.to_json()) == COSTS
