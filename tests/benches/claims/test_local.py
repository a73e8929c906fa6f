"""Every peer of the bench does the same work: its first call gives what float64 arithmetic gives."""

from __future__ import annotations

import importlib
import json
import math
import os

import numpy as np
import numpy.typing as npt
import pytest
from benches.first_steps import first_step

from bench import RESULTS, figures
from bench.cases import local as cases
from bench.cases.common import resnet50
from bench.cases.local import LocalCase
from bench.claims import local
from bench.peers.base import Peer, Unsupported, digest
from bench.peers.group.driver import Alone
from bench.peers.setting import Setting
from bench.peers.worker import make
from bench.runner import compiled, run, table
from bench.runner.machine import Probe
from bench.runner.rounds import Measured, Plan, measure

pytestmark = pytest.mark.bench

Array = npt.NDArray[np.float64]

ODD = ((1003,), (5, 7, 11), (1,), (70_001,), (64,))
DENSE = [
    LocalCase(f"{verb} {update} k={k}{' in place' if in_place else ''}", verb, ODD, k, update, in_place)
    for verb in ("pushpull", "pair", "push", "pull")
    for update in ("", "sgd_momentum", "adam")
    for k in (1, 2, 3, 8)
    for in_place in (False, True)
    if not (in_place and verb != "pushpull") and not (update and verb == "pull")
]
SPARSE = [
    LocalCase(f"sparse {verb} {update}", verb, ((500, 6),), 3, update, rows=60)
    for verb, update in (("push", ""), ("push", "sgd"), ("pull", ""))
]
LOCAL = ["ours", "numpy", *(["limit"] if compiled.compiler() else [])]


def expected(case: LocalCase) -> list[Array]:
    data = cases.inputs(case)
    results = []
    for weight, values in zip(data.weights, data.values, strict=True):
        total = np.sum(np.stack(values).astype(np.float64), axis=0)
        new = first_step(case.update, weight.astype(np.float64), total) if case.update else total
        result = weight.astype(np.float64) if case.verb == "pull" else new
        results += [result] if case.verb == "push" else [result] * case.k
    return results


def expected_rows(case: LocalCase) -> list[Array]:
    data = cases.sparse_inputs(case)
    merged = np.zeros(data.table.shape)
    for ids, rows in zip(data.ids, data.rows, strict=True):
        merged[ids] += rows
    if case.verb == "pull":
        merged = data.table.astype(np.float64)
    elif case.update:
        merged = data.table - cases.LEARNING_RATE * merged
    return [merged[ids] for ids in data.ids]


def close(case: LocalCase) -> float:
    """Values summed in place are tiny."""
    return 1e-7 if case.update or not case.in_place else 1e-36


@pytest.fixture(scope="module", params=LOCAL)
def peer(request: pytest.FixtureRequest) -> Peer:
    return make("local", request.param)


@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.name)
def test_dense_result(peer: Peer, case: LocalCase) -> None:
    for mine, right in zip(peer.prepare(case), expected(case), strict=True):
        np.testing.assert_allclose(mine, right, rtol=2e-5, atol=close(case))
    peer.release()


@pytest.mark.parametrize("case", SPARSE, ids=lambda case: case.name)
def test_sparse_result(peer: Peer, case: LocalCase) -> None:
    try:
        results = peer.prepare(case)
    except Unsupported:
        pytest.skip("the compiled limit is for dense cases")
    for mine, right in zip(results, expected_rows(case), strict=True):
        np.testing.assert_allclose(mine, right, rtol=2e-5, atol=1e-7)
    peer.release()


@pytest.mark.skipif("limit" not in LOCAL, reason="needs a C compiler")
@pytest.mark.parametrize("case", DENSE, ids=lambda case: case.name)
def test_every_way_of_the_compiled_limit(case: LocalCase, monkeypatch: pytest.MonkeyPatch) -> None:
    module = importlib.import_module("bench.peers.local.limit")
    monkeypatch.setattr(module, "SMALL", 0)
    limit = module.Limit()
    limit.prepare(case)
    for variant in limit.variants:
        fresh = limit.prepare(case)
        if case.update or case.in_place:
            continue  # a second call has other inputs
        for array in fresh:
            array.fill(-1)
        limit.run(variant, 1)
        for mine, right in zip(fresh, expected(case), strict=True):
            np.testing.assert_allclose(mine, right, rtol=2e-5, atol=close(case), err_msg=variant)


