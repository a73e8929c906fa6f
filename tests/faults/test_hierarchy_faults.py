"""Workers of hosts that sum first, killed and stopped: no hang, no wrong sum, the others continue."""

from __future__ import annotations

import random
import signal
import time
from collections.abc import Callable
from typing import Any

import jobs
import pace
import pytest
from faults.faulty_jobs import (
    BODIES,
    UNTIL_TOLD,
    Faults,
    FaultyJob,
    finish,
    kill,
    ready,
    say,
)
from faults.test_dist_faults import kill_one_of, kill_one_server, restart_under
from nightly import nightly_unless
from servers import start_on, start_on_hosts

LAYOUTS = [[0, 0, 1, 1], [0, 0, 1], [0, 1, 0]]
PHASES = ["init", "push", "pushpull", "quick", "pull", "rows", "barrier", "settings", "close"]


SERVED = ["push", "pushpull", "rows", "barrier"]
LIVED = ["pushpull", "push", "rows", "barrier", "close"]
RETURNED = [("pushpull", True), ("rows", True), ("barrier", True), ("barrier", True, "fp16")]


def kill_a_worker(faults: Faults, draw: random.Random, phase: str) -> None:
    hosts = draw.choice(LAYOUTS)
    with faults.job(len(hosts), draw.choice([1, 2])) as made:
        workers = start_on_hosts(made, hosts, BODIES, "until_lost", phase, str(made.folder))
        kill_one_of(made, workers, draw)


@pytest.mark.parametrize("seed", [0])
def test_a_killed_worker(faults: Faults, seed: int) -> None:
    faults.run(kill_a_worker, [(phase,) for phase in PHASES], seed)


def kill_a_server(faults: Faults, draw: random.Random, phase: str) -> None:
    with faults.job(4, 2) as made:
        workers = start_on_hosts(made, [0, 0, 1, 1], BODIES, "until_lost", phase, str(made.folder))
        kill_one_server(made, workers, draw)


@pytest.mark.parametrize("seed", [0])
def test_a_killed_server(faults: Faults, seed: int) -> None:
    faults.run(kill_a_server, [(phase,) for phase in SERVED], seed)


def go_on(
    faults: Faults,
    draw: random.Random,
    phase: str,
    back: bool,
    codec: str = "",
) -> None:
    """Where that option is set, sums are those of the living; another worker may replace the dead."""
    hosts = draw.choice([[0, 0, 1, 1], [0, 0, 1], [0, 0, 0]])
    size = len(hosts)
    with faults.job(size, draw.choice([1, 2])) as made:
        workers = start_on_hosts(made, hosts, BODIES, "going_on", phase, codec)
        ready(*workers, line="working")
        rank = draw.choice([one for one in range(1, size) if not back or hosts.count(hosts[one]) > 1])
        time.sleep(draw.random() * 0.1)
        kill(workers[rank])
        time.sleep(draw.random() * 2 * made.dead_after)
        if back:
            workers[rank] = start_on(made, hosts[rank], rank, BODIES, "going_on", phase, codec)
            workers[rank].expect("working", 20)
        else:
            time.sleep(1.5 * made.dead_after)
            workers.pop(rank)
        workers[0].say("stop")
        found = finish(*workers)
        everybody = sum(10**one for one in range(size))
        assert all(one == found[0] for one in found), found
        assert found[0]["last"] == [everybody if back else everybody - 10**rank]
        assert made.ended(10) == [0] * (1 + len(made.servers))


@pytest.mark.parametrize("seed", nightly_unless(lambda seed: seed == 0, [0, 1]))
def test_the_living_go_on(faults: Faults, seed: int) -> None:
    faults.run(go_on, [(phase, False) for phase in LIVED], seed)


@pytest.mark.parametrize("seed", nightly_unless(lambda seed: seed == 0, [0, 1]))
def test_a_worker_that_is_started_again_joins_its_host(faults: Faults, seed: int) -> None:
    # Phases with one push of each key in a pass, as docs/stores.md says of rejoining workers.
    faults.run(go_on, RETURNED, seed)


PASSES = [(verb, meets) for verb in ("pushpull", "push") for meets in (False, True)]


