"""Peers of the parameter server do the same work: the first call gives what float64 arithmetic gives."""

from __future__ import annotations

import ctypes
import json
import math
import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pace
import pytest
from benches.first_steps import first_step

from bench.cases import dist as dist_cases
from bench.cases import local as cases
from bench.cases.common import KB
from bench.cases.dist import APART, ENTRIES, KEY, DistCase, Goal, Inputs
from bench.claims import dist
from bench.peers.base import digest
from bench.peers.dist import sockets
from bench.peers.dist.bare_zmq import _cuts
from bench.peers.dist.base import PAIR
from bench.peers.dist.launch import DistGroup
from bench.plots import dist as dist_plot
from bench.runner import compiled, machine, profile, run
from bench.runner.machine import Probe
from bench.runner.rounds import Measured, Plan
from kvstore.observe.bench.worker_group import PeerFailure

pytestmark = [
    pytest.mark.bench,
    pytest.mark.skipif(compiled.compiler() is None, reason="the barrier is C"),
]

Array = npt.NDArray[np.float64]

ODD = ((1003,), (5, 7, 11), (1,), (70_001,), (64,))
LIMITS = [name for name, entry in ENTRIES.items() if entry.engine in ("zmq", "sockets", "memcpy")]
SUMMING = ["zmq-c", "sum", "memcpy-sum", "memcpy-server", "gloo"]
STORES = [name for name, entry in ENTRIES.items() if entry.engine in ("ours", "mxnet")]
#: By hosts the sum of a host is packed, which has other bits, and rows are refused.
FLAT = [name for name in STORES if ENTRIES[name].hierarchy == "flat"]
CODECS = [name for name in FLAT if ENTRIES[name].codec and name != "packing"]
PLAIN = [name for name in STORES if not ENTRIES[name].codec]
MAIN = [name for name in PLAIN if ENTRIES[name].transport == "tcp" and not ENTRIES[name].secure]
JOBS = [(name, 2, 1) for name in PLAIN] + [
    (name, *job) for name in ("ours", "mxnet") for job in ((1, 1), (2, 2), (4, 2))
]


def gradients(case: DistCase) -> list[list[Array]]:
    """The arrays that each worker pushes in the compared call: for each key one array."""
    return [
        [gradient.astype(np.float64) for gradient in Inputs(case, rank).gradients(1)]
        for rank in range(case.workers)
    ]


def expected(case: DistCase) -> list[Array]:
    """Sums, or the change made by the first step of a rule."""
    sums = [np.sum(np.stack(own), axis=0) for own in zip(*gradients(case), strict=True)]
    if not case.update:
        return sums
    decay = cases.WEIGHT_DECAY if case.update == "sgd_momentum" else 0.0
    weights = Inputs(case, 0).weights()
    return [-dist_cases.LEARNING_RATE * (g + decay * w) for g, w in zip(sums, weights, strict=True)]


def expected_rows(case: DistCase) -> list[Array]:
    total = np.zeros(case.shapes[0])
    for rank in range(case.workers):
        data = dist_cases.sparse_inputs(case, rank)
        total[data.ids] -= dist_cases.LEARNING_RATE * data.rows
    return [total[data.compared]]


def expected_codes(case: DistCase) -> list[Array]:
    """Sums of the values that the second push of each worker sends, after one that only fills residuals."""
    totals = [np.zeros(shape) for shape in case.shapes]
    for rank in range(case.workers):
        data = Inputs(case, rank)
        for total, seed, gradient in zip(totals, data.seeds(), data.gradients(1), strict=True):
            left = seed + gradient
            total += np.sign(left) * (np.abs(left) >= dist_cases.THRESHOLD) * dist_cases.THRESHOLD
    return totals


def group(name: str, workers: int = 2, servers: int = 1) -> DistGroup:
    case = DistCase(name, ODD, workers, servers, peers=(name,))
    found = dist.CLAIM.settings([case])
    if not found:
        pytest.skip(f"{name} has no environment here")
    return DistGroup(found[0])


