"""Every peer of the bench compresses alike: words, residuals and sums are what their definition gives."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from references import lcg

from bench.cases import compression as compression_cases
from bench.cases.compression import CHECKED, CompressionCase
from bench.claims import compression
from bench.peers.base import digest
from bench.peers.compression import spans
from bench.peers.group.driver import Alone
from bench.peers.setting import Setting
from bench.peers.worker import make
from bench.runner import compiled, run
from bench.runner.machine import Probe
from bench.runner.rounds import Measured, Plan, measure

pytestmark = pytest.mark.bench

Array = npt.NDArray[Any]

LOCAL = ["ours", "numpy", *(["limit"] if compiled.compiler() else [])]
CASES = [
    CompressionCase(f"{verb} {codec} {size} {data}", verb, codec, size, data)
    for verb in ("quantise", "dequantise", "pair")
    for codec in ("2bit", "1bit")
    for size in (37, 70_001)
    for data in ("normal", "uniform")
]


def sent(case: CompressionCase, gradient: Array, residual: Array) -> tuple[Array, Array]:
    """The values sent, and the residual."""
    x = residual + gradient
    if case.codec == "1bit":
        out = np.where(x > case.threshold, np.float32(1), np.float32(-1))
    else:
        out = (np.sign(x) * (np.abs(x) >= case.threshold) * case.threshold).astype(np.float32)
    return out, x - out


def expected(case: CompressionCase) -> list[Array]:
    """Sums of the values sent in the calls that are compared."""
    data = compression_cases.inputs(case)
    left = [sent(case, first, np.zeros_like(first))[1] for first in data.first]
    sums = []
    for call in range(CHECKED):
        pairs = [sent(case, g, r) for g, r in zip(data.gradients(call), left, strict=True)]
        left = [residual for _, residual in pairs]
        sums.append(pairs[0][0] + pairs[1][0])
    return sums


@pytest.mark.parametrize("name", LOCAL)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_results(name: str, case: CompressionCase) -> None:
    peer = make("compression", name)
    for mine, right in zip(peer.prepare(case), expected(case), strict=True):
        np.testing.assert_array_equal(mine, right)
    for variant in peer.variants:
        assert all(seconds > 0 for seconds in peer.run(variant, 3))
    peer.release()


def ways(name: str) -> list[str]:
    """Every way of a peer that does the work."""
    peer: Any = make("compression", name)
    found = [
        label
        for verb in ("quantise", "pair")
        for label in peer.ways(CompressionCase("x", verb, "2bit", 1, "normal"))
        if not label.startswith("bytes alone")
    ]
    assert found
    return list(dict.fromkeys(found))


def way(name: str, label: str, case: CompressionCase) -> Any:
    peer: Any = make("compression", name)
    return (peer.ways(case) | peer.ways(CompressionCase("x", "pair", *fields(case))))[label]


def fields(case: CompressionCase) -> tuple[Any, ...]:
    return case.codec, case.size, case.data, case.threshold


@pytest.mark.parametrize("size", [1, 17, 1000])
@pytest.mark.parametrize("name", LOCAL)
def test_words_are_those_that_mxnet_packs(name: str, size: int, golden: Callable[[str], Any]) -> None:
    case = CompressionCase("x", "quantise", "2bit", size, "uniform")
    for label in ways(name):
        one, residual = way(name, label, case), np.zeros(size, np.float32)
        for number, words in enumerate(golden("compress2bit.npz")[f"n{size}_t0p5_words"]):
            packed = np.full(case.packed_bytes, 255, np.uint8)
            one.encode(lcg(size, number, -1.3, 1.3), residual, packed)
            np.testing.assert_array_equal(packed.view(np.uint32), words, err_msg=label)


@pytest.mark.parametrize("codec", ["2bit", "1bit"])
@pytest.mark.parametrize("size", [31, 1003, 70_001])
@pytest.mark.parametrize("name", LOCAL)
def test_every_way(name: str, size: int, codec: str) -> None:
    case = CompressionCase("x", "quantise", codec, size, "uniform")
    data = compression_cases.inputs(case)
    right = [sent(case, g, np.zeros_like(g)) for g in data.gradients(0)]
    for label in ways(name):
        check(way(name, label, case), case, data, right, label)


def check(one: Any, case: CompressionCase, data: Any, right: list[tuple[Array, Array]], label: str) -> None:
    """The values that one way encodes, adds, pushes and pulls."""
    size, same = case.size, partial(np.testing.assert_array_equal, err_msg=label)
    residuals = [np.zeros(size, np.float32) for _ in range(2)]
    packed, total = np.zeros(case.packed_bytes, np.uint8), np.full(size, 3, np.float32)
    one.encode(data.gradients(0)[0], residuals[0], packed)
    one.add(packed, total)
    same(total, 3 + right[0][0])
    same(residuals[0], right[0][1])
    residuals[0].fill(0)
    memory = np.empty(size + 16, np.float32)
    stored = memory[-memory.ctypes.data % 64 // 4 :][:size]
    outs = [np.empty(size + 1, np.float32)[1:] for _ in range(2)]
    one.push(data.gradients(0), residuals, stored)
    one.pull(stored, outs)
    for out in outs:
        same(out, right[0][0] + right[1][0])
    same(residuals[1], right[1][1])


def test_gradients_are_the_same_for_everybody_and_others_at_each_call() -> None:
    case = CompressionCase("x", "quantise", "2bit", 5000, "normal")
    a, b = compression_cases.inputs(case), compression_cases.inputs(case)
    assert digest(a.gradients(5)) == digest(b.gradients(5))
    starts = [compression_cases.beginning(call, a.size, a.pools[0].size) for call in range(100)]
    assert len(set(starts)) == 100
    assert all(0 <= start <= a.pools[0].size - a.size for start in starts)
    assert not np.array_equal(a.gradients(0)[0], a.gradients(0)[1])


def test_first_gradients_stay_in_the_residual() -> None:
    case = CompressionCase("x", "quantise", "2bit", 100_000, "normal")
    for first in compression_cases.inputs(case).first:
        assert np.abs(first).max() < case.threshold
        assert 0.19 < np.abs(first).std() / np.abs(first).max() < 0.27  # a triangle's: 1 / sqrt(18)


def test_names_are_unique_and_cases_survive_json() -> None:
    found = compression_cases.all_cases()
    assert len({case.name for case in found}) == len(found)
    for case in found:
        assert CompressionCase.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_time_covered_by_spans() -> None:
    assert spans.covered([]) == 0
    assert spans.covered([(3, 4), (0, 2), (1, 2.5), (1, 1.5)]) == 3.5


def test_spans_of_a_trace() -> None:
    def event(ph: str, ts: int, tid: int, name: str = "Q") -> dict[str, Any]:
        return {"ph": ph, "ts": ts, "pid": 1, "tid": tid, "name": name}

    events = [{"ph": "M"}, event("B", 10, 1), event("B", 12, 2), event("E", 20, 1), event("E", 32, 2)]
    events += [event("B", 40, 1, "other"), event("E", 50, 1, "other")]
    right = [(10e-6, 20e-6), (12e-6, 32e-6)]
    rest = ",\n".join(map(json.dumps, events))
    np.testing.assert_allclose(spans.read('{\n"traceEvents": [' + rest, "Q"), right)
    np.testing.assert_allclose(spans.read("\n,\n" + rest + "\n", "Q"), right)
    assert spans.read("", "Q") == []


def still() -> Probe:
    return Probe(100.0, 50.0)


def test_peers_in_processes_take_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_BENCH_MXNET", raising=False)
    case = CompressionCase("small", "quantise", "2bit", 3000, "uniform", goals={"numpy": 1e-9, "mxnet": 2})
    with run.running(compression.CLAIM, compression.CLAIM.settings()) as peers:
        result = measure(case, peers, Plan(rounds=3, spare=0, turn=0.001), still)
    assert result is not None
    assert result.wrong == []
    assert set(result.seconds) == set(LOCAL)
    page = compression.CLAIM.page([result], 60.0)
    assert "| small | NumPy |" in page
    assert "Not run: MXNet 1.9.1." in page
    assert json.loads(compression.CLAIM.to_json([result], 60.0))["cases"][0]["case"] == "small"


def test_wrong_result_shows() -> None:
    case = CompressionCase("small", "quantise", "2bit", 3, "uniform")
    found = Measured(case, {"ours": [1.0], "numpy": [2.0]}, {}, [], [0.0], wrong=["numpy"])
    assert "2 s: 2.00 [2.00-2.00] wrong result!" in compression.CLAIM.page([found], 1.0)


def test_failure_in_a_peer_is_told() -> None:
    with Alone(Setting("numpy", "compression")) as process:
        process.start_prepare(CompressionCase("bad", "unheard of", "2bit", 3, "uniform"))
        assert "Traceback" in process.finish_prepare()


def test_mxnet() -> None:
    if not os.environ.get("KVSTORE_BENCH_MXNET"):
        pytest.skip("KVSTORE_BENCH_MXNET names no interpreter")
    done = 0
    for setting in compression.CLAIM.settings():
        if setting.name != "mxnet":
            continue
        with Alone(setting) as process:
            for case in CASES:
                process.start_prepare(case)
                reply = process.finish_prepare()
                if isinstance(reply, str):
                    continue
                variants, found = reply
                np.testing.assert_allclose(found, digest(expected(case)), rtol=1e-6, err_msg=case.name)
                assert all(seconds > 0 for variant in variants for seconds in process.run(variant, 3))
                done += 1
    assert done
