"""Jobs with servers, and strangers that send garbage, connect in crowds, or try to join."""

from __future__ import annotations

import random
import resource
import signal
import socket
from typing import Any

import pace
import pytest
from faults import strangers
from faults.faulty_jobs import (
    BODIES,
    UNTIL_TOLD,
    Faults,
    FaultyJob,
    finish,
    keys_of_a_job,
    kill,
    ready,
    say,
    silence,
)
from launched import until

PATIENT = {"KVSTORE_DEAD_AFTER": "60"}  # no process is lost here, even on a busy machine


def test_two_jobs_do_not_meet(faults: Faults) -> None:
    with faults.job(2, 1, **PATIENT) as one, faults.job(2, 2, **PATIENT) as two:
        workers = [*one.start_all(BODIES, "trained", 5), *two.start_all(BODIES, "trained", 5)]
        finish(*workers)
        assert one.ended(10) == [0, 0]
        assert two.ended(10) == [0, 0, 0]


def intrude(faults: Faults, draw: random.Random, who: str) -> None:
    """A process without a place in the job gets an error, and the job continues."""
    with faults.job(2, 1, **PATIENT) as made:
        workers = made.start_all(BODIES, "sits")
        ready(*workers, line="in")
        body, arguments, rank, variables, word = {
            "rank of another": ("refused", ["FencedError"], 1, {}, "already; every process"),
            "number of workers": (
                "refused",
                ["ConfigError"],
                5,
                {"KVSTORE_SIZE": "6", "KVSTORE_LOCAL_SIZE": "6", "KVSTORE_NUM_WORKERS": "6"},
                "out of range",
            ),
            "job": ("refused", ["AuthError"], 0, {"KVSTORE_JOB": "yesterday"}, "another job"),
            "version": ("of_another_version", [], 0, {}, "99"),
        }[who]
        stranger = made.start(BODIES, body, *arguments, rank=rank, **variables)
        assert word in finish(stranger)[0]
        for worker in workers:
            worker.say("go")
        finish(*workers)
        assert made.ended(10) == [0, 0]


def test_a_process_without_a_place_in_the_job(faults: Faults) -> None:
    faults.run(intrude, [("rank of another",), ("number of workers",), ("job",), ("version",)], 0)


def take_ports(faults: Faults, draw: random.Random, role: str) -> None:
    """Another job has the ports of a process that has died; a store that is created then reports the loss.

    It was told that the process "belongs to another job", or that it lacks keys.
    """
    with faults.job(1, 1) as made:
        worker = made.start(BODIES, "creates_one_more", rank=0)
        ready(worker, line="in")
        victim = made.scheduler if role == "scheduler" else made.servers[0]
        ports = strangers.listening(victim.pid)
        kill(victim)
        victim.finish(pace.deadline(20))
        variables = {"KVSTORE_JOB": "another", "KVSTORE_NUM_WORKERS": "1"}
        others = [
            made.role("scheduler", KVSTORE_SCHEDULER=f"tcp://127.0.0.1:{port}", **variables) for port in ports
        ]
        for other in others:
            other.expect_some("at ")
        say(worker, "go")
        [found] = finish(worker, timeout=UNTIL_TOLD)
        assert (found["error"], found["role"]) == ("PeerLostError", role), found


def test_ports_of_the_dead_that_another_job_has(faults: Faults) -> None:
    faults.run(take_ports, [("scheduler",), ("server",)], 0)


def differ(faults: Faults, draw: random.Random, options: dict[str, Any], word: str) -> None:
    """Of two workers the scheduler refuses the one whose message arrives last."""
    with faults.job(2, 1, **PATIENT) as made:
        pair = [
            made.start(BODIES, "refused_with", "ConfigError", own, rank=r)
            for r, own in enumerate([{}, options])
        ]
        until(lambda: any(worker.has_ended() for worker in pair))
        early, late = pair if pair[1].has_ended() else reversed(pair)
        late.finish(pace.deadline(20))
        assert word in late.result()
        early.signal(signal.SIGKILL)