def check(peer: DistGroup, case: DistCase, right: list[Array] | None) -> None:
    """The first call is right, and every way of calling works."""
    peer.start_prepare(case)
    reply = peer.finish_prepare()
    assert not isinstance(reply, str), reply
    variants, found = reply
    if right is not None:
        np.testing.assert_allclose(found, digest(right), rtol=1e-3, atol=1e-6)
    for variant in variants:
        times = peer.run(variant, 4)
        assert len(times) == 4
        assert all(math.isfinite(seconds) and seconds > 0 for seconds in times)
        assert peer.column(variant) in (peer.setting.name, peer.setting.name + APART)
        assert peer.cpu > 0
    peer.rest()


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workers", "servers"), [(1, 1), (2, 2), (4, 1)])
@pytest.mark.parametrize("name", [*LIMITS, *SUMMING])
def test_limits_and_gloo(name: str, workers: int, servers: int) -> None:
    if name == "gloo" and workers == 1:
        pytest.skip("nothing to reduce")
    with group(name, workers, servers) as peer:
        for shapes in (ODD, ((1024,),)):
            case = DistCase("sums", shapes, workers, servers, peers=(name,))
            check(peer, case, expected(case) if name in SUMMING else None)


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("name", "workers", "servers"), JOBS)
def test_sums(name: str, workers: int, servers: int) -> None:
    with group(name, workers, servers) as peer:
        for shapes in (ODD, ((1024,),)):
            case = DistCase("sums", shapes, workers, servers, peers=(name,))
            check(peer, case, expected(case))


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("mode", "update"), [("sync", "sgd_momentum"), ("async", "sgd")])
@pytest.mark.parametrize("name", MAIN)
def test_updates(name: str, mode: str, update: str) -> None:
    with group(name) as peer:
        case = DistCase("updates", ODD, mode=mode, update=update, peers=(name,))
        check(peer, case, expected(case))


@pytest.mark.parametrize(("mode", "update"), [("sync", "sgd_momentum"), ("async", "sgd")])
def test_floor_with_an_update(mode: str, update: str) -> None:
    with group("floor update") as peer:
        check(peer, DistCase("updates", ODD, mode=mode, update=update, peers=("floor update",)), None)


def test_updates_of_the_floor_are_those_of_the_rules() -> None:
    code = compiled.load(Path(sockets.__file__).with_name("floor.c"))
    weights, gradients = np.random.default_rng(3).standard_normal((2, 1003), np.float32)
    decayed, momentum = weights.copy(), np.zeros_like(weights)
    w, v, g, n = (*(ctypes.c_void_p(array.ctypes.data) for array in (decayed, momentum, gradients)), 1003)
    rates = map(ctypes.c_float, (cases.LEARNING_RATE, cases.MOMENTUM, cases.WEIGHT_DECAY))
    code.floor_sgd_momentum(w, v, g, ctypes.c_int64(n), *rates)
    np.testing.assert_allclose(decayed, first_step("sgd_momentum", weights, gradients), rtol=1e-5)
    plain = weights.copy()
    code.floor_sgd(ctypes.c_void_p(plain.ctypes.data), g, ctypes.c_int64(n), ctypes.c_float(0.1))
    np.testing.assert_allclose(plain, weights - 0.1 * gradients.astype(np.float64), rtol=1e-4, atol=1e-6)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CODECS)
def test_compression(name: str) -> None:
    with group(name) as peer:
        case = DistCase("2bit", ((70_001,), (17,)), peers=(name,))
        check(peer, case, expected_codes(case))


def test_limit_of_compression_packs_and_pulls() -> None:
    with group("packing") as peer:
        case = DistCase("2bit", ((70_001,), (17,)), peers=("packing",))
        assert prepared(peer, case) == PAIR
        check(peer, case, None)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", [*(name for name in MAIN if name in FLAT), "rows"])
def test_row_sparse(name: str) -> None:
    with group(name) as peer:
        case = DistCase("rows", ((500, 6),), update="sgd", rows=60, peers=(name,))
        check(peer, case, expected_rows(case))


def prepared(peer: DistGroup, case: DistCase) -> str:
    peer.start_prepare(case)
    reply = peer.finish_prepare()
    assert not isinstance(reply, str), reply
    return reply[0][0]


@pytest.mark.parametrize("name", ["floor", "zmq-c", "sum"])
def test_dead_worker_is_told_and_leaves_nothing(name: str) -> None:
    peer = group(name)
    case = DistCase("sums", ODD, peers=(name,))
    variant = prepared(peer, case)
    pids = peer.pids
    assert len(pids) == 3  # two workers, and one that answers them
    os.kill(pids[1], signal.SIGKILL)
    with pytest.raises(PeerFailure):
        peer.run(variant, 3)
    end = pace.deadline(5)
    while any(alive(pid) for pid in pids):
        assert time.monotonic() < end
        time.sleep(0.01)
    assert prepared(peer, case) == variant
    peer.close()


