"""Several workers and servers: the bits of `local`, on any number of servers, and the meaning of a round."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tested_store
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from nightly import each_once, nightly_unless, portions
from servers import ServedJob

BODIES, ROUNDS, OWN = "procs_shared", "procs_shared_rounds", "procs_dist"
TESTS = Path(__file__).parents[2]

SEEDS = [(seed, 1 + seed // 2 % 2) for seed in range(12)]
Served = Callable[..., ServedJob]
SYNC = {tested_store.NAME: "dist_sync"}
#: Slices of an eighth of the usual size: the values of the tests are cut into many.
SMALL = {**SYNC, "KVSTORE_SLICE_BYTES": "131072"}
BY_FRAME = {**SMALL, "KVSTORE_SAME_HOST_SHM": "0"}
P3 = {tested_store.NAME: "p3"}
#: Workers and servers.
LAYOUTS = [(1, 1), (2, 1), (2, 2), (4, 2)]


def run(job: ServedJob, module: str, function: str, *arguments: object) -> list[Any]:
    """Run a function on all workers, which check for themselves; then the whole job must end."""
    try:
        job.start_all(module, function, *arguments)
        results = job.results()
        assert job.ended() == [0] * (1 + len(job.servers))
    except AssertionError as error:
        everybody = (job.scheduler, *job.servers, *job.workers)
        raise AssertionError("\n".join([str(error), *(one.errors() for one in everybody)])) from None
    return results


def same(job: ServedJob, function: str, *arguments: object) -> object:
    """Run a function on all workers; they must agree."""
    first, *others = run(job, BODIES, function, *arguments)
    assert all(other == first for other in others)
    return first


# ------------------------------------------------------------------------------------------------------ bits


@pytest.mark.parametrize(
    ("workers", "servers"), nightly_unless(lambda *layout: layout in ((1, 1), (4, 2)), LAYOUTS)
)
def test_sums_are_those_of_local_bit_for_bit(served: Served, workers: int, servers: int) -> None:
    same(served(workers, servers, **SMALL), "sums", "float32", 1)


@pytest.mark.parametrize(
    "name",
    nightly_unless(lambda name: name in ("bfloat16", "int8"), ["float16", "bfloat16", "float64", "int8"]),
)
def test_sums_of_other_types(served: Served, name: str) -> None:
    same(served(2, 2, **SMALL), "sums", name, 1)


@pytest.mark.parametrize(("servers", "altered"), each_once([1, 2], [True, False]))
def test_sums_by_encrypted_streams(served: Served, servers: int, altered: bool) -> None:
    """With keys data is sent over streams, too, and over ZeroMQ if an attacker alters the streams."""
    job = served(2, servers, secure=True, **BY_FRAME)
    (first, *secrets), *others = run(job, OWN, "by_encrypted_streams", altered)
    assert all(digest == first for digest, _ in others)
    said = "".join(one.errors() for one in (job.scheduler, *job.servers, *job.workers))
    assert ("altered" in said) == altered
    secret = secrets[0]
    assert len(secret) == 64 * servers and secret[:64] not in said


def test_a_worker_that_reads_late_gets_what_it_asked_for(served: Served) -> None:
    """Servers send a value from where it lies, and later rounds may be written there."""
    run(served(2, 1, KVSTORE_SAME_HOST_SHM="0", **SYNC), OWN, "reads_late")


def test_equal_rows_beside_a_push_are_those_of_their_rounds(served: Served) -> None:
    made = served(1, 1, **SYNC, KVSTORE_DEAD_AFTER="60")
    (worker,) = made.start_all(OWN, "equal_rows_beside_a_push")
    for step in range(5):
        worker.expect(f"stop {step}")
        made.servers[0].signal(signal.SIGSTOP)
        worker.say("go")
        worker.expect(f"asked {step}")
        made.servers[0].signal(signal.SIGCONT)
    made.results()


def test_sums_by_frames_alone(served: Served) -> None:
    same(served(2, 2, **BY_FRAME), "sums", "float32", 1)


@pytest.mark.parametrize(
    ("workers", "servers"), nightly_unless(lambda workers, _: workers == 2, [(1, 1), (2, 2)])
)
def test_arrays_that_overlap_end_as_in_local(served: Served, workers: int, servers: int) -> None:
    same(served(workers, servers, **SMALL), "overlaps")


@pytest.mark.nightly
def test_arrays_that_overlap_and_go_by_frames(served: Served) -> None:
    same(served(2, 2, **BY_FRAME), "overlaps")


@pytest.mark.parametrize(
    ("workers", "servers", "every"),
    nightly_unless(lambda *case: case[2] > 1, [(2, 2, 3), *((*layout, 1) for layout in LAYOUTS[1:])]),
)
def test_every_optimizer_gives_the_weights_of_local(
    served: Served, workers: int, servers: int, every: int
) -> None:
    """Every time every third, at night all, as `shared` does every time."""
    same(served(workers, servers, **SMALL), "optimizers", 3, every)


def test_a_schedule_begins_with_its_optimizer(served: Served) -> None:
    same(served(2, 2, **SMALL), "schedules")


@pytest.mark.parametrize(
    ("workers", "servers"), nightly_unless(lambda *layout: layout in ((2, 1), (4, 2)), LAYOUTS[1:])
)
def test_rows_are_those_of_local(served: Served, workers: int, servers: int) -> None:
    same(served(workers, servers, **{**SYNC, "KVSTORE_SLICE_BYTES": "4096"}), "rows")


@pytest.mark.parametrize(
    ("servers", "streams"),
    nightly_unless(
        lambda servers, streams: (servers == 2) == (streams == "1"), [(1, "1"), (2, "1"), (1, "0")]
    ),
)
def test_large_rows_are_those_of_local(served: Served, servers: int, streams: str) -> None:
    run(served(2, servers, **SYNC, KVSTORE_STREAMS=streams), OWN, "large_rows")


@pytest.mark.parametrize("function", ["golden_sums", "golden_rows"])
def test_recorded_sums_of_mxnet(served: Served, function: str) -> None:
    same(served(2, 2, **SYNC), function, str(TESTS / "data" / "aggregate.npz"))


@pytest.mark.nightly
def test_recorded_optimizers_of_mxnet(served: Served) -> None:
    same(served(2, 2, **SYNC), "golden_optimizers", str(TESTS / "optimizer"))


def test_threads_wait_side_by_side(served: Served) -> None:
    run(served(2, 1, **SYNC), OWN, "threads_in_opposite_order", 4, 1 << 20)


def test_a_wait_is_not_held_up_by_operations_of_other_keys(served: Served) -> None:
    run(served(2, 1, **SYNC), ROUNDS, "waits_out_of_order")


#: Nothing is asked for again within a test.
ONCE = {**BY_FRAME, "KVSTORE_RESEND": "600"}


@pytest.mark.parametrize(
    ("size", "credit"),
    nightly_unless(lambda size, _: size < 1_000_000, [(40_000, 65_536), (1_000_000, 1 << 20)]),
)
def test_threads_do_not_hold_up_each_other_by_the_credit(served: Served, size: int, credit: int) -> None:
    """The server reports the received parts also where no round of it is complete."""
    run(served(2, 1, **ONCE), OWN, "threads_in_opposite_order", size, credit)


@pytest.mark.parametrize(
    ("size", "credit", "servers"),
    nightly_unless(
        lambda size, _, servers: (size > 1_000_000) == (servers == 2),
        [(*one, servers) for one in ((300_000, 1 << 17), (3_000_000, 4 << 20)) for servers in (1, 2)],
    ),
)
def test_an_update_that_needs_more_than_the_credit(
    served: Served, size: int, credit: int, servers: int
) -> None:
    run(served(2, servers, **ONCE), OWN, "an_update_of_the_whole_key", size, credit)


@pytest.mark.parametrize("variables", [SYNC, BY_FRAME], ids=["memory", "frames"])
@pytest.mark.parametrize(("seed", "servers"), nightly_unless(lambda seed, _: seed < 2, SEEDS))
def test_asynchronous_calls_one_behind_the_other(
    served: Served, seed: int, servers: int, variables: dict[str, str]
) -> None:
    found = run(served(2 + seed % 2, servers, **variables), OWN, "chains", seed, servers)
    assert any(chained for chained, _ in found)


@pytest.mark.parametrize("variables", [SYNC, BY_FRAME, {**SYNC, "KVSTORE_STREAMS": "0"}], ids=repr)
def test_values_that_count_divided(served: Served, variables: dict[str, str]) -> None:
    run(served(3, 2, **variables), OWN, "quotients")


@pytest.mark.parametrize("variables", [SYNC, BY_FRAME], ids=["memory", "frames"])
def test_many_operations_of_one_key_on_the_way(served: Served, variables: dict[str, str]) -> None:
    run(served(2, 1, **variables), OWN, "many_on_the_way", 200)


@pytest.mark.parametrize(
    ("size", "variables"),
    nightly_unless(
        lambda size, variables: (size == 1000) == (variables is BY_FRAME),
        [(1000, BY_FRAME), (1000, SYNC), (100_000, SYNC)],
    ),
)
def test_a_deadline_in_a_round_ends_nothing_else(
    served: Served, size: int, variables: dict[str, str]
) -> None:
    job = served(2, 1, **variables)
    job.start_all(OWN, "after_a_deadline", size)
    job.workers[0].expect("gave up")
    for worker in job.workers:
        worker.say("late")
    job.results()
    assert job.ended() == [0] * 2


def test_keys_that_cannot_travel(served: Served) -> None:
    run(served(1, 1, **SYNC), OWN, "keys_that_cannot_travel")


# ---------------------------------------------------------------------------------------------------- memory


def test_what_a_server_refuses_reaches_its_sender(served: Served) -> None:
    run(served(1, 1, **BY_FRAME), OWN, "refused_by_a_server")


def test_a_table_that_is_larger_than_a_message(served: Served, tmp_path: Path) -> None:
    run(served(1, 1, **SYNC), OWN, "a_table_larger_than_a_message", str(tmp_path / "t.safetensors"))


def test_memory_of_arrays_goes_with_the_last_of_them(served: Served) -> None:
    run(served(2, 2, **SMALL), OWN, "memory_of_arrays", 60)


# ---------------------------------------------------------------------------------------------------- rounds


@pytest.mark.parametrize("key", ["small", "large"])
def test_the_third_push_waits(served: Served, key: str) -> None:
    made = served(2, 2, **SMALL)
    ahead, behind = made.start_all(ROUNDS, "third_push_waits", key, False)
    ahead.expect("waits")
    behind.say("go")
    made.results()


@pytest.mark.parametrize("key", ["small", "large"])
def test_a_pull_gives_the_value_of_the_round_that_was_pushed_into(served: Served, key: str) -> None:
    made = served(2, 2, **SMALL)
    behind, ahead = made.start_all(ROUNDS, "pull_gives_the_round", key)
    ahead.expect("ahead")
    behind.say("go")
    made.results()


def test_a_worker_that_has_not_pushed_reads_at_once(served: Served) -> None:
    made = served(2, 2, **SMALL)
    pushing, reading = made.start_all(ROUNDS, "reads_without_a_push")
    pushing.expect("pushed")
    reading.say("go")
    reading.expect("done")
    pushing.say("go")
    made.results()


@pytest.mark.parametrize(
    ("workers", "servers"), nightly_unless(lambda workers, _: workers == 4, [(2, 1), (4, 2)])
)
def test_workers_with_fewer_batches_join(served: Served, workers: int, servers: int) -> None:
    made = served(workers, servers, **SMALL)
    started = made.start_all(ROUNDS, "uneven")
    for worker in started:
        worker.expect("joined")
    for worker in started:
        worker.say("go")
    made.results()


def test_no_worker_passes_a_barrier_before_all_have_arrived(served: Served) -> None:
    for times in zip(*run(served(4, 1, **SYNC), ROUNDS, "barriers", 20), strict=True):
        assert max(came for came, _ in times) <= min(went for _, went in times)


@pytest.mark.parametrize(
    "function",
    ["settings_change", "set_by_one", "set_late", "set_differently", "several_stores", "first_values"],
)
def test_one_meaning_on_all_workers(served: Served, function: str) -> None:
    run(served(2, 2, **SMALL), ROUNDS, function)


@pytest.mark.parametrize("keys", nightly_unless(lambda keys: keys == 2000, [2000, 5000]))
def test_many_keys(served: Served, keys: int) -> None:
    run(served(2, 2, **SYNC), ROUNDS, "many_keys", keys)


def test_keys_are_made_while_others_work(served: Served) -> None:
    run(served(3, 2, **SYNC), ROUNDS, "growing_table", 300)


@pytest.mark.parametrize("workers", nightly_unless(lambda workers: workers == 3, [1, 3]))
def test_any_worker_saves_and_any_other_loads(served: Served, tmp_path: Path, workers: int) -> None:
    (tmp_path / "files").mkdir()
    run(served(workers, 2, **SMALL), ROUNDS, "saved_and_loaded", str(tmp_path / "files"))


@pytest.mark.parametrize("variables", [SMALL, P3, BY_FRAME], ids=["small slices", "p3", "frames"])
def test_operations_in_the_background_need_no_common_order(served: Served, variables: dict[str, str]) -> None:
    run(served(3, 2, **variables), ROUNDS, "in_the_background", 6)


def test_pushes_without_pulls_go_on(served: Served) -> None:
    run(served(2, 2, **SYNC), ROUNDS, "pushed_and_never_pulled")


def test_arrays_that_the_caller_drops_are_read_all_the_same(served: Served) -> None:
    run(served(3, 2, **SMALL), ROUNDS, "dropped")


# ----------------------------------------------------------------------------------------------- compression

COMPRESSION = "procs_shared_compression"
TWO, ONE = {"type": "2bit", "threshold": 0.3}, {"type": "1bit", "threshold": 0.0}
HALF, BELOW = {"type": "fp16"}, {"type": "1bit", "threshold": -0.25}

#: Further pairs of these codecs and verbs.
AT_NIGHT = nightly_unless(
    lambda *_: False,
    [
        ([TWO, TWO], None, "pushpull"),
        ([TWO, TWO, TWO], None, "push, then pull"),
        ([TWO, TWO], None, "one at a time"),
        ([TWO] * 4, None, "in place"),
        ([ONE] * 3, None, "push, then pull"),
    ],
)


@pytest.mark.parametrize(
    ("codecs", "rule", "verb"),
    [
        ([TWO, TWO], "sgd", "pushpull"),
        ([ONE, ONE], "adam", "push, then pull"),
        ([HALF, HALF], None, "in place"),
        ([BELOW, BELOW], None, "pushpull"),
        ([TWO, TWO], "lamb", "one at a time"),
        ([TWO, None, ONE, HALF], None, "from the store"),
        ([TWO], None, "push, then pull"),
        ([TWO, {"type": "2bit", "threshold": 0.2}], None, "push, then pull"),
        *AT_NIGHT,
    ],
)
def test_compression(
    served: Served, codecs: list[dict[str, Any] | None], rule: str | None, verb: str
) -> None:
    first, *others = run(served(len(codecs), 2, **SMALL), COMPRESSION, "rounds", codecs, rule, verb)
    assert all(other == first for other in others)


@portions(2)
@settings(
    max_examples=3,
    phases=[Phase.explicit, Phase.reuse, Phase.generate],  # to shrink takes minutes: each example is a job
    suppress_health_check=[HealthCheck.function_scoped_fixture],
)
@given(
    workers=st.integers(1, 4),
    threshold=st.floats(2.0**-126, 2.0**120, width=32),
    sizes=st.lists(st.sampled_from([1, 3, 127, 128, 4096, 32_769, 70_001]), min_size=1, max_size=5),
    verb=st.sampled_from(["pushpull", "push, then pull", "one at a time", "async"]),
    streams=st.booleans(),
)
def test_sums_of_any_threshold_are_the_same_packed_and_plain(
    served: Served, portion: int, workers: int, threshold: float, sizes: list[int], verb: str, streams: bool
) -> None:
    job = served(workers, 2, **SMALL, KVSTORE_STREAMS=str(int(streams)))
    outs = run(job, COMPRESSION, "packed_sums", threshold, sizes, verb)
    assert all(one == outs[0] for one in outs)
    job.close()


def test_compression_beside_rows(served: Served) -> None:
    run(served(2, 2, **SYNC), COMPRESSION, "beside_rows")


def test_residuals_in_files(served: Served, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    run(served(2, 2, **SMALL), COMPRESSION, "saved", str(tmp_path / "files"))


# ---------------------------------------------------------------------------------------- what servers decide


@pytest.mark.parametrize(
    ("codec", "counts"),
    nightly_unless(lambda _, counts: len(counts) == 2, [("", [1, 3]), ("", [1, 2, 3]), ("2bit", [1, 3])]),
)
def test_numbers_do_not_depend_on_the_number_of_servers(
    served: Served, codec: str, counts: list[int]
) -> None:
    digests = set()
    for servers in counts:
        digests |= set(run(served(2, servers, **SMALL), OWN, "digest_of_everything", codec))
    assert len(digests) == 1


def test_settings_that_change_at_any_time_change_for_all_alike(served: Served) -> None:
    assert len(set(run(served(3, 2, **SMALL), OWN, "settings_at_any_time", 15))) == 1


@pytest.mark.parametrize("kind", ["str", "int"])
def test_keys_may_be_made_in_any_order(served: Served, kind: str) -> None:
    run(served(4, 2, **SYNC), OWN, "keys_in_any_order", kind)


@pytest.mark.parametrize("variables", [SMALL, P3], ids=["small slices", "p3"])
def test_keys_are_spread_by_bytes(served: Served, variables: dict[str, str]) -> None:
    first, other = run(served(2, 2, **variables), OWN, "placed", 2)
    assert first == other


@pytest.mark.parametrize("function", ["out_of_reach", "own_rule"])
def test_rules_of_ones_own(served: Served, function: str) -> None:
    run(served(2, 2, **SMALL), OWN, function)


def test_an_error_of_a_rule_reaches_everybody(served: Served) -> None:
    first, other = run(served(2, 2, **SMALL), OWN, "failing_rule")
    assert first == other


def test_a_wait_ends_at_the_deadline_and_says_for_whom_it_was(served: Served) -> None:
    made = served(2, 2, **SMALL)
    waiting, late = made.start_all(OWN, "deadline")
    waiting.expect("late")
    late.say("go")
    waiting.say("go")
    made.results()


def test_files_go_to_a_store_of_one_process_and_back(served: Served, tmp_path: Path) -> None:
    (tmp_path / "files").mkdir()
    run(served(2, 2, **SMALL), OWN, "files_go_to_local", str(tmp_path / "files"))


def test_two_jobs_at_once(served: Served) -> None:
    made = [served(2, 1, **SMALL), served(2, 2, **SMALL)]
    for job in made:
        job.start_all(OWN, "own_rule")
    for job in made:
        job.results()
        assert job.ended() == [0] * (1 + len(job.servers))


# ------------------------------------------------------------------------------------------------ dist_async

ASYNC = {tested_store.NAME: "dist_async", "KVSTORE_SLICE_BYTES": "131072"}


def test_the_third_push_waits_without_rounds(served: Served) -> None:
    made = served(2, 1, **ASYNC, KVSTORE_DEAD_AFTER="60")
    first, _ = made.start_all(OWN, "third_push_waits_without_rounds")
    first.expect("stop")
    made.servers[0].signal(signal.SIGSTOP)
    first.say("go")
    first.expect("waits")
    made.servers[0].signal(signal.SIGCONT)
    made.results()


@pytest.mark.parametrize(("workers", "function"), each_once([1, 2], ["async_failure", "at_once"]))
def test_without_rounds(served: Served, workers: int, function: str) -> None:
    run(served(workers, 2, **ASYNC), OWN, function)


def test_a_pull_has_no_later_push_of_its_worker(served: Served) -> None:
    run(served(2, 1, **ASYNC), OWN, "a_pull_has_no_later_push", 200)


def test_pushes_of_all_workers_at_once(served: Served) -> None:
    run(served(3, 2, **ASYNC), OWN, "one_update_at_a_time", 30)


BEYOND_CREDIT = {"KVSTORE_SAME_HOST_SHM": "0", "KVSTORE_CREDIT_BYTES": "65536", "KVSTORE_SLICE_BYTES": "4096"}


@pytest.mark.parametrize("store", ["dist_async", "dist_sync"])
def test_no_priority_overtakes_an_earlier_operation_of_its_key(served: Served, store: str) -> None:
    job = served(1, 1, **BEYOND_CREDIT, **{tested_store.NAME: store})
    run(job, OWN, "a_key_in_the_order_of_the_calls")


@pytest.mark.parametrize(
    "variables", [ASYNC, {**ASYNC, "KVSTORE_SAME_HOST_SHM": "0"}], ids=["memory", "frames"]
)
def test_a_pull_in_the_background_sees_the_push_before_it(served: Served, variables: dict[str, str]) -> None:
    run(served(1, 1, **variables), OWN, "a_pull_sees_its_push")
