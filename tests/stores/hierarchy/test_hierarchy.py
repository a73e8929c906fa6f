"""Sums by hosts: the bits of ranks within a host and then hosts, and the meaning of a round."""

from __future__ import annotations

import itertools
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pace
import pytest
import tested_store
from nightly import each_once, nightly_unless
from servers import ServedJob, start_on_hosts

from kvstore.observe.counters import SHARED, STREAM

SUMS, ROUNDS, OWN, HOSTS = "procs_shared", "procs_shared_rounds", "procs_dist", "procs_hierarchy"
QUICK = "procs_hierarchy_quick"

Served = Callable[..., ServedJob]
SMALL = {tested_store.NAME: "dist_sync", "KVSTORE_SLICE_BYTES": "131072"}
#: Hosts of each rank, with the order of sums of the ranks, so that the bits are those of `local`.
IN_ORDER = [[0, 0], [0, 0, 1]]
TWO_BY_TWO = [0, 0, 1, 1]
QUICK_HOSTS = [[0, 0], TWO_BY_TWO]


def run(
    served: Served,
    hosts: list[int],
    module: str,
    function: str,
    *arguments: object,
    servers: int = 2,
    **variables: str,
) -> list[Any]:
    """Run a function on all workers, which check for themselves; then the whole job must end."""
    job = served(len(hosts), servers, **SMALL)
    try:
        start_on_hosts(job, hosts, module, function, *arguments, **variables)
        results = job.results()
        assert job.ended() == [0] * (1 + len(job.servers))
    except AssertionError as error:
        everybody = (job.scheduler, *job.servers, *job.workers)
        raise AssertionError("\n".join([str(error), *(one.errors() for one in everybody)])) from None
    job.close()
    return results


def same(served: Served, hosts: list[int], function: str, *arguments: object) -> object:
    """Run a function on all workers; they must agree."""
    first, *others = run(served, hosts, SUMS, function, *arguments)
    assert all(other == first for other in others)
    return first


@pytest.mark.parametrize(
    ("hosts", "name"),
    each_once([*IN_ORDER, TWO_BY_TWO, [0, 1, 0, 1]], ["float32", "bfloat16", "int8"]),
)
def test_sums_are_those_of_ranks_and_then_of_hosts(served: Served, hosts: list[int], name: str) -> None:
    same(served, hosts, "sums", name, 1)


@pytest.mark.parametrize(
    ("hosts", "every"),
    nightly_unless(lambda _, every: every > 1, [([0, 0], 1), ([0, 0, 1], 1), ([0, 0, 1], 6)]),
)
def test_every_optimizer_gives_the_weights_of_local(served: Served, hosts: list[int], every: int) -> None:
    same(served, hosts, "optimizers", 3, every)


@pytest.mark.parametrize("hosts", IN_ORDER)
def test_rows_are_merged_within_a_host(served: Served, hosts: list[int]) -> None:
    """Rows for row-sparse keys, and for dense ones."""
    same(served, hosts, "rows")


def test_arrays_of_gpus_are_those_of_the_host(served: Served) -> None:
    """Each worker has a CUDA driver of its own that needs no GPU."""
    assert (
        len(set(run(served, [0, 0, 1], "procs_shared_gpu", "sums", "float32", ["gpu", "host", "any"]))) == 1
    )


def test_a_schedule_begins_with_its_optimizer(served: Served) -> None:
    same(served, [0, 0, 1], "schedules")


@pytest.mark.nightly
@pytest.mark.parametrize("hosts", IN_ORDER)
def test_arrays_that_overlap_end_as_in_local(served: Served, hosts: list[int]) -> None:
    same(served, hosts, "overlaps")


@pytest.mark.parametrize(("key", "home"), each_once(["small", "large"], [False, True]))
def test_the_third_push_waits(served: Served, key: str, home: bool) -> None:
    job = served(2, 2, **SMALL)
    ahead, behind = start_on_hosts(job, [0, 0], ROUNDS, "third_push_waits", key, home)
    ahead.expect("waits")
    behind.say("go")
    job.results()


