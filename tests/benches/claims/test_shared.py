"""Peers between processes do the same work: the first call of each gives what float64 arithmetic gives."""

from __future__ import annotations

import json
import math
import os
import signal
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from benches.first_steps import first_step

from bench.cases import shared as shared_cases
from bench.cases.common import bert_base
from bench.cases.shared import RIVALS, USERS, SharedCase
from bench.claims import shared
from bench.peers.base import digest
from bench.peers.setting import Setting
from bench.peers.shared.launch import SharedGroup
from bench.plots import shared as plot
from bench.runner import compiled, rivals, run, table
from bench.runner.machine import Probe
from bench.runner.rounds import Measured, Plan
from kvstore.observe.bench.worker_group import PeerFailure

pytestmark = [
    pytest.mark.bench,
    pytest.mark.skipif(compiled.compiler() is None, reason="the barrier is C"),
]

ODD = ((1003,), (5, 7, 11), (1,), (70_001,), (64,))
ONE = ((70_001,),)
SUMS = ("limit", "bare", "cma", *RIVALS)
UPDATES = ("limit", "openmpi", "mpich", "gloo", "mxnet")


def expected(case: SharedCase) -> list[npt.NDArray[np.float64]]:
    workers = [shared_cases.inputs(case, rank) for rank in range(case.processes)]
    results = []
    for key, weight in enumerate(workers[0].weights):
        total = np.sum(np.stack([one.values[key] for one in workers]).astype(np.float64), axis=0)
        results.append(first_step(case.update, weight.astype(np.float64), total) if case.update else total)
    return results


def setting(name: str, processes: int = 2) -> Setting:
    found = [
        one
        for one in shared.CLAIM.settings([SharedCase(name, "allreduce", ODD, processes)])
        if one.name == name
    ]
    if not found:
        pytest.skip(f"no environment has {name}: {rivals.rival(name)}")
    return found[0]


def check(group: SharedGroup, case: SharedCase) -> None:
    """Sums are right at first, and stay finite and right after chains that are rescaled."""
    group.start_prepare(case)
    reply = group.finish_prepare()
    assert not isinstance(reply, str), reply
    variants, found = reply
    np.testing.assert_allclose(found, digest(expected(case)), rtol=1e-4, atol=1e-7)
    for variant in variants:
        times = group.run(variant, 5)
        assert len(times) == 5
        assert all(math.isfinite(seconds) and seconds > 0 for seconds in times)
        assert group.cpu >= 0
    group.rest()


@pytest.mark.parametrize("processes", [2, 3])
@pytest.mark.parametrize("name", ["ours", *SUMS])
def test_sums(name: str, processes: int) -> None:
    case = SharedCase("sums", "allreduce", ODD, processes)
    with SharedGroup(setting(name, processes)) as group:
        check(group, case)
        check(group, replace(case, home="private", pages="small"))


@pytest.mark.parametrize("name", ["ours", *UPDATES])
def test_updates(name: str) -> None:
    with SharedGroup(setting(name)) as group:
        for update in ("sgd_momentum", "adam"):
            check(group, SharedCase(update, "update", ODD, update=update))


@pytest.mark.parametrize("name", ["queue", "manager", *USERS[2:]])
def test_what_users_might_do(name: str) -> None:
    with SharedGroup(setting(name)) as group:
        check(group, SharedCase("one", "allreduce", ONE, home="private"))


@pytest.mark.parametrize("wait", ["spin", "block"])
@pytest.mark.parametrize("name", ["ours", "limit", "openmpi"])
def test_chains(name: str, wait: str) -> None:
    with SharedGroup(setting(name)) as group:
        case = SharedCase("chain", "allreduce", ((1024,),), wait=wait)
        check(group, case)
        group.start_prepare(case)
        group.finish_prepare()
        assert len(group.run(group_variant(group, case), 250)) == 250


def group_variant(group: SharedGroup, case: SharedCase) -> str:
    group.start_prepare(case)
    reply = group.finish_prepare()
    assert not isinstance(reply, str), reply
    return reply[0][0]


@pytest.mark.parametrize("name", ["memcpy", "line", "futex"])
def test_measures_run(name: str) -> None:
    with SharedGroup(setting(name)) as group:
        variant = group_variant(group, SharedCase(name, "allreduce", ((1024,),)))
        assert all(seconds > 0 for seconds in group.run(variant, 20))


def test_dead_worker_is_told_and_leaves_nothing() -> None:
    case = SharedCase("sums", "allreduce", ODD)
    group = SharedGroup(setting("limit"))
    variant = group_variant(group, case)
    pids = group.pids
    os.kill(pids[-1], signal.SIGKILL)
    with pytest.raises(PeerFailure):
        group.run(variant, 3)
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)
    assert group_variant(group, case) == variant
    group.close()


def test_error_in_a_worker_leaves_the_peer_out() -> None:
    with SharedGroup(setting("limit")) as group:
        group.start_prepare(SharedCase("bad", "allreduce", ODD, update="unheard of"))
        reply = group.finish_prepare()
        assert isinstance(reply, str)
        assert "Traceback" in reply


def still() -> Probe:
    return Probe(100.0, 50.0)


def test_groups_take_turns(tmp_path: Path) -> None:
    goals = {"limit": 1e-9, "openmpi|mpich": 3}
    case = SharedCase("small", "allreduce", ODD, peers=("limit", "bare"), goals=goals, tail=1e9)
    limit, bare = setting("limit"), setting("bare")
    with run.running(shared.CLAIM, [limit, bare]) as peers:
        result = run.one(shared.CLAIM, case, peers, Plan(rounds=3, spare=0, turn=0.001), still)
    assert result is not None
    assert result.wrong == []
    assert "÷" in shared.CLAIM.page([result], 60.0)
    for name in ("seconds", "tails", "cpu", "variants"):
        found = getattr(result, name)
        found["ours"] = found["bare"]
    rows = table.goals([result], shared.PEERS)
    assert [row[-1] for row in rows] == ["yes", "not run", "yes"]
    written = json.loads(shared.CLAIM.to_json([result, result], 60.0))
    assert len(written["cases"]) == 2
    assert len(written["cases"][0]["tails"]["ours"]) == 3


def test_best_of_several_is_taken_round_by_round() -> None:
    case = SharedCase("x", "allreduce", ONE, goals={"openmpi|mpich": 2})
    seconds = {"ours": [1.0, 1.0], "openmpi": [2.0, 5.0], "mpich": [4.0, 3.0]}
    row = table.goals([Measured(case, seconds, {}, [], [0.0])], shared.PEERS)[0]
    assert row[4] == "2.50 [2.00-3.00]"


def test_plot(tmp_path: Path) -> None:
    case = {"verb": "allreduce", "keys": 1, "pages": "huge", "wait": "", "processes": 2, "home": "store"}
    found = [
        {**case, "bytes": size, "seconds": {"ours": [1.0, 2.0], "gloo": [8.0, 9.0]}} for size in (4096, 65536)
    ]
    assert plot.curves(found, 2, "store") == {"gloo": [(4096, 6.25, 4.5, 8.0), (65536, 6.25, 4.5, 8.0)]}
    pytest.importorskip("matplotlib")
    plot.draw({"machine": "a machine", "cases": found}, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


def test_bert_has_its_real_size() -> None:
    shapes = bert_base()
    assert len(shapes) == 199
    assert sum(math.prod(shape) for shape in shapes) == 109_482_240


def test_names_are_unique_and_cases_survive_json() -> None:
    found = shared_cases.all_cases()
    assert len({case.name for case in found}) == len(found)
    assert [SharedCase.from_json(case.to_json()) for case in found] == found
