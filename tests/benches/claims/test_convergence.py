"""The effect of compression on training: the tasks are as described, and the bench counts right."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from bench import figures
from bench.cases.convergence import TASKS, Batch, Recipe, recipes
from bench.claims import convergence
from bench.plots import convergence as plot

pytestmark = [
    pytest.mark.bench,
    pytest.mark.skipif(importlib.util.find_spec("sklearn") is None, reason="needs scikit-learn"),
]


@pytest.mark.parametrize("name", TASKS)
def test_gradients_are_slopes(name: str) -> None:
    task = TASKS[name]()
    weights = {key: array.astype(np.float64) for key, array in task.initial(3).items()}
    batch = next(task.epoch(np.random.default_rng(1)))
    found = task.gradients(weights, batch)
    random = np.random.default_rng(2)
    for key, array in weights.items():
        direction, step = random.standard_normal(array.shape), 1e-7
        ends = [loss(name, {**weights, key: array + sign * step * direction}, batch) for sign in (1, -1)]
        assert (ends[0] - ends[1]) / (2 * step) == pytest.approx((found[key] * direction).sum(), rel=1e-4), (
            key
        )


def loss(name: str, weights: dict[str, Any], batch: Batch) -> float:
    """Cross-entropy summed over a batch."""
    if name == "digits":
        hidden = np.maximum(batch.examples @ weights["fc1.weight"] + weights["fc1.bias"], 0)
        logits = hidden @ weights["fc2.weight"] + weights["fc2.bias"]
    else:
        read = [
            np.maximum(batch.examples[:, i] @ weights["read.weight"] + weights["read.bias"], 0)
            for i in (0, 1)
        ]
        value = np.concatenate(read, axis=1)
        for key in ("add1", "add2"):
            value = np.maximum(value @ weights[f"{key}.weight"] + weights[f"{key}.bias"], 0)
        logits = value @ weights["tell.weight"] + weights["tell.bias"]
    return float((np.log(np.exp(logits).sum(axis=1)) - logits[np.arange(len(logits)), batch.labels]).sum())


@pytest.mark.parametrize("name", TASKS)
def test_shards_add_up_to_the_batch(name: str) -> None:
    task = TASKS[name]()
    weights, batch = task.initial(0), next(task.epoch(np.random.default_rng(0)))
    parts = list(convergence.shards(batch))
    assert len(parts) == convergence.WORKERS
    whole = task.gradients(weights, batch)
    for key in weights:
        total = sum(task.gradients(weights, part)[key] for part in parts)
        np.testing.assert_allclose(total, whole[key], rtol=1e-3, atol=1e-4)


def test_bytes_that_are_pushed() -> None:
    assert convergence.packed_bytes(Recipe("none"), 1.0, 1000) == 4000
    assert convergence.packed_bytes(Recipe("fp16"), 1.0, 1000) == 2000
    assert convergence.packed_bytes(Recipe("2bit", 3), 0.1, 1000) == 252
    assert convergence.packed_bytes(Recipe("1bit", 3), 0.1, 1000) == 128


def test_recipes_count_in_the_size_of_gradients() -> None:
    assert Recipe("2bit", 3).params(0.5) == {"type": "2bit", "threshold": 1.5}
    assert Recipe("2bit", 3).unit(0.5) == 1
    assert Recipe("1bit", 4).params(0.5) == {"type": "1bit", "threshold": 0}
    assert Recipe("1bit", 4).unit(0.5) == 2
    assert len({recipe.label for recipe in recipes()}) == len(recipes())


def test_size_of_gradients() -> None:
    found = convergence.sizes("digits")
    tensors = [size for key, size in found.items() if key != "all"]
    assert len(tensors) == 4
    assert 0 < min(tensors) < found["all"] < max(tensors)


@pytest.mark.parametrize("recipe", [Recipe("none"), Recipe("bf16"), Recipe("2bit", 10), Recipe("1bit", 10)])
def test_each_codec_learns(recipe: Recipe) -> None:
    run = convergence.train("digits", recipe, 0, convergence.sizes("digits")["all"], epochs=4)
    assert len(run.accuracy) == 4
    assert run.accuracy[-1] > 0.7
    assert run == convergence.train("digits", recipe, 0, convergence.sizes("digits")["all"], epochs=4)


def made() -> dict[str, Any]:
    """Results of a run that never was: `none` ends at 90 %, every other recipe at 80 %."""
    rows = [
        {
            "codec": recipe.codec,
            "multiple": recipe.multiple,
            "label": recipe.label,
            "bytes_each_epoch": convergence.packed_bytes(recipe, 1.0, 32_000),
            "accuracy": [[0.5, end - 0.01], [0.7, end + 0.01]],
        }
        for recipe in recipes()
        for end in (0.9 if recipe.codec == "none" else 0.8,)
    ]
    return {
        "machine": "a machine",
        "minutes": 3,
        "tasks": [{"task": "sums", "rms": {"all": 0.2, "a": 0.1, "b": 0.4}, "recipes": rows}],
    }


def test_table() -> None:
    rows = convergence.rows(made()["tasks"][0])
    assert rows[0] == ["none", "90.00 [89.00-91.00]", "+0.00", "2", "128", "0.256", "1/1"]
    assert rows[3] == ["2bit, 1 RMS", "80.00 [79.00-81.00]", "-10.00", "never", "8", "0.016", "1/16"]
    page = convergence.report(made())
    assert "2 seeds" in page
    assert "RMS 0.2; of single tensors 0.1 to 0.4" in page


def test_results_survive_json() -> None:
    assert json.loads(convergence.to_json(made())) == made()


def test_figures_go_between_the_marks_of_a_page(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("before\n<!-- figures: begin (x) -->\nold\n<!-- figures: end -->\nafter\n")
    figures.put(page, figures.guide(made()))
    text = page.read_text()
    assert "old" not in text
    assert "\n### Sums of two digits\n" in text
    assert "\n## Sums of two digits\n" in convergence.report(made())
    assert text.startswith("before\n<!-- figures: begin (x) -->\n")
    assert text.endswith("<!-- figures: end -->\nafter\n")
    page.write_text("no marks")
    with pytest.raises(SystemExit, match=r"page\.md has no marks"):
        figures.put(page, "x")


def test_plot(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    plot.draw(json.loads(convergence.to_json(made())), tmp_path / "x.png")
    assert (tmp_path / "x.png").stat().st_size > 1000