def test_a_pull_gives_the_value_of_the_round_that_was_pushed_into(served: Served) -> None:
    job = served(2, 2, **SMALL)
    behind, ahead = start_on_hosts(job, [0, 0], ROUNDS, "pull_gives_the_round", "large")
    ahead.expect("ahead")
    behind.say("go")
    job.results()


def test_a_worker_that_has_not_pushed_reads_at_once(served: Served) -> None:
    job = served(2, 2, **SMALL)
    pushing, reading = start_on_hosts(job, [0, 0], ROUNDS, "reads_without_a_push")
    pushing.expect("pushed")
    reading.say("go")
    reading.expect("done")
    pushing.say("go")
    job.results()


@pytest.mark.parametrize(
    "hosts", nightly_unless(lambda hosts: len(hosts) > 4, [[0, 0], TWO_BY_TWO, [0, 1, 0, 1, 2]])
)
def test_workers_with_fewer_batches_join(served: Served, hosts: list[int]) -> None:
    job = served(len(hosts), 2, **SMALL)
    started = start_on_hosts(job, hosts, ROUNDS, "uneven")
    for worker in started:
        worker.expect("joined")
    for worker in started:
        worker.say("go")
    job.results()


@pytest.mark.parametrize("pushes", [[2, 2, 2], [2, 1, 2], [1, 2, 2]])
@pytest.mark.parametrize(("codec", "name"), [({}, "bfloat16"), ({"type": "fp16"}, "float32")])
def test_a_worker_that_closes_ahead_of_other_hosts_counts(
    served: Served, pushes: list[int], codec: dict[str, Any], name: str
) -> None:
    job = served(3, 2, **SMALL)
    *ahead, last = start_on_hosts(job, [0, 0, 1], HOSTS, "close_ahead", pushes, codec, False, name)
    last.expect("waits")
    for worker in ahead:
        worker.finish(pace.deadline(30))
    last.say("go")
    job.results()


def test_what_a_worker_has_pushed_ahead_counts_though_the_rest_of_its_host_joins(served: Served) -> None:
    job = served(3, 2, **SMALL)
    ahead, joining, last = start_on_hosts(job, [0, 0, 1], HOSTS, "close_ahead", [2, 1, 2], {}, True)
    for worker in (joining, last):
        worker.expect("waits")
    ahead.finish(pace.deadline(30))
    for worker in (joining, last):
        worker.say("go")
    job.results()


def test_no_worker_passes_a_barrier_before_all_have_arrived(served: Served) -> None:
    for times in zip(*run(served, TWO_BY_TWO, ROUNDS, "barriers", 20), strict=True):
        assert max(came for came, _ in times) <= min(went for _, went in times)


def test_a_worker_that_waits_at_a_barrier_is_alone_at_the_sockets(served: Served) -> None:
    """Its carrier would wake it, and be woken by it, all the time."""
    job = served(3, 1, **SMALL)
    first, *others = start_on_hosts(job, [0, 1, 1], HOSTS, "waits_alone")
    for worker in (first, *others):
        worker.expect("waits")
    time.sleep(0.5)  # the wait itself
    for worker in others:
        worker.say("go")
    turns = [one == "MainThread" for one in job.results()[0]]
    assert turns.count(True) > 1
    assert all(turns[turns.index(True) : len(turns) - turns[::-1].index(True)]), turns


@pytest.mark.parametrize(
    ("hosts", "function"),
    nightly_unless(
        lambda hosts, function: (len(hosts), function) in ((2, "settings_change"), (3, "several_stores")),
        itertools.product(
            IN_ORDER, ["settings_change", "set_by_one", "set_late", "set_differently", "several_stores"]
        ),
    ),
)
def test_one_meaning_on_all_workers(served: Served, hosts: list[int], function: str) -> None:
    run(served, hosts, ROUNDS, function)


@pytest.mark.parametrize(
    ("hosts", "keys"),
    nightly_unless(lambda _, keys: keys < 2000, [([0, 0, 1], 800), ([0, 0, 1], 2000), (TWO_BY_TWO, 2000)]),
)
def test_many_keys(served: Served, hosts: list[int], keys: int) -> None:
    run(served, hosts, ROUNDS, "many_keys", keys)


@pytest.mark.nightly
def test_keys_are_made_while_others_work(served: Served) -> None:
    run(served, [0, 0, 1], ROUNDS, "growing_table", 300)


