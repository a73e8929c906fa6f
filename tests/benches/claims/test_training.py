"""The bench of training steps: what its page says, and that it runs where there is torch."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

import bench
from bench import ROOT
from bench.cases.common import resnet50
from bench.cases.training import EXCHANGE, LOSSES, WAYS, Curves, TrainingCase, all_cases, link
from bench.claims import training as claim
from bench.claims import training_tables as tables
from bench.peers.dist.hosts import Hosts
from bench.peers.setting import Setting
from bench.peers.training.launch import TwoHosts
from bench.runner import compiled, run
from bench.runner.machine import Probe
from bench.runner.rounds import Measured

pytestmark = pytest.mark.bench

STEPS = [case for case in all_cases() if isinstance(case, TrainingCase)]
ONE, TWO = (next(case for case in STEPS if case.job == job) for job in ((1, 0.0), (2, 1.0)))
TIMES = {
    "alone": [0.010, 0.010],
    "gloo": [0.020, 0.030],
    "hook": [0.010, 0.010],
    "optimizer": [0.016, 0.020],
    "store": [0.008, 0.009],
    "packed": [0.012, 0.012],
    "bare": [0.0125, 0.0125],
}


def made(case: TrainingCase) -> Measured:
    """Two rounds of a case; the second was disturbed."""
    seconds = {way: TIMES[way] for way in case.ways}
    seconds |= {way + EXCHANGE: [0.02, 0.02] for way in case.ways if way != "alone"}
    cpu = {way: [2 * time for time in times] for way, times in seconds.items()}
    moved = {way: [case.nbytes * (0.5 if way == "packed" else 1.0)] * 2 for way in seconds}
    probes = [Probe(100.0, 20.0)] * 3
    return Measured(case, seconds, {way: way for way in seconds}, probes, [0.01, 0.3], cpu=cpu, moved=moved)


def learnt() -> claim.Learnt:
    runs = [
        {
            "way": way,
            "seed": seed,
            "threshold": 0.1,
            "seconds": 9.0,
            "loss": [5.0, 2.0 + seed / 10],
            "test": 2.5,
        }
        for way in ("gloo", "optimizer", "packed")
        for seed in range(2)
    ]
    return claim.Learnt(LOSSES, runs)


@pytest.fixture
def torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(claim, "versions", lambda: ("torch 2, kvstore 0", False))


@pytest.fixture
def python() -> str:
    named = os.environ.get("KVSTORE_TEST_TORCH", "")
    if not named:
        pytest.skip("KVSTORE_TEST_TORCH names no python with torch and kvstore")
    return named


@pytest.mark.usefixtures("torch")
def test_the_page_has_ratios_what_is_hidden_and_goals() -> None:
    page = claim.CLAIM.page([made(ONE), made(TWO), learnt()], 60)
    row = "| 25 ms | 1.00 [1.00-1.00] | 0.42 [0.33-0.50] | 20 ms | 25 % | 50 ms |"
    assert f"| DDP, gloo {row}" in page
    assert f"| DDP, gloo {row} 1.000 |" in page
    assert (
        "| updates in the store | 8.5 ms | 2.92 [2.50-3.33] | 1.18 [1.11-1.25] | 20 ms | 108 % | 17 ms |"
        in page
    )
    assert (
        "| no exchange ÷ it | updates in the store | 1.18 [1.11-1.25] | 0.80 [0.80-0.80] | ≥ 0.95 | yes |"
        in page
    )
    packed = (
        "| DDP, gloo ÷ it | DistributedOptimizer, 2bit | 2.08 [1.67-2.50] | 2.00, the bytes | ≥ 3 | **no** |"
    )
    assert packed in page
    assert (
        "| DistributedOptimizer, 2bit | 2.050 [2.000-2.100] | 2.500 [2.500-2.500] | 9.0 [9.0-9.0] s |" in page
    )
    assert "torch 2, kvstore 0." in page
    assert "DDP over MPI is missing" in page
    assert "other processes were busy" in page


def test_a_goal_is_asked_only_where_rivals_miss_it() -> None:
    found = made(ONE)
    found.seconds["gloo"] = found.seconds["alone"]
    assert list(tables.goals(found)) == []


@pytest.mark.usefixtures("torch")
def test_other_cases_are_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    written = claim.CLAIM.to_json([made(TWO), learnt(), made(ONE), made(ONE)], 60)
    (tmp_path / "x.json").write_text(written)
    found = list(claim.kept("x"))
    assert [m.case.name for m in found] == [ONE.name, TWO.name, LOSSES.name]
    assert json.loads(claim.CLAIM.to_json(found, 60)) == json.loads(written)
    assert list(claim.kept("y")) == []


@pytest.mark.usefixtures("torch")
def test_a_case_with_other_ways_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    old = made(ONE)
    del old.seconds["bare"]
    (tmp_path / "x.json").write_text(claim.CLAIM.to_json([made(TWO), old], 60))
    assert [m.case.name for m in claim.kept("x")] == [TWO.name]


@pytest.mark.usefixtures("torch")
def test_results_are_drawn(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    (tmp_path / "x.json").write_text(claim.CLAIM.to_json([made(ONE), made(TWO), learnt()], 60))
    assert run.main(claim.CLAIM, ["--draw", "x"]) == 0
    assert (tmp_path / "x.png").read_bytes().startswith(b"\x89PNG")


def test_cases_are_sound() -> None:
    names = [case.name for case in all_cases()]
    assert len(set(names)) == len(names)
    assert all(("packed" in case.ways) == (case.hosts == 2) for case in STEPS)
    assert all(("bare" in case.ways) == (case.hosts == 1) for case in STEPS)
    assert set(WAYS) == {*ONE.ways, *TWO.ways}
    assert TWO.needed == pytest.approx(8 * TWO.nbytes / 1e9)


def test_cases_are_picked_by_name(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        run.main(claim.CLAIM, ["--only", "digits", "--list"])
    assert capsys.readouterr().out.strip() == ONE.name


def test_without_torch_it_says_what_to_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("KVSTORE_BENCH_TORCH", raising=False)
    with pytest.raises(SystemExit, match="KVSTORE_BENCH_TORCH"):
        run.main(claim.CLAIM, ["--only", "digits"])


def setting(python: str) -> Setting:
    return Setting("torch", "training", python, processes=2, servers=2)


@contextlib.contextmanager
def joined(case: TrainingCase | Curves) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        try:
            TwoHosts.hosts = stack.enter_context(Hosts(2, link(case)))
        except OSError as error:
            pytest.skip(str(error))
        yield


_MODELS = """
import sys; sys.path.append(sys.argv[1])
import json
from bench.peers.training import models
found = {}
for name in models.MODELS:
    model = models.make(name)
    other = models.twin(name, model)
    pairs = zip(model.parameters(), other.parameters(), strict=True)
    assert all(one.data_ptr() == two.data_ptr() for one, two in pairs)
    found[name] = [list(parameter.shape) for parameter in other.parameters()]
