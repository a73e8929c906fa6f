"""The time of a schedule is that of the place of a push, in Python and in the shared region alike."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import kvstore as kv
from kvstore.optimizer import Optimizer, create, lr_scheduler
from kvstore.optimizer.update_clock import TIME_BITS, CallOrder, UpdateClock, time_at
from kvstore.stores.shared.native import _shared as shm

CALLS = st.lists(st.lists(st.sampled_from("abcd"), min_size=1, max_size=4, unique=True), max_size=30)
MOST = (1 << 24) - 1  # of an epoch


def counted_one_by_one(optimizer: Optimizer, calls: list[list[str]]) -> list[list[int]]:
    """Return the time of each update, as one process has it that carries each out when it is called for."""
    found = []
    for keys in calls:
        found.append([])
        for key in keys:
            optimizer._update_count(key)
            found[-1].append(optimizer.num_update)
    return found


@given(calls=CALLS, begin=st.integers(0, 5), epoch=st.integers(0, MOST))
def test_stamps_are_the_times_of_one_process(calls: list[list[str]], begin: int, epoch: int) -> None:
    clock, found = UpdateClock(begin, epoch=epoch), []
    for keys in calls:
        stamps = clock.stamps(keys)
        assert stamps == clock.stamps(keys)  # nothing is counted by that
        for key in keys:
            clock.count_push(key)
        assert clock.stamp == stamps[-1]
        assert {stamp >> TIME_BITS for stamp in stamps} == {epoch}
        found.append([time_at([stamp], epoch) for stamp in stamps])
    assert found == counted_one_by_one(create("sgd", begin_num_update=begin), calls)


@given(before=CALLS, after=CALLS, begin=st.integers(0, 5))
def test_a_clock_goes_on_from_the_counts_of_an_optimizer(
    before: list[list[str]], after: list[list[str]], begin: int
) -> None:
    optimizer = create("sgd", begin_num_update=begin)
    counted_one_by_one(optimizer, before)
    clock, counts = UpdateClock.from_optimizer(optimizer, 3), dict(optimizer._index_update_count)
    assert clock.stamp == UpdateClock(time=optimizer.num_update, epoch=3).stamp
    for keys, times in zip(after, counted_one_by_one(optimizer, after), strict=True):
        assert clock.stamps(keys) == [UpdateClock(time=time, epoch=3).stamp for time in times]
        for key in keys:
            clock.count_push(key)
    assert clock.counts == optimizer._index_update_count
    assert all(clock.counts[key] >= count for key, count in counts.items())


@given(
    stamps=st.lists(st.tuples(st.integers(0, 3), st.integers(0, (1 << TIME_BITS) - 1))),
    epoch=st.integers(0, 3),
)
def test_the_time_of_a_round_is_the_largest_of_its_epoch(stamps: list[tuple[int, int]], epoch: int) -> None:
    made = [UpdateClock(time=time, epoch=one).stamp for one, time in stamps]
    assert time_at(made, epoch) == max((time for one, time in stamps if one == epoch), default=0)


# ---------------------------------------------------------------------------------- in the shared region


class Region:
    """One worker in a region, whose pushes are rounds by themselves or have been pushed ahead."""

    def __init__(self, keys: str) -> None:
        self.store = kv.create("shared")
        self.store.init(list(keys), [np.zeros(3, np.float32)] * len(keys))
        self.backend: Any = self.store._backend
        self.handles = {one.key: one for one in self.backend._keys.all() if one.key in keys}

    def __enter__(self) -> Region:
        return self

    def __exit__(self, *_: object) -> None:
        self.store.close()

    def stamps(self, keys: list[str]) -> list[int]:
        """Push keys in one call, which are updated in the order of their init; return the stamps of that."""
        self.store.push(keys, [np.ones(3, np.float32)] * len(keys))
        return [shm.stamp(self.handles[key], self.handles[key].arrived, 1) for key in keys]


def stamps_in_order(clock: UpdateClock, keys: list[str]) -> list[int]:
    """Count a push of keys, in the order of their init; return the stamp of each."""
    stamps = dict(zip(sorted(keys), clock.stamps(sorted(keys)), strict=True))
    for key in keys:
        clock.count_push(key)
    return [stamps[key] for key in keys]


@pytest.mark.parametrize("begin", [0, 4])
def test_stamps_of_the_region_are_those_of_a_clock(begin: int) -> None:
    calls = [
        list(one) for one in ("a", "ab", "ba", "c", "b", "cab", "c", "c", "c", "c", "c", "abc", "d", "ad")
    ]
    with Region("abcd") as region:
        for epoch in (1, 2):
            rule = create("sgd", lr_scheduler=lr_scheduler.FactorScheduler(2), begin_num_update=begin)
            region.store.set_optimizer(rule)
            clock = UpdateClock(begin, epoch=epoch)
            for keys in calls:
                assert region.stamps(keys) == stamps_in_order(clock, keys), keys


@given(calls=CALLS, begin=st.integers(0, 5), time=st.integers(0, 30), epoch=st.integers(1, MOST))
def test_a_region_and_a_clock_go_on_from_the_same_counts(
    region: Region, calls: list[list[str]], begin: int, time: int, epoch: int
) -> None:
    counts = dict(zip("abcd", (begin + 1, begin + 7, begin + 3, begin + 2), strict=True))
    for key, handle in region.handles.items():
        handle.updates = counts.get(key, 0)
    region.backend._updater._epoch = epoch
    shm.begin_counts(region.backend._job, epoch, begin, max(begin, time))
    clock = UpdateClock(begin, counts, time, epoch)
    for keys in calls:
        assert region.stamps(keys) == stamps_in_order(clock, keys)


@pytest.fixture(scope="module")
def region() -> Any:
    with Region("abcd") as region:
        region.store.set_optimizer(create("sgd"))
        yield region


def test_stamps_of_a_call_are_in_the_order_of_its_keys_whichever_arrives_first() -> None:
    """Of a key with several values the sum arrives after a copy."""
    with Region("ab") as region:
        region.store.set_optimizer(create("sgd"))
        assert region.stamps(["a"]) == [1 << TIME_BITS | 1]
        ones = np.ones(3, np.float32)
        region.store.push(["a", "b"], [[ones, ones], ones])
        stamps = [shm.stamp(handle, handle.arrived, 1) for handle in region.handles.values()]
        assert stamps == [1 << TIME_BITS | 2] * 2


def test_sums_have_no_stamps() -> None:
    with Region("ab") as region:
        assert region.stamps(["a", "b"]) == [0, 0]
        region.store.set_optimizer(create("sgd"))
        assert region.stamps(["a"]) == [1 << TIME_BITS | 1]
        region.store.set_updater(None)
        assert region.stamps(["b"]) == [0]


# --------------------------------------------------------------------------- asynchronous pushes in `local`


def rates(store: kv.KVStore, keys: str) -> dict[str, float]:
    """Return the sum of the rates with which each key was updated, of gradients of 1."""
    found = {}
    for key in sorted(set(keys)):
        out = np.empty(1, np.float64)
        store.pull(key, out=out)
        found[key] = -out[0]
    return found


class PowersOfTwo(lr_scheduler.LRScheduler):
    """The rate of update n is 2 to the power of -n: a sum of rates shows which rates were used."""

    def __call__(self, num_update: int) -> float:
        return float(2.0**-num_update)


def run(program: str, kinds: str, verb: str = "push") -> tuple[dict[str, float], int, dict[Any, int]]:
    """Push keys one after the other, asynchronously where the kind is "a"."""
    with kv.create("local") as store:
        keys = sorted(set(program))
        store.init(keys, [np.zeros(1, np.float64)] * len(keys))
        store.set_optimizer(create("sgd", lr_scheduler=PowersOfTwo(base_lr=1.0)))
        works = []
        for key, kind in zip(program, itertools.cycle(kinds)):
            more = {"out": np.empty(1, np.float64)} if verb == "pushpull" else {}
            works.append(getattr(store, verb)(key, np.ones(1, np.float64), async_op=kind == "a", **more))
        for work in works:
            if work is not None:
                work.wait()
        optimizer = store._backend.updater.optimizer
        return rates(store, program), optimizer.num_update, dict(optimizer._index_update_count)


@pytest.mark.parametrize("verb", ["push", "pushpull"])
@pytest.mark.parametrize("program", ["aaab", "aaabb", "aabbbacb", "abcabcccb"])
def test_asynchronous_pushes_have_the_time_of_their_place(program: str, verb: str) -> None:
    expected = run(program, "s", verb)
    for _ in range(60):
        assert run(program, "a", verb) == expected
    for kinds in ("as", "aas", "sa"):
        for _ in range(10):
            assert run(program, kinds, verb) == expected


def test_a_push_that_is_carried_out_first_has_the_time_of_its_place() -> None:
    """Pushes are called for as a, a, a, b; and the last of them is carried out first."""
    optimizer, order = create("sgd", lr_scheduler=PowersOfTwo(base_lr=1.0)), CallOrder()
    found: list[tuple[str, int]] = []

    def push(key: str) -> None:
        optimizer._update_count(key)
        found.append((key, optimizer.num_update))

    calls = [order.timed_push(optimizer, key, push) for key in "aaab"]
    for at in (3, 0, 1, 2):
        calls[at]("aaab"[at])
    assert found == [("b", 3), ("a", 1), ("a", 2), ("a", 3)]
    assert (optimizer.num_update, optimizer._index_update_count) == (3, {"a": 3, "b": 1})
    order.timed_push(optimizer, "b", push)("b")  # nothing else is under way: from the counts on
    assert found[-1] == ("b", 3)


@given(calls=CALLS, data=st.data())
def test_the_order_in_which_pushes_are_carried_out_changes_no_time(calls: list[list[str]], data: Any) -> None:
    """Pushes of a key stay in order; apart from that, any may be carried out first."""
    optimizer, order = create("sgd", lr_scheduler=PowersOfTwo(base_lr=1.0)), CallOrder()
    alone = counted_one_by_one(create("sgd"), calls)
    found: dict[int, list[int]] = {}

    def push(at: int) -> None:
        found[at] = []
        for key in calls[at]:
            optimizer._update_count(key)
            found[at].append(optimizer.num_update)

    placed = [order.timed_push(optimizer, keys, push) for keys in calls]
    waiting = list(range(len(calls)))
    while waiting:
        free = [
            at for at in waiting if not any(set(calls[at]) & set(calls[one]) for one in waiting if one < at)
        ]
        at = data.draw(st.sampled_from(free))
        waiting.remove(at)
        placed[at](at)
    assert [found[at] for at in range(len(calls))] == alone


def test_a_push_that_fails_leaves_the_time_of_the_others() -> None:
    optimizer, order = create("sgd", lr_scheduler=PowersOfTwo(base_lr=1.0)), CallOrder()
    optimizer._update_count("a")
    optimizer._update_count("a")

    def push() -> None:
        optimizer._update_count("b")
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        order.timed_push(optimizer, "b", push)()
    assert optimizer.num_update == 2


def test_counts_of_pushes_that_are_not_placed_are_known_once_no_placed_push_is_open() -> None:
    """While only a pull was in the background, the time was that of the push in the background before it."""
    optimizer, order = create("sgd", lr_scheduler=PowersOfTwo(base_lr=1.0)), CallOrder()

    def push(key: str) -> int:
        optimizer._update_count(key)
        return optimizer.num_update

    assert order.timed_push(optimizer, "a", push)("a") == 1
    for _ in range(3):
        push("a")
    assert order.timed_push(optimizer, "b", push)("b") == 4


def test_pushes_without_a_schedule_are_as_they_are() -> None:
    def push() -> None:
        raise AssertionError

    assert CallOrder().timed_push(create("sgd"), "a", push) is push


def test_asynchronous_pushes_of_several_threads_count_once_each() -> None:
    with kv.create("local") as store:
        store.init(list("abcd"), [np.zeros(1, np.float64)] * 4)
        store.set_optimizer(create("sgd", lr_scheduler=PowersOfTwo(base_lr=1.0)))

        def push(key: str) -> None:
            works = [store.push(key, np.ones(1, np.float64), async_op=True) for _ in range(50)]
            for work in works:
                assert work is not None
                work.wait()

        threads = [threading.Thread(target=push, args=key) for key in "abcd"]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        optimizer = store._backend.updater.optimizer
        assert optimizer._index_update_count == dict.fromkeys("abcd", 50)
        assert optimizer.num_update == 50