def test_any_worker_saves_and_any_other_loads(served: Served, tmp_path: Any) -> None:
    (tmp_path / "files").mkdir()
    run(served, [0, 0, 1], ROUNDS, "saved_and_loaded", str(tmp_path / "files"))


def test_operations_in_the_background_need_no_common_order(served: Served) -> None:
    run(served, [0, 0, 1], ROUNDS, "in_the_background", 6)


@pytest.mark.parametrize("how", ["pull", "pushpull"])
def test_no_push_overtakes_a_read_in_the_background(served: Served, how: str) -> None:
    run(served, [0, 0], ROUNDS, "late_reads", how)


def test_arrays_that_the_caller_drops_are_read_all_the_same(served: Served) -> None:
    run(served, [0, 0, 1], ROUNDS, "dropped")


def test_threads_wait_side_by_side(served: Served) -> None:
    run(served, [0, 0], "procs_dist", "threads_in_opposite_order", 4, 1 << 20)


def test_a_wait_is_not_held_up_by_operations_of_other_keys(served: Served) -> None:
    run(served, [0, 0], ROUNDS, "waits_out_of_order")


# -------------------------------------------------------------------------------------------- its purpose


@pytest.mark.parametrize(
    ("wanted", "hosts", "by_hosts"),
    [
        ("host", [0, 0, 1], True),
        ("host", [0, 1], False),
        ("auto", [0, 0, 1, 1], True),
        ("auto", [0, 0, 1], False),
        ("flat", [0, 0, 1, 1], False),
    ],
)
def test_when_hosts_push(served: Served, wanted: str, hosts: list[int], by_hosts: bool) -> None:
    found = run(served, hosts, OWN, "kind_of_store", KVSTORE_HIERARCHY=wanted)
    assert found == [by_hosts] * len(hosts)


def test_one_sum_of_a_host_travels(served: Served) -> None:
    """Of four workers on two hosts the servers get half the bytes; where it is busy, one can send most."""
    shares = run(served, TWO_BY_TWO, OWN, "bytes_to_servers", 64, 20)
    size = 64 * 131072 * 20
    for host in (shares[:2], shares[2:]):
        assert size <= sum(host) <= 1.02 * size
        assert min(host) > 0, shares


@pytest.mark.parametrize(("hosts", "verb"), [([0, 0], "pushpull"), ([0, 1, 1], "push")])
def test_the_first_slices_are_summed_before_the_last_are_pushed(
    served: Served, hosts: list[int], verb: str
) -> None:
    *_, last = run(served, hosts, HOSTS, "pushes_in_portions", verb)
    assert last == 3 * 3


@pytest.mark.parametrize("verb", ["push", "pushpull"])
def test_a_call_goes_on_when_its_first_key_has_failed(served: Served, verb: str) -> None:
    run(served, [0, 0], HOSTS, "fails_between_portions", verb)


@pytest.mark.parametrize(("hosts", "at"), each_once([[0, 0], [0, 1, 1]], ["portions", "rows"]))
def test_a_worker_interrupted_within_a_push_is_out(served: Served, hosts: list[int], at: str) -> None:
    job = served(len(hosts), 2, **SMALL)
    first, *others = start_on_hosts(job, hosts, HOSTS, "interrupted_by_half", at, KVSTORE_TIMEOUT="100")
    for worker in job.workers:
        worker.expect("ready")
    for worker in job.workers:
        worker.say("go")
    for other in others:  # these get no error, because the first worker ends
        assert other.finish(pace.deadline(20)) == 0, other.errors()
        kind, text = other.result()
        assert kind == "PeerLostError", text
        assert "worker 0" in text
    first.say("go")
    first.finish(pace.deadline(20))
    kind, text = first.result()
    assert "worker 0 was interrupted while it began a push, and has left the job" in text, (kind, text)


def test_tables_without_rows(served: Served) -> None:
    """The servers have no row of them that could be asked for."""
    run(served, [0, 0, 1], HOSTS, "empty_tables")


