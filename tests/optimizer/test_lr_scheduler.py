"""Schedules: the tables recorded from MXNet 1.9.1, purity, configuration, misuse."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from kvstore.errors import ConfigError
from kvstore.optimizer import lr_scheduler
from kvstore.optimizer.lr_scheduler import (
    CosineScheduler,
    FactorScheduler,
    LRScheduler,
    MultiFactorScheduler,
    PolyScheduler,
)

GOLDEN = json.loads((Path(__file__).parents[1] / "data" / "lr_schedulers.json").read_text())
FADING = {"max_update": 10, "base_lr": 1, "final_lr": 0.1, "warmup_steps": 2, "warmup_begin_lr": 0.2}
WARM = {"step": 3, "factor": 0.5, "base_lr": 1, "warmup_steps": 4, "warmup_begin_lr": 0.1}
SCHEDULES = {
    "factor": FactorScheduler(step=3, factor=0.5, stop_factor_lr=0.2, base_lr=1),
    "factor_warmup": FactorScheduler(**WARM),
    "factor_warmup_const": FactorScheduler(**WARM, warmup_mode="constant"),
    "multifactor": MultiFactorScheduler(step=[2, 5, 6], factor=0.1, base_lr=1),
    "poly": PolyScheduler(**FADING, pwr=2),
    "cosine": CosineScheduler(**FADING),
}
# Asked for an update behind max_update first, MXNet's two give base_lr; here it is always final_lr.
ON_PURPOSE = {"poly_jump_to_14": 0.1, "cosine_jump_to_14": 0.1}


@pytest.mark.parametrize("name", SCHEDULES)
def test_recorded_tables(name):
    table = [SCHEDULES[name](n) for n in range(15)]
    assert table == pytest.approx(GOLDEN[name], rel=1e-15)


@pytest.mark.parametrize("name", SCHEDULES)
def test_jumps(name):
    recorded = GOLDEN[f"{name}_jump_to_14"]
    assert SCHEDULES[name](14) == ON_PURPOSE.get(f"{name}_jump_to_14", recorded)


def test_the_two_deliberate_differences_are_real():
    assert all(GOLDEN[name] == 1.0 != value for name, value in ON_PURPOSE.items())


@pytest.mark.parametrize("name", SCHEDULES)
@given(asked=st.lists(st.integers(0, 30)))
@settings(max_examples=20, deadline=None)
def test_a_call_changes_nothing(name, asked):
    schedule = SCHEDULES[name]
    fresh = lr_scheduler.from_config({"name": type(schedule).__name__, "config": schedule.get_config()})
    for n in asked:
        assert schedule(n) == fresh(n)
    assert schedule.get_config() == fresh.get_config()


@pytest.mark.parametrize("schedule", [LRScheduler(0.3, warmup_steps=2), *SCHEDULES.values()])
def test_configuration_round_trip(schedule):
    config = json.loads(json.dumps(schedule.get_config()))
    again = lr_scheduler.from_config({"name": type(schedule).__name__, "config": config})
    assert again == schedule
    assert [again(n) for n in range(20)] == [schedule(n) for n in range(20)]


def test_the_boundary_belongs_to_the_old_rate():
    schedule = FactorScheduler(step=2, factor=0.5, base_lr=0.4)
    assert [schedule(n) for n in (1, 2, 3, 4, 5)] == [0.4, 0.4, 0.2, 0.2, 0.1]


@pytest.mark.parametrize("schedule", [PolyScheduler(**FADING), CosineScheduler(**FADING)])
def test_fading_ends_at_final_lr_and_never_rises(schedule):
    table = [schedule(n) for n in range(2, 30)]
    assert table == sorted(table, reverse=True)
    assert set(table[8:]) == {0.1}


def test_a_far_update_costs_no_loop():
    assert FactorScheduler(step=1, factor=0.999999, base_lr=1)(10**15) == 1e-8


@pytest.mark.parametrize(
    ("make", "word"),
    [
        (lambda: LRScheduler(0.1, warmup_begin_lr=0.2), "warmup_begin_lr"),
        (lambda: LRScheduler(warmup_steps=-1), "warmup_steps"),
        (lambda: LRScheduler(warmup_steps=1.5), "warmup_steps"),
        (lambda: LRScheduler(warmup_mode="cubic"), "warmup_mode"),
        (lambda: LRScheduler(base_lr="much"), "base_lr"),
        (lambda: FactorScheduler(step=0), "step"),
        (lambda: FactorScheduler(step=1, factor=1.1), "factor"),
        (lambda: MultiFactorScheduler(step=[]), "step"),
        (lambda: MultiFactorScheduler(step=5), "step"),
        (lambda: MultiFactorScheduler(step=[0, 2]), "step"),
        (lambda: MultiFactorScheduler(step=[3, 3]), "step"),
        (lambda: MultiFactorScheduler(step=[1], factor=2), "factor"),
        (lambda: PolyScheduler(max_update=0), "max_update"),
        (lambda: PolyScheduler(max_update=1.5), "max_update"),
        (lambda: CosineScheduler(max_update=5, warmup_steps=5), "warm-up"),
        (
            lambda: lr_scheduler.from_config({"name": "FactorSchedule", "config": {}}),
            "did you mean 'FactorScheduler'",
        ),
        (
            lambda: lr_scheduler.from_config({"name": "FactorScheduler", "config": {"stop": 1}}),
            "does not fit",
        ),
        (lambda: lr_scheduler.from_config({"name": "FactorScheduler"}), "does not fit"),
    ],
)
def test_misuse(make, word):
    with pytest.raises(ConfigError, match=word) as caught:
        make()
    assert isinstance(caught.value, ValueError)


def test_unknown_keyword():
    with pytest.raises(TypeError, match="warmup_stepz"):
        FactorScheduler(step=1, warmup_stepz=3)


def test_own_schedule_can_be_registered():
    @lr_scheduler.register
    class Halves(LRScheduler):
        """Half the base rate."""

        def after_warmup(self, num_update):
            return self.base_lr / 2

    again = lr_scheduler.from_config({"name": "Halves", "config": Halves(0.4).get_config()})
    assert again(7) == 0.2
    del lr_scheduler._registry["Halves"]


def test_equality_and_repr():
    assert (
        FactorScheduler(3, base_lr=0.1) == FactorScheduler(3, base_lr=0.1) != FactorScheduler(4, base_lr=0.1)
    )
    assert FactorScheduler(3) != "FactorScheduler"
    assert "step=3" in repr(FactorScheduler(3))
    assert len({FactorScheduler(3), FactorScheduler(3)}) == 1
