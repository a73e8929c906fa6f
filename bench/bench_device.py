"""The store on a GPU: pytest-benchmark times the host's part of a plan; peers take turns for the ratios.

``pytest bench/bench_device.py`` needs PyTorch and a GPU. For figures to publish: ``python -m bench.device``.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from bench.cases.device import Case, all_cases
from bench.claims import device
from bench.peers.device.base import Data, Peer, Unsupported
from bench.peers.device.ours import Ours
from bench.peers.device.rival_cupy import CuPy
from bench.peers.device.rival_torch import Torch
from bench.peers.device.rival_triton import Triton
from bench.runner import table
from bench.runner.gpu_rounds import Clock, Measured, copy_rate, measure

torch: Any = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("there is no GPU here", allow_module_level=True)

CASES = [case for case in all_cases() if case.share or case.goals or case.most_us]


@pytest.fixture(scope="module")
def rate() -> float:
    return copy_rate(torch, "cuda", Clock(torch, "cuda"), 256 << 20)


@pytest.fixture(scope="module")
def measured(request: pytest.FixtureRequest, rate: float) -> Iterator[list[Measured]]:
    """Collect what was measured, and print the tables at the end."""
    found: list[Measured] = []
    yield found
    capture: Any = request.config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled():
        print(f"\n\na copy moves {rate / 1e12:.3f} TB/s\n")
        print(table.markdown(device.GOALS_HEAD, device.goals(found)))
        print(table.markdown(device.HEAD, device.rows(found)))


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_case(benchmark: Any, case: Case, rate: float, measured: list[Measured]) -> None:
    peers: list[Peer] = [Ours(), Torch(), CuPy(), Triton()]
    result = measure(case, peers, torch, "cuda", rate, rounds=5)
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
