"""Workers of a shared store that are killed, stopped, starved, forked and interrupted.

No process may hang, no value may be wrong, and no process or file may remain.
"""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pace
import pytest
from jobs import Job
from nightly import each_once, nightly_unless

from kvstore.stores.shared.native.rendezvous import RegionRendezvous

BODIES = "procs_shared_faults"
IN_TIME = 3.0  # seconds from a death until every survivor knows: the machine may stand still for one

MakeJob = Callable[..., Job]


def kill_one(job: MakeJob, folder: Path, seed: int) -> None:
    """Kill a worker at an instant that the seed decides, and check the values of the others."""
    draw = random.Random(seed)
    size = draw.choice([2, 3, 3, 4])
    made, victim = job(size), draw.randrange(size)
    spin = draw.choice(["0", "0.00005", "0.001"])
    workers = made.start_all(BODIES, "until_lost", seed, str(folder), KVSTORE_SPIN=spin)
    for worker in workers:
        worker.expect("ready")
    time.sleep(draw.random() * 0.06)  # the instant
    killed = time.monotonic()
    workers[victim].signal(signal.SIGKILL)
    made.finish(30)
    assert workers[victim].code == -signal.SIGKILL, workers[victim].errors()
    survivors = [worker.result() for rank, worker in enumerate(workers) if rank != victim]
    for found in survivors:
        assert found["rank"] == victim
        assert found["noticed"] - killed < pace.seconds(IN_TIME)
        assert found["digest"] == survivors[0]["digest"], [other["seen"] for other in survivors]
    made.close()


@pytest.mark.parametrize("seed", nightly_unless(lambda seed: seed < 3, range(20)))
def test_a_killed_worker(job: MakeJob, tmp_path: Path, seed: int) -> None:
    kill_one(job, tmp_path, seed)


def kill_one_among_rows(job: MakeJob, seed: int, body: str = "rows_until_lost") -> None:
    draw = random.Random(seed)
    made = job(draw.choice([2, 3]))
    workers = made.start_all(BODIES, body, seed)
    for worker in workers:
        worker.expect("ready")
    time.sleep(draw.random() * 0.06)  # the instant
    workers.pop(draw.randrange(made.size)).signal(signal.SIGKILL)
    made.finish(30)
    first, *others = [worker.result() for worker in workers]
    assert all(other["seen"] == first["seen"] for other in others)
    made.close()


@pytest.mark.parametrize("seed", nightly_unless(lambda seed: seed < 2, range(5)))
def test_a_worker_killed_in_an_update_of_rows(job: MakeJob, seed: int) -> None:
    kill_one_among_rows(job, seed)


@pytest.mark.parametrize("seed", nightly_unless(lambda seed: seed < 4, range(20)))
def test_a_worker_killed_while_a_table_grows(job: MakeJob, seed: int) -> None:
    kill_one_among_rows(job, seed, "growing_rows_until_lost")


@pytest.mark.nightly
@pytest.mark.timeout(1200)
def test_two_hundred_killed_workers(job: MakeJob, tmp_path: Path) -> None:
    for seed in range(1000, 1200):
        kill_one(job, tmp_path, seed)


# ------------------------------------------------------------------------------- keys of one call


@pytest.mark.parametrize("arrivals", range(5))
def test_a_call_is_part_of_all_of_its_rounds_or_of_none(job: MakeJob, tmp_path: Path, arrivals: int) -> None:
    made = job(3)
    made.start_all(BODIES, "dies_within_a_call", arrivals, str(tmp_path))
    made.finish()
    first, second = (made.workers[rank].result() for rank in (0, 2))
    assert first == second == [-4.5], "three rounds of three workers at the rate of 0.5, and no more"


@pytest.mark.parametrize("optimizer", [False, True])
def test_keys_of_two_rounds_are_not_read_as_one(job: MakeJob, tmp_path: Path, optimizer: bool) -> None:
    made = job(2)
    survivor, victim = made.start_all(BODIES, "keys_of_two_rounds", str(tmp_path), optimizer)
    assert victim.finish(pace.deadline(60)) == -signal.SIGKILL, victim.errors()
    survivor.say("dead")
    made.finish()
    survivor.result()