def test_rows_of_a_host_travel_once(served: Served) -> None:
    """Statistics count the values of rows, without their ids."""
    shares = run(served, TWO_BY_TWO, HOSTS, "rows_to_servers", 20)
    for host in (shares[:2], shares[2:]):
        assert sum(host) == 20 * 300 * 50 * 4, shares


@pytest.mark.parametrize(
    "hosts", nightly_unless(lambda hosts: hosts is TWO_BY_TWO, [TWO_BY_TWO, [0, 1, 1, 1]])
)
def test_each_worker_counts_rounds_and_each_host_its_bytes_once(served: Served, hosts: list[int]) -> None:
    counted = run(served, hosts, HOSTS, "counted", 12)
    assert [one["rounds"] for one in counted] == [4 * 12] * len(hosts)
    size = 4 * 131072 * 12
    for host in set(hosts):
        of_host = [one for one, there in zip(counted, hosts, strict=True) if there == host]
        for way in ("sent", "received"):
            assert size <= sum(one[way] for one in of_host) <= 1.02 * size, (way, of_host)


@pytest.mark.parametrize("shares", [True, False])
def test_what_a_host_has_for_its_own_server_goes_through_memory(served: Served, shares: bool) -> None:
    """Each of two hosts has a server, and that has half of the slices."""
    found = run(served, TWO_BY_TWO, HOSTS, "by_way", 40, KVSTORE_SAME_HOST_SHM=str(int(shares)))
    half = 2 * 131072 * 40
    for host in (found[:2], found[2:]):
        for way in ("sent", "received"):
            ways = [sum(several) for several in zip(*(one[way] for one in host), strict=True)]
            expected = {SHARED: half, STREAM: half} if shares else {STREAM: 2 * half}
            assert {number: nbytes for number, nbytes in enumerate(ways) if nbytes} == expected
    assert all(one["kept"] <= 4 << 20 for one in found)  # 10 MB, if memory were not used again


def test_stores_side_by_side(served: Served) -> None:
    run(served, [0, 0, 1], HOSTS, "several_stores", 10)


def test_what_hosts_do_not_do_is_said(served: Served) -> None:
    run(served, [0, 0], OWN, "not_by_hosts")


def test_an_error_of_an_update_reaches_all(served: Served) -> None:
    run(served, TWO_BY_TWO, "procs_dist", "failing_rule")


@pytest.mark.parametrize("words", [1, 2000])
def test_all_late_readers_of_a_failed_round_get_its_error(served: Served, words: int) -> None:
    run(served, [0, 0], ROUNDS, "failed_long_ago", words)


@pytest.mark.parametrize(("verb", "arrives"), each_once(["push", "pushpull", "async push"], [False, True]))
def test_a_push_that_raises_counts_only_where_it_has_arrived(
    served: Served, verb: str, arrives: bool
) -> None:
    run(served, [0, 0], HOSTS, "raising_pushes", verb, arrives)


def test_without_rounds_it_stays_flat(served: Served) -> None:
    assert run(served, [0, 0], OWN, "asynchronous") == [False, False]


def test_workers_that_want_different_hierarchies(served: Served) -> None:
    job = served(2, 1, **SMALL)
    start_on_hosts(job, [0], OWN, "refused", KVSTORE_HIERARCHY="host")
    job.start(OWN, "refused", rank=1)
    assert "refused" in job.results()


@pytest.mark.parametrize(
    ("hosts", "codec"),
    each_once([[0, 0], TWO_BY_TWO], [{"type": "2bit", "threshold": 0.3}, {"type": "1bit"}, {"type": "fp16"}]),
)
def test_sums_of_hosts_are_packed(served: Served, hosts: list[int], codec: dict[str, Any]) -> None:
    run(served, hosts, OWN, "packed", codec, hosts, 5)


def test_a_sum_that_cannot_be_packed_comes_to_nothing_for_all(served: Served) -> None:
    job = served(2, 1, **SMALL)
    workers = start_on_hosts(job, [0, 0], HOSTS, "without_memory", KVSTORE_TIMEOUT="10")
    for worker in workers:
        worker.expect("told")
    for worker in workers:
        worker.say("go")
    job.results()


