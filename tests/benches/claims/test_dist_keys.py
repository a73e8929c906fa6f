"""The cost of a key: both peers do the same work, and the page has the requested figures."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from bench.cases.dist import EACH, INIT, DistCase
from bench.claims import dist_keys
from bench.claims.dist_keys import CLAIM
from bench.peers.dist.base import PUSHPULL
from bench.peers.setting import Setting
from bench.plots import dist_keys as plot
from bench.runner import compiled, run
from kvstore.observe.bench.worker_group import PeerFailure

pytestmark = [
    pytest.mark.bench,
    pytest.mark.skipif(compiled.compiler() is None, reason="the barrier is C"),
]


@pytest.mark.timeout(300)
def test_keys_and_requests_are_measured_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = [dist_keys.keys(50), dist_keys.requests(5, 3)]
    monkeypatch.setattr(dist_keys.DistKeys, "cases", lambda self, options: cases)
    assert run.main(CLAIM, ["--busy", "1", "--write", f"{tmp_path}/keys"]) == 0
    found = json.loads((tmp_path / "keys.json").read_text())
    (counted,), (asked,) = found["cases"], found["requests"]
    assert counted["keys"] == 50
    assert len(counted[INIT]) == len(counted[PUSHPULL]) == dist_keys.ROUNDS["ours"]
    assert set(asked["seconds"]["ours"]) == {PUSHPULL, EACH}
    rivals = {"mxnet"} if "mxnet" in {s.name for s in CLAIM.settings(cases[:1])} else set()
    assert set(counted["others"]) == set(asked["seconds"]) - {"ours"} == rivals
    assert all(
        len(times) == dist_keys.ROUNDS["mxnet"] for times in counted["others"].get("mxnet", {}).values()
    )
    page = (tmp_path / "keys.md").read_text()
    assert "| 50 |" in page
    assert "with 1 other busy processes" in page
    assert "| requests, 3 workers, 5 keys of 4 KB | kvstore, tcp | pushpull |" in page


class Failing:
    """A peer that ends in its second round."""

    def __init__(self, name: str) -> None:
        self.setting, self.failure, self.cpu, self.runs = Setting(name, "dist"), "", 0.1, 0

    def start_prepare(self, case: DistCase) -> None:
        """Have nothing to make."""

    def finish_prepare(self) -> tuple[list[str], list[float]]:
        return [PUSHPULL], []

    def run(self, way: str, repeats: int) -> list[float]:
        self.runs += 1
        if self.setting.name == "mxnet" and self.runs == 2:
            self.failure = "gone"
            raise PeerFailure("gone")
        return [1.0] * repeats


def test_peer_that_fails_is_left_out() -> None:
    peers: Any = [Failing("ours"), Failing("mxnet")]
    found = dist_keys.measure(dist_keys.keys(10), peers)
    assert found.seconds == {"ours": {PUSHPULL: [1.0] * dist_keys.ROUNDS["ours"]}}
    assert peers[1].runs == 2


def results(pushpull: float, seconds: float) -> dict[str, Any]:
    ours, mxnet = {INIT: [1.0, 2.0, 3.0], PUSHPULL: [pushpull]}, {PUSHPULL: [0.8], EACH: [0.4], INIT: [4.0]}
    times = {"ours": {PUSHPULL: [seconds], EACH: [1.0]}}
    case = {"case": "requests", "workers": 8, "keys": 250, "seconds": times, "cpu": times}
    counted = [{"keys": 20_000, **ours, "others": {"mxnet": mxnet}}, {"keys": 40_000, **ours, "others": {}}]
    return {"machine": "a machine", "busy": 0, "cases": counted, "requests": [case]}


def test_goals_are_of_20000_keys_and_of_requests_in_one_call() -> None:
    rows = dist_keys.goals(results(0.1, 0.01))
    assert [row[1:] for row in rows] == [
        ["2 s", "≤ 1.5 s", "**no**"],
        ["100 ms", "≤ 100 ms", "yes"],
        ["200,000/s", "≥ 150,000/s", "yes"],
    ]
    assert dist_keys.goals(results(0.1, 0.02))[-1][1:] == ["100,000/s", "≥ 150,000/s", "**no**"]


def test_page_has_the_better_way_of_the_rival_and_what_a_key_costs() -> None:
    page = dist_keys.page_of(results(0.1, 0.01))
    assert "| 20,000 | 100.00 µs | 1.00 | 2.00 | 5.00 µs | 1.00 | 5.00-5.00 µs | 4.00 |" in page
    assert "| 40,000 | 50.00 µs | 0.50 |  | 2.50 µs | 0.50 | 2.50-2.50 µs |  |" in page
    assert "| requests | kvstore, tcp | pushpull, a call for each key | 2,000 | 500 µs |" in page


def test_cases_are_sound() -> None:
    found = list(CLAIM.cases(run.parse(CLAIM, ["--counts", "20,30000"])))
    assert [case.peers for case in found] == [("ours", "mxnet"), ("ours",), ("ours", "mxnet")]
    for case in found:
        assert DistCase.from_json(json.loads(json.dumps(case.to_json()))) == case


def test_plot_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(results(0.1, 0.01), tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