def test_a_read_after_a_loss_waits_for_a_survivor_at_work(job: MakeJob) -> None:
    made = job(3)
    told, working, victim = made.start_all(BODIES, "reads_wait_for_who_works")
    for worker in (told, victim):
        worker.expect("pushed")
    working.say("go")
    working.expect("works")
    victim.signal(signal.SIGKILL)
    told.expect("told")
    working.say("go")
    made.finish()
    assert told.result() == working.result() == 3


@pytest.mark.parametrize("optimizer", [False, True])
def test_a_round_of_a_loss_stays_open_when_a_survivor_leaves(job: MakeJob, optimizer: bool) -> None:
    made = job(3)
    reader, leaver, victim = made.start_all("procs_losses", "leaves_after_a_loss", "shared", optimizer)
    for worker in made.workers:
        worker.expect("pushed")
    victim.signal(signal.SIGKILL)
    reader.say("dead")
    reader.expect("told")
    leaver.say("dead")
    assert leaver.finish(pace.deadline(60)) == 0, leaver.errors()
    reader.say("left")
    made.finish()
    assert reader.result() == [0, 0] and leaver.result() == [0]


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 200))]
)
@pytest.mark.timeout(400)
def test_a_worker_killed_among_calls_of_several_keys(job: MakeJob, tmp_path: Path, seed: int) -> None:
    draw = random.Random(seed)
    made = job(draw.choice([2, 3, 3]))
    workers = made.start_all(BODIES, "calls_until_lost", seed, str(tmp_path), KVSTORE_TIMEOUT="150")
    for worker in workers:
        worker.expect("ready", 150)
    time.sleep(draw.random() * 0.06)  # the instant
    workers.pop(draw.randrange(made.size)).signal(signal.SIGKILL)
    made.finish(300)
    first, *others = [worker.result() for worker in workers]
    assert all(other == first for other in others)


# ------------------------------------------------------------------------------- leaving without a word


@pytest.mark.parametrize(("size", "how"), each_once([50, 40_000], ["exit", "close", "with", "join"]))
def test_a_worker_that_leaves_without_join_is_named_once(job: MakeJob, how: str, size: int) -> None:
    made = job(3)
    workers = made.start_all(BODIES, "leaves_early", how, size)
    for worker in workers:
        worker.expect("half")
    workers[1].finish(pace.deadline(60))
    workers[0].say("go")
    workers[2].say("go")
    made.finish()
    for worker in (workers[0], workers[2]):
        if how == "join":
            assert worker.result() == []
            continue
        (text,) = worker.result()
        assert "worker 1 has left after round 5 of key 'w', without join(): round 6" in text


@pytest.mark.parametrize(
    "seed", [*range(2), *(pytest.param(seed, marks=pytest.mark.nightly) for seed in range(2, 200))]
)
@pytest.mark.timeout(400)
def test_no_worker_is_named_at_an_ordinary_end(job: MakeJob, seed: int) -> None:
    made = job(random.Random(seed).choice([2, 3, 4]))
    made.start_all(BODIES, "ends_in_its_own_time", seed, KVSTORE_TIMEOUT="150")
    assert made.results(300) == [[]] * made.size


# ------------------------------------------------------------------------------- going on without


@pytest.mark.parametrize("seed", nightly_unless(lambda seed: seed < 2, range(4)))
def test_the_living_go_on_where_that_was_asked_for(job: MakeJob, seed: int) -> None:
    draw = random.Random(seed)
    made = job(draw.choice([2, 3, 4]))
    workers = made.start_all(BODIES, "going_on")
    for worker in workers:
        worker.expect("working")
    time.sleep(draw.random() * 0.03)  # the instant
    victim = workers.pop(draw.randrange(1, made.size))
    victim.signal(signal.SIGKILL)
    time.sleep(0.1)
    workers[0].say("stop")
    made.finish(20)
    results = [worker.result() for worker in workers]
    assert all(result == results[0] for result in results)
    rest = sum(10**rank for rank in range(made.size) if made.workers[rank] is not victim)
    assert set(results[0]["last"].values()) == {rest}