def test_a_sum_that_cannot_be_worked_out_is_left_to_the_rest_of_the_host(served: Served) -> None:
    """Servers wait for each round of a host: one that came to nothing there would hold up all later ones."""
    job = served(2, 1, **SMALL)
    first, second = start_on_hosts(job, [0, 0], HOSTS, "cannot_sum")
    second.expect("pushed")
    first.say("go")
    first.expect("refused")
    second.say("go")
    assert job.results() == [[], [[2] * 5, [1] * 5]]


def test_what_an_interrupted_worker_carries_is_taken_over(served: Served) -> None:
    job = served(3, 1, **SMALL)
    first, second, third = start_on_hosts(job, [0, 0, 1], HOSTS, "leaves_while_it_carries")
    second.expect("pushed")
    first.say("go")
    first.expect("interrupted")
    third.say("go")
    second.say("go")
    assert job.results() == [[], [12] * 5, [12] * 5]


def test_workers_of_a_host_that_set_different_codecs(served: Served) -> None:
    assert sorted(run(served, [0, 0], OWN, "codecs_differ")) == ["refused", "set"]


def test_a_worker_that_sets_codecs_later_than_another(served: Served) -> None:
    job = served(2, 1, **SMALL)
    quick, slow = start_on_hosts(job, [0, 0], HOSTS, "set_again", 4)
    quick.expect("set")
    slow.say("go")
    job.results()


@pytest.mark.parametrize("hosts", QUICK_HOSTS)
def test_small_calls_take_few_steps(served: Served, hosts: list[int]) -> None:
    rounds = 300
    for usual in run(served, hosts, QUICK, "quickly", rounds):
        # On a busy machine an exchange may not begin at once, or others may be late.
        assert sum(usual.values()) < rounds / 4, usual


@pytest.mark.parametrize("hosts", QUICK_HOSTS)
def test_the_machine_goes_on_with_exchanges_that_are_disturbed(served: Served, hosts: list[int]) -> None:
    assert sum(run(served, hosts, QUICK, "handed_over", 200)) > 0


def test_the_worker_that_waits_for_a_small_sum_carries_it(served: Served) -> None:
    rounds = 200
    carried: Counter[str] = sum(
        map(Counter, run(served, TWO_BY_TWO, QUICK, "who_carries", rounds)), Counter()
    )
    assert carried["MainThread"] > rounds, (
        carried
    )  # of two hosts; on a busy machine some are left to the thread


@pytest.mark.parametrize("hosts", [*QUICK_HOSTS, [0, 0, 1]])
def test_a_caller_that_carries_is_interrupted(served: Served, hosts: list[int]) -> None:
    assert sum(run(served, hosts, QUICK, "interrupted", 60)) > 20


def test_others_are_later_than_a_caller_waits_alone(served: Served) -> None:
    run(served, [0, 0, 1], QUICK, "others_are_late", 8)


@pytest.mark.parametrize("hosts", QUICK_HOSTS)
def test_two_threads_with_small_calls(served: Served, hosts: list[int]) -> None:
    run(served, hosts, QUICK, "two_threads", 150)


@pytest.mark.parametrize("hosts", QUICK_HOSTS)
def test_small_calls_are_counted(served: Served, hosts: list[int]) -> None:
    found = run(served, hosts, QUICK, "counted", 30)
    for one in found:
        calls = {name: one[name] for name in ("pushes", "pulls", "rounds")}
        assert calls == {"pushes": 30, "pulls": 30, "rounds": 30}
    for host in set(hosts):
        of_host = [one for one, there in zip(found, hosts, strict=True) if there == host]
        for way in ("sent", "received"):
            assert sum(one[way] for one in of_host) == 4 * 150 * 30, (way, of_host)


def test_small_calls_that_are_unusual_go_the_usual_way(served: Served) -> None:
    run(served, TWO_BY_TWO, QUICK, "what_is_unusual")


@pytest.mark.parametrize("hosts", QUICK_HOSTS)
def test_small_pushes_ahead_have_their_own_time(served: Served, hosts: list[int]) -> None:
    run(served, hosts, QUICK, "ahead", 20, servers=1)


def test_small_pushes_of_what_a_codec_does_not_take(served: Served) -> None:
    run(served, TWO_BY_TWO, QUICK, "other_types_with_a_codec")