def test_workers_that_want_different_stores(faults: Faults) -> None:
    faults.run(
        differ, [({"on_peer_loss": "continue"}, "on_peer_loss"), ({"slice_bytes": 8192}, "slice_bytes")], 0
    )


def garbage(address: str, draw: random.Random, count: int) -> int:
    """Connect so often, and say what makes no sense, or nothing; return how many got through."""
    host, _, port = address.rpartition("//")[2].rpartition(":")
    greeting = b"\xff\0\0\0\0\0\0\0\x01\x7f\x03\0NULL" + b"\0" * 48
    open_: list[socket.socket] = []
    there = 0
    for number in range(count):
        try:
            made = socket.create_connection((host, int(port)), timeout=5)
        except OSError:
            continue
        there += 1
        text = draw.randbytes(draw.randrange(200))
        made.sendall(
            [b"", text, greeting[: draw.randrange(65)], greeting + text, b"GET / HTTP/1.1\r\n"][number % 5]
        )
        open_.append(made)
        if len(open_) > 100:  # some stay half open for a while
            open_.pop(draw.randrange(100)).close()
    for made in open_:
        made.close()
    return there


def test_garbage_while_a_job_trains(faults: Faults) -> None:
    """2,000 connections by strangers change nothing."""
    with faults.job(2, 1, server="behind", KVSTORE_DEAD_AFTER=silence(5)) as made:
        targets = [made.variables["KVSTORE_SCHEDULER"]]
        for what in ("at ", "streams at "):
            targets.append(made.servers[0].expect_some(what).removeprefix(what))
            made.servers[0].say(targets[-1])
        workers = made.start_all(BODIES, "trained", 150, 0.01)
        ready(*workers)
        there = [garbage(one, random.Random(1), 1000) for one in targets]
        first, second = finish(*workers, timeout=60)
        assert first["digest"] == second["digest"]
        assert min(there) == 1000
        assert made.ended(10) == [0, 0]
        for one in (made.scheduler, *made.servers):
            assert one.errors().count("\n") < 10, one.errors()


def test_wrong_keys(faults: Faults) -> None:
    """A process with another job's keys, or none, is refused, with few log lines; the job continues."""
    files = [keys_of_a_job(faults.folder / name, workers=2) for name in ("ours", "theirs")]
    ours, theirs = files
    with faults.job(2, 1, keys=ours, KVSTORE_DEAD_AFTER=silence(5)) as made:
        workers = [
            made.start(BODIES, "trained", 60, 0.02, rank=rank, KVSTORE_KEYS_FILE=ours[f"worker-{rank}"])
            for rank in (0, 1)
        ]
        ready(*workers)
        stranger = made.start(BODIES, "refused", "AuthError", rank=1, KVSTORE_KEYS_FILE=theirs["worker-1"])
        bare = made.start(BODIES, "refused", "AuthError", rank=1)
        assert all("refuses this process" in text for text in finish(stranger, bare))
        first, second = finish(*workers, timeout=40)
        assert first["digest"] == second["digest"]
        assert made.ended(10) == [0, 0]
        assert made.scheduler.errors().count("\n") < 6, made.scheduler.errors()


