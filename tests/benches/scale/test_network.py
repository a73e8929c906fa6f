"""Links and processes of a simulated job."""

from __future__ import annotations

import math
from typing import Any

import pytest
from benches.scale.sample_costs import COSTS
from hypothesis import given
from hypothesis import strategies as st

from bench.scale.network import Clock, Host, LinkKind, ethernet, send
from bench.scale.processes import Process

sizes = st.integers(1, 1 << 30)
rates, latencies = st.floats(1e6, 1e11), st.floats(0.0, 0.1)


def delivered(clock: Clock, n: int, arrived: list[Any]) -> None:
    assert clock.run(lambda: len(arrived) == n, math.inf)


@given(nbytes=sizes, rate=rates, latency=latencies)
def test_a_link_takes_its_bytes_over_its_bandwidth_and_its_latency(
    nbytes: int, rate: float, latency: float
) -> None:
    clock, arrived = Clock(), list[float]()
    kind = LinkKind(rate, latency)
    send(Host(clock, kind), Host(clock, kind), nbytes, lambda: arrived.append(clock.now))
    delivered(clock, 1, arrived)
    assert arrived[0] == pytest.approx(nbytes / rate + latency, rel=1e-6)


@given(several=st.lists(sizes, min_size=2, max_size=8), rate=rates, latency=latencies)
def test_messages_of_several_hosts_queue_at_the_one_that_they_go_to(
    several: list[int], rate: float, latency: float
) -> None:
    clock, arrived = Clock(), list[int]()
    kind = LinkKind(rate, latency)
    target = Host(clock, kind)
    sources = [Host(clock, kind) for _ in several]
    for number, (source, nbytes) in enumerate(zip(sources, several, strict=True)):
        send(source, target, nbytes, arrived.append, number)
    delivered(clock, len(several), arrived)
    assert arrived == sorted(arrived)  # first in, first out
    assert clock.now == pytest.approx(sum(several) / rate + latency, rel=1e-6)
    assert target.into.nbytes == sum(source.out.nbytes for source in sources) == sum(several)


def test_a_dead_host_gets_nothing() -> None:
    clock, arrived = Clock(), list[float]()
    source, target = Host(clock, ethernet(10)), Host(clock, ethernet(10))
    send(source, target, 1000, lambda: arrived.append(clock.now))
    target.die()
    assert not clock.run(lambda: bool(arrived), math.inf)
    source.die()
    send(source, Host(clock, ethernet(10)), 1000, lambda: arrived.append(clock.now))
    assert not clock.run(lambda: bool(arrived), math.inf)


@given(tasks=st.lists(st.floats(0.001, 1.0), min_size=1, max_size=12), cores=st.integers(1, 4))
def test_processes_of_a_host_share_its_cores(tasks: list[float], cores: int) -> None:
    clock, done = Clock(), list[int]()
    host = Host(clock, ethernet(10), cores)
    processes = [Process(clock, host, str(number), COSTS) for number in range(len(tasks))]
    for number, (process, seconds) in enumerate(zip(processes, tasks, strict=True)):
        process.post(process.spend, seconds)
        process.post(done.append, number)
    assert clock.run(lambda: len(done) == len(tasks), math.inf)
    free = [0.0] * cores
    for seconds in tasks:  # the first task gets the first free core
        free[free.index(min(free))] += seconds
    assert clock.now == pytest.approx(max(free), rel=1e-6)
    assert host.busy == pytest.approx(sum(tasks))


def test_a_process_does_one_thing_after_the_other_and_a_slow_one_takes_longer() -> None:
    clock, done = Clock(), list[float]()
    process = Process(clock, Host(clock, ethernet(10)), "p", COSTS)
    process.slow = 3.0
    for _ in range(4):
        process.post(process.spend, 0.5)
    process.post(lambda: done.append(clock.now))
    assert clock.run(lambda: bool(done), math.inf)
    assert done == [pytest.approx(6.0)]


def test_a_dead_process_does_nothing_more() -> None:
    clock, done = Clock(), list[float]()
    process = Process(clock, Host(clock, ethernet(10)), "p", COSTS)
    process.post(process.spend, 1.0)
    process.post(lambda: done.append(clock.now))
    clock.at(0.5, process.die)
    assert not clock.run(lambda: bool(done), math.inf)
