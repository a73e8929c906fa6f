"""Jobs with servers whose processes are killed, stopped, cut off, starved and interrupted.

No process may hang, no value may be wrong, and no process or file may remain.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from typing import Any

import jobs
import pace
import pytest
from faults import strangers
from faults.faulty_jobs import (
    BODIES,
    UNTIL_TOLD,
    Behind,
    Case,
    Faults,
    FaultyJob,
    check_lost,
    finish,
    kill,
    ready,
    say,
    silence,
    stood_still,
)
from faults.proxy import Proxy
from nightly import nightly_unless
from servers import start_on_hosts

# ------------------------------------------------------------------------------------------------- kill -9

PHASES = ["init", "push", "pushpull", "quick", "pull", "barrier", "settings", "close"]


def drawn(phases: list[str], seed: int) -> list[Case]:
    """Half of them; the other cases run at night."""
    return [(phase,) for phase in random.Random(seed).sample(phases, 4)]


def kill_a_worker(faults: Faults, draw: random.Random, phase: str) -> None:
    with faults.job(draw.choice([2, 3]), draw.choice([1, 2])) as made:
        workers = made.start_all(BODIES, "until_lost", phase, str(made.folder))
        kill_one_of(made, workers, draw)


def kill_one_of(made: FaultyJob, workers: list[jobs.Worker], draw: random.Random) -> None:
    """Kill a worker of a job while it works: all others get an error, and the job ends."""
    ready(*workers)
    rank = draw.randrange(made.size)
    victim = workers.pop(rank)
    time.sleep(draw.random() * 0.1)
    killed = kill(victim)
    check_lost(made, finish(*workers), killed, "worker", rank)
    assert victim.finish(pace.deadline(5)) == -signal.SIGKILL, victim.errors()
    assert made.ended(10) == [0] * (1 + len(made.servers))


@pytest.mark.parametrize("seed", [0])
def test_a_killed_worker(faults: Faults, seed: int) -> None:
    faults.run(kill_a_worker, [(phase,) for phase in PHASES], seed)


def kill_a_server(faults: Faults, draw: random.Random, phase: str) -> None:
    with faults.job(2, 2) as made:
        workers = made.start_all(BODIES, "until_lost", phase, str(made.folder))
        kill_one_server(made, workers, draw)


def kill_one_server(made: FaultyJob, workers: list[jobs.Worker], draw: random.Random) -> None:
    """Kill one of two servers while the workers work: all get an error, and the job ends."""
    ready(*workers)
    rank = draw.randrange(2)
    time.sleep(draw.random() * 0.1)
    killed = kill(made.servers[rank])
    check_lost(made, finish(*workers), killed, "server", rank)
    codes = made.ended(10)
    assert codes.pop(1 + rank) == -signal.SIGKILL
    assert codes == [0, 0]


@pytest.mark.parametrize("seed", [0])
def test_a_killed_server(faults: Faults, seed: int) -> None:
    faults.run(kill_a_server, drawn(PHASES, seed), seed)


def kill_the_scheduler(faults: Faults, draw: random.Random, phase: str) -> None:
    with faults.job(2, 2) as made:
        workers = made.start_all(BODIES, "until_lost", phase, str(made.folder))
        ready(*workers)
        time.sleep(draw.random() * 0.1)
        killed = kill(made.scheduler)
        if ran := [one for one in finish(*workers) if not stood_still(one["text"])]:
            check_lost(made, ran, killed, "scheduler", 0)
        assert made.ended(15) == [-signal.SIGKILL, 1, 1]
        for server in made.servers:
            errors = server.errors()
            assert "PeerLostError: scheduler is lost" in errors or stood_still(errors), errors


@pytest.mark.parametrize("seed", [0])
def test_a_killed_scheduler(faults: Faults, seed: int) -> None:
    faults.run(kill_the_scheduler, drawn(PHASES, seed), seed)


def kill_one_at_the_start(faults: Faults, draw: random.Random, on_peer_loss: str) -> None:
    """One of three workers dies while it waits for the third."""
    with faults.job(3, 1) as made:
        body = "until_lost" if on_peer_loss == "raise" else "going_on"
        arguments = ("pushpull", str(made.folder)) if on_peer_loss == "raise" else ("pushpull",)
        workers = [made.start(BODIES, body, *arguments, rank=rank) for rank in (0, 1)]
        ready(*workers, line="known")
        time.sleep(draw.random() * 0.1)
        killed = kill(workers[1])
        if on_peer_loss == "raise":
            check_lost(made, finish(workers[0]), killed, "worker", 1)
            return
        workers.append(made.start(BODIES, body, *arguments, rank=2))
        ready(workers[0], workers[2], line="working")
        workers[0].say("stop")
        first, last = finish(workers[0], workers[2])
        assert first == last
        assert first["last"] == [101]


def kill_a_server_at_the_start(faults: Faults, draw: random.Random) -> None:
    """A server dies before the workers are there; another one takes its place."""
    with faults.job(2, 2) as made:
        time.sleep(pace.seconds(0.2 + draw.random() * 0.2))  # the scheduler knows it by now
        kill(made.servers[0])
        worker = made.start(BODIES, "until_lost", "pushpull", str(made.folder), rank=0)
        other = made.start(BODIES, "until_lost", "pushpull", str(made.folder), rank=1)
        found = finish(worker, other)
        assert [(one["role"], one["rank"]) for one in found] == [("server", 0)] * 2, found


def kill_the_scheduler_at_the_start(faults: Faults, draw: random.Random) -> None:
    with faults.job(2, 1) as made:
        worker = made.start(BODIES, "until_lost", "pushpull", str(made.folder), rank=0)
        worker.expect("known")
        time.sleep(0.5 + draw.random() * 0.2)  # the server has been there for longer, and says nothing
        killed = kill(made.scheduler)
        check_lost(made, finish(worker), killed, "scheduler", 0)
        assert made.ended(10) == [-signal.SIGKILL, 1]


@pytest.mark.parametrize("seed", [0])
def test_a_death_at_the_start(faults: Faults, seed: int) -> None:
    faults.run(kill_one_at_the_start, [("raise",), ("continue",)], seed)
    faults.run(kill_a_server_at_the_start, [()], seed)
    faults.run(kill_the_scheduler_at_the_start, [()], seed)


def kill_after_close(faults: Faults, draw: random.Random) -> None:
    """A worker that has closed its store is not missed, even if it does not end well."""
    with faults.job(3, 1) as made:
        closed = made.start(BODIES, "rests_after_close", rank=1)
        workers = [made.start(BODIES, "goes_on_alone", rank=rank) for rank in (0, 2)]
        ready(*workers)
        closed.expect("closed")
        kill(closed)
        time.sleep(draw.random() * 2 * made.dead_after)
        for worker in workers:
            worker.say("go")
        finish(*workers)
        assert made.ended(10) == [0, 0]


@pytest.mark.parametrize("seed", [0])
def test_a_worker_killed_after_close(faults: Faults, seed: int) -> None:
    faults.run(kill_after_close, [()], seed)


def test_a_push_that_came_to_nothing_is_told_by_the_pull_after_it(faults: Faults) -> None:
    """Also where the worker has heard of the loss before that pull."""
    with faults.job(2, 1) as made:
        there = made.start(BODIES, "reads_after_a_loss", rank=0)
        gone = made.start(BODIES, "rests_after_init", rank=1)
        gone.expect("ready")
        there.expect("pushed")
        kill(gone)
        assert finish(there) == [[5.0, 0.0]]


def lose_between_slices(faults: Faults, draw: random.Random, seed: int) -> None:
    """What survivors read is of one round for all keys of a call, and for all of them."""
    workers = draw.choice([2, 3])
    with faults.job(workers, 2, KVSTORE_DEAD_AFTER=silence(5), KVSTORE_TIMEOUT="120",
                    KVSTORE_SAME_HOST_SHM=str(draw.randrange(2))) as made:  # fmt: skip
        victim = draw.randrange(workers)
        killed = draw.random() < 0.3
        started = made.start_all(BODIES, "whole_after_loss", seed, victim, killed)
        for worker in started:
            worker.expect("ready", 120)
        time.sleep(draw.random() * 0.2)
        if killed:
            kill(started[victim])
        found = finish(*(one for rank, one in enumerate(started) if rank != victim), timeout=240)
        rounds = [one["rounds"] for one in found if "rounds" in one]
        assert all(one == rounds[0] for one in rounds), found
        started[victim].finish(pace.deadline(120))
        assert made.ended(120) == [0, 0, 0]


@pytest.mark.parametrize("first", nightly_unless(lambda first: first == 0, [0, 2]))
def test_a_loss_between_slices(faults: Faults, first: int) -> None:
    faults.run(lose_between_slices, [(seed,) for seed in (first, first + 1)], 0)


def read_beside(faults: Faults, draw: random.Random, seed: int) -> None:
    patience = {"KVSTORE_DEAD_AFTER": "60", "KVSTORE_TIMEOUT": "120"}
    with faults.job(3, 2, KVSTORE_SAME_HOST_SHM=str(draw.randrange(2)), **patience) as made:
        made.start_all(BODIES, "reads_while_others_go_on", seed)
        seen = finish(*made.workers, timeout=240)[0]["seen"]
        assert len(seen) > 1
        assert made.ended(120) == [0, 0, 0]


def test_reads_beside_the_rounds_of_others(faults: Faults) -> None:
    faults.run(read_beside, [(seed,) for seed in range(2)], 0)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(200))
def test_a_loss_between_slices_with_many_seeds(faults: Faults, seed: int) -> None:
    faults.run(lose_between_slices, [(1000 + seed,)], seed)


# ---------------------------------------------------------------------------------------------- going on


def go_on(faults: Faults, draw: random.Random, phase: str, back: bool) -> None:
    """Where that option is set, sums are those of the living; another worker may replace the dead."""
    size = draw.choice([2, 3])
    with faults.job(size, draw.choice([1, 2])) as made:
        workers = made.start_all(BODIES, "going_on", phase)
        ready(*workers, line="working")
        rank = draw.randrange(1, size)
        time.sleep(draw.random() * 0.1)
        kill(workers[rank])
        time.sleep(draw.random() * 2 * made.dead_after)
        if back:
            workers[rank] = made.start(BODIES, "going_on", phase, rank=rank)
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


def come_back_into_a_pass(faults: Faults, draw: random.Random, verb: str, meets: bool) -> None:
    """The others push key after key: a rejoined worker is in all rounds of a pass, or in none."""
    size = draw.choice([2, 3])
    with faults.job(size, draw.choice([1, 2])) as made:
        workers = made.start_all(BODIES, "one_by_one", verb, meets)
        ready(*workers, line="working")
        for _ in range(2):
            rank = draw.randrange(1, size)
            time.sleep(draw.random() * 0.1)
            kill(workers[rank])
            time.sleep(draw.random() * 2 * made.dead_after)
            workers[rank] = made.start(BODIES, "one_by_one", verb, meets, rank=rank)
            workers[rank].expect("working", 20)
        workers[0].say("stop")
        found = finish(*workers)
        everybody = {"members": list(range(size)), "totals": [sum(10**one for one in range(size))]}
        assert found == [everybody] * size
        assert made.ended(10) == [0] * (1 + len(made.servers))


@pytest.mark.parametrize("seed", nightly_unless(lambda seed: seed == 0, [0, 1]))
def test_a_worker_rejoins_in_a_pass(faults: Faults, seed: int) -> None:
    cases = [(verb, meets) for verb in ("pushpull", "push") for meets in (False, True)]
    faults.run(come_back_into_a_pass, cases, seed)


@pytest.mark.parametrize("seed", [0])
def test_the_living_go_on(faults: Faults, seed: int) -> None:
    cases = [("pushpull", False), ("push", False), ("pushpull", True), ("barrier", False), ("close", False)]
    faults.run(go_on, cases, seed)


# ------------------------------------------------------------------------------------------------- SIGSTOP


def stop_for_a_while(faults: Faults, draw: random.Random, role: str) -> None:
    """A process that is stopped for less than the time of a loss: no process notices."""
    with faults.job(2, 2, KVSTORE_DEAD_AFTER=silence(3)) as made:
        workers = made.start_all(BODIES, "trained", 60, 0.01)
        ready(*workers)
        one = {"worker": workers[1], "server": made.servers[1], "scheduler": made.scheduler}[role]
        for _ in range(2):
            time.sleep(draw.random() * 0.3)
            one.signal(signal.SIGSTOP)
            time.sleep(0.8)
            one.signal(signal.SIGCONT)
        first, second = finish(*workers)
        assert first["digest"] == second["digest"]
        assert made.ended(10) == [0, 0, 0]


def stop_for_long(faults: Faults, draw: random.Random, role: str) -> None:
    """A process that is stopped for longer is lost, and fenced when it wakes up."""
    with faults.job(3 if role == "worker" else 2, 2) as made:
        workers = made.start_all(BODIES, "until_fenced", draw.choice(["pushpull", "push", "barrier"]), True)
        ready(*workers)
        time.sleep(draw.random() * 0.1)
        one = {"worker": workers[-1], "server": made.servers[1], "scheduler": made.scheduler}[role]
        one.signal(signal.SIGSTOP)
        stopped = time.monotonic()
        others = [worker for worker in workers if worker is not one]
        ready(*others, line="noticed")
        one.signal(signal.SIGCONT)
        if one in workers:
            ready(one, line="noticed")  # while the scheduler is there
        for worker in workers:
            say(worker, "go")
        found = finish(*workers)
        codes = made.ended(15)
        for worker, told in zip(workers, found, strict=True):
            if worker is one:
                assert told["error"] == "FencedError", told
                assert "was stopped itself" in told["text"], told
            else:
                assert told["error"] == "PeerLostError", told
                assert role in told["text"], told
                assert told["noticed"] - stopped < made.in_time
        if role == "server":
            assert codes[2] == 1
            assert "FencedError" in made.servers[1].errors()
        elif role == "worker":
            assert codes == [0, 0, 0]


@pytest.mark.parametrize("seed", [0])
def test_a_process_stands_still(faults: Faults, seed: int) -> None:
    roles = [("worker",), ("server",), ("scheduler",)]
    faults.run(stop_for_a_while, roles, seed)
    faults.run(stop_for_long, roles, seed)


def test_a_stopped_worker_costs_a_server_little(faults: Faults) -> None:
    """It has asked for 100 MB, and reads nothing: its credit is kept for it, and the others are served."""
    far = {"KVSTORE_SAME_HOST_SHM": "0", "KVSTORE_CREDIT_BYTES": str(8 << 20), "KVSTORE_RESEND": "60"}
    with faults.job(2, 1, KVSTORE_DEAD_AFTER="60", KVSTORE_TIMEOUT="100", **far) as made:
        workers = made.start_all(BODIES, "beside_one_that_reads_nothing", 100)
        ready(workers[0])
        with strangers.Memory(made.servers[0].pid) as server:
            ready(workers[1], line="asks")
            say(workers[0], "go")
            ready(workers[0], line="trained")
        assert server.grown < 32, server.grown


def wake_after_the_end(faults: Faults, draw: random.Random, role: str) -> None:
    """A process that is stopped until its job is over gets FencedError, not the loss of the others."""
    with faults.job(2, 2) as made:
        workers = made.start_all(BODIES, "until_fenced", draw.choice(["pushpull", "push", "barrier"]))
        ready(*workers)
        time.sleep(draw.random() * 0.1)
        one = workers[1] if role == "worker" else made.servers[1]
        one.signal(signal.SIGSTOP)
        others = [other for other in (made.scheduler, *made.servers, *workers) if other is not one]
        end = pace.deadline(60)
        assert [other.finish(end) for other in others] == [0] * len(others)
        time.sleep(2 * made.dead_after)  # the shortest time that it can have been stopped
        one.signal(signal.SIGCONT)
        if role == "server":
            assert one.finish(pace.deadline(60)) == 1
            assert "server 1 was stopped itself" in one.errors()
            return
        told = finish(one, timeout=60)[0]
        assert "worker 1 was stopped itself" in told["text"], told
        assert "the job has ended" in told["text"], told


@pytest.mark.parametrize("seed", [0])
def test_a_process_wakes_after_the_end(faults: Faults, seed: int) -> None:
    faults.run(wake_after_the_end, [("worker",), ("server",)], seed)


# --------------------------------------------------------------------------------------------- a server again


def restart_a_server(faults: Faults, draw: random.Random, same_host: bool) -> None:
    restart_under(faults, draw, same_host, 2, lambda made: made.start_all(BODIES, "going_through_restarts"))


def test_a_worker_killed_before_its_memory_is_found(faults: Faults) -> None:
    """Its pushed array cannot be read: it has not arrived, and its round is not complete."""
    with faults.job(2, 1, KVSTORE_SAME_HOST_SHM="1", KVSTORE_DEAD_AFTER=silence(4)) as made:
        first, second = made.start_all(BODIES, "on_command", "raise", 20_000)
        ready(first, second)
        say(second, "pull")  # when answered, the server reads the worker's memory with its pushes
        assert second.expect_some("pull: ") == "pull: 0"
        made.servers[0].signal(signal.SIGSTOP)
        say(second, "push")
        time.sleep(0.5)
        kill(second)
        second.finish(pace.deadline(20))
        made.servers[0].signal(signal.SIGCONT)
        say(first, "pushpull")
        assert first.expect_some("pushpull: ", UNTIL_TOLD).startswith("pushpull: PeerLostError: worker 1 ")
        say(first, "pull")
        assert first.expect_some("pull: ", UNTIL_TOLD) == "pull: 0"
        say(first, "close")
        finish(first)
        assert made.ended(15) == [0, 0]


def restart(made: FaultyJob, rank: int, count: int) -> None:
    """Kill a server, and start one in its place, for the `count`th time."""
    kill(made.servers[rank])
    again = made.start_server(rank, KVSTORE_RESTART=str(count))
    made.servers[rank].close()
    made.servers[rank] = again
    made.servers.pop()


def restart_under(
    faults: Faults,
    draw: random.Random,
    same_host: bool,
    size: int,
    start: Callable[[FaultyJob], list[jobs.Worker]],
) -> None:
    """A server restarts from its snapshot, and loses at most the later changes; the job continues."""
    folder = faults.folder / f"shots-{draw.random()}"
    variables = {
        "KVSTORE_SNAPSHOT": str(folder),
        "KVSTORE_SNAPSHOT_INTERVAL": "0.2",
        "KVSTORE_SERVER_RESTARTS": "3",
        "KVSTORE_SAME_HOST_SHM": str(int(same_host)),
    }
    with faults.job(size, 2, **variables) as made:
        workers = start(made)
        ready(*workers)
        for count in range(2):
            rank = draw.randrange(2)
            time.sleep(draw.random() * 0.5)
            restart(made, rank, count + 1)
            time.sleep(1.0)
        for worker in workers:
            say(worker, "stop")
        assert len({one["digest"] for one in finish(*workers)}) == 1
        assert made.ended(10) == [0, 0, 0]


@pytest.mark.parametrize("seed", [0])
def test_a_server_comes_back(faults: Faults, seed: int) -> None:
    faults.run(restart_a_server, [(True,), (False,)], seed)


def first_that_says(workers: Sequence[jobs.Worker], line: str) -> jobs.Worker:
    end = pace.deadline(UNTIL_TOLD)
    while time.monotonic() < end:
        for worker in workers:
            with contextlib.suppress(AssertionError):
                worker.expect(line, 0.1)
                return worker
    raise AssertionError(f"nobody has said {line!r}")


@pytest.mark.parametrize("hosts", [[], [0, 0]], ids=["flat", "a host of two"])
def test_an_answer_in_the_memory_of_a_dead_server(faults: Faults, hosts: list[int]) -> None:
    """Its sum is lost with the server, and pushed again: it is what the worker gets."""
    variables = {
        "KVSTORE_SNAPSHOT": str(faults.folder / "shots"),
        "KVSTORE_SNAPSHOT_INTERVAL": "1000",
        "KVSTORE_SERVER_RESTARTS": "1",
        "KVSTORE_SAME_HOST_SHM": "1",
        "KVSTORE_DEAD_AFTER": silence(8),
    }
    with faults.job(max(1, len(hosts)), 1, **variables) as made:
        if hosts:
            workers = start_on_hosts(made, hosts, BODIES, "reads_of_a_dead_server")
        else:
            workers = made.start_all(BODIES, "reads_of_a_dead_server")
        reader = first_that_says(workers, "reads")
        restart(made, 0, 1)
        say(reader, "go on")
        assert finish(*workers) == [len(workers) * (len(workers) + 1) / 2] * len(workers)


# ---------------------------------------------------------------------------------------------- the network


def disturb(faults: Faults, draw: random.Random, how: str, same_host: bool) -> None:
    """Connections are slow, or break repeatedly: every push counts once, and no process is lost."""
    options: dict[str, Any] = {
        "slow": {"delay": 0.02},
        "cut": {"cut_after": 1 << 18 if same_host else 1 << 20, "delay": 0.001},
    }[how]
    variables = {"KVSTORE_SAME_HOST_SHM": str(int(same_host)), "KVSTORE_DEAD_AFTER": silence(5)}
    with faults.job(2, 2, server="behind", scheduler="scheduler_behind", **variables) as made:
        with Behind(made, lambda target: Proxy(target, draw.random(), **options)) as behind:
            workers = made.start_all(BODIES, "trained", 30 if same_host else 5)
            if how == "cut":
                ready(*workers, line="working")
                for proxy in behind.proxies:
                    proxy.cut()
            first, second = finish(*workers, timeout=40)
            assert how == "slow" or sum(proxy.cuts for proxy in behind.proxies) > 0
        assert first["digest"] == second["digest"]
        assert made.ended(10) == [0, 0, 0]


@pytest.mark.parametrize("seed", [0])
def test_a_bad_network_changes_nothing(faults: Faults, seed: int) -> None:
    cases = [("slow", False), ("cut", False), ("cut", True)]
    faults.run(disturb, cases, seed)


def cut_off(faults: Faults, draw: random.Random, what: str) -> None:
    """One worker cannot be reached for a while, or for good."""
    with faults.job(
        2, 1, server="behind", scheduler="scheduler_behind", KVSTORE_DEAD_AFTER=silence(3)
    ) as made:
        with Behind(made, lambda target: Proxy(target, draw.random())) as behind:
            workers = made.start_all(BODIES, "trained" if what == "heals" else "until_fenced",
                                     *([40, 0.01] if what == "heals" else []))  # fmt: skip
            ready(*workers)
            time.sleep(draw.random() * 0.2)
            for proxy in behind.proxies:
                proxy.stop()
            time.sleep(1.0)
            if what == "heals":
                for proxy in behind.proxies:
                    proxy.go_on()
            found = finish(*workers, timeout=30)
        if what == "heals":
            assert found[0]["digest"] == found[1]["digest"]
            assert made.ended(10) == [0, 0]
        else:
            assert {one["error"] for one in found} == {"PeerLostError"}, found
            told = [one["text"] for one in found]
            assert all("scheduler is lost" in text or stood_still(text) for text in told)


@pytest.mark.parametrize("seed", [0])
def test_the_network_stands_still(faults: Faults, seed: int) -> None:
    faults.run(cut_off, [("heals",), ("for good",)], seed)


# ---------------------------------------------------------------------------------------- ends of every kind


def end_badly(faults: Faults, draw: random.Random, how: str) -> None:
    with faults.job(3, 1) as made:
        rank = draw.randrange(3)
        workers = made.start_all(BODIES, "ends", how, rank)
        ended = workers[rank].expect("ends")
        victim = workers.pop(rank)
        for one in finish(*workers):
            assert one["noticed"] - ended < made.in_time
        codes = {"_exit": 0, "exit from with": 3, "abort": -signal.SIGABRT}
        assert victim.finish(pace.deadline(10)) == codes.get(how, 1), victim.errors()
        assert made.ended(10) == [0, 0]


@pytest.mark.parametrize("seed", [0])
def test_a_worker_that_ends_badly_is_lost(faults: Faults, seed: int) -> None:
    ways = ["_exit", "exception", "with", "exit from with", "thread", "abort"]
    faults.run(end_badly, [(how,) for how in ways], seed)


def end_well(faults: Faults, draw: random.Random, how: str) -> None:
    with faults.job(3, 1) as made:
        made.start_all(BODIES, "leaves_well", how, 0 if how == "close" else draw.randrange(3))
        assert made.finish(20) == [0, 0, 0], made.told()
        assert made.ended(10) == [0, 0]


@pytest.mark.parametrize("seed", [0])
def test_a_worker_that_ends_well_is_not_missed(faults: Faults, seed: int) -> None:
    faults.run(end_well, [("close",), ("return",), ("sys.exit",)], seed)


def leave_in_the_middle(faults: Faults, draw: random.Random, name: str, how: str, seed: int) -> None:
    """Sums without a worker are reported, once, in each of the others; an ordinary end and `join` are not."""
    leaver, patience = draw.randrange(3), {"KVSTORE_DEAD_AFTER": "60", "KVSTORE_TIMEOUT": "120"}
    with faults.job(3, 2, **patience) as made:
        workers = made.start_all(BODIES, "leaves_in_the_middle", name, how, leaver, seed)
        found = finish(*workers, timeout=240)
        made.ended(120)
    warned = name == "dist_sync" and how in ("sys.exit", "close")
    for rank, one in enumerate(found):
        expected = int(warned and rank != leaver)
        assert len(one["warnings"]) == expected, (rank, leaver, one)
        if expected:
            text, last = one["warnings"][0], one["last"]
            assert f"worker {leaver} has ended, or closed its store, without join()" in text
            assert f"was number {last} of key 'a'" in text or f"was number {last} of key 'b'" in text, text
            assert one["totals"][last - 1 : last + 1] == [111, 111 - 10**leaver]


LEAVING = [
    ("dist_sync", "sys.exit"),
    ("dist_sync", "close"),
    ("dist_sync", "join"),
    ("dist_sync", "at the end"),
    ("dist_async", "sys.exit"),
]


def test_a_worker_that_leaves_in_the_middle(faults: Faults) -> None:
    faults.run(leave_in_the_middle, [(*case, 0) for case in LEAVING], 0)


@pytest.mark.nightly
@pytest.mark.timeout(900)
@pytest.mark.parametrize("seed", range(200))
def test_a_worker_that_leaves_in_the_middle_with_many_seeds(faults: Faults, seed: int) -> None:
    faults.run(leave_in_the_middle, [(*LEAVING[seed % len(LEAVING)], 1000 + seed)], seed)


@pytest.mark.parametrize("optimizer", [False, True])
def test_a_round_of_a_loss_stays_open_when_a_survivor_leaves(faults: Faults, optimizer: bool) -> None:
    with faults.job(3, 1) as made:
        reader, leaver, victim = made.start_all("procs_losses", "leaves_after_a_loss", "dist_sync", optimizer)
        ready(reader, leaver, victim, line="pushed")
        time.sleep(0.2)  # the push has no answer to wait for
        victim.signal(signal.SIGKILL)
        say(reader, "dead")
        ready(reader, line="told")
        say(leaver, "dead")
        assert finish(leaver) == [[0]]
        say(reader, "left")
        assert finish(reader) == [[0, 0]]


def test_a_joined_worker_reads_the_rounds_of_others_after_a_loss(faults: Faults) -> None:
    with faults.job(2, 2) as made:
        reader, victim = made.start_all("procs_losses", "rests_when_another_is_lost")
        ready(reader, victim, line="joined")
        kill(victim)
        say(reader, "go")
        assert finish(reader) == [[6.0]]


def test_uneven_batches(faults: Faults) -> None:
    with faults.job(3, 2) as made:
        workers = made.start_all(BODIES, "uneven", [3, 9, 6])
        assert [len(one["sums"]) for one in finish(*workers)] == [3, 9, 6]
        assert made.ended(10) == [0, 0, 0]


def test_a_fork_has_no_part_in_the_job(faults: Faults) -> None:
    with faults.job(2, 1) as made:
        made.start_all(BODIES, "forks")
        made.results(30)
        assert made.ended(10) == [0, 0]


def interrupt(faults: Faults, draw: random.Random, where: str, same_host: bool) -> None:
    with faults.job(2, 1, KVSTORE_SAME_HOST_SHM=str(int(same_host))) as made:
        waiting = made.start(BODIES, "interrupted", where, same_host, rank=0)
        late = None if where == "create" else made.start(BODIES, "interrupted", where, same_host, rank=1)
        waiting.expect("waits")
        time.sleep(0.3 + draw.random() * 0.3)  # it is likely to wait now; sooner is no error
        sent = time.monotonic()
        waiting.signal(signal.SIGINT)
        assert waiting.expect("interrupted") - sent < made.in_time
        if late is not None:
            late.say("go")
            finish(late)
        finish(waiting)


@pytest.mark.parametrize("seed", [0])
def test_ctrl_c_in_a_wait(faults: Faults, seed: int) -> None:
    cases = [("create", True), ("push", False), ("pushpull", True), ("pushpull", False), ("pull", True)]
    faults.run(interrupt, [*cases, ("barrier", True)], seed)


@pytest.mark.parametrize("size", [100, 70_000])
def test_ctrl_c_in_the_wait_for_a_sum(faults: Faults, size: int) -> None:
    with faults.job(2, 1) as made:
        waiting, late = made.start_all(BODIES, "interrupted_sum", size)
        waiting.expect("waits")
        time.sleep(0.1)  # it is likely to wait now; sooner is no error
        waiting.signal(signal.SIGINT)
        waiting.expect("interrupted")
        say(late, "go")
        finish(waiting, late)


def test_a_worker_that_leaves_says_why_also_if_pushes_had_no_answer(faults: Faults) -> None:
    with faults.job(1, 1, KVSTORE_DEAD_AFTER="60") as made:
        (worker,) = made.start_all(BODIES, "leaves_with_open_pushes")
        ready(worker)
        made.servers[0].signal(signal.SIGSTOP)
        say(worker, "go")
        assert finish(worker) == ["it was interrupted"]
        made.servers[0].signal(signal.SIGCONT)


# ------------------------------------------------------------------------------------------------ many stores


def test_nothing_grows_over_many_stores(faults: Faults) -> None:
    with faults.job(2, 1) as made:
        made.start_all(BODIES, "many_stores", 100)
        marks = [one["marks"] for one in finish(*made.workers, timeout=60)]
        assert all(first == last for first, last in marks), marks
        assert made.ended(10) == [0, 0]


# -------------------------------------------------------------------------------------------------- hunger


def test_a_worker_without_memory(faults: Faults) -> None:
    with faults.job(2, 1) as made:
        made.start_all(BODIES, "starved_worker")
        assert finish(*made.workers, timeout=40)[0] in ("MemoryError", "KVStoreError")
        assert made.ended(10) == [0, 0]


def test_a_server_without_memory(faults: Faults) -> None:
    with faults.job(2, 1, server="starved_server", KVSTORE_DEAD_AFTER=silence(5)) as made:
        made.start_all(BODIES, "too_much_for_a_server")
        text = finish(*made.workers, timeout=60)[0]
        assert re.search(r"server 0\b.*memory.*ulimit -v", text), text
        assert made.ended(10) == [0, 0]


def refuse_first_values(faults: Faults, draw: random.Random, late: float) -> None:
    variables = {"KVSTORE_DEAD_AFTER": silence(5), "KVSTORE_TIMEOUT": "120"}
    with faults.job(3, 1, server="starved_server", **variables) as made:
        made.start_all(BODIES, "too_much_for_all", late)
        first, *others = finish(*made.workers, timeout=60)
        assert re.search(r"server 0\b.*memory.*ulimit -v", first), first
        for text in others:  # these waited until their deadline
            assert re.search(r"worker 0 cannot store the first value of key 'huge\d+'", text), text
            assert text.endswith(first.partition(": ")[2])
        assert made.ended(10) == [0, 0]


def test_all_workers_are_told_of_first_values_that_a_server_refuses(faults: Faults) -> None:
    faults.run(refuse_first_values, [(0.0,), (1.0,)], 0)


def fill_the_disk(faults: Faults, draw: random.Random, when: str) -> None:
    """Before there is a snapshot that is an error; later the last one stays, and the log says so once."""
    folder = faults.folder / f"shots-{when}"
    variables = {"KVSTORE_SNAPSHOT_INTERVAL": "0.2", "KVSTORE_SNAPSHOT": str(folder)}
    with faults.job(1 if when == "at first" else 2, 1, server="without_disk", **variables) as made:
        server = made.servers[0]
        if when == "at first":
            server.say("fill")
            server.expect("full")
            made.start_all(BODIES, "first_values_on_a_full_disk")
            told = finish(*made.workers)[0]
            assert re.search(
                rf"no snapshot: {folder}/\S+ cannot be written: File too large; free space", told
            ), told
            assert told.rstrip().endswith("unchanged. Correct it, then init the key again"), told
            assert ".tmp" not in told
        else:
            workers = made.start_all(BODIES, "trained", 40, 0.03)
            ready(*workers)
            server.say("fill")
            first, second = finish(*workers, timeout=40)
            assert first["digest"] == second["digest"]
        assert made.ended(10) == [0, 0]
        assert server.errors().count("no snapshot could be written") == 1


def test_a_full_disk(faults: Faults) -> None:
    faults.run(fill_the_disk, [("at first",), ("later",)], 0)


# ------------------------------------------------------------------------------------------- nothing is there


def test_no_scheduler(faults: Faults) -> None:
    """No process listens at the address, or a stranger."""
    with faults.job(1, 1) as made, socket.create_server(("127.0.0.1", 0)) as silent:
        nobody = f"tcp://127.0.0.1:{silent.getsockname()[1]}"
        made.variables.update(KVSTORE_SCHEDULER=nobody, KVSTORE_TIMEOUT="3")
        worker = made.start(BODIES, "refused", "KVStoreError", rank=0)
        assert nobody in finish(worker)[0]


def test_a_worker_that_never_comes(faults: Faults) -> None:
    with faults.job(2, 1, KVSTORE_TIMEOUT="3") as made:
        worker = made.start(BODIES, "refused", "TimeoutError", rank=0)
        assert "worker 1" in finish(worker)[0]


def start_the_scheduler_late(faults: Faults, draw: random.Random) -> None:
    """Servers and workers may start long before it: a process that was never met is not lost."""
    with faults.job(2, 1) as made:
        port = made.variables["KVSTORE_SCHEDULER"].rpartition(":")[2]
        made.scheduler.signal(signal.SIGKILL)
        made.servers[0].signal(signal.SIGKILL)
        made.ended()
        server = made.start_server(0)
        workers = made.start_all(BODIES, "trained", 3)
        time.sleep(3 * made.dead_after)
        address = f"tcp://127.0.0.1:{port}"
        scheduler = made.role("scheduler", KVSTORE_SCHEDULER=address, KVSTORE_NUM_WORKERS="2")
        finish(*workers)
        end = pace.deadline(10)
        assert (scheduler.finish(end), server.finish(end)) == (0, 0)


def take_an_old_port(faults: Faults, draw: random.Random) -> None:
    """A new scheduler at the address of another one: processes of the other job are refused."""
    with faults.job(2, 1, KVSTORE_DEAD_AFTER=silence(5)) as made:
        workers = made.start_all(BODIES, "until_fenced", "pushpull")
        ready(*workers)
        made.scheduler.signal(signal.SIGKILL)
        made.scheduler.finish(pace.deadline(5))
        address = made.variables["KVSTORE_SCHEDULER"]
        made.role("scheduler", KVSTORE_SCHEDULER=address, KVSTORE_NUM_WORKERS="2")
        for found in finish(*workers):
            assert found["error"] == "FencedError", found
        assert made.servers[0].finish(pace.deadline(10)) == 1
        assert "FencedError" in made.servers[0].errors()


def test_schedulers_that_come_late(faults: Faults) -> None:
    faults.run(start_the_scheduler_late, [()], 0)
    faults.run(take_an_old_port, [()], 0)


def test_addresses_that_cannot_be_had(faults: Faults) -> None:
    with faults.job(1, 1) as made:
        taken = made.variables["KVSTORE_SCHEDULER"]
        for address, word in {
            taken: "is taken by another process",
            "tcp://203.0.113.7:0": "Error",
        }.items():
            second = made.role(
                "scheduler", KVSTORE_SCHEDULER=address, KVSTORE_INSECURE="1", KVSTORE_NUM_WORKERS="1"
            )
            assert second.finish(pace.deadline(10)) == 1
            assert "ConfigError" in second.errors()
            assert word in second.errors()


# ------------------------------------------------------------------------------------------------ namespaces


def no_namespaces() -> str:
    """Why there are none; empty: there are."""
    if not (shutil.which("ip") and shutil.which("unshare") and shutil.which("nsenter")):
        return "takes ip, unshare and nsenter"
    made = subprocess.run(["unshare", "-n", "ip", "link", "add", "type", "veth"], capture_output=True)
    return "network namespaces are not allowed here" if made.returncode else ""


class Networks:
    """Two namespaces, joined by a cable, in the first of which there are scheduler, servers and worker 0."""

    HERE, THERE = "10.89.0.1", "10.89.0.2"

    def __init__(self) -> None:
        holder = ["unshare", "-n", "sleep", "300"]
        self._holders = [subprocess.Popen(holder) for _ in range(2)]
        self.pids = [one.pid for one in self._holders]
        own = os.readlink("/proc/self/ns/net")
        end = pace.deadline(5)
        while any(os.readlink(f"/proc/{pid}/ns/net") == own for pid in self.pids):
            assert time.monotonic() < end
            time.sleep(0.01)
        self._do(0, f"link add here type veth peer name there netns {self.pids[1]}")
        for at, name, address in ((0, "here", self.HERE), (1, "there", self.THERE)):
            self._do(at, "link set lo up")
            self._do(at, f"addr add {address}/24 dev {name}")
            self._do(at, f"link set {name} up")

    def _do(self, at: int, command: str) -> None:
        subprocess.run(["nsenter", "-t", str(self.pids[at]), "-n", "ip", *command.split()], check=True)

    def cut(self) -> None:
        """Let packets to the second one vanish."""
        self._do(0, f"route add blackhole {self.THERE}/32")

    def heal(self) -> None:
        self._do(0, f"route del blackhole {self.THERE}/32")

    def __enter__(self) -> Networks:
        return self

    def __exit__(self, *_: object) -> None:
        for one in self._holders:
            one.kill()
            one.wait()


def part(faults: Faults, draw: random.Random, seconds: float) -> None:
    """Worker 1 cannot be reached for a while. It heals in time, or the job is two that know of each other."""
    heals = seconds < 3
    variables = {
        "KVSTORE_DEAD_AFTER": "6" if heals else "2",
        "KVSTORE_INSECURE": "1",
        "KVSTORE_SAME_HOST_SHM": "0",
        "KVSTORE_SCHEDULER": f"tcp://{Networks.HERE}:0",
        "TEST_BINDS": Networks.HERE,
    }
    with Networks() as networks:
        here, there = ({"TEST_NETWORK": str(pid)} for pid in networks.pids)
        with faults.job(2, 2, server="server_elsewhere", scheduler="scheduler_elsewhere",
                        **variables, **here) as made:  # fmt: skip
            body, arguments = ("trained", (60, 0.02)) if heals else ("until_fenced", ("pushpull",))
            workers = [
                made.start(BODIES, "elsewhere", body, arguments, network["TEST_NETWORK"], rank=rank)
                for rank, network in enumerate((here, there))
            ]
            ready(*workers)
            time.sleep(draw.random() * 0.3)
            networks.cut()
            start = time.monotonic()
            if heals:
                time.sleep(seconds)
                networks.heal()
                first, second = finish(*workers, timeout=40)
                assert first["digest"] == second["digest"]
                assert made.ended(20) == [0, 0, 0]
                return
            ready(*workers, line="noticed")
            networks.heal()
            first, second = finish(*workers, timeout=20)
            assert (first["error"], second["error"]) == ("PeerLostError", "PeerLostError")
            assert "worker 1" in first["text"]
            assert "scheduler" in second["text"]
            assert max(one["noticed"] for one in (first, second)) - start < 6 * 2
            assert made.ended(20) == [0, 0, 0]


@pytest.mark.skipif(no_namespaces() != "", reason=no_namespaces())
def test_packets_that_vanish(faults: Faults) -> None:
    faults.run(part, [(2.0,), (8.0,)], 0)


# ----------------------------------------------------------------------------------------------------- night

DRAWN: list[tuple[Callable[..., None], list[Case]]] = [
    (kill_a_worker, [(phase,) for phase in PHASES]),
    (kill_a_server, [(phase,) for phase in PHASES]),
    (kill_the_scheduler, [(phase,) for phase in PHASES]),
    (kill_one_at_the_start, [("raise",), ("continue",)]),
    (kill_after_close, [()]),
    (go_on, [(phase, False) for phase in PHASES if phase != "settings"] + [("pushpull", True)]),
    (come_back_into_a_pass, [("pushpull", False), ("push", False), ("push", True)]),
    (stop_for_a_while, [("worker",), ("server",), ("scheduler",)]),
    (stop_for_long, [("worker",), ("server",), ("scheduler",)]),
    (restart_a_server, [(True,), (False,)]),
    (disturb, [("slow", False), ("cut", False), ("cut", True)]),
    (cut_off, [("heals",), ("for good",)]),
    (end_badly, [(how,) for how in ("_exit", "exception", "with", "exit from with", "thread", "abort")]),
    (interrupt, [("create", True), ("push", False), ("pushpull", True), ("pull", True), ("barrier", True)]),
]


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("body", "cases"), DRAWN, ids=[body.__name__ for body, _ in DRAWN])
def test_fifty_seeds(faults: Faults, body: Callable[..., None], cases: list[Case]) -> None:
    for seed in range(1000, 1050):
        faults.run(body, cases, seed)


#: How often at night, so that there are 200 repeats of each kind.
LARGE_SLICES: dict[str, tuple[int, list[tuple[Callable[..., None], list[Case]]]]] = {
    "kill": (17, [(body, [("push",), ("pushpull",), ("pull",), ("rows",)])
                  for body in (kill_a_worker, kill_a_server, kill_the_scheduler)]),
    "SIGSTOP": (34, [(body, [("worker",), ("server",), ("scheduler",)])
                     for body in (stop_for_a_while, stop_for_long)]),
    "partition": (100, [(part, [(2.0,), (8.0,)])]),
}  # fmt: skip


def with_large_slices(faults: Faults, kind: str, seeds: Sequence[int]) -> None:
    """Disturb jobs whose values go over streams in slices that two threads of a server receive and send."""
    faults.variables = {"KVSTORE_SAME_HOST_SHM": "0", "TEST_LARGE_SLICES": "1"}
    for seed in seeds:
        for body, cases in LARGE_SLICES[kind][1]:
            faults.run(body, cases, seed)


@pytest.mark.parametrize("kind", ["kill", "SIGSTOP"])
def test_large_slices(faults: Faults, kind: str) -> None:
    with_large_slices(faults, kind, [0])


@pytest.mark.nightly
@pytest.mark.timeout(7200)
@pytest.mark.parametrize("kind", LARGE_SLICES)
def test_large_slices_with_many_seeds(faults: Faults, kind: str) -> None:
    if kind == "partition" and (why := no_namespaces()):
        pytest.skip(why)
    with_large_slices(faults, kind, range(2000, 2000 + LARGE_SLICES[kind][0]))