def come_back_into_a_pass(faults: Faults, draw: random.Random, verb: str, meets: bool) -> None:
    """The others push key after key: a rejoined worker is in all rounds of a pass, or in none."""
    hosts = draw.choice([[0, 0, 1, 1], [0, 0, 1], [0, 0, 0]])
    with faults.job(len(hosts), draw.choice([1, 2])) as made:
        workers = start_on_hosts(made, hosts, BODIES, "one_by_one", verb, meets)
        ready(*workers, line="working")
        for _ in range(2):
            rank = draw.choice([one for one in range(1, len(hosts)) if hosts.count(hosts[one]) > 1])
            time.sleep(draw.random() * 0.1)
            kill(workers[rank])
            time.sleep(draw.random() * 2 * made.dead_after)
            workers[rank] = start_on(made, hosts[rank], rank, BODIES, "one_by_one", verb, meets)
            workers[rank].expect("working", 20)
        workers[0].say("stop")
        found = finish(*workers)
        members = list(range(len(hosts)))
        assert found == [{"members": members, "totals": [sum(10**one for one in members)]}] * len(hosts)
        assert made.ended(10) == [0] * (1 + len(made.servers))


@pytest.mark.parametrize("seed", [0])
def test_a_worker_rejoins_in_a_pass(faults: Faults, seed: int) -> None:
    faults.run(come_back_into_a_pass, PASSES, seed)


def lose_a_host(faults: Faults, draw: random.Random) -> None:
    """All workers of a host die; the others continue."""
    with faults.job(4, 2) as made:
        workers = start_on_hosts(made, [0, 0, 1, 1], BODIES, "going_on", "pushpull")
        ready(*workers, line="working")
        for rank in (2, 3):
            time.sleep(draw.random() * 0.05)
            kill(workers[rank])
        time.sleep(2 * made.dead_after)
        workers[0].say("stop")
        found = finish(*workers[:2])
        assert [one["last"] for one in found] == [[11], [11]]
        assert made.ended(10) == [0, 0, 0]


def test_a_host_is_lost(faults: Faults) -> None:
    faults.run(lose_a_host, [()], 0)


def lose_a_host_and_raise(faults: Faults, draw: random.Random, phase: str) -> None:
    """All workers of a host die together: all others get an error, read one round, save and close."""
    hosts = draw.choice([[0, 0, 1, 1], [0, 1, 1], [0, 1, 0, 1]])
    with faults.job(len(hosts), draw.choice([1, 2])) as made:
        workers = start_on_hosts(made, hosts, BODIES, "until_lost", phase, str(made.folder), "host")
        ready(*workers)
        lost = draw.choice([0, 1])
        time.sleep(draw.random() * 0.1)
        victims = [worker for worker, host in zip(workers, hosts, strict=True) if host == lost]
        for victim in draw.sample(victims, len(victims)):
            killed = kill(victim)
        found = finish(*(worker for worker in workers if worker not in victims))
        for one in found:
            assert one["role"] == "worker", one
            assert hosts[one["rank"]] == lost, one
            assert one["noticed"] - killed < made.in_time
        assert len({str(one["values"]) for one in found}) == 1, found
        assert made.ended(10) == [0] * (1 + len(made.servers))


@pytest.mark.parametrize("seed", [0])
def test_a_host_is_lost_where_that_is_an_error(faults: Faults, seed: int) -> None:
    faults.run(lose_a_host_and_raise, [(phase,) for phase in ("push", "pushpull", "barrier", "pull")], seed)


def start_to_be_refused(made: FaultyJob, rank: int) -> jobs.Worker:
    """Start a worker of the second host that must get the error that it cannot rejoin."""
    options = {"on_peer_loss": "continue", "slice_bytes": 1 << 16}
    return start_on(made, 1, rank, BODIES, "refused_with", "PeerLostError", options)


def refuse_all(made: FaultyJob, again: list[jobs.Worker], others: list[jobs.Worker]) -> None:
    for text in finish(*again):
        assert "its host had no other worker left to hold its part" in text, text
    others[0].say("stop")
    assert [one["last"] for one in finish(*others)] == [[11], [11]]
    assert made.ended(10) == [0, 0, 0]


def wait_until_lost(worker: jobs.Worker, *ranks: int) -> None:
    """Wait until a worker has heard that these are lost."""
    end = pace.deadline(20)
    while not all(f"worker {rank} is lost" in worker.errors() for rank in ranks):
        assert time.monotonic() < end
        time.sleep(0.05)


