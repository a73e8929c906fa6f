"""Simulated jobs: the same for the same seed, nothing lost, and deaths are noticed."""

from __future__ import annotations

import math
from typing import Any

import pytest
from benches.scale.sample_costs import COSTS

from bench.cases.common import KB, MB
from bench.cases.scale import TWO_BIT, ExactCase, StepCase, key_set
from bench.scale import experiments, programs
from bench.scale.job import Job, Plan
from bench.scale.network import LinkKind, ethernet
from kvstore.kernels import cpu
from kvstore.stores.parameter_server.protocol.messages import KeySpec

KEYS = (KeySpec("a", (1000,), "float32"), KeySpec("b", (600, 1000), "float32"), KeySpec("c", (5,), "float32"))
NBYTES = 4 * (1000 + 600_000 + 5)


def job_of(steps: int = 2, closes: bool = False, keys: tuple[KeySpec, ...] = KEYS, **plan: Any) -> Job:
    plan = {"workers": 6, "servers": 3, "per_host": 2, "jitter": 0.01, **plan}
    return Job(Plan(**plan), COSTS, programs.steps(keys, steps, closes=closes))


def test_a_job_goes_the_same_way_for_the_same_seed() -> None:
    jobs = [job_of(seed=seed, closes=True) for seed in (1, 1, 2)]
    assert all(job.run() for job in jobs)
    assert jobs[0].marks == jobs[1].marks
    assert jobs[0].clock.count == jobs[1].clock.count
    assert jobs[0].marks != jobs[2].marks


@pytest.mark.parametrize("mode", ["sync", "async"])
def test_every_byte_that_is_sent_is_received(mode: str) -> None:
    job = job_of(mode=mode)
    assert job.run()
    assert sum(one.values_out for one in job.workers) == sum(one.values_in for one in job.servers)
    assert sum(one.values_out for one in job.workers) == (1 + 6 * 2) * NBYTES  # one brings the first values
    assert sum(one.values_in for one in job.workers) == sum(one.values_out for one in job.servers)
    assert sum(one.values_in for one in job.workers) == 6 * 2 * NBYTES
    hosts = [job.scheduler.host, *(one.host for one in job.servers), *job.hosts]
    assert sum(one.out.nbytes for one in hosts) >= 2 * 6 * 2 * NBYTES
    settled = job.run(lambda: sum(h.out.nbytes for h in hosts) == sum(h.into.nbytes for h in hosts), math.inf)
    assert settled


def test_a_slice_is_one_request_of_each_worker_and_one_round_of_all() -> None:
    job = job_of(steps=3)
    assert job.run()
    slices = 1 + 3 + 1  # 2.4 MB are cut at 1 MB
    assert sum(one.requests for one in job.servers) == slices * (1 + 3 * 6)
    assert sum(one.rounds for one in job.servers) == 3 * slices
    single = job_of(steps=3, mode="async")
    assert single.run()
    assert sum(one.rounds for one in single.servers) == 3 * slices * 6


def test_packed_gradients_are_fewer_bytes_there_and_as_many_back() -> None:
    job = job_of(coding=TWO_BIT, keys=KEYS[1:2])
    assert job.run()
    packed = sum(one.values_out for one in job.workers) - 4 * 600_000
    cuts = (262_144, 262_144, 75_712)
    assert packed == 6 * 2 * sum(cpu.encoded_bytes(TWO_BIT, n) for n in cuts)
    assert sum(one.values_in for one in job.workers) == 6 * 2 * 4 * 600_000


