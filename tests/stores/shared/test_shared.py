"""Several processes and one store: the same bits everywhere, those of `local`, and the meaning of a round."""

from __future__ import annotations

import gc
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import Job
from nightly import each_once, nightly_unless
from references import DTYPES

import kvstore as kv
from kvstore.stores.shared.native import _shared as shm

TESTS = Path(__file__).parents[2]
BODIES = "procs_shared"

MakeJob = Callable[..., Job]


def same(job: Job, function: str, *arguments: object) -> object:
    """Run a function on all workers; they must agree."""
    job.start_all(BODIES, function, *arguments)
    first, *others = job.results()
    assert all(other == first for other in others)
    return first


# ------------------------------------------------------------------------------------------------------ bits


AT_NIGHT = pytest.mark.nightly


# Four workers sum a wide and a narrow type, two all others; at night all.
@pytest.mark.parametrize(
    ("size", "name"),
    [
        pytest.param(size, name, marks=AT_NIGHT if (size == 4) != (name in ("float32", "bfloat16")) else ())
        for size in (2, 4)
        for name in DTYPES
    ],
)
def test_sums_are_those_of_local_bit_for_bit(job: MakeJob, size: int, name: str) -> None:
    same(job(size), "sums", name, 1)


@pytest.mark.parametrize("on_peer_loss", ["raise", "continue"])
@pytest.mark.parametrize("size", [2, 3])
def test_quotients_are_those_of_division_before_the_sum(job: MakeJob, size: int, on_peer_loss: str) -> None:
    same(job(size), "quotients", on_peer_loss)


@pytest.mark.parametrize("updater", ["rule", "python"])
def test_updates_take_quotients(job: MakeJob, updater: str) -> None:
    same(job(2), "updates_by_quotients", updater)


@pytest.mark.parametrize("size", [2, 3])
def test_quotients_beside_rows(job: MakeJob, size: int) -> None:
    same(job(size), "quotients_beside_rows")


def test_sums_are_the_same_from_run_to_run(job: MakeJob) -> None:
    assert same(job(2), "sums", "float32", 2) == same(job(2), "sums", "float32", 2)


@pytest.mark.parametrize("size", nightly_unless(lambda size: size != 2, [1, 2, 3]))
def test_arrays_that_overlap_end_as_in_local(job: MakeJob, size: int) -> None:
    same(job(size), "overlaps")


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=AT_NIGHT)])
def test_every_optimizer_gives_the_weights_of_local(job: MakeJob, size: int) -> None:
    same(job(size), "optimizers")


@pytest.mark.parametrize("size", nightly_unless(lambda size: size == 3, [2, 3]))
def test_rules_of_ones_own_give_the_weights_of_local(job: MakeJob, size: int) -> None:
    same(job(size), "own_rule")


@pytest.mark.parametrize("size", nightly_unless(lambda size: size == 4, [2, 4]))
def test_rows_are_those_of_local(job: MakeJob, size: int) -> None:
    same(job(size), "rows")


@pytest.mark.parametrize("size", [1, 3])
def test_a_huge_table_costs_the_rows_that_are_touched(job: MakeJob, size: int) -> None:
    same(job(size), "huge_rows")


@pytest.mark.parametrize("size", [1, 2])
def test_files_of_a_huge_table_have_the_rows_that_are_touched(
    job: MakeJob, tmp_path: Path, size: int
) -> None:
    same(job(size), "huge_files", str(tmp_path))


def test_rounds_of_rows_that_fail_leave_nothing(job: MakeJob) -> None:
    same(job(1), "rows_that_fail")


def test_values_and_states_of_tables_that_are_loaded(job: MakeJob, tmp_path: Path) -> None:
    same(job(2), "assigned_rows", str(tmp_path))


@pytest.mark.parametrize(("size", "function"), each_once([2, 4], ["golden_sums", "golden_rows"]))
def test_recorded_sums_of_mxnet(job: MakeJob, size: int, function: str) -> None:
    same(job(size), function, str(TESTS / "data" / "aggregate.npz"))


@pytest.mark.parametrize("size", nightly_unless(lambda size: size == 2, [2, 4]))
def test_recorded_optimizers_of_mxnet(job: MakeJob, size: int) -> None:
    same(job(size), "golden_optimizers", str(TESTS / "optimizer"))