def host_comes_back(faults: Faults, draw: random.Random, count: int) -> None:
    """Workers of a host that is known to be lost whole are refused, with the reason; the others continue."""
    with faults.job(4, 2) as made:
        workers = start_on_hosts(made, [0, 0, 1, 1], BODIES, "going_on", "pushpull")
        ready(*workers, line="working")
        for rank in (2, 3):
            time.sleep(draw.random() * 0.05)
            kill(workers[rank])
        wait_until_lost(workers[0], 2, 3)
        again = [start_to_be_refused(made, rank) for rank in draw.sample((2, 3), count)]
        refuse_all(made, again, workers[:2])


def host_dies_while_one_comes_back(faults: Faults, _: random.Random, rank: int) -> None:
    """The scheduler lets it in, as it does not know yet that the other one of its host is dead, too."""
    with faults.job(4, 2) as made:
        workers = start_on_hosts(made, [0, 0, 1, 1], BODIES, "going_on", "pushpull")
        ready(*workers, line="working")
        kill(workers[rank])
        again = start_to_be_refused(made, rank)
        time.sleep(made.dead_after / 2)
        kill(workers[5 - rank])
        refuse_all(made, [again], workers[:2])


def test_a_host_that_was_lost_is_turned_away(faults: Faults) -> None:
    faults.run(host_comes_back, [(1,), (2,), (2,)], 0)


def test_a_host_that_dies_while_one_of_it_comes_back(faults: Faults) -> None:
    faults.run(host_dies_while_one_comes_back, [(2,), (3,)], 0)


def restart_a_server(faults: Faults, draw: random.Random, hosts: list[int]) -> None:
    """A server restarts from its snapshot; later pushes of hosts are lost, or sent again once."""

    def start(made: FaultyJob) -> list[jobs.Worker]:
        return start_on_hosts(made, hosts, BODIES, "going_through_restarts")

    restart_under(faults, draw, True, len(hosts), start)


RESTARTED = [([0, 0, 1, 1],), ([0, 0, 1],), ([0, 0],)]


@pytest.mark.parametrize("seed", [0])
def test_a_server_comes_back(faults: Faults, seed: int) -> None:
    faults.run(restart_a_server, RESTARTED, seed)


def stop_for_long(faults: Faults, draw: random.Random) -> None:
    """A worker stopped for long is lost, and fenced when it wakes up; or killed, if it was at work (0007)."""
    with faults.job(4, 2) as made:
        phase = draw.choice(["pushpull", "push", "barrier"])
        workers = start_on_hosts(made, [0, 0, 1, 1], BODIES, "until_fenced", phase, True)
        ready(*workers)
        time.sleep(draw.random() * 0.1)
        one = workers[draw.randrange(4)]
        one.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        others = [worker for worker in workers if worker is not one]
        ready(*others, line="noticed")
        one.signal(signal.SIGCONT)
        try:
            ready(one, line="noticed")
        except AssertionError:
            assert one.finish(pace.deadline(5)) == -signal.SIGKILL, one.errors()
            workers.remove(one)
        for worker in workers:
            say(worker, "go")
        for worker, told in zip(workers, finish(*workers), strict=True):
            assert told["error"] == ("FencedError" if worker is one else "PeerLostError"), told
            assert worker is one or told["noticed"] - stopped < made.in_time
        assert made.ended(15) == [0, 0, 0]


def test_a_worker_stands_still(faults: Faults) -> None:
    faults.run(stop_for_long, [()], 0)


def on_command(made: FaultyJob, loss: str, **variables: str) -> list[jobs.Worker]:
    """Start two workers of a host, and one of another, which run the test's commands."""
    workers = start_on_hosts(made, [0, 0, 1], BODIES, "on_command", loss, **variables)
    ready(*workers)
    return workers


def answer(worker: jobs.Worker, word: str, begun: bool = False) -> str:
    """Have a worker make a call, unless it has begun; return its result."""
    if not begun:
        say(worker, word)
    return worker.expect_some(f"{word}: ", UNTIL_TOLD).removeprefix(f"{word}: ")


