"""The effect of compression on training: accuracy and bytes of each codec.

Four workers' gradients are the four values of each push into a `device` store, each with its own residual.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import kvstore as kv
from bench.cases.common import Case
from bench.cases.convergence import TASKS, Batch, Recipe, Task, recipes
from bench.runner import machine
from bench.runner.claim import Claim
from bench.runner.table import markdown
from kvstore import compression

WORKERS = 4
MOMENTUM = 0.9
#: One thread for each library: there is a process for each core.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "KVSTORE_NUM_THREADS")


@dataclass(frozen=True)
class Run:
    """One training: the test accuracy after each epoch, and the bytes that all workers push in an epoch."""

    task: str
    recipe: Recipe
    seed: int
    accuracy: list[float]
    bytes_each_epoch: int


# ------------------------------------------------------------------------------------------------ training


def train(name: str, recipe: Recipe, seed: int, rms: float, epochs: int = 0) -> Run:
    """Train from the seed's first weights; `rms` is the unit of the recipe's threshold."""
    task: Task = TASKS[name]()
    epochs = epochs or task.epochs
    weights, random = task.initial(seed), np.random.default_rng(seed)
    names, unit = list(weights), recipe.unit(rms)
    accuracy = []
    with kv.create("device") as store:
        if recipe.codec != "none":
            store.set_gradient_compression(recipe.params(rms))
        store.init(names, list(weights.values()))
        store.set_optimizer(_optimizer(task, epochs, unit))
        for _ in range(epochs):
            for batch in task.epoch(random):
                parts = [task.gradients(weights, shard) for shard in shards(batch)]
                store.push(names, [[part[key] / np.float32(unit) for part in parts] for key in names])
                store.pull(names, out=[weights[key] for key in names])
            accuracy.append(task.accuracy(weights))
    pushed = sum(packed_bytes(recipe, rms, array.size) for array in weights.values())
    return Run(name, recipe, seed, accuracy, WORKERS * task.steps * pushed)


def shards(batch: Batch) -> Iterator[Batch]:
    """Divide a batch into the workers' parts."""
    for parts in zip(*(np.array_split(array, WORKERS) for array in batch), strict=True):
        yield Batch(*parts)


def packed_bytes(recipe: Recipe, rms: float, size: int) -> int:
    """Return the bytes of one pushed tensor."""
    return 4 * size if recipe.codec == "none" else compression.create(recipe.params(rms)).nbytes(size)


def _optimizer(task: Task, epochs: int, unit: float) -> kv.optimizer.Optimizer:
    """Make SGD with momentum and a cosine schedule after a short warm-up, on the mean of a batch."""
    updates = epochs * task.steps
    schedule = kv.lr_scheduler.CosineScheduler(
        max_update=updates,
        base_lr=task.learning_rate,
        final_lr=task.learning_rate / 100,
        warmup_steps=updates // 20,
    )
    return kv.optimizer.SGD(momentum=MOMENTUM, rescale_grad=unit / task.batch, lr_scheduler=schedule)


def sizes(name: str) -> dict[str, float]:
    """Return the root mean square of a worker's gradients in the first epoch, of each tensor and ``all``.

    The weights are the first ones: a user can measure this before the first training.
    """
    task: Task = TASKS[name]()
    weights, random = task.initial(0), np.random.default_rng(0)
    squares = dict.fromkeys(weights, 0.0)
    for batch in task.epoch(random):
        for key, part in task.gradients(weights, next(shards(batch))).items():
            squares[key] += float(np.square(part, dtype=np.float64).mean()) / task.steps
    counts = [array.size for array in weights.values()]
    mean = np.average(list(squares.values()), weights=counts)
    return {"all": float(np.sqrt(mean)), **{key: float(np.sqrt(square)) for key, square in squares.items()}}


# ------------------------------------------------------------------------------------------------- results


@dataclass(frozen=True)
class Training(Case):
    """All trainings of one task."""

    name: str


@dataclass(frozen=True)
class Measured:
    """The results of a task, as in the JSON."""

    case: Training
    row: dict[str, Any]


