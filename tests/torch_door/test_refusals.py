"""Programs that would be wrong are refused, on all workers, in their first step or when it is found out."""

from __future__ import annotations

import os
import re
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

BODY = "frameworks.procs_torch_refusals"
REPEATS = int(os.environ.get("KVSTORE_TEST_REPEATS", "1"))
STORES = ["shared", "dist_sync"]
OPTIONS: list[dict[str, Any]] = [{}, {"overlap": False}, {"whole_steps": True}]
#: Of the product with stores, what runs every time: options with `shared`, the default with servers.
WAYS = [
    pytest.param(
        name,
        options,
        marks=pytest.mark.nightly if name == "dist_sync" and options else (),
        id=f"{name}-{number}",
    )
    for name in STORES
    for number, options in enumerate(OPTIONS)
]


@pytest.fixture
def told(work: Callable[..., list[Any]]) -> Callable[..., list[Any]]:
    """Run a function of the body, and return each worker's error."""

    def run(function: str, *arguments: Any, **options: Any) -> list[Any]:
        return work(function, *arguments, body=BODY, **options)

    return run


@pytest.mark.parametrize(("name", "options"), WAYS)
def test_a_worker_that_skips_a_step_is_told_and_so_are_the_others(
    name: str, options: dict[str, Any], told: Callable[..., list[Any]]
) -> None:
    for _ in range(REPEATS):
        for rank, (number, text, again) in enumerate(told("skipped_step", name, options)):
            assert number == 0
            assert re.match(rf"KVStoreError: worker {rank}: .*\(worker 0 2, worker 1 1\)", text)
            assert again == text


@pytest.mark.parametrize("on_store", [False, True])
@pytest.mark.parametrize(("name", "options"), WAYS)
def test_equal_steps_are_not_refused(
    name: str, options: dict[str, Any], on_store: bool, told: Callable[..., list[Any]]
) -> None:
    assert told("equal_steps", name, options, on_store) == [[6, ""]] * 2


@pytest.mark.parametrize(("name", "options"), WAYS)
def test_a_step_that_one_worker_skips_after_backward(
    name: str, options: dict[str, Any], told: Callable[..., list[Any]]
) -> None:
    for number, text in told("skipped_by_one", name, options):
        assert number == 0
        assert re.search(r"\(worker 0 2, worker 1 1\)", text)


@pytest.mark.parametrize(("name", "options"), WAYS)
@pytest.mark.parametrize("when", ["created", "later", "off"])
def test_settings_that_differ(
    name: str, options: dict[str, Any], when: str, told: Callable[..., list[Any]]
) -> None:
    options = {**options, "check_every": {"created": 100, "later": 3, "off": 0}[when]}
    for rank, (number, text) in enumerate(told("other_settings", name, options, when)):
        if when == "off":
            assert number == 6
            continue
        assert number == {"created": -1, "later": 2}[when]
        rate = 0.1 + rank * {"created": 0.1, "later": 1}[when]
        assert re.match(rf"ConfigError: worker {rank}: .*worker 1 has other settings.*lr={rate:g}", text)


@pytest.mark.parametrize("every", [3, 0])
@pytest.mark.parametrize(("name", "options"), WAYS)
def test_weights_that_differ(
    name: str, options: dict[str, Any], every: int, told: Callable[..., list[Any]]
) -> None:
    for number, text in told("other_weights", name, {**options, "check_every": every}):
        assert number == (2 if every else 6)
        assert not every or re.search(r"weights of worker 1 differ from those of worker 0", text)


@pytest.mark.parametrize(("name", "options"), WAYS)
def test_sums_are_not_summed_again(
    name: str, options: dict[str, Any], told: Callable[..., list[Any]]
) -> None:
    for texts in told("summed_twice", name, options):
        assert all(re.match(r"KVStoreError: .*average=False.*zero_grad", text) for text in texts)


@pytest.mark.parametrize(("name", "options"), WAYS)
def test_gradients_that_are_not_complete_cannot_be_read(
    name: str, options: dict[str, Any], told: Callable[..., list[Any]]
) -> None:
    for texts in told("between_passes", name, options):
        assert all(re.match(r"KVStoreError: .*only 1 of 3 backward passes", text) for text in texts)


@pytest.mark.parametrize(("name", "options"), WAYS)
def test_gradients_in_the_store_cannot_be_read(
    name: str, options: dict[str, Any], told: Callable[..., list[Any]]
) -> None:
    for texts in told("in_the_store", name, options):
        assert len(texts) == 40
        assert all(re.match(r"KVStoreError: .*update_on_kvstore.*clip_gradient", text) for text in texts)