@pytest.mark.parametrize("seed", nightly_unless(lambda seed: seed < 2, range(4)))
def test_a_worker_that_is_started_again_joins_in(job: MakeJob, seed: int) -> None:
    draw = random.Random(100 + seed)
    made = job(draw.choice([2, 3, 4]))
    workers = made.start_all(BODIES, "going_on")
    for worker in workers:
        worker.expect("working")
    rank = draw.randrange(1, made.size)
    time.sleep(draw.random() * 0.03)  # the instant
    workers[rank].signal(signal.SIGKILL)
    time.sleep(draw.random() * 0.1)
    workers[rank] = made.start(BODIES, "going_on", rank=rank)
    workers[rank].expect("working")
    workers[0].say("stop")
    made.finish(30)
    results = [worker.result() for worker in workers]
    assert all(result["last"] == results[0]["last"] for result in results)
    assert set(results[0]["last"].values()) == {int("1" * made.size)}


@pytest.mark.parametrize(("back", "seed"), [(b, s) for b in (False, True) for s in range(3)])
def test_a_table_grows_on_without_the_dead_and_with_them_again(job: MakeJob, back: bool, seed: int) -> None:
    draw = random.Random(200 + seed)
    made = job(draw.choice([2, 3]))
    workers = made.start_all(BODIES, "growing_rows_going_on")
    for worker in workers:
        worker.expect("working")
    rank = draw.randrange(1, made.size)
    time.sleep(draw.random() * 0.05)  # the instant
    victim = workers.pop(rank)
    victim.signal(signal.SIGKILL)
    if back:
        workers.append(made.start(BODIES, "growing_rows_going_on", rank=rank))
        workers[-1].expect("working")
    time.sleep(0.1)
    workers[0].say("stop")
    made.finish(30)
    assert len({worker.result() for worker in workers}) == 1


@pytest.mark.parametrize("told", [[], [0], [0, 1]])
def test_no_worker_replaces_the_lost_where_a_loss_is_an_error(job: MakeJob, told: list[int]) -> None:
    made = job(3)
    workers = [made.start(BODIES, "computes_meanwhile", rank in told, rank=rank) for rank in range(3)]
    for worker in workers:
        worker.expect("computes")
    workers[2].signal(signal.SIGKILL)
    for rank in told:
        workers[rank].say("dead")
        workers[rank].expect("told")
    again = made.start(BODIES, "refused", "PeerLostError", rank=2)
    again.finish(pace.deadline(60))
    assert "worker 2 of 3" in again.result() and "restart the job" in again.result()
    for worker in workers[:2]:
        worker.say("started again")
    made.finish()
    assert ["worker 2 of 3 died" in worker.result() for worker in workers[:2]] == [True, True]


# ----------------------------------------------------------------------------- ends of every kind


NOT_SEEN = "when the process ends, nothing tells sys.exit(3) from an end that is well"


@pytest.mark.parametrize(
    "how",
    [
        "_exit",
        "exception",
        pytest.param("sys.exit", marks=pytest.mark.xfail(reason=NOT_SEEN, strict=True)),
        "with",
        "exit from with",
        "thread",
        "abort",
    ],
)
def test_a_worker_that_ends_badly_is_lost(job: MakeJob, how: str) -> None:
    made = job(3)
    workers = made.start_all(BODIES, "ends", how, 1)
    ended = workers[1].expect("ends")
    made.finish()
    assert workers[1].code == {"_exit": 0, "sys.exit": 3, "exit from with": 3, "abort": -signal.SIGABRT}.get(
        how, 1
    )
    for worker in (workers[0], workers[2]):
        assert worker.result() - ended < pace.seconds(IN_TIME)


def test_a_leaving_worker_judges_no_other_and_extends_no_file(job: MakeJob, tmp_path: Path) -> None:
    made = job(3)
    leaver, *others = made.start_all(BODIES, "leaves_as_a_thread_waits", str(tmp_path))
    assert leaver.finish(pace.deadline(60)) == 0, leaver.errors()
    for worker in others:
        worker.say("left")
    assert made.results() == [0, 2, 2]


@pytest.mark.parametrize("rank", [0, 1, 2])
def test_a_worker_that_ends_well_is_not_missed(job: MakeJob, rank: int) -> None:
    made = job(3)
    made.start_all(BODIES, "leaves_well", rank)
    made.results()


@pytest.mark.parametrize("how", ["killed", "closes"])
def test_the_initializer_of_a_key_is_gone_while_others_wait_for_it(job: MakeJob, how: str) -> None:
    made = job(3)
    first, *others = made.start_all(BODIES, "waits_for_a_key", how)
    for worker in others:
        worker.expect("waits")
    if how == "killed":
        first.signal(signal.SIGKILL)
    else:
        first.say("close")
    for worker in others:
        worker.finish(pace.deadline(20))
        assert worker.result() == [1.0, 1.0, 1.0]