@pytest.mark.parametrize("secured", [False, True])
@pytest.mark.parametrize(
    "seconds", [2, pytest.param(600, marks=[pytest.mark.nightly, pytest.mark.timeout(3600)])]
)
def test_floods_of_strangers(faults: Faults, seconds: int, secured: bool) -> None:
    """Ten senders of what never ends, at every port: little memory, few words, and right sums."""
    keys = keys_of_a_job(faults.folder / "keys", workers=2) if secured else {}
    own = [{"KVSTORE_KEYS_FILE": keys[f"worker-{rank}"]} if secured else {} for rank in (0, 1)]
    with faults.job(2, 1, keys=keys, KVSTORE_DEAD_AFTER="60", KVSTORE_TIMEOUT="100") as made:
        workers = [
            made.start(BODIES, "trained", seconds * 20, 0.05, True, rank=rank, **own[rank]) for rank in (0, 1)
        ]
        ready(*workers, line="working")
        ports = [port for one in (made.scheduler, *made.servers) for port in strangers.listening(one.pid)]
        assert len(ports) == 5  # three are the scheduler's, two the server's: one of them for streams
        with (
            strangers.Memory(made.scheduler.pid) as scheduler,
            strangers.Memory(made.servers[0].pid) as server,
            strangers.flood(ports, list(strangers.KINDS)) as end,
        ):
            for worker in workers:
                say(worker, "go")
            first, second = finish(*workers, timeout=60 + 4 * seconds)
            assert all(count > 0 for count in end())
        assert first["digest"] == second["digest"]
        assert made.ended(30) == [0, 0]
        said = [line for one in (made.scheduler, *made.servers) for line in one.errors().splitlines()]
        assert 0 < max(scheduler.grown, server.grown) < 16, (scheduler.grown, server.grown)
        # For each port, and for all that showed something wrong to a process; again after a minute.
        assert 2 <= len(said) <= 5 * (2 + first["lasted"] // 60), said
        assert all("refused a " in line for line in said), said


def with_files(faults: Faults, files: int, **variables: str) -> FaultyJob:
    """Start a job of two workers whose server and scheduler may open so many files."""
    roles = {"server": "server_of_files", "scheduler": "scheduler_of_files"}
    return faults.job(2, 1, **roles, FILES=str(files), **variables)


def test_strangers_leave_descriptors_for_the_job(faults: Faults) -> None:
    """More strangers than descriptors: present workers are served, and new workers are admitted."""
    with with_files(faults, 256) as made:
        workers = made.start_all(BODIES, "going_on", "pushpull")
        ready(*workers, line="working")
        roles = [made.scheduler, *made.servers]
        before = [strangers.descriptors(one.pid) for one in roles]
        ports = [port for one in roles for port in strangers.listening(one.pid)]
        with strangers.crowd(ports, 2000):
            # A listener with a pending connection and no descriptor for it would poll without a pause.
            until(lambda: all(strangers.unaccepted(one.pid) == 0 for one in roles))
            assert all(strangers.open_files(one.pid) < 256 for one in roles)
            kill(workers[1])
            workers[1] = made.start(BODIES, "going_on", "pushpull", rank=1)
            workers[1].expect("working", UNTIL_TOLD)
        until(lambda: strangers.have_closed([one.pid for one in roles], before))
        say(workers[0], "stop")
        assert [one["last"] for one in finish(*workers)] == [[11], [11]]
        assert made.ended(10) == [0, 0]
        for one in roles:
            assert one.errors().count("few descriptors are left") == 1, one.errors()


@pytest.mark.nightly
@pytest.mark.timeout(1800)
def test_ten_thousand_strangers(faults: Faults) -> None:
    """All at once, and again: the job trains on, and nothing is kept of them."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < 12_000:
        pytest.skip(f"a process may open {hard} files here")
    patient = {"HANDSHAKES": "300000", "KVSTORE_DEAD_AFTER": "60", "KVSTORE_TIMEOUT": "100"}
    with with_files(faults, hard, **patient) as made:
        workers = made.start_all(BODIES, "going_on", "pushpull")
        ready(*workers, line="working")
        roles = [made.scheduler, *made.servers]
        ports = [port for one in roles for port in strangers.listening(one.pid)]
        before = [strangers.descriptors(one.pid) for one in roles]
        sizes = [[strangers.memory(one.pid) for one in roles]]
        for _ in range(3):
            with strangers.crowd(ports, 10_000, processes=4):
                until(lambda: not any(strangers.unaccepted(one.pid) for one in roles))
                assert sum(strangers.open_files(one.pid) for one in roles) > 5000
            until(lambda: strangers.have_closed([one.pid for one in roles], before))
            sizes.append([strangers.memory(one.pid) for one in roles])
        # Freed memory is not returned to the kernel, but used for the next connections.
        for first, second, *_, last in zip(*sizes, strict=True):
            assert second - first < 64, sizes
            assert last - second < 16, sizes
        say(workers[0], "stop")
        assert [one["last"] for one in finish(*workers)] == [[11], [11]]
        assert made.ended(30) == [0, 0]