def test_a_step_takes_at_least_what_its_links_need_and_not_much_more() -> None:
    keys = tuple(KeySpec(n, (MB // 4,), "float32") for n in range(16))
    slow = LinkKind(1e7, 0.001)
    job = job_of(workers=4, servers=2, per_host=1, keys=keys, link=slow, jitter=0.0)
    assert job.run()
    took = max(job.marks["end 1"]) - min(job.marks["begin 1"])
    wire = 4 * 16 * MB / 2 / 1e7  # of four workers, half to each server; replies overlap
    assert wire < took < 1.4 * wire


def test_a_host_that_sums_first_sends_less() -> None:
    flat = job_of(workers=8, servers=2, per_host=4)
    by_host = job_of(workers=2, servers=2, per_host=1, sharers=4)
    for job in (flat, by_host):
        assert job.run()
    used = [max(host.out.nbytes for host in job.hosts[1:]) for job in (flat, by_host)]
    assert used[0] == pytest.approx(4 * used[1], rel=0.01)


def test_a_straggler_holds_up_rounds_and_nothing_else() -> None:
    took = {}
    for mode in ("sync", "async"):
        job = job_of(mode=mode, jitter=0.0, steps=1, per_host=1)
        job.workers[5].slow = 1000.0
        assert job.run()
        took[mode] = sorted(end - max(job.marks["begin 0"]) for end in job.marks["end 0"])
    assert took["sync"][0] > 0.5 * took["sync"][-1]
    assert took["async"][-2] < 0.05 * took["async"][-1]


def test_a_dead_server_is_noticed_by_all() -> None:
    job = job_of(steps=1000, on_peer_loss="continue")
    assert job.run(lambda: "end 1" in job.marks)
    died = job.clock.now
    job.kill(job.servers[1])
    assert job.run()
    failures = [one.failure for one in job.workers]
    assert all(
        one is not None and (one.error, one.role, one.rank) == ("PeerLostError", "server", 1)
        for one in failures
    )
    assert 5.0 < job.clock.now - died < 7.0


@pytest.mark.parametrize("on_peer_loss", ["continue", "raise"])
def test_the_others_go_on_without_a_dead_host_or_are_told_of_it(on_peer_loss: str) -> None:
    job = job_of(steps=20, on_peer_loss=on_peer_loss)
    assert job.run(lambda: "end 1" in job.marks)
    job.hosts[2].die()
    job.kill(*job.workers[4:])
    assert job.run(limit=60.0)
    found = {one.failure and one.failure.error for one in job.workers[:4]}
    assert found == ({None} if on_peer_loss == "continue" else {"PeerLostError"})


def test_the_scheduler_tells_all_of_many_that_leave_with_few_views() -> None:
    job = job_of(workers=40, servers=2, closes=True, jitter=0.001)
    assert job.run()
    assert job.scheduler.kinds["ViewNotice"] < 10 * (40 + 2)  # not one to each for each


def test_an_experiment_says_what_a_step_is_bound_by() -> None:
    slow = experiments.run(StepCase("a", "step", f"8x{MB}", 16, 2, 4, gbits=0.1), COSTS)
    assert slow["bound"] == "server link"
    assert slow["shares"]["server link"] > 0.8
    fast = experiments.run(StepCase("a", "step", f"2000x{KB}", 4, 2, 4, gbits=100), COSTS)
    assert fast["bound"] in ("server core", "worker core")


def test_sets_of_keys_are_those_of_the_models() -> None:
    assert len(key_set("ResNet-50").shapes) == 161
    assert 6.7e9 < key_set("7 billion").nbytes / 2 < 6.8e9
    whole, part = key_set("7 billion"), key_set("7 billion/8")
    assert part.nbytes < whole.nbytes / 3
    assert key_set("20x4096").nbytes == 20 * 4096


def test_two_parts_of_a_model_stand_for_all_of_it() -> None:
    whole, *parts = (f"{count}x{MB}" for count in (96, 16, 32))
    found = experiments.run(ExactCase("a", "exact", whole, tuple(parts), 4, 2), COSTS)
    assert abs(found["error"]) < 0.02
    scaled = StepCase("b", "step", whole, 4, 2, 1, steps=1, parts=tuple(parts))
    assert experiments.run(scaled, COSTS)["seconds"] == pytest.approx(found["scaled"])


def test_cores_of_one_host_are_shared() -> None:
    link = LinkKind(math.inf, 0.0, 20e-6)
    found = {}
    for cores in (1, 4):
        job = job_of(workers=4, servers=1, per_host=4, link=link, cores=cores, jitter=0.0)
        assert job.run()
        found[cores] = max(job.marks["end 1"]) - min(job.marks["begin 1"])
    assert found[1] > 1.5 * found[4]


def test_ethernet_has_less_than_its_name_says() -> None:
    assert ethernet(10).rate == pytest.approx(1.25e9 * 1448 / 1538)
