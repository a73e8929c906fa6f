"""The store on a GPU: pytest-benchmark times the host's part of a plan; the peers take turns for the ratios.

``pytest bench/bench_device.py`` needs PyTorch and a GPU. For figures to publish: ``python -m bench device``.
"""

from __future__ import annotations

from typing import Any

import pytest

from bench.cases.device import DeviceCase, all_cases
from bench.claims.device import CLAIM, peers
from bench.peers.base import Unsupported
from bench.peers.device.base import Data
from bench.peers.device.ours import Ours
from bench.runner import run
from bench.runner.gpu_rounds import Clock, Measured, copy_rate, measure

torch: Any = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

__all__ = ["CLAIM"]  # conftest.py prints the tables of this claim at the end

CASES = [case for case in all_cases() if run.has_goal(case)]


@pytest.fixture(scope="module")
def rate() -> float:
    return copy_rate(torch, "cuda", Clock(torch, "cuda"), 256 << 20)


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(benchmark: Any, case: DeviceCase, rate: float, measured: list[Measured]) -> None:
    result = measure(case, peers(), torch, "cuda", rate, rounds=5)
    assert result is not None
    assert not {way for way in result.wrong if way.startswith("kvstore")}
    measured.append(result)
    ours, data = Ours(), Data(case, torch, "cuda")
    try:
        (way, *_) = ours.ways(data).values()
    except Unsupported:
        pytest.skip("not a call of a store")
    benchmark.pedantic(way, args=(0,), rounds=50, warmup_rounds=2)
    torch.cuda.synchronize()
    ours.release()
