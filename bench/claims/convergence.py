"""What compression does to training: accuracy and bytes of each codec: ``python -m bench.convergence``.

Four workers' gradients are the four values of each push into a `device` store, each with its own residual.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import statistics
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

import kvstore as kv
from bench.cases.training import TASKS, Batch, Task
from bench.runner import machine
from bench.runner.command import RESULTS
from bench.runner.table import markdown
from kvstore import compression

WORKERS = 4
MOMENTUM = 0.9
#: Thresholds of 2bit and units of 1bit that are tried, in multiples of the gradients' root mean square.
MULTIPLES = (1.0, 3.0, 10.0, 30.0, 100.0)
#: The multiple that gets a curve.
SHOWN = 10.0
#: The libraries' own threads: there is a process for each core.
ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "KVSTORE_NUM_THREADS")


@dataclass(frozen=True)
class Recipe:
    """How gradients are sent.

    Attributes
    ----------
    codec : str
        ``none``, or a codec's name.
    multiple : float
        For 2bit the threshold, for 1bit the unit that +1 and -1 stand for, in multiples of the gradients'
        root mean square; 0 for the others.
    """

    codec: str
    multiple: float = 0.0

    @property
    def label(self) -> str:
        return f"{self.codec}, {self.multiple:g} RMS" if self.multiple else self.codec

    def params(self, rms: float) -> dict[str, Any]:
        """Parameters of `set_gradient_compression`. 1bit sends +1 above zero, -1 otherwise."""
        if self.codec == "2bit":
            return {"type": "2bit", "threshold": self.multiple * rms}
        return {"type": self.codec, **({"threshold": 0.0} if self.codec == "1bit" else {})}

    def unit(self, rms: float) -> float:
        """Size that gradients are divided by before the push, and the optimizer multiplies sums with."""
        return self.multiple * rms if self.codec == "1bit" else 1.0


@dataclass(frozen=True)
class Run:
    """One training: the test accuracy after each epoch, and the bytes that all workers push in an epoch."""

    task: str
    recipe: Recipe
    seed: int
    accuracy: list[float]
    bytes_each_epoch: int


def recipes() -> list[Recipe]:
    """Every way to send, in the order of the tables."""
    coarse = [Recipe(codec, multiple) for codec in ("2bit", "1bit") for multiple in MULTIPLES]
    return [Recipe("none"), Recipe("fp16"), Recipe("bf16"), *coarse]


# ------------------------------------------------------------------------------------------------ training


def train(name: str, recipe: Recipe, seed: int, rms: float, epochs: int = 0) -> Run:
    """Train from the seed's first weights; `rms` is the gradients' size that the recipe counts in."""
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
    """Cut a batch into the workers' parts."""
    for parts in zip(*(np.array_split(array, WORKERS) for array in batch), strict=True):
        yield Batch(*parts)


