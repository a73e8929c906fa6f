"""Round costs for simulated jobs, of about the size that is measured."""

from __future__ import annotations

from bench.scale.costs import Costs

COSTS = Costs(
    worker_call=20e-6,
    worker_message=10e-6,
    worker_request=0.5e-6,
    worker_push=0.2e-9,
    worker_pull=0.2e-9,
    worker_pack=0.1e-9,
    server_message=10e-6,
    server_request=0.5e-6,
    server_push=0.3e-9,
    server_pull=0.2e-9,
    server_unpack=0.1e-9,
    control_message=30e-6,
    control_encode=5e-9,
    control_decode=3e-9,
    control_copy=0.2e-9,
    names_encode=4e-9,
    names_decode=3e-9,
    beat=20e-6,
    idle=0.005,
    host_sum=0.5e-9,
    host_workers=8,
)
