"""Whole jobs with random faults; see `simulator`. KVSTORE_SIM_SEED=... runs the job of that seed alone."""

from __future__ import annotations

import os
import random
import time

import pytest
from simulator import Broken, Faults, simulate

JOBS, PORTION = 10_000, 250
EVERY_TIME = (5_000, 5_250)  # one of these has found a fault; at night all
CHOSEN = os.environ.get("KVSTORE_SIM_SEED")


def run(seed: int, faults: Faults | None = None) -> None:
    try:
        simulate(seed, faults)
    except Exception as error:
        what = str(error) if isinstance(error, Broken) else repr(error)
        again = f"run it again with KVSTORE_SIM_SEED={seed} pytest -k one_seed {__file__}"
        raise AssertionError(f"seed {seed}: {what}; {again}") from error


@pytest.mark.skipif(CHOSEN is None, reason="KVSTORE_SIM_SEED is not set")
def test_one_seed() -> None:
    run(int(CHOSEN or 0))


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "first",
    [
        pytest.param(first, marks=() if first in EVERY_TIME else pytest.mark.nightly)
        for first in range(0, JOBS, PORTION)
    ],
)
def test_jobs(first: int) -> None:
    for seed in range(first, first + PORTION):
        run(seed)


@pytest.mark.nightly
@pytest.mark.timeout(1500)
def test_as_many_jobs_as_fit_in_twenty_minutes() -> None:
    seed = random.SystemRandom().randrange(1 << 40)
    end = time.monotonic() + 1200
    while time.monotonic() < end:
        run(seed)
        seed += 1


def test_the_same_seed_is_the_same_job() -> None:
    for seed in (1, 2, 3):
        first, second = simulate(seed), simulate(seed)
        assert first.plan.script == second.plan.script
        assert first.now == second.now
        assert first.applied == second.applied


def test_faults_are_drawn() -> None:
    kinds = {tuple(bool(one) for one in simulate(seed).plan.faults) for seed in range(60)}
    assert len(kinds) > 10


EACH = [pytest.param(first, marks=() if not first else pytest.mark.nightly) for first in range(0, 5_000, 50)]


@pytest.mark.parametrize("first", EACH)
def test_nothing_of_a_worker_that_dies_ahead_of_the_others_stays(first: int) -> None:
    for seed in range(first, first + 50):
        draw = random.Random(seed)
        back, tardy = draw.random() < 0.3, draw.choice((0.0, 2.0, 4.0))
        noisy = Faults(late=draw.choice((0.0, 0.4)), drop=draw.choice((0.0, 0.1)))
        run(seed, noisy._replace(kill_worker=True, return_worker=back, ahead=True, tardy=tardy))


@pytest.mark.parametrize("first", EACH)
def test_a_server_whose_last_answers_are_lost_comes_back(first: int) -> None:
    for seed in range(first, first + 50):
        draw = random.Random(seed)
        noisy = Faults(
            late=draw.choice((0.0, 0.4)), drop=draw.choice((0.0, 0.1)), double=draw.choice((0.0, 0.3))
        )
        run(seed, noisy._replace(kill_server=True, return_server=True, mute=True))


@pytest.mark.parametrize("first", EACH)
def test_a_scheduler_that_comes_back_changes_nothing(first: int) -> None:
    for seed in range(first, first + 50):
        draw = random.Random(seed)
        worker = draw.random() < 0.3
        faults = Faults(
            late=draw.choice((0.0, 0.1)),
            drop=draw.choice((0.0, 0.05)),
            double=draw.choice((0.0, 0.1)),
            kill_scheduler=True,
            return_scheduler=True,
            kill_worker=worker,
            return_worker=worker and draw.random() < 0.5,
        )
        run(seed, faults)


@pytest.mark.parametrize("first", EACH)
def test_steps_are_whole(first: int) -> None:
    for seed in range(first, first + 50):
        draw = random.Random(seed)
        noisy = Faults(late=draw.choice((0.0, 0.4)), drop=draw.choice((0.0, 0.1)), steps=True)
        kill, ahead, more = draw.random() < 0.8, draw.random() < 0.5, draw.choice((0, 0, 1))
        faults = noisy._replace(kill_worker=kill, ahead=kill and ahead, tardy=draw.choice((0.0, 2.0, 4.0)))
        run(seed, faults._replace(kill_more=kill * more, kill_server=draw.random() < 0.2))