def test_a_fork_has_no_part_in_the_job(job: MakeJob) -> None:
    made = job(2)
    made.start_all(BODIES, "forks")
    made.results()


# ----------------------------------------------------------------------------------------- hunger


@pytest.mark.parametrize("limit", ["machine", "RLIMIT_FSIZE", "RLIMIT_AS"])
def test_a_key_that_does_not_fit_is_an_error_and_nothing_else(job: MakeJob, limit: str) -> None:
    made = job(2)
    made.start_all(BODIES, "starved", limit)
    assert made.results()[0] == "MemoryError"


@pytest.mark.parametrize("size", [1, 3])
def test_a_table_that_outgrows_the_machine_is_as_it_was(job: MakeJob, size: int) -> None:
    made = job(size)
    made.start_all(BODIES, "starved_rows")
    (rounds,) = {t for (t,) in made.results()}
    assert rounds > 10


@pytest.mark.parametrize("rank", [0, 1])
def test_a_worker_that_can_address_less_keeps_the_region_small(job: MakeJob, rank: int) -> None:
    made = job(2)
    made.start_all(BODIES, "one_can_address_less", rank)
    made.results()


def test_without_descriptors_a_death_is_noticed_all_the_same(job: MakeJob) -> None:
    made = job(3)
    workers = made.start_all(BODIES, "few_files", 0)
    for worker in workers:
        worker.expect("ready")
    workers[2].signal(signal.SIGKILL)
    made.finish()
    assert [worker.code for worker in workers] == [0, 0, -signal.SIGKILL]


@pytest.mark.parametrize("function", ["few_files_at_first", "no_room_to_map"])
def test_a_store_that_cannot_be_made_is_an_error(job: MakeJob, function: str) -> None:
    made = job(2)
    made.start(BODIES, function, rank=0)
    made.results()


@pytest.mark.parametrize("lost", [False, True])
def test_the_wait_for_a_worker_that_stays_within_the_lock_has_an_end(job: MakeJob, lost: bool) -> None:
    made = job(3 if lost else 2)
    waiting, holder, *victims = made.start_all(BODIES, "holds_the_lock", lost)
    for victim in victims:
        victim.expect("in")
        victim.signal(signal.SIGKILL)
    holder.expect("holds")
    waiting.say("held")
    waiting.expect("gave up")
    holder.say("go")
    assert holder.finish(pace.deadline(60)) == 0, holder.errors()
    waiting.say("let go")
    assert waiting.finish(pace.deadline(60)) == 0, waiting.errors()
    error, warning = waiting.result()
    for text in (error, warning):
        assert text.startswith("worker 0 has waited") and "lock" in text
        assert f"worker 1 (process {holder.pid}" in text


# -------------------------------------------------------------------------------- other processes


def test_two_jobs_do_not_meet(job: MakeJob) -> None:
    made = [job(2), job(2)]
    workers = [
        one.start_all(BODIES, "sums_once", value) for one, value in zip(made, (1.0, 10.0), strict=True)
    ]
    for worker in (*workers[0], *workers[1]):
        worker.expect("in")
    for worker in (*workers[0], *workers[1]):
        worker.say("go")
    assert [one.results() for one in made] == [[2, 2], [20, 20]]


def test_two_processes_of_one_rank(job: MakeJob) -> None:
    made = job(2)
    workers = made.start_all(BODIES, "sits")
    for worker in workers:
        worker.expect("in")
    second = made.start(BODIES, "refused", "ConfigError", rank=1)
    second.finish(pace.deadline(20))
    assert "taken" in second.result()
    for worker in workers:
        worker.say("go")
    made.finish()
    assert [worker.code for worker in workers] == [0, 0]


def test_processes_that_were_told_of_different_sizes(job: MakeJob) -> None:
    made = job(2)
    workers = made.start_all(BODIES, "sits")
    for worker in workers:
        worker.expect("in")
    other = job(3, made.name)
    third = other.start(BODIES, "refused", "ConfigError", rank=2)
    other.finish()
    assert "2" in third.result()
    for worker in workers:
        worker.say("go")
    made.finish()
    assert [worker.code for worker in workers] == [0, 0]


