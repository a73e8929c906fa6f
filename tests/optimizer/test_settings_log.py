"""Changes of settings have one order, and the same result with any worker late."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.optimizer import create, lr_scheduler
from kvstore.optimizer.descriptions import text_of
from kvstore.optimizer.settings_log import SettingsAt, SettingsChange, SettingsLog

SCHEDULE = {"lr_scheduler": {"name": "FactorScheduler", "config": {"step": 2, "base_lr": 0.5}}}


def optimizer(**settings: Any) -> str:
    return text_of(create("sgd", **settings))


def setting(name: str, value: Any) -> str:
    return json.dumps({name: value})


def config(at: SettingsAt) -> dict[str, Any]:
    return dict(json.loads(at.text)["config"]) if at.text else {}


class Call(NamedTuple):
    """A call of a program that changes settings."""

    kind: str
    text: str
    #: Calls in which all take part, between this call and the previous one.
    passed: int


class Worker:
    """Makes the changes of a program, each where no other has made it."""

    def __init__(self, log: SettingsLog, rank: int, program: list[Call]) -> None:
        self.log, self.rank, self.program = log, rank, program
        self.at = self.place = self.ordinal = 0

    def step(self) -> None:
        kind, text, passed = self.program[self.at]
        self.at += 1
        self.place += passed
        self.ordinal += kind in ("optimizer", "none")
        change = self.log.find(self.rank, self.place, kind, self.ordinal, text)
        if change is None:
            self.log.add(self.rank, self.place, kind, self.ordinal, text)
        else:
            self.log.share(change, self.rank)


def by_place(log: SettingsLog) -> dict[int, SettingsAt]:
    """Return the settings after each place; update counts are another number in another order of changes."""
    places = sorted({change.place for change in log.changes})
    found = [log.settings_at(place) for place in places]
    numbers = {epoch: n for n, epoch in enumerate(dict.fromkeys(one.epoch for one in found))}
    return {place: one._replace(epoch=numbers[one.epoch]) for place, one in zip(places, found, strict=True)}


CHANGES = st.one_of(
    st.sampled_from([0.125, 0.25, 0.5]).map(lambda rate: ("optimizer", optimizer(learning_rate=rate))),
    st.sampled_from([0.125, 0.25, 0.5, 1.0]).map(lambda rate: ("configure", setting("learning_rate", rate))),
    st.sampled_from([0.0, 0.1]).map(lambda wd: ("configure", setting("wd", wd))),
    st.sampled_from([("counts", ""), ("steps", ""), ("none", "")]),
)
PROGRAMS = st.lists(st.tuples(CHANGES, st.integers(0, 2)), max_size=25).map(
    lambda made: [Call(*change, passed) for change, passed in made]
)
ORDERS = st.lists(st.integers(0, 2), max_size=75)


def run(workers: list[Worker], order: list[int]) -> None:
    """Let workers continue in this order, and in turns after it."""
    for rank in [*order, *(worker.rank for worker in workers for _ in worker.program)]:
        if rank < len(workers) and workers[rank].at < len(workers[rank].program):
            workers[rank].step()


@given(program=PROGRAMS, order=ORDERS, count=st.integers(2, 3))
def test_workers_with_one_program_have_the_settings_of_one_process(
    program: list[Call], order: list[int], count: int
) -> None:
    log, one = SettingsLog(), SettingsLog()
    workers = [Worker(log, rank, program) for rank in range(count)]
    run(workers, order)
    run([Worker(one, 0, program)], [])
    assert by_place(log) == by_place(one)
    assert len(log.changes) == len(one.changes)
    assert log.newest._replace(epoch=0) == one.newest._replace(epoch=0)


@given(program=PROGRAMS, order=ORDERS)
def test_no_place_is_ever_ahead_of_the_worker_that_is_furthest(program: list[Call], order: list[int]) -> None:
    """While some are late, the settings of each place are those of the calls that any of them has made."""
    log, one = SettingsLog(), SettingsLog()
    workers, alone = [Worker(log, rank, program) for rank in range(3)], Worker(one, 0, program)
    for rank in order:
        if workers[rank].at < len(program):
            workers[rank].step()
            if workers[rank].at > alone.at:
                alone.step()
            assert by_place(log) == by_place(one)


@given(
    steps=st.lists(st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 8)), max_size=30),
    order=st.randoms(use_true_random=False),
)
def test_changes_of_different_settings_all_hold_in_any_order_of_their_coming(
    steps: list[tuple[int, int, int]], order: Any
) -> None:
    """A worker changes a setting of its own: that of its last change up to a place holds there."""
    names = ["learning_rate", "wd", "rescale_grad"]
    made = [
        sorted(((place, value) for rank, place, value in steps if rank == r), key=lambda s: s[0])
        for r in range(3)
    ]
    log, queues = SettingsLog(), [list(one) for one in made]
    log.add(0, 0, "optimizer", 1, optimizer(learning_rate=0.5))
    while any(queues):
        rank = order.choice([r for r in range(3) if queues[r]])
        place, value = queues[rank].pop(0)
        log.add(rank, place, "configure", 1, setting(names[rank], value / 8))
    start = config(SettingsAt(1, optimizer(learning_rate=0.5)))
    for place in range(7):
        expected = dict(start)
        for rank, own in enumerate(made):
            expected |= dict([(names[rank], value / 8) for at, value in own if at <= place][-1:])
        assert config(log.settings_at(place)) == expected


@given(st.permutations(range(4)))
def test_the_same_setting_at_one_place_is_that_of_the_highest_rank(ranks: list[int]) -> None:
    log = SettingsLog()
    log.add(0, 0, "optimizer", 1, optimizer())
    for rank in ranks:
        log.add(rank, 3, "configure", 1, setting("learning_rate", (rank + 1) / 8))
    assert config(log.newest)["learning_rate"] == 0.5


def test_a_change_at_an_earlier_place_reaches_the_settings_of_later_ones() -> None:
    log = SettingsLog()
    log.add(0, 0, "optimizer", 1, optimizer(learning_rate=0.5))
    _, told = log.add(0, 5, "configure", 1, setting("learning_rate", 0.25))
    assert [change.place for change in told] == [5]
    _, told = log.add(1, 2, "configure", 1, setting("wd", 0.1))
    assert [change.place for change in told] == [2, 5]
    rates = [
        (config(log.settings_at(place))["learning_rate"], config(log.settings_at(place))["wd"])
        for place in (1, 2, 4, 5)
    ]
    assert rates == [(0.5, 0.0), (0.5, 0.1), (0.5, 0.1), (0.25, 0.1)]


def test_a_change_that_a_later_one_hides_is_told_of_where_it_holds_alone() -> None:
    log = SettingsLog()
    log.add(0, 0, "optimizer", 1, optimizer(learning_rate=0.5))
    log.add(0, 5, "configure", 1, setting("learning_rate", 0.25))
    _, told = log.add(1, 2, "configure", 1, setting("learning_rate", 0.125))
    assert [change.place for change in told] == [2]


@pytest.mark.parametrize("kind", ["configure", "counts"])
@pytest.mark.parametrize("new", ["optimizer", "none"])
def test_a_change_of_an_older_optimizer_changes_nothing_in_the_newer_one(kind: str, new: str) -> None:
    log = SettingsLog()
    log.add(0, 0, "optimizer", 1, optimizer(learning_rate=0.5))
    log.add(0, 1, new, 2, optimizer(momentum=0.9) if new == "optimizer" else "")
    there = log.newest
    text = setting("learning_rate", 0.125) if kind == "configure" else ""
    _, told = log.add(1, 1, kind, 1, text)  # a worker that is late: before it sets the next one
    _, later = log.add(2, 3, kind, 1, text)
    assert log.settings_at(1) == log.settings_at(3) == log.newest == there
    assert there not in (told[0].settings for told in (told, later) if told and told[0].settings != there)
    _, told = log.add(1, 0, kind, 1, text)
    assert [change.place for change in told] == [0]
    assert log.settings_at(0) != SettingsAt(1, optimizer(learning_rate=0.5), 1)
    assert log.newest == there


def test_an_optimizer_that_is_set_late_is_not_set_again() -> None:
    log = SettingsLog()
    log.add(0, 0, "optimizer", 1, optimizer(learning_rate=0.5))
    log.add(0, 2, "optimizer", 2, optimizer(learning_rate=0.25))
    _, told = log.add(1, 4, "optimizer", 2, optimizer(learning_rate=0.125))
    assert config(log.newest)["learning_rate"] == 0.25
    assert [change.settings for change in told] == [log.settings_at(2)]  # once, with valid settings


def test_sums_have_no_settings_to_change() -> None:
    log = SettingsLog()
    log.add(0, 0, "configure", 0, setting("wd", 0.5))
    log.add(0, 0, "counts", 0, "")
    assert log.newest == SettingsAt()
    log.add(0, 0, "steps", 0, "")
    assert log.newest == SettingsAt(keeps_states=True)
    log.add(0, 1, "optimizer", 1, optimizer())
    log.add(0, 2, "none", 2, "")
    assert (log.newest.ordinal, log.newest.text, log.newest.keeps_states) == (2, "", True)


def test_update_counts_are_those_of_the_last_optimizer_or_file() -> None:
    log, epochs = SettingsLog(), []
    for place, (kind, ordinal) in enumerate(
        [("optimizer", 1), ("configure", 1), ("counts", 1), ("steps", 1), ("counts", 1), ("none", 2)]
    ):
        text = {"optimizer": optimizer(), "configure": setting("wd", 0.5)}.get(kind, "")
        log.add(0, place, kind, ordinal, text)
        epochs.append(log.newest.epoch)
    assert epochs[0] == epochs[1] < epochs[2] == epochs[3] < epochs[4] < epochs[5]


# -------------------------------------------------------------------------------------------- refused calls


def test_a_rate_beside_a_schedule_of_another_worker_is_refused() -> None:
    log = SettingsLog()
    log.add(0, 0, "optimizer", 1, optimizer())
    log.add(0, 2, "configure", 1, json.dumps(SCHEDULE))
    before = list(log.changes), log.newest
    with pytest.raises(ConfigError, match="the learning rate is that of a schedule"):
        log.add(1, 3, "configure", 1, setting("learning_rate", 0.25))
    assert (log.changes, log.newest) == before
    assert [change.settings for change in log.changes] == [log.settings_at(0), log.settings_at(2)]
    log.add(1, 1, "configure", 1, setting("learning_rate", 0.25))  # before the schedule
    both = json.dumps({"learning_rate": 0.125, "lr_scheduler": None})
    log.add(1, 3, "configure", 1, both)
    assert config(log.newest)["learning_rate"] == 0.125


def test_a_schedule_before_a_rate_of_another_worker_is_refused() -> None:
    log = SettingsLog()
    log.add(0, 0, "optimizer", 1, optimizer())
    log.add(0, 3, "configure", 1, setting("learning_rate", 0.25))
    before = list(log.changes), log.settings_at(0), log.newest
    with pytest.raises(ConfigError, match="the learning rate is that of a schedule"):
        log.add(1, 2, "configure", 1, json.dumps(SCHEDULE))
    assert (log.changes, log.settings_at(0), log.newest) == before


@pytest.mark.parametrize("text", ["", "{", "[1]", "3", '"wd"', "null", "[" * 100_000])
def test_what_is_no_change_is_refused(text: str) -> None:
    log = SettingsLog()
    log.add(0, 0, "optimizer", 1, optimizer())
    before = log.newest
    with pytest.raises(ConfigError, match="this is not a change of an optimizer"):
        log.add(0, 0, "configure", 1, text)
    assert (log.newest, len(log.changes)) == (before, 1)


# ----------------------------------------------------------------------------------- sharing and withdrawing


def made(log: SettingsLog, rank: int, place: int, name: str, value: float) -> SettingsChange:
    text = setting(name, value)
    change = log.find(rank, place, "configure", 1, text)
    if change is None:
        return log.add(rank, place, "configure", 1, text)[0]
    log.share(change, rank)
    return change


def test_the_same_change_at_the_same_place_is_one_for_each_time_that_a_worker_makes_it() -> None:
    log = SettingsLog()
    log.add(0, 0, "optimizer", 1, optimizer())
    values = [0.5, 0.25, 0.5, 0.5]
    firsts = [made(log, 0, 1, "learning_rate", value) for value in values]
    others = [made(log, 1, 1, "learning_rate", value) for value in values]
    assert firsts == others
    assert len(set(map(id, firsts))) == 4
    assert config(log.newest)["learning_rate"] == 0.5
    assert made(log, 1, 1, "learning_rate", 0.5) not in firsts  # once more than the other has
    assert made(log, 1, 2, "learning_rate", 0.5) not in firsts


def test_a_shared_change_has_the_later_place_of_the_two() -> None:
    log = SettingsLog()
    log.add(0, 0, "optimizer", 1, optimizer())
    made(log, 0, 1, "wd", 0.5)
    made(log, 1, 1, "wd", 0.25)
    assert config(log.newest)["wd"] == 0.25
    text = setting("wd", 0.5)
    change = log.find(2, 1, "configure", 1, text)
    assert change is not None
    told = log.share(change, 2)
    assert told == [change]
    assert config(log.newest)["wd"] == 0.5
    assert log.share(change, 0) == []
    assert config(log.newest)["wd"] == 0.5


def test_a_shared_change_that_would_be_refused_elsewhere_stays() -> None:
    log = SettingsLog()
    log.add(0, 0, "optimizer", 1, optimizer())
    rate = made(log, 0, 1, "learning_rate", 0.5)
    log.add(1, 1, "configure", 1, json.dumps(SCHEDULE))
    before = list(log.changes), log.newest
    assert log.share(rate, 2) == []
    assert (log.changes, log.newest) == before


@given(program=PROGRAMS.filter(bool), order=ORDERS, data=st.data())
def test_a_change_that_is_withdrawn_was_never_made(program: list[Call], order: list[int], data: Any) -> None:
    log, other = SettingsLog(), SettingsLog()
    run([Worker(log, rank, program) for rank in range(2)], order)
    changes = list(log.changes)
    gone = data.draw(st.sampled_from(changes))
    before = {id(change): change.settings for change in changes}
    told, dropped = log.withdraw(gone)
    for change in changes:
        if change is not gone and change not in dropped:
            other._insert_change(dataclasses.replace(change, settings=SettingsAt()))
    assert [change.settings for change in log.changes] == [change.settings for change in other.changes]
    assert told == [change for change in log.changes if change.settings != before[id(change)]]


def test_a_change_that_is_not_allowed_without_one_that_is_withdrawn_is_withdrawn_too() -> None:
    log = SettingsLog()
    log.add(0, 0, "optimizer", 1, json.dumps({"name": "sgd", "config": {**SCHEDULE, "learning_rate": 0.5}}))
    gone, _ = log.add(0, 1, "configure", 1, json.dumps({"lr_scheduler": None, "learning_rate": 0.25}))
    rate, _ = log.add(1, 2, "configure", 1, json.dumps({"learning_rate": 0.125}))
    last, _ = log.add(1, 3, "configure", 1, json.dumps({"wd": 0.5}))
    told, dropped = log.withdraw(gone)
    assert list(dropped) == [rate]
    assert told == [last]
    assert json.loads(log.newest.text)["config"] == {**SCHEDULE, "learning_rate": 0.5, "wd": 0.5}


# ----------------------------------------------------------------------------------------- dropped entries


@given(program=PROGRAMS, keep=st.integers(0, 10), passed=st.integers(0, 60))
def test_settings_of_what_is_kept_are_as_before(program: list[Call], keep: int, passed: int) -> None:
    log = SettingsLog()
    run([Worker(log, 0, program)], [])
    places = range(60)
    before, newest, count = [log.settings_at(place) for place in places], log.newest, len(log.changes)
    dropped = log.drop_old(keep, passed)
    assert len(dropped) + len(log.changes) == count
    assert len(log.changes) >= min(keep, count)
    assert all(change.place < passed for change in dropped)
    assert not dropped or log.first == dropped[-1].settings
    assert log.newest == newest
    first = dropped[-1].place if dropped else 0
    assert [log.settings_at(place) for place in places[first:]] == before[first:]


def test_changes_of_one_place_stay_together() -> None:
    log = SettingsLog()
    log.add(0, 0, "optimizer", 1, optimizer(learning_rate=0.5))
    for number in range(6):
        log.add(0, 1 + number // 3, "configure", 1, setting("wd", number / 8))
    assert [one.place for one in log.drop_old(2, 9)] == [0, 1, 1, 1]
    assert [one.place for one in log.changes] == [2, 2, 2]
    assert log.drop_old(2, 9) == []


def test_a_worker_that_is_forgotten_makes_its_changes_from_the_beginning() -> None:
    log = SettingsLog()
    log.add(0, 0, "optimizer", 1, optimizer())
    change = made(log, 0, 4, "wd", 0.5)
    assert (log.place_of(0), log.place_of(1)) == (4, -1)
    assert log.find(0, 4, "configure", 1, setting("wd", 0.5)) is None
    log.forget(0)
    assert log.place_of(0) == -1
    assert log.find(0, 4, "configure", 1, setting("wd", 0.5)) is change
    log.forget(7)


def test_a_schedule_is_one_setting_with_the_rate() -> None:
    from kvstore.optimizer.descriptions import changes_of

    rule = create("sgd", lr_scheduler=lr_scheduler.FactorScheduler(2, base_lr=0.25))
    assert set(json.loads(changes_of(rule, ["lr_scheduler", "wd"]))) == {
        "lr_scheduler",
        "learning_rate",
        "wd",
    }
    log = SettingsLog()
    log.add(0, 0, "optimizer", 1, optimizer())
    log.add(0, 1, "configure", 1, changes_of(rule, ["lr_scheduler"]))
    assert log.newest.text == text_of(rule)