# ---------------------------------------------------------------------------------------------------- rounds

ROUNDS = "procs_shared_rounds"
KEYS = ["small", "edge", "large"]


def together(job: Job, function: str, *arguments: object) -> list[Any]:
    """Run a function on all workers, which check for themselves."""
    job.start_all(ROUNDS, function, *arguments)
    return job.results()


@pytest.mark.parametrize(("key", "home"), each_once(KEYS, [False, True]))
def test_the_third_push_waits(job: MakeJob, key: str, home: bool) -> None:
    made = job(2)
    ahead, behind = made.start_all(ROUNDS, "third_push_waits", key, home)
    ahead.expect("waits")
    behind.say("go")
    made.results()


@pytest.mark.parametrize("key", KEYS)
def test_a_pull_gives_the_value_of_the_round_that_was_pushed_into(job: MakeJob, key: str) -> None:
    made = job(2)
    behind, ahead = made.start_all(ROUNDS, "pull_gives_the_round", key)
    ahead.expect("ahead")
    behind.say("go")
    made.results()


def test_a_worker_that_has_not_pushed_reads_at_once(job: MakeJob) -> None:
    made = job(2)
    pushing, reading = made.start_all(ROUNDS, "reads_without_a_push")
    pushing.expect("pushed")
    reading.say("go")
    reading.expect("done")
    pushing.say("go")
    made.results()


def test_a_wait_ends_at_the_deadline_and_says_for_whom_it_was(job: MakeJob) -> None:
    made = job(2)
    waiting, late = made.start_all(ROUNDS, "deadline")
    waiting.expect("late")
    late.say("go")
    late.expect("pushed")
    waiting.say("go")
    waiting.expect("read")
    late.say("go")
    made.results()


# --------------------------------------------------------------------------------------------------- threads


@pytest.mark.parametrize("seed", nightly_unless(lambda seed: seed < 1, range(200)))
@pytest.mark.timeout(400)
def test_threads_with_a_key_each_in_any_order(job: MakeJob, seed: int) -> None:
    made = job(random.Random(seed).choice([2, 2, 3, 4]))
    made.start_all(ROUNDS, "threads_with_keys", seed, 30, KVSTORE_TIMEOUT="150")
    made.results(300)


def test_threads_with_one_key_take_turns(job: MakeJob) -> None:
    made = job(2)
    made.start_all(ROUNDS, "threads_with_one_key", 300)
    made.results()


def test_threads_that_read_in_a_loop_leave_others_their_turn(job: MakeJob) -> None:
    made = job(2)
    made.start_all(ROUNDS, "reads_in_a_loop", 40)
    made.results()


def test_a_wait_is_not_held_up_by_operations_of_other_keys(job: MakeJob) -> None:
    made = job(2)
    made.start_all(ROUNDS, "waits_out_of_order")
    made.results()


def test_a_store_is_closed_when_no_thread_waits_in_it(job: MakeJob) -> None:
    made = job(2)
    closing, late = made.start_all(ROUNDS, "close_waits_for_threads")
    closing.expect("closes")
    late.say("go")
    made.results()


def test_an_updater_calls_its_store_while_a_thread_waits_for_others(job: MakeJob) -> None:
    made = job(2)
    made.start_all(ROUNDS, "an_updater_calls_the_store")
    made.results()


def test_a_part_that_dies_with_its_worker_is_not_updated_from_in_place(job: MakeJob) -> None:
    made = job(2)
    pushing, setting = made.start_all(ROUNDS, "optimizer_under_a_pushed_array")
    pushing.expect("pushed")
    setting.say("go")
    made.results()


@pytest.mark.parametrize("size", nightly_unless(lambda size: size == 4, [2, 4]))
def test_workers_with_fewer_batches_join(job: MakeJob, size: int) -> None:
    made = job(size)
    workers = made.start_all(ROUNDS, "uneven")
    for worker in workers:
        worker.expect("joined")
    for worker in workers:
        worker.say("go")
    made.results()


def test_no_worker_passes_a_barrier_before_all_have_arrived(job: MakeJob) -> None:
    for times in zip(*together(job(4), "barriers", 30), strict=True):
        assert max(came for came, _ in times) <= min(went for _, went in times)