def test_a_worker_that_never_comes(job: MakeJob) -> None:
    made = job(2)
    alone = made.start(BODIES, "refused", "KVStoreError", rank=0)
    made.finish()
    assert "1" in alone.result()


@pytest.mark.skipif(os.getuid() != 0, reason="takes two users")
def test_another_users_process_under_the_name_of_a_worker(job: MakeJob) -> None:
    made = job(2)
    name = RegionRendezvous(made.name, "default", 0, 0, 2)._rank_address(0).decode()
    squatter = made.start(BODIES, "squats", name, 65534, rank=0)
    squatter.expect("squats")
    victim = made.start(BODIES, "refused", "AuthError", rank=1)
    victim.finish(pace.deadline(20))
    assert "65534" in victim.result()
    founder = made.start(BODIES, "refused", "KVStoreError", rank=0)
    founder.finish(pace.deadline(20))
    founder.result()
    squatter.say("go")
    made.finish()


@pytest.mark.parametrize("where", ["pull", "barrier", "join", "rest of a pushpull", "rest of small sums"])
def test_ctrl_c_in_a_wait(job: MakeJob, where: str) -> None:
    made = job(2)
    waiting, late = made.start_all(BODIES, "interrupted", where)
    waiting.expect("waits")
    time.sleep(0.1)  # it is likely to wait now; sooner is no error
    sent = time.monotonic()
    waiting.signal(signal.SIGINT)
    waiting.expect("interrupted")
    late.say("go")
    assert made.results()[0] - sent < pace.seconds(IN_TIME)


def interrupted_push(made: Job, *body: object) -> list[Any]:
    """Run a body in which worker 0 pushes last, and is interrupted; what both return."""
    interrupted, other = made.start_all(BODIES, *body)
    other.expect("has pushed")
    interrupted.say("go")
    interrupted.expect("is interrupted")
    other.say("go")
    return made.results()


@pytest.mark.parametrize("size", [100, 40_000])
@pytest.mark.parametrize("then", ["view", "pushpull"])
def test_ctrl_c_between_the_opening_of_a_round_and_its_update(job: MakeJob, size: int, then: str) -> None:
    """The next call of the worker carries the update out; before, all waited to their deadlines."""
    assert interrupted_push(job(2), "interrupted_as_it_opens", size, then) == [[4.0, 6.0]] * 2


@pytest.mark.parametrize("size", [100, 40_000])
def test_ctrl_c_while_the_error_of_an_updater_is_handled(job: MakeJob, size: int) -> None:
    """The update is made anew, by one of the two; before, all waited to their deadlines."""
    values, calls = zip(*interrupted_push(job(2), "interrupted_as_it_fails", size), strict=True)
    assert values == (2.0, 2.0)
    assert sum(calls) == 2


@pytest.mark.parametrize(
    ("owner", "name"),
    [
        ("_waiter", "_prepare_work"),
        ("_updater", "_enter_update"),
        ("_updater", "_carry_out"),
        ("_updater", "note_state"),
    ],
)
@pytest.mark.parametrize("kind", ["dense", "lamb", "rows", "table", "rows without an optimizer"])
def test_ctrl_c_in_an_update_leaves_it_to_another(job: MakeJob, kind: str, owner: str, name: str) -> None:
    """Only an updater of the user can fail a round; before, all of them got an UpdaterError, or waited."""
    if name == "note_state" and kind in ("table", "rows without an optimizer"):
        pytest.skip("it has no such step")
    made = job(2)
    interrupted, other = made.start_all(BODIES, "interrupted_and_idle", kind, owner, name)
    other.expect("has pushed")
    interrupted.say("go")
    interrupted.expect("is interrupted")
    other.say("go")
    other.finish(pace.deadline(30))
    interrupted.say("go")
    assert made.results() == [True, True]


def test_an_updater_that_closes_its_store(job: MakeJob) -> None:
    """It is called once; before, without an end."""
    made = job(2)
    closing, other = made.start_all(BODIES, "closes_in_its_updater")
    other.expect("has pushed")
    closing.say("go")
    closing.finish(pace.deadline(30))
    other.say("go")
    assert made.results() == [1.0, 2.0]


@pytest.mark.parametrize("before", [True, False], ids=["before it holds the key", "as it holds the key"])
def test_ctrl_c_as_a_value_is_overwritten(job: MakeJob, tmp_path: Path, before: bool) -> None:
    made = job(2)
    made.start_all(BODIES, "interrupted_as_it_assigns", before, str(tmp_path))
    assert made.results() == [[0.0, 2.0, 2.0]] * 2