@pytest.mark.parametrize("name", STORES)
def test_a_pass_is_an_update_where_the_store_updates(name: str, told: Callable[..., list[Any]]) -> None:
    for texts in told("two_passes_in_the_store", name, {}):
        assert all(re.match(r"KVStoreError: .*call step after each backward pass", text) for text in texts)


@pytest.mark.parametrize(("name", "options"), WAYS)
def test_a_step_needs_averages(name: str, options: dict[str, Any], told: Callable[..., list[Any]]) -> None:
    for (text,) in told("only_local_passes", name, options):
        assert re.match(r"KVStoreError: .*no_sync.*synchronize", text)


@pytest.mark.parametrize("on_store", [False, True])
@pytest.mark.parametrize("joins", [False, True])
@pytest.mark.parametrize(("name", "options"), WAYS)
def test_a_worker_that_has_closed_its_store_is_missed_unless_it_has_joined(
    name: str, options: dict[str, Any], joins: bool, on_store: bool, told: Callable[..., list[Any]]
) -> None:
    (text, first), (_, second) = told("one_step_more", name, options, on_store, joins)
    assert bool(re.match(r"KVStoreError: worker 0: worker 1 has closed its store", text)) is not joins
    assert first == second


@pytest.mark.parametrize("when", ["created", "later"])
@pytest.mark.parametrize(("name", "options"), WAYS)
def test_a_parameter_that_one_worker_has_frozen(
    name: str, options: dict[str, Any], when: str, told: Callable[..., list[Any]]
) -> None:
    for rank, (text,) in enumerate(told("frozen_by_one", name, options, when)):
        assert re.match(rf"ConfigError: worker {rank}: worker 1 exchanges .*requires_grad", text)


@pytest.mark.parametrize(("name", "options"), WAYS)
def test_a_gradient_that_the_store_has_is_not_replaced(
    name: str, options: dict[str, Any], told: Callable[..., list[Any]]
) -> None:
    for (text,) in told("replaced_in_the_store", name, options):
        assert re.match(r"KVStoreError: .*'0.weight' was replaced", text)


@pytest.mark.parametrize(("name", "options"), WAYS)
def test_passes_in_no_sync_count_where_the_store_updates(
    name: str, options: dict[str, Any], told: Callable[..., list[Any]]
) -> None:
    first, second = told("local_passes_in_the_store", name, options)
    assert first == second
    (start,) = told("untrained_bias", workers=1)
    np.testing.assert_allclose(first, np.array(start) - 2 * 2 * 0.1, rtol=1e-5)


def test_a_model_that_is_moved_later(told: Callable[..., list[Any]]) -> None:
    for texts in told("moved", "shared"):
        assert all(re.match(r"ConfigError: .*after model\.to\(\)", text) for text in texts)


def test_attributes_are_those_of_the_wrapped_optimizer(told: Callable[..., list[Any]]) -> None:
    (found,) = told("attributes", workers=1)
    assert found == [3, 3, True, False, False, ["step", "before", "after"], 0.25]


@pytest.mark.parametrize(("name", "options"), WAYS)
def test_two_models_with_gradients_of_each_other(
    name: str, options: dict[str, Any], told: Callable[..., list[Any]]
) -> None:
    first, second = told("gan", name, options)
    assert first == second
    assert np.isfinite(first).all()


@pytest.mark.parametrize(("name", "options"), WAYS)
def test_a_weight_that_the_store_updates_is_not_changed(
    name: str, options: dict[str, Any], told: Callable[..., list[Any]]
) -> None:
    for texts in told("changed_weights", name, options):
        for text in texts:
            assert re.match(r"KVStoreError: .*has changed parameter '0\.weight'.*would be lost", text)


@pytest.mark.parametrize(("name", "options"), WAYS)
def test_a_step_in_a_backward_pass(
    name: str, options: dict[str, Any], told: Callable[..., list[Any]]
) -> None:
    for text in told("step_in_a_hook", name, options):
        assert re.match(r"KVStoreError: .*step was called in a backward pass", text)


@pytest.mark.parametrize(("name", "options"), WAYS)
def test_a_changed_setting_of_the_rule_is_that_of_the_store(
    name: str, options: dict[str, Any], told: Callable[..., list[Any]]
) -> None:
    for weights in told("changed_rule", name, options):
        assert weights == pytest.approx([-1.0, -11.0, -16.0])


@pytest.mark.parametrize("name", STORES)
def test_a_compiled_function_may_call_backward(name: str, told: Callable[..., list[Any]]) -> None:
    for changes in told("compiled_backward", name, {}):
        assert changes == pytest.approx([-0.45, -0.45, -0.45, -0.3], rel=1e-5)