def packed_bytes(recipe: Recipe, rms: float, size: int) -> int:
    """Bytes of one pushed tensor."""
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
    """Root mean square of the gradients that a worker pushes in the first epoch, of each tensor and ``all``.

    With the weights as they are at first: it is what a user can measure before the first training.
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


def measure(names: Iterable[str], seeds: int) -> dict[str, Any]:
    """Train everything, as many at a time as there are processors."""
    started, found = time.time(), []
    context = multiprocessing.get_context("spawn")
    os.environ.update(dict.fromkeys(ONE_THREAD, "1"))  # for the children, who have yet to import NumPy
    with ProcessPoolExecutor(len(machine.cpus()), mp_context=context) as pool:
        for name in names:
            size = sizes(name)
            jobs = [
                [pool.submit(train, name, recipe, seed, size["all"]) for seed in range(seeds)]
                for recipe in recipes()
            ]
            found.append({"task": name, "rms": size, "recipes": [_row(job, size["all"]) for job in jobs]})
    return {"machine": machine.describe(), "minutes": (time.time() - started) / 60, "tasks": found}


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


HEAD = [
    "codec",
    "test accuracy",
    "points from none",
    "epoch of 95 %",
    "KB each epoch",
    "MB in all",
    "bytes ÷ none",
]
#: Share of none's final accuracy that counts as nearly there.
NEARLY = 0.95


def report(results: dict[str, Any]) -> str:
    """Write the page."""
    seeds = len(results["tasks"][0]["recipes"][0]["accuracy"])
    parts = [
        "# Training with compressed gradients\n",
        f"{results['machine']}. {results['minutes']:.0f} minutes.\n\n"
        f"{WORKERS} workers, SGD with momentum, {seeds} seeds: mean [lowest-highest] of the test accuracy "
        "at the end, in percent. RMS is the root mean square of the gradients that a worker pushes, before "
        "training: 2bit's threshold, and what 1bit's +1 and -1 stand for, are given in multiples of it. "
        "*Epoch of 95 %*: the first one at which the mean over the seeds is at 95 % of what none ends with. "
        "Bytes are those that all workers push; what they pull is not compressed, and not counted.\n",
        "![accuracy over epochs, over bytes, and over thresholds](convergence.png)\n",
        *tables(results),
    ]
    return "\n".join(parts)


def tables(results: dict[str, Any]) -> list[str]:
    """Lay out each task under a heading."""
    parts = []
    for task in results["tasks"]:
        parts += [f"### {_title(task)}\n", _about(task), markdown(HEAD, rows(task))]
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


def _title(task: dict[str, Any]) -> str:
    return TASKS[task["task"]].name.capitalize()


def _about(task: dict[str, Any]) -> str:
    by_tensor = [size for key, size in task["rms"].items() if key != "all"]
    return (
        f"Gradients are sums over {TASKS[task['task']].batch // WORKERS} examples. "
        f"RMS {task['rms']['all']:.3g}; of single tensors {min(by_tensor):.3g} to {max(by_tensor):.3g}.\n"
    )


def rows(task: dict[str, Any]) -> list[list[str]]:
    """One row for each recipe."""
    none = task["recipes"][0]
    target = NEARLY * final(none)
    found = []
    for recipe in task["recipes"]:
        epochs = len(recipe["accuracy"][0])
        each, ends = recipe["bytes_each_epoch"], [100 * run[-1] for run in recipe["accuracy"]]
        found.append(
            [
                recipe["label"],
                f"{statistics.mean(ends):.2f} [{min(ends):.2f}-{max(ends):.2f}]",
                f"{100 * (final(recipe) - final(none)):+.2f}",
                next((str(at) for at, value in enumerate(means(recipe), 1) if value >= target), "never"),
                f"{each / 1e3:.0f}",
                _megabytes(each * epochs),
                f"1/{none['bytes_each_epoch'] / each:.3g}",
            ]
        )
    return found


def _megabytes(count: int) -> str:
    return f"{count / 1e6:,.0f}" if count >= 1e8 else f"{count / 1e6:.3g}"


def means(recipe: dict[str, Any]) -> list[float]:
    """Mean accuracy over the seeds after each epoch."""
    return [statistics.mean(values) for values in zip(*recipe["accuracy"], strict=True)]


def final(recipe: dict[str, Any]) -> float:
    """Mean accuracy at the end."""
    return means(recipe)[-1]


# ------------------------------------------------------------------------------------------------- picture


def draw(results: dict[str, Any], target: Any) -> None:
    """Draw a row for each task: accuracy over epochs, over bytes, and at the end over the multiple.

    Raises
    ------
    SystemExit
        There is no matplotlib.
    """
    try:
        from matplotlib.backends.backend_agg import FigureCanvasAgg
        from matplotlib.figure import Figure
    except ImportError:
        raise SystemExit("plots need matplotlib: pip install matplotlib") from None
    tasks = results["tasks"]
    figure = Figure(figsize=(15, 4.2 * len(tasks)), layout="constrained")
    FigureCanvasAgg(figure)
    for (epochs, moved, ends), task in zip(figure.subplots(len(tasks), 3, squeeze=False), tasks, strict=True):
        _draw_curves(epochs, moved, task)
        _draw_ends(ends, task)
    figure.savefig(target, dpi=110)


def _draw_curves(epochs: Any, moved: Any, task: dict[str, Any]) -> None:
    for colour, recipe in enumerate(shown(task)):
        middle, runs = means(recipe), recipe["accuracy"]
        numbers = range(1, len(middle) + 1)
        low, high = ([pick(at) for at in zip(*runs, strict=True)] for pick in (min, max))
        style = {"color": f"C{colour}", "label": recipe["label"]}
        epochs.plot(numbers, middle, **style)
        epochs.fill_between(numbers, low, high, alpha=0.15, color=f"C{colour}")
        moved.plot([number * recipe["bytes_each_epoch"] / 1e6 for number in numbers], middle, **style)
    epochs.set(xlabel="epochs", ylabel="test accuracy", title=TASKS[task["task"]].name)
    moved.set(xlabel="MB pushed by all workers", xscale="log")
    for panel in (epochs, moved):
        panel.set_ylim(0.5, 1)
        panel.grid(alpha=0.3)
        panel.legend(fontsize="small")


def shown(task: dict[str, Any]) -> list[dict[str, Any]]:
    """Pick what gets a curve: each codec, the coarse ones with the same multiple in every task."""
    return [recipe for recipe in task["recipes"] if recipe["multiple"] in (0, SHOWN)]


def _draw_ends(panel: Any, task: dict[str, Any]) -> None:
    for codec, colour in (("2bit", "C3"), ("1bit", "C4")):
        tried = [recipe for recipe in task["recipes"] if recipe["codec"] == codec]
        middle = [final(recipe) for recipe in tried]
        ends = [[run[-1] for run in recipe["accuracy"]] for recipe in tried]
        spread = [
            [a - min(e) for a, e in zip(middle, ends, strict=True)],
            [max(e) - a for a, e in zip(middle, ends, strict=True)],
        ]
        multiples = [recipe["multiple"] for recipe in tried]
        panel.errorbar(multiples, middle, spread, marker="o", capsize=3, color=colour, label=codec)
    panel.axhline(final(task["recipes"][0]), color="C0", linestyle="--", label="none")
    panel.set(
        xlabel="threshold (2bit) or unit (1bit) ÷ RMS of the gradients", ylabel="test accuracy at the end"
    )
    panel.set_xscale("log")
    panel.grid(alpha=0.3)
    panel.legend(fontsize="small")


def main(arguments: list[str] | None = None) -> int:
    """Train, print, write."""
    parser = argparse.ArgumentParser(
        prog="python -m bench.convergence", description=__doc__.partition("\n")[0]
    )
    parser.add_argument("--task", choices=list(TASKS), nargs="+", default=list(TASKS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--write", default="", metavar="NAME", help="write bench/results/NAME.md, .json and .png"
    )
    parser.add_argument(
        "--draw", default="", metavar="NAME", help="only draw NAME.png from NAME.json, and stop"
    )
    options = parser.parse_args(arguments)
    if options.draw:
        draw(json.loads((RESULTS / f"{options.draw}.json").read_text()), RESULTS / f"{options.draw}.png")
        return 0
    results = measure(options.task, options.seeds)
    text = report(results)
    print(text)
    if options.write:
        (RESULTS / f"{options.write}.md").write_text(text)
        (RESULTS / f"{options.write}.json").write_text(to_json(results))
        draw(results, RESULTS / f"{options.write}.png")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