@pytest.mark.nightly
@pytest.mark.parametrize("where", [0.0, 0.01, 0.02])
def test_a_worker_that_is_stopped_is_lost_and_fenced_when_it_wakes(job: MakeJob, where: float) -> None:
    made = job(3)
    workers = made.start_all(BODIES, "stopped")
    for worker in workers:
        worker.expect("ready")
    time.sleep(where)  # the instant
    workers[1].signal(signal.SIGSTOP)
    end = pace.deadline(9)
    for worker in (workers[0], workers[2]):
        worker.finish(end)
        assert worker.result() == "PeerLostError"
    workers[1].signal(signal.SIGCONT)
    made.finish()
    if workers[1].code != -signal.SIGKILL:  # it was ended if it stood still within a piece of work
        assert workers[1].result() == "FencedError"


@pytest.mark.parametrize(("where", "loss"), each_once(["updater", "rows", "lock"], ["raise", "continue"]))
def test_a_worker_stopped_at_work_on_what_others_read_writes_no_more(
    job: MakeJob, where: str, loss: str
) -> None:
    """It is killed: each update is made once, at any point of the stop."""
    made = job(3)
    *others, one = made.start_all(BODIES, "stopped_at_work", where, loss)
    for worker in others:
        worker.expect("pushed")
    one.say("go")
    one.expect("stops")
    for worker in others:
        worker.say("go")
    for worker in others:
        worker.expect("read")
    one.signal(signal.SIGCONT)  # it is dead, or continues
    assert one.finish(pace.deadline(20)) == -signal.SIGKILL, one.errors()
    for worker in others:
        worker.say("go")
    made.finish()
    value = 0 if (where, loss) == ("lock", "raise") else 2  # a sum of two, or one update in two steps
    assert [worker.result() for worker in others] == [[value, value]] * 2


@pytest.mark.parametrize("rows", [False, True])
def test_a_worker_stopped_within_a_call_gets_no_value_of_the_others(job: MakeJob, rows: bool) -> None:
    """Its round is complete when it wakes up, and the value is of a later one."""
    made = job(2)
    first, second = made.start_all(BODIES, "stopped_within_a_call", rows)
    second.expect("pushes")
    time.sleep(0.1)  # it waits
    second.signal(signal.SIGSTOP)
    first.say("go on")
    first.expect("went on", 20)
    second.signal(signal.SIGCONT)
    assert made.results() == ["", "FencedError"]


@pytest.mark.nightly
@pytest.mark.parametrize("size", [2, 4])
def test_no_worker_is_lost_if_all_stand_still(job: MakeJob, size: int) -> None:
    """As on a virtual machine that is stopped, or one that is moved to another host."""
    made = job(size)
    workers = made.start_all(BODIES, "stands_still", 2000)
    for worker in workers:
        worker.expect("ready")
    for number, seconds in ((signal.SIGSTOP, 7), (signal.SIGCONT, 0)):
        for worker in workers:
            worker.signal(number)
        time.sleep(seconds)  # the silence itself
    assert made.results() == [size] * size


@pytest.mark.parametrize("size", nightly_unless(lambda size: size < 100_000, [40_000, 3_000_000]))
def test_memory_that_was_pushed_in_vain_is_the_callers_again(job: MakeJob, size: int) -> None:
    made = job(2)
    waiting, late = made.start_all(BODIES, "gives_up", size)
    waiting.expect("gone")
    late.say("go")
    waiting.say("go")
    for worker in (waiting, late):
        worker.expect("done")
    for worker in (waiting, late):
        worker.say("end")
    made.results()


# ------------------------------------------------------------------------------------------- soak


def check_soak(made: Job, seconds: float) -> None:
    made.start_all(BODIES, "soak", seconds)
    for result in made.results(seconds + 60):
        first, last = result["marks"]
        assert last[0] - first[0] < 4096  # KiB
        assert last[1:] == first[1:]


def test_nothing_grows(job: MakeJob) -> None:
    check_soak(job(2), 8)


@pytest.mark.nightly
@pytest.mark.timeout(900)
def test_nothing_grows_in_ten_minutes(job: MakeJob) -> None:
    check_soak(job(3), 600)