@pytest.mark.skipif(len(machine.cpus()) < 2, reason="one core is all there is")
def test_workers_may_roam_as_they_have_threads() -> None:
    with group("ours") as peer:
        prepared(peer, DistCase("sums", ODD, peers=("ours",)))
        assert {len(os.sched_getaffinity(pid)) for pid in peer.workers} == {len(machine.cpus())}


def test_slices_of_two_servers_are_summed_in_rank_order() -> None:
    """More slices than are on the way at a time; the last one is short."""
    shapes = ((40 * 256 * KB // 4 + 16,),)
    with group("zmq-c", 3, 2) as peer:
        case = DistCase("sums", shapes, 3, 2, peers=("zmq-c",))
        check(peer, case, expected(case))


@pytest.mark.parametrize("name", ["sum", "memcpy-sum", "memcpy-server"])
def test_blocks_are_summed_in_rank_order(name: str) -> None:
    """More blocks than are on the way at a time; the last one is short. Every way must give the same bits."""
    shapes = ((1_200_016,),)
    with group(name, 3, 2) as peer:
        case = DistCase("sums", shapes, 3, 2, peers=(name,))
        check(peer, case, expected(case))


def alive(pid: int) -> bool:
    status = Path(f"/proc/{pid}/stat")
    return status.exists() and status.read_text().rpartition(")")[2].split()[0] != "Z"


def still() -> Probe:
    return Probe(100.0, 50.0)


def test_groups_take_turns() -> None:
    case = DistCase("small", ODD, peers=("floor", "memcpy"), goals=(Goal("ours", "floor", 1e-9),))
    wanted = dist.CLAIM.settings([case])
    with run.running(dist.CLAIM, wanted) as peers:
        result = run.one(dist.CLAIM, case, peers, Plan(rounds=3, spare=0, turn=0.001), still)
    assert result is not None
    assert result.wrong == []
    assert len(result.seconds["floor"]) == 3
    assert dist.goals([result])[0][-1] == "not run"
    page = dist.CLAIM.page([result], 60.0)
    assert "| floor: TCP sockets |" in page
    written = json.loads(dist.CLAIM.to_json([result, result], 60.0))
    assert len(written["cases"]) == 2
    assert len(written["cases"][0]["cpu"]["memcpy"]) == 3


def test_one_call_is_compared_with_one_and_two_with_two() -> None:
    case = DistCase(
        "x", ODD, peers=("ours", "mxnet"), goals=(Goal("ours", "mxnet", 2), Goal("ours", "floor", 1))
    )
    seconds = {"ours": [1.0, 1.0], "ours apart": [2.0, 2.0], "mxnet": [3.0, 3.0], "mxnet apart": [3.0, 3.0]}
    found = Measured(case, {**seconds, "floor": [1.0, 3.0]}, {}, [], [0.0], cpu={})
    rows = dist.goals([found])
    assert [(row[1], row[5], row[-1]) for row in rows] == [
        ("kvstore, tcp", "3.00 [3.00-3.00]", "yes"),
        ("kvstore, tcp, push then pull", "1.50 [1.50-1.50]", "**no**"),
        ("kvstore, tcp", "2.00 [1.00-3.00]", "yes"),
        ("kvstore, tcp, push then pull", "1.00 [0.50-1.50]", "yes"),
    ]
    assert rows[0][6] == "peer ÷ kvstore ≥ 2"


def test_goals_of_processor_seconds_and_of_our_own_time() -> None:
    goals = (
        Goal("ours", "mxnet", most=1, of="cpu"),
        Goal("ours curve", "ours", most=2.5),
        Goal("ours", "gloo", most=1, of="cpu"),
    )
    seconds = {"ours": [1.0, 1.0], "mxnet": [9.0, 9.0], "mxnet apart": [1.0, 1.0], "ours curve": [2.0, 4.0]}
    cpu = {"ours": [2.0, 4.0], "mxnet": [2.0, 2.0], "mxnet apart": [1.0, 1.0], "ours curve": [1.0, 1.0]}
    case = DistCase("x", ODD, goals=goals)
    rows = dist.goals([Measured(case, seconds, {}, [], [0.0], cpu=cpu)])
    assert [row[2:] for row in rows] == [
        ["3 s", "MXNet, tcp", "2 s", "1.50 [1.00-2.00]", "processor seconds, kvstore ÷ peer ≤ 1", "**no**"],
        ["3 s", "kvstore, tcp", "1 s", "3.00 [2.00-4.00]", "kvstore ÷ peer ≤ 2.5", "**no**"],
        ["", "torch gloo all-reduce", "", "", "processor seconds, kvstore ÷ peer ≤ 1", "not run"],
    ]


def test_cases_are_sound() -> None:
    found = dist_cases.all_cases()
    names = [case.name for case in found]
    assert len(set(names)) == len(names)
    for case in found:
        assert DistCase.from_json(json.loads(json.dumps(case.to_json()))) == case
        assert set(case.peers) <= set(ENTRIES)
        assert {name for goal in case.goals for name in (goal.own, goal.peer)} <= set(case.peers)
    assert {(case.workers, case.servers) for case in found} == {(w, s) for w in (1, 2, 4) for s in (1, 2)}


def test_gradients_differ_from_call_to_call_and_stay_in_their_arrays() -> None:
    data = Inputs(DistCase("x", ODD), 0)
    first = [value.copy() for value in data.values]
    data.write(data.gradients(1))
    assert not any(np.array_equal(a, b) for a, b in zip(first, data.values, strict=True))
    assert all(np.shares_memory(value, data.flat) for value in data.values)
    assert max(float(np.abs(value).max()) for value in data.values) < 0.1
    assert max(float(np.abs(seed).max()) for seed in data.seeds()) < dist_cases.THRESHOLD


def row(case: DistCase, **seconds: float) -> dict[str, Any]:
    times = {name.replace("_", " "): [first, 2 * first, 3 * first] for name, first in seconds.items()}
    found: dict[str, Any] = json.loads(dist.CLAIM.to_json([Measured(case, times, {}, [], [0.0])], 1.0))[
        "cases"
    ][0]
    return found


def test_plot_takes_the_better_way_and_leaves_other_work_out(tmp_path: Path) -> None:
    one, many = (KEY // 4,), ((KEY // 4,),) * 16
    found = [
        row(DistCase("a", (one,)), ours=2.0, ours_apart=1.0, mxnet=4.0),
        row(DistCase("b", many), ours=8.0, floor=3.0),
        row(DistCase("c", (one,), update="sgd"), ours=5.0),
        row(DistCase("d", (one,)), ours_2bit=5.0, ours=7.0),
        row(DistCase("e: ResNet-50", (one,), 4, 1), ours=9.0),
        row(DistCase("f: ResNet-50", (one,), 2, 2), ours=6.0),
    ]
    panels = dist_plot._panels(found)
    ours = [lines.get("ours", []) for _, _, lines, _ in panels]
    assert ours == [
        [(KEY, 2000.0, 1000.0, 3000.0)],
        [(1, 2000.0, 1000.0, 3000.0), (16, 16000.0, 8000.0, 24000.0)],
        [(4, 18000.0, 9000.0, 27000.0)],
        [(2, 12000.0, 6000.0, 18000.0)],
    ]
    pytest.importorskip("matplotlib")
    dist_plot.draw({"machine": "a machine", "cases": found}, tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000


@pytest.mark.parametrize("calls", [False, True])
def test_profile_looks_at_every_process(monkeypatch: pytest.MonkeyPatch, calls: bool) -> None:
    monkeypatch.setattr(profile, "SECONDS", 0.3)
    case = DistCase("small", ((70_001,),), peers=("zmq",))
    (setting,) = dist.CLAIM.settings([case])
    text = profile.profile(case, setting, calls=calls)
    assert text.count("## worker") == 3  # two, and one that sends back
    assert "ZMQbg" in text
    assert re.search(r"bare_zmq.py(:\d+)? _trip", text)


@pytest.mark.parametrize("servers", [1, 2, 3])
@pytest.mark.parametrize("n", [1, 2, 7, 100, 101])
def test_chunks_cover_all_bytes_once(n: int, servers: int) -> None:
    found = list(_cuts(n, servers, 7))
    assert sorted(at for _, start, end in found for at in range(start, end)) == list(range(n))
    assert all(0 < end - start <= 7 and 0 <= server < servers for server, start, end in found)


def test_settings_name_the_job() -> None:
    for setting in dist.CLAIM.settings([DistCase("x", ODD, 4, 2, peers=tuple(ENTRIES))]):
        assert (setting.processes, setting.servers) == (4, 2)