def test_a_fenced_worker_leaves_what_it_carries_to_its_host(faults: Faults) -> None:
    """The scheduler missed it, and the workers of its host did not: they are more patient."""
    with faults.job(3, 1) as made:
        first, second, other = on_command(made, "continue", KVSTORE_DEAD_AFTER="60")
        answer(second, "push")
        answer(first, "push")  # is last, so it carries
        for worker in (first, second):
            say(worker, "pull")  # which waits for the other host
        first.signal(signal.SIGSTOP)
        wait_until_lost(other, 0)
        first.signal(signal.SIGCONT)
        assert answer(first, "pull", begun=True).startswith("FencedError: worker 0 ")
        assert answer(other, "pushpull") == "111"
        assert answer(second, "pull", begun=True) == "111"
        say(second, "pushpull")
        assert answer(other, "pushpull again") == "110"
        for worker in (first, second, other):
            say(worker, "close")
        finish(first, second, other)
        assert made.ended(10) == [0, 0]


def test_the_last_push_of_a_host_counts_though_another_of_it_is_found_dead_later(faults: Faults) -> None:
    with faults.job(3, 1) as made:
        first, second, other = on_command(made, "continue")
        kill(second)
        assert second.finish(pace.deadline(20)) == -signal.SIGKILL  # so that its host finds it dead
        assert answer(first, "push") == "0"
        say(first, "close")
        finish(first)
        wait_until_lost(other, 1)
        assert answer(other, "pushpull") == "101"
        say(other, "close")
        finish(other)
        assert made.ended(10) == [0, 0]


def test_a_wait_for_ones_host_misses_the_scheduler(faults: Faults) -> None:
    """Nothing of this worker is under way at servers or scheduler."""
    with faults.job(3, 1, KVSTORE_TIMEOUT=pace.variable(100)) as made:
        first, *_ = on_command(made, "raise")
        say(first, "pushpull")
        time.sleep(0.5)
        kill(made.scheduler)
        assert "PeerLostError: scheduler is lost" in answer(first, "pushpull", begun=True)


def test_reads_after_another_has_missed_the_scheduler(faults: Faults) -> None:
    """A worker that learns of it by the carrier of its round detects the loss itself before it reads."""
    with faults.job(3, 1, KVSTORE_TIMEOUT=pace.variable(100)) as made:
        first, second, _ = on_command(made, "raise")
        answer(first, "push")
        say(second, "pushpull")
        time.sleep(0.5)
        kill(made.scheduler)
        told = [answer(second, "pushpull", begun=True), answer(first, "pull"), answer(first, "pull again")]
        assert all(one.startswith("PeerLostError: scheduler is lost") for one in told), told


def test_the_job_says_how_long_a_worker_may_stand_still(faults: Faults) -> None:
    """In the memory of a host, too: a worker that stands still for less is not missed."""
    with faults.job(3, 1, KVSTORE_DEAD_AFTER="60", KVSTORE_TIMEOUT="120") as made:
        workers = start_on_hosts(made, [0, 0, 1], BODIES, "through_absences", 8)
        ready(*workers)
        workers[1].signal(signal.SIGSTOP)
        time.sleep(6.5)  # more than the default
        workers[1].signal(signal.SIGCONT)
        digests = {one["digest"] for one in finish(*workers, timeout=60)}
        assert len(digests) == 1
        assert made.ended(20) == [0, 0]


#: Workers rejoin in phases with one push of each key in a pass.
CASES: list[tuple[Callable[..., None], list[tuple[Any, ...]]]] = [
    (kill_a_worker, [(phase,) for phase in PHASES]),
    (kill_a_server, [(phase,) for phase in SERVED]),
    (go_on, [(phase, False) for phase in LIVED]),
    (go_on, RETURNED),
    (come_back_into_a_pass, PASSES),
    (lose_a_host, [()]),
    (lose_a_host_and_raise, [(phase,) for phase in ("push", "pushpull", "barrier", "pull")]),
    (host_comes_back, [(1,), (2,)]),
    (restart_a_server, RESTARTED),
    (stop_for_long, [()]),
]


@pytest.mark.nightly
@pytest.mark.timeout(600)
@pytest.mark.parametrize("seed", range(50))
@pytest.mark.parametrize(("body", "cases"), CASES)
def test_fifty_seeds(
    faults: Faults,
    body: Callable[..., None],
    cases: list[tuple[Any, ...]],
    seed: int,
) -> None:
    faults.run(body, cases, 100 + seed)