class Convergence(Claim):
    name, title = "convergence", "Training with compressed gradients"
    common = ("only", "list", "write")
    picture = ""

    def options(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("--seeds", type=int, default=5)

    def cases(self, options: argparse.Namespace) -> Iterable[Any]:
        return map(Training, TASKS)

    def measured(self, chosen: list[Any], options: argparse.Namespace) -> Iterator[Measured]:
        """Train all recipes, one process for each processor."""
        context = multiprocessing.get_context("spawn")
        os.environ.update(dict.fromkeys(ONE_THREAD, "1"))  # for the children, which import NumPy later
        with ProcessPoolExecutor(len(machine.cpus()), mp_context=context) as pool:
            for case in chosen:
                yield Measured(case, _measured(case.name, options.seeds, pool))

    def page(self, found: list[Measured], took: float) -> str:
        return report(_results(found, took)) if found else ""

    def to_json(self, found: list[Measured], took: float) -> str:
        return to_json(_results(found, took))


def _results(found: list[Measured], took: float) -> dict[str, Any]:
    return {"machine": machine.describe(), "minutes": took / 60, "tasks": [m.row for m in found]}


def _measured(name: str, seeds: int, pool: ProcessPoolExecutor) -> dict[str, Any]:
    size = sizes(name)
    jobs = [
        [pool.submit(train, name, recipe, seed, size["all"]) for seed in range(seeds)] for recipe in recipes()
    ]
    return {"task": name, "rms": size, "recipes": [_row(job, size["all"]) for job in jobs]}


def _row(jobs: list[Any], rms: float) -> dict[str, Any]:
    runs: list[Run] = [job.result() for job in jobs]
    recipe = runs[0].recipe
    return {
        **asdict(recipe),
        "label": recipe.label,
        "params": recipe.params(rms) if recipe.codec != "none" else {},
        "unit": recipe.unit(rms),
        "bytes_each_epoch": runs[0].bytes_each_epoch,
        "accuracy": [[round(value, 4) for value in run.accuracy] for run in runs],
    }


HEAD = ["codec", "test accuracy", "points from none", "epoch of 95 %"]
HEAD += ["KB each epoch", "MB in all", "bytes ÷ none"]
#: The share of the final accuracy without compression that the column of epochs shows.
NEARLY = 0.95


def report(results: dict[str, Any]) -> str:
    """Write the page."""
    seeds = len(results["tasks"][0]["recipes"][0]["accuracy"])
    parts = [
        f"# {Convergence.title}\n",
        f"{results['machine']}. {results['minutes']:.0f} minutes.\n\n"
        f"{WORKERS} workers, SGD with momentum, {seeds} seeds: mean [lowest-highest] of the test accuracy "
        "at the end, in percent. RMS is the root mean square of the gradients that a worker pushes, before "
        "training: 2bit's threshold, and the unit of 1bit's +1 and -1, are given in multiples of it. "
        "*Epoch of 95 %*: the first one at which the mean over the seeds is at 95 % of the final accuracy of "
        "none. Bytes are those that all workers push; pulls are not compressed and not counted.\n",
        "![accuracy over epochs, over bytes, and over thresholds](convergence.png)\n",
        *tables(results, "##"),
    ]
    return "\n".join(parts)


def tables(results: dict[str, Any], heading: str) -> list[str]:
    """Format each task under a heading."""
    parts = []
    for task in results["tasks"]:
        of, rms = TASKS[task["task"]], task["rms"]
        by_tensor = [size for key, size in rms.items() if key != "all"]
        about = (
            f"Gradients are sums over {of.batch // WORKERS} examples. "
            f"RMS {rms['all']:.3g}; of single tensors {min(by_tensor):.3g} to {max(by_tensor):.3g}.\n"
        )
        parts += [f"{heading} {of.name.capitalize()}\n", about, markdown(HEAD, rows(task))]
    return parts


def to_json(results: dict[str, Any]) -> str:
    """Write one line for each recipe."""
    tasks = []
    for task in results["tasks"]:
        lines = ",\n".join(f"  {json.dumps(recipe)}" for recipe in task["recipes"])
        head = {"task": task["task"], "rms": task["rms"]}
        tasks.append(json.dumps(head).removesuffix("}") + f', "recipes": [\n{lines}\n]}}')
    head = {"machine": results["machine"], "minutes": round(results["minutes"], 1)}
    return json.dumps(head).removesuffix("}") + ', "tasks": [\n' + ",\n".join(tasks) + "\n]}\n"


def rows(task: dict[str, Any]) -> list[list[str]]:
    """Return one row for each recipe."""
    none = task["recipes"][0]
    return [_recipe(recipe, final(none), none["bytes_each_epoch"]) for recipe in task["recipes"]]


def _recipe(recipe: dict[str, Any], none: float, whole: int) -> list[str]:
    each, ends = recipe["bytes_each_epoch"], [100 * run[-1] for run in recipe["accuracy"]]
    near = (str(at) for at, value in enumerate(means(recipe), 1) if value >= NEARLY * none)
    count = each * len(recipe["accuracy"][0])
    return [
        recipe["label"],
        f"{statistics.mean(ends):.2f} [{min(ends):.2f}-{max(ends):.2f}]",
        f"{100 * (final(recipe) - none):+.2f}",
        next(near, "never"),
        f"{each / 1e3:.0f}",
        f"{count / 1e6:,.0f}" if count >= 1e8 else f"{count / 1e6:.3g}",
        f"1/{whole / each:.3g}",
    ]


def means(recipe: dict[str, Any]) -> list[float]:
    """Return the mean accuracy over the seeds after each epoch."""
    return [statistics.mean(values) for values in zip(*recipe["accuracy"], strict=True)]


def final(recipe: dict[str, Any]) -> float:
    """Return the mean accuracy at the end."""
    return means(recipe)[-1]


CLAIM = Convergence()