print(json.dumps(found))
"""


@pytest.mark.timeout(120)
def test_models_have_the_sizes_that_the_tables_say(python: str) -> None:
    """Twins have the same memory."""
    command = [python, "-c", _MODELS, str(ROOT)]
    found = json.loads(subprocess.run(command, check=True, capture_output=True, cwd="/", text=True).stdout)
    assert [tuple(shape) for shape in found["resnet50"]] == list(resnet50())
    for case in STEPS:
        assert _count(found[case.model]) == case.parameters


def _count(shapes: list[list[int]]) -> int:
    total = 0
    for shape in shapes:
        size = 1
        for one in shape:
            size *= one
        total += size
    return total


@pytest.mark.timeout(300)
@pytest.mark.skipif(compiled.compiler() is None, reason="the barrier is C")
def test_a_case_is_measured(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, python: str) -> None:
    monkeypatch.setattr(bench, "RESULTS", tmp_path)
    monkeypatch.setenv("KVSTORE_BENCH_TORCH", python)
    few = ["--only", "digits", "--rounds", "2", "--turn", "0.02", "--write", "x"]
    assert run.main(claim.CLAIM, few) == 0
    (case,) = json.loads((tmp_path / "x.json").read_text())["cases"]
    exchanges = {way + EXCHANGE for way in ONE.ways if way != "alone"}
    assert set(case["seconds"]) == {*ONE.ways, *exchanges}
    assert "digits" in (tmp_path / "x.md").read_text()


@pytest.mark.timeout(300)
@pytest.mark.skipif(compiled.compiler() is None, reason="the barrier is C")
def test_two_hosts_train(python: str) -> None:
    """All ways give the same weights, or preparing fails."""
    case = replace(ONE, hosts=2, gbit=10.0)
    with joined(case), TwoHosts(setting(python)) as peer:
        peer.start_prepare(case)
        reply = peer.finish_prepare()
        assert not isinstance(reply, str), reply
        assert set(reply[0]) == {*case.ways, *(way + EXCHANGE for way in case.ways if way != "alone")}
        for variant in ("gloo", "packed", "store" + EXCHANGE):
            assert len(peer.run(variant, 2)) == 2
            assert peer.moved > 0


@pytest.mark.timeout(300)
def test_losses_become_less(python: str) -> None:
    """Without compression the place of the exchange does not matter."""
    if subprocess.run([python, "-c", "import sklearn"], check=False, capture_output=True).returncode:
        pytest.skip("that python has no scikit-learn")
    few = Curves("few", steps=100, seeds=1, every=20, gbit=10.0)
    with joined(few):
        runs = TwoHosts(setting(python)).losses(few)
    assert [run["way"] for run in runs] == ["gloo", "optimizer", "packed"]
    for one in runs:
        assert one["loss"][-1] < one["loss"][0]
    assert runs[0]["loss"] == pytest.approx(runs[1]["loss"], rel=0.01)