@pytest.mark.parametrize(
    ("size", "function"),
    each_once(
        [2, 4],
        ["settings_change", "set_by_one", "set_late", "set_differently", "several_stores", "first_values"],
    ),
)
def test_one_meaning_on_all_workers(job: MakeJob, size: int, function: str) -> None:
    together(job(size), function)


def test_states_can_be_saved_while_another_worker_is_back_at_plain_sums(job: MakeJob, tmp_path: Path) -> None:
    together(job(2), "plain_again", str(tmp_path / "states"))


@pytest.mark.parametrize("size", nightly_unless(lambda size: size == 4, [2, 4]))
def test_an_error_of_the_updater_reaches_everybody(job: MakeJob, size: int) -> None:
    first, *others = together(job(size), "failing_updater")
    assert all(other == first for other in others)


@pytest.mark.parametrize("words", [1, 2000])
def test_all_late_readers_of_a_failed_round_get_its_error(job: MakeJob, words: int) -> None:
    together(job(2), "failed_long_ago", words)


def test_kinds_of_keys_that_differ_between_workers(job: MakeJob) -> None:
    made = job(2)
    founding, waiting = made.start_all(ROUNDS, "kinds_differ")
    waiting.expect("waiting")
    founding.say("go")
    made.results()


@pytest.mark.parametrize("keys", nightly_unless(lambda keys: keys < 100_000, [30_000, 100_000, 1_000_000]))
def test_many_keys(job: MakeJob, keys: int) -> None:
    made = job(2)
    made.start_all(ROUNDS, "many_keys", keys, KVSTORE_TIMEOUT="100")
    made.results(110)


def test_keys_are_made_while_others_work(job: MakeJob) -> None:
    together(job(3), "growing_table", 3000)


@pytest.mark.parametrize("size", nightly_unless(lambda size: size == 3, [2, 3]))
def test_any_worker_saves_and_any_other_loads(job: MakeJob, tmp_path: Path, size: int) -> None:
    (tmp_path / "files").mkdir()
    together(job(size), "saved_and_loaded", str(tmp_path / "files"))


@pytest.mark.parametrize("size", nightly_unless(lambda size: size == 3, [2, 3]))
def test_operations_in_the_background_need_no_common_order(job: MakeJob, size: int) -> None:
    together(job(size), "in_the_background", 12)


@pytest.mark.parametrize("how", ["pull", "pushpull", "rows"])
def test_no_push_overtakes_a_read_in_the_background(job: MakeJob, how: str) -> None:
    together(job(2), "late_reads", how)


@pytest.mark.parametrize("size", nightly_unless(lambda size: size == 3, [2, 3]))
def test_pushes_without_pulls_go_on(job: MakeJob, size: int) -> None:
    together(job(size), "pushed_and_never_pulled")


def test_arrays_that_the_caller_drops_are_read_all_the_same(job: MakeJob) -> None:
    together(job(3), "dropped")


# ------------------------------------------------------------------------------------------- one process