@pytest.mark.skipif("limit" not in LOCAL, reason="needs a C compiler")
def test_bare_passes_run() -> None:
    limit = make("local", "limit")
    for verb in cases.STREAMS:
        limit.prepare(LocalCase(verb, verb, ((1 << 18,),), 1))
        assert all(min(limit.run(variant, 2)) > 0 for variant in limit.variants)


def test_resnet50_has_its_real_size() -> None:
    shapes = resnet50()
    assert len(shapes) == 161
    assert sum(math.prod(shape) for shape in shapes) == 25_557_032


def test_names_of_cases_are_unique() -> None:
    names = [case.name for case in cases.all_cases()]
    assert len(set(names)) == len(names)


def test_case_survives_json() -> None:
    for case in cases.all_cases():
        assert LocalCase.from_json(case.to_json()) == case


def test_inputs_are_the_same_for_everybody_and_private() -> None:
    case = LocalCase("x", "pushpull", ((4, 3), (5,)), 2)
    a, b = cases.inputs(case), cases.inputs(case)
    assert digest([v for own in a.values for v in own]) == digest([v for own in b.values for v in own])
    assert not any(np.shares_memory(v, o) for v in a.values[0] for o in a.outs[0])


def still() -> Probe:
    return Probe(100.0, 50.0)


def test_peers_in_processes_take_turns() -> None:
    case = LocalCase("small", "pushpull", ((300,), (20, 5)), 2, goals={"numpy": 1e-9}, most_us=1e9)
    with run.running(local.CLAIM, [Setting("ours"), Setting("numpy")]) as peers:
        result = measure(case, peers, Plan(rounds=3, spare=0, turn=0.001), still)
    assert result is not None
    assert result.wrong == []
    assert len(result.ratios("numpy")) == 3
    assert [row[-1] for row in table.goals([result], local.PEERS)] == ["yes", "yes"]
    assert "small" in local.CLAIM.page([result], 60.0)


def test_wrong_result_shows() -> None:
    case = LocalCase("small", "pushpull", ((3,),))
    found = Measured(case, {"ours": [1.0], "numpy": [2.0]}, {}, [], [0.0], wrong=["numpy"])
    assert "2 s: 2.00 [2.00-2.00] wrong result!" in table.everything([found], local.PEERS)


def test_failure_in_a_peer_is_told() -> None:
    with Alone(Setting("numpy")) as process:
        process.start_prepare(LocalCase("bad", "pushpull", ((2,),), k=0))
        assert "Traceback" in process.finish_prepare()
        process.start_prepare(LocalCase("good", "pushpull", ((2,),)))
        assert process.finish_prepare()


@pytest.mark.parametrize("name", ["mxnet", "torch"])
def test_rivals_of_other_environments(name: str) -> None:
    python = os.environ.get(f"KVSTORE_BENCH_{name.upper()}")
    if not python:
        pytest.skip(f"KVSTORE_BENCH_{name.upper()} names no interpreter")
    done = 0
    with Alone(Setting(name, python=python)) as process:
        for case in DENSE + SPARSE:
            process.start_prepare(case)
            reply = process.finish_prepare()
            if isinstance(reply, str):
                continue
            right = expected_rows(case) if case.rows else expected(case)
            np.testing.assert_allclose(reply[1], digest(right), rtol=1e-4, atol=1e-6, err_msg=case.name)
            done += 1
    assert done


def test_figures_for_the_readme() -> None:
    seconds = {"ours": [1.0, 2.0], "ours apart": [8.0, 8.0], "numpy": [3.0, 4.0], "gloo": [2.0, 2.0]}
    case = {"case": "x", "seconds": {**seconds, "gloo apart": [1.0, 1.0]}}
    row = figures.Row("local", "x", "an x", others=("numpy", "gloo"))
    text = figures.readme({"local": {"machine": "a machine", "cases": [case]}}, [row])
    assert "On a machine." in text
    assert text.endswith("| an x | 1.5 s |  |  | 0.75 [0.50-1.00] torch gloo |\n")


def test_every_row_of_the_readme_has_been_measured() -> None:
    for row in figures.ROWS:
        results = json.loads((RESULTS / f"{row.results}.json").read_text())
        shown = figures.cells(row, results)
        assert len(shown) == len(figures.HEAD)
        assert shown[4] and (shown[3] or row.results == "device"), row  # no MXNet runs on that GPU
