"""Decisions repeat from a seed, in Python and in C alike, and do not depend on each other."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path

import jobs
import pytest
from buggify import Points, interposed, simulated
from buggify.interposed import Kinds
from buggify.points import drawn
from hypothesis import given
from hypothesis import strategies as st

NAMES = st.text(st.characters(codec="ascii", min_codepoint=33), min_size=1, max_size=12)


@given(seed=st.integers(0, 1 << 64), process=NAMES, point=NAMES)
def test_they_repeat(seed: int, process: str, point: str) -> None:
    first, second = Points(seed), Points(seed)
    told = [first.fires(process, point, 0.5) for _ in range(20)]
    second.fires(process + "b", point, 0.5)
    second.fires(process, point + "b", 0.5)
    assert [second.fires(process, point, 0.5) for _ in range(20)] == told


@given(seed=st.integers(0, 1 << 64), process=NAMES, point=NAMES, count=st.integers(0, 1 << 40))
def test_they_are_numbers_from_0_to_1(seed: int, process: str, point: str, count: int) -> None:
    assert 0 <= drawn(seed, process, point, count) < 1


def test_about_half_of_the_points_are_on_and_fire_as_often_as_they_are_to() -> None:
    points = Points(3)
    told = [[points.fires("worker", str(point), 0.25) for _ in range(400)] for point in range(100)]
    on = [one for one in told if any(one)]
    assert 30 < len(on) < 70
    assert 0.2 < sum(map(sum, on)) / (400 * len(on)) < 0.3


def test_none_fires_that_is_off() -> None:
    points = Points(3, on=False)
    assert not any(points.fires("worker", str(point), 1.0) for point in range(100))
    assert points.seconds("worker", "any", 1.0, 2.0) == 0.0


def test_a_simulated_job_repeats() -> None:
    for kind in simulated.KINDS:
        first, second = simulated.run(kind, 5), simulated.run(kind, 5)
        assert (first.now, first.applied) == (second.now, second.applied)


SOURCE = Path(interposed.__file__).with_name("interposer.c").read_text()
ROW = re.compile(r"X\((\w+), BG_(\w+), (\d+)\)")
POINTS = [(name, Kinds[kind], int(chance)) for name, kind, chance in ROW.findall(SOURCE)]


@pytest.fixture(scope="module")
def nursery(tmp_path_factory: pytest.TempPathFactory):  # type: ignore[no-untyped-def]
    with jobs.nursery(interposed.built(tmp_path_factory.mktemp("buggify"))) as made:
        yield made


def test_each_kind_has_points() -> None:
    assert {kind for _, kind, _ in POINTS} == set(Kinds)


@pytest.mark.parametrize("seed", range(4))
def test_the_interposer_decides_as_python_does(nursery: jobs.Nursery, tmp_path: Path, seed: int) -> None:
    with contextlib.closing(jobs.Job(nursery, tmp_path, 1)) as job:
        job.start("buggify.interposed_calls", "sends", seed, 300, rank=0)
        (told,) = job.results()
    chance = next(chance for name, _, chance in POINTS if name == "short_send") / 1024
    on = drawn(seed, "me", "short_send", 0) < 0.5
    wanted = sum(drawn(seed, "me", "short_send", count) < chance for count in range(1, 301)) if on else 0
    assert told == {"fired": wanted, "short": wanted, "whole": True}


def test_each_point_fires_and_is_legal(nursery: jobs.Nursery, tmp_path: Path) -> None:
    """What fails, fails as the C library may; and errors end with their budget."""
    with contextlib.closing(jobs.Job(nursery, tmp_path, 1)) as job:
        job.start("buggify.interposed_calls", "all_points", str(tmp_path), rank=0)
        (told,) = job.results()
    assert told["errors"] == 3
    of_c = {"delay_futex", "delay_peek", "intr_futex", "wake_futex"}  # Python has no such calls
    assert set(told["fired"]) == {name for name, _, _ in POINTS} - of_c