def mapped() -> set[str]:
    """The regions in this process, each with its address and inode."""
    return {line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:kvstore" in line}


def test_the_region_goes_when_the_last_array_does() -> None:
    gc.collect()  # the regions of tests before
    before = mapped()
    store = kv.create("shared")
    store.init("w", np.ones(1000, np.float32))
    home, view = store.empty("w"), store.view("w")
    store.close()
    del store
    gc.collect()
    (region,) = mapped() - before
    assert (view == 1).all()
    home[...] = 3
    del home, view
    gc.collect()
    assert region not in mapped()


def test_a_push_in_the_background_that_cannot_be_has_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    def start(self: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with kv.create("shared") as store:
        store.init("w", np.zeros(3, np.float32))
        store.set_gradient_compression({"type": "2bit"})
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(kv.KVStoreError, match="no background thread"):
                store.push("w", np.full(3, 0.4, np.float32), async_op=True)
        np.testing.assert_array_equal(store.view("w"), 0)
        store.push("w", np.full(3, 0.3, np.float32))
        np.testing.assert_array_equal(store.view("w"), 0)  # no residual of the push that was not


@pytest.mark.parametrize("verb", ["pull", "view", "push"])
def test_an_updater_may_look_at_its_own_key(verb: str) -> None:
    with kv.create("shared", timeout=5) as store:
        store.init(["a", "b"], [np.full(3, 7, np.float32)] * 2)
        seen = np.zeros(3, np.float32)

        def updater(key: str, merged: Any, stored: Any) -> None:
            if key == "b":
                stored += merged
            elif verb == "pull":
                store.pull("a", out=seen)
            elif verb == "view":
                seen[...] = store.view("a")
            else:
                store.push("b", merged)
                store.pull("b", out=seen)

        store.set_updater(updater)
        store.push("a", np.ones(3, np.float32))
        store.wait()
        np.testing.assert_array_equal(store.view("a"), 7)
        np.testing.assert_array_equal(seen, 8 if verb == "push" else 7)


@pytest.mark.parametrize("verb", ["push", "pushpull"])
def test_a_worker_declared_dead_as_a_push_asks_for_memory_is_fenced(
    verb: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = kv.create("shared", group=verb)
    store.init("w", np.zeros(5, np.float32))
    backend = store._backend
    pusher, name = backend._pusher, "push" if verb == "push" else "push_pushpull"
    arrives = getattr(pusher, name)

    def taken_for_dead(*arguments: Any) -> Any:
        backend._job.declare_lost()
        return arrives(*arguments)

    monkeypatch.setattr(pusher, name, taken_for_dead)
    monkeypatch.setattr(backend, "quick_pushpull", lambda *_: False)
    with pytest.raises(kv.FencedError, match="worker 0 was declared lost"):
        getattr(store, verb)("w", np.ones(5, np.float32))
    store.close()


def test_a_worker_declared_dead_takes_back_what_others_may_read(monkeypatch: pytest.MonkeyPatch) -> None:
    store = kv.create("shared", group="fenced", on_peer_loss="raise")
    store.init(["w", "x"], [np.zeros(40_000, np.float32)] * 2)
    backend = store._backend
    exchange, failed = backend._pusher.push_pushpull, []

    def taken_for_dead(wanted: Any, private: set[str], divisor: int) -> Any:
        direct = exchange(wanted, private, divisor)
        private.update(handle.key for handle, _, _ in wanted)
        backend._job.declare_lost()
        return direct

    monkeypatch.setattr(backend._pusher, "push_pushpull", taken_for_dead)
    monkeypatch.setattr(backend._waiter, "give_up", _noting(backend._waiter.give_up, failed))
    with pytest.raises(kv.FencedError, match="worker 0 was declared lost"):
        store.pushpull(["w", "x"], [np.ones(40_000, np.float32)] * 2)
    assert failed == [["w", "x"]]
    store.close()


def _noting(give_up: Any, failed: list[list[str]]) -> Any:
    def noting(calls: Any) -> None:
        give_up(calls)
        failed.append([call.handle.key for call in calls])

    return noting


@pytest.mark.parametrize(
    ("size", "count"), [(5, 80), (5, 81), (5, 1000), (40_000, 80), (40_000, 81), (40_000, 500), (300_000, 90)]
)
def test_any_number_of_outs(size: int, count: int) -> None:
    """More than are written together with the sum."""
    with kv.create("shared", group="outs") as store:
        store.init("w", np.zeros(size, np.float32))
        outs = [np.zeros(size, np.float32) for _ in range(count)]
        for step in (1, 2):
            store.pushpull("w", np.full(size, step, np.float32), out=outs)
            assert all((out == step).all() for out in outs)
        store.push("w", np.full(size, 3, np.float32))
        store.pull("w", out=outs)
        assert all((out == 3).all() for out in outs)


def test_memory_is_given_back_while_this_thread_has_the_lock() -> None:
    """A collection of garbage may run at any place, also where the lock of the region is held."""
    with kv.create("shared", group="garbage", timeout=30) as store:
        store.init("w", np.zeros(1 << 20, np.float32))
        job = store._backend._job
        array, begin = store.empty("w"), time.monotonic()
        place = array.ctypes.data
        with shm.RegionLock(job):
            del array
        assert time.monotonic() - begin < 15
        others = [store.empty("w") for _ in range(3)]
        assert place in [other.ctypes.data for other in others], "its place is used again"
