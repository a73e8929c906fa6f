"""``kvstore demo``: data-parallel training of a small network on handwritten digits, through a store.

Each replica of the network computes the gradients of its shard of a batch; the store sums them and updates
the weights. A batch is cut into ``workers * replicas`` shards in rank order, and a store sums in that order:
four replicas in one process and four processes with one replica get the same gradients.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

import kvstore as kv
from kvstore.errors import CapabilityError, ConfigError, MissingBackendError, WorkerError
from kvstore.settings import launchers, roles
from kvstore.store_kinds import STORES

Array = npt.NDArray[np.float32]
Labels = npt.NDArray[np.int64]
Tensors = dict[str, Array]

#: Images of one step, over all replicas of all workers.
BATCH = 64
#: Settings for this network; other optimizers run with their defaults.
TUNED: dict[str, dict[str, Any]] = {
    "sgd": {"learning_rate": 0.1, "momentum": 0.9},
    "nag": {"learning_rate": 0.1, "momentum": 0.9},
    "adam": {"learning_rate": 0.005},
    "lamb": {"learning_rate": 0.01},
    "lars": {"learning_rate": 10.0},
}
_WIDTHS = (64, 128, 10)  # an image of 8 x 8 pixels, the hidden layer, ten classes
_DIGITS_FILE = "datasets/data/digits.csv.gz"  # in the folder of scikit-learn
_TEST_SHARE = 5  # one image in five is for the test


class DigitImages(NamedTuple):
    """Images ``(n, 64)`` in 0..1 and labels ``(n,)`` in 0..9, for training and for the test."""

    images: Array
    labels: Labels
    test_images: Array
    test_labels: Labels


@dataclass(frozen=True)
class TrainingSettings:
    """Settings of a training run; with ``lr=None`` the peak learning rate depends on the optimizer."""

    store: str = "local"
    optimizer: str = "sgd"
    replicas: int = 4
    epochs: int = 30
    seed: int = 0
    lr: float | None = None


class TrainingResult(NamedTuple):
    """The result of a run: test accuracy in 0..1, seconds and their parts, a digest of the weights."""

    accuracy: float
    seconds: float
    parts: dict[str, float]
    weights: str


# ----------------------------------------------------------------------------------- the data and the network


def load_digits() -> DigitImages:
    """Return scikit-learn's 1797 images in a split that does not depend on the seed of the user.

    They are read from its file if it is there: the import of scikit-learn needs a second.
    """
    sklearn = find_spec("sklearn")
    file = Path(str(sklearn.origin if sklearn else "")).parent / _DIGITS_FILE
    if file.exists():
        numbers = np.loadtxt(file, delimiter=",")
    else:
        from sklearn import datasets

        numbers = np.column_stack(datasets.load_digits(return_X_y=True))
    images = np.ascontiguousarray(numbers[:, :-1] / 16, dtype=np.float32)
    labels = np.asarray(numbers[:, -1], dtype=np.int64)
    order = np.random.default_rng(0).permutation(len(labels))
    test, rest = np.split(order, [len(labels) // _TEST_SHARE])
    return DigitImages(images[rest], labels[rest], images[test], labels[test])


def initial_weights(seed: int) -> Tensors:
    """Return He-normal weights and zero biases of two layers: ``fc1.weight``, ``fc1.bias``, ..."""
    random = np.random.default_rng(seed)
    tensors: Tensors = {}
    for layer, (inputs, outputs) in enumerate(itertools.pairwise(_WIDTHS), 1):
        normal = random.standard_normal((inputs, outputs), dtype=np.float32)
        tensors[f"fc{layer}.weight"] = np.float32(np.sqrt(2 / inputs)) * normal
        tensors[f"fc{layer}.bias"] = np.zeros(outputs, np.float32)
    return tensors


def _activations(weights: Tensors, images: Array) -> tuple[Array, Array]:
    """Return the values of the hidden layer, and the logits."""
    hidden = np.maximum(images @ weights["fc1.weight"] + weights["fc1.bias"], 0)
    return hidden, hidden @ weights["fc2.weight"] + weights["fc2.bias"]


def sum_gradients(weights: Tensors, images: Array, labels: Labels) -> Tensors:
    """Return the gradient of the sum of the cross-entropy over the images.

    Sums of the shards of a batch add up to that of the batch. The optimizer divides (``rescale_grad``).
    """
    hidden, logits = _activations(weights, images)
    error = np.exp(logits - logits.max(axis=1, keepdims=True))
    error /= error.sum(axis=1, keepdims=True)
    error[np.arange(len(labels)), labels] -= 1
    first = (error @ weights["fc2.weight"].T) * (hidden > 0)
    return {
        "fc2.weight": hidden.T @ error,
        "fc2.bias": error.sum(axis=0),
        "fc1.weight": images.T @ first,
        "fc1.bias": first.sum(axis=0),
    }


def label_accuracy(weights: Tensors, images: Array, labels: Labels) -> float:
    """Return the share of the images with the largest logit at their label."""
    return float((_activations(weights, images)[1].argmax(axis=1) == labels).mean())


def digest_of(weights: Tensors) -> str:
    """Return twelve hexadecimal digits that differ if one bit of the weights differs."""
    sha = hashlib.sha256()
    for name, array in sorted(weights.items()):
        sha.update(name.encode())
        sha.update(array.tobytes())
    return sha.hexdigest()[:12]


# ----------------------------------------------------------------------------------------------- the training


class PartTimes(dict[str, float]):
    """Seconds by the name of a part of the training."""

    @contextlib.contextmanager
    def measure(self, name: str) -> Iterator[None]:
        """Add the time inside the ``with`` block to `name`."""
        start = time.perf_counter()
        yield
        self[name] = self.get(name, 0.0) + time.perf_counter() - start


def scheduled_optimizer(settings: TrainingSettings, updates: int) -> kv.optimizer.Optimizer:
    """Return the optimizer with a cosine schedule: a warm-up, then down to a hundredth of the peak."""
    options = TUNED.get(settings.optimizer.lower(), {})
    if settings.lr is not None:
        options = {**options, "learning_rate": settings.lr}
    peak = kv.optimizer.create(settings.optimizer, **options).learning_rate
    schedule = kv.lr_scheduler.CosineScheduler(
        max_update=updates, base_lr=peak, final_lr=peak / 100, warmup_steps=updates // 20
    )
    options = {**options, "lr_scheduler": schedule}
    return kv.optimizer.create(settings.optimizer, rescale_grad=1 / BATCH, **options)


def train(
    store: kv.KVStore, settings: TrainingSettings, data: DigitImages, show: Callable[[float], None]
) -> TrainingResult:
    """Train with a new store; `show` is called after each epoch with the test accuracy."""
    replicas = [initial_weights(settings.seed) for _ in range(settings.replicas)]
    steps = len(data.labels) // BATCH
    store.init(list(replicas[0]), list(replicas[0].values()))
    store.set_optimizer(scheduled_optimizer(settings, steps * settings.epochs))
    times, accuracy, start = PartTimes(), 0.0, time.perf_counter()
    random = np.random.default_rng(settings.seed)
    for _ in range(settings.epochs):
        order = random.permutation(len(data.labels))[: steps * BATCH]
        for batch in np.split(order, steps):
            train_step(store, replicas, data, batch, times)
        with times.measure("evaluation"):
            accuracy = label_accuracy(replicas[0], data.test_images, data.test_labels)
        show(accuracy)
    return TrainingResult(accuracy, time.perf_counter() - start, dict(times), digest_of(replicas[0]))


def train_step(
    store: kv.KVStore, replicas: list[Tensors], data: DigitImages, batch: Labels, times: PartTimes
) -> None:
    """Train with one batch: each replica computes the gradient of its shard; push and pull all keys.

    `pull` would wait for the slowest worker too; the barrier separates that time from that of the pull.
    """
    names = list(replicas[0])
    first = store.rank * len(replicas)
    shards = np.array_split(batch, store.num_workers * len(replicas))[first : first + len(replicas)]
    with times.measure("forward + backward"):
        parts = [
            sum_gradients(weights, data.images[shard], data.labels[shard])
            for weights, shard in zip(replicas, shards, strict=True)
        ]
    with times.measure("push"):
        store.push(names, [[part[name] for part in parts] for name in names])
    if store.num_workers > 1 and "async" not in store.type:  # only then rounds wait for all workers
        with times.measure("waiting for others"):
            store.barrier()
    with times.measure("pull"):
        store.pull(names, out=[[weights[name] for weights in replicas] for name in names])


# ------------------------------------------------------------------------------------------------ the command


def start_demo(settings: TrainingSettings, workers: int, servers: int | None = None) -> int:
    """Train in `workers` processes; return an exit code.

    With `servers` None a store on servers gets one, unless the variables of this process name some.
    ConfigError: the store has no servers, or does not connect several processes. MissingBackendError: an
    extra is not installed. KVStoreError: a worker has failed.
    """
    kind = STORES.get(settings.store.lower())
    on_servers = kind is not None and kind.on_servers
    if servers and not on_servers:
        raise ConfigError(
            f"--servers is for stores on servers, such as 'dist_sync'; {settings.store!r} has no servers"
        )
    if kind is not None and kind.one_process and not kind.joins and workers > 1:
        raise ConfigError(
            f"store {settings.store!r} is for one process, so {workers} processes would train separately: "
            f"use --store shared or dist_sync, or one process with --replicas {workers}"
        )
    if missing := next((name for name in ("sklearn", "rich") if find_spec(name) is None), None):
        raise MissingBackendError(
            f"kvstore demo needs the module {missing!r}; install it: pip install 'kvstore-train[demo]'"
        )
    scheduled_optimizer(settings, updates=1)
    if on_servers and (servers or not roles.signs()):
        return _start_with_servers(settings, workers, servers or 1)
    if workers == 1:
        train_and_report(settings)
        return 0
    try:
        kv.spawn(train_and_report, workers, (settings,))
    except WorkerError as error:  # without the traceback of kvstore
        first, *_, last = str(error).splitlines()
        raise kv.KVStoreError(first if first == last else f"{first} {last}") from error
    return 0


def _start_with_servers(settings: TrainingSettings, workers: int, servers: int) -> int:
    from kvstore.launch.run import run
    from kvstore.launch.service import Service

    options = [f"--{name}={value}" for name, value in asdict(settings).items() if value is not None]
    command = [sys.executable, "-m", "kvstore.launch", "demo", *options]
    return run(command, workers, prefix=False, service=Service(servers))


def train_and_report(settings: TrainingSettings) -> None:
    """Train as one worker; the first worker prints the progress and the result.

    CapabilityError is raised if the store cannot run an optimizer, or does not connect all workers.
    """
    with _open_store(settings.store) as store:
        first = store.rank == 0
        with _progress(settings, visible=first) as show:
            result = train(store, settings, load_digits(), show)
        if first:
            place, part = launchers.detect_placement(), roles.find()
            servers = part.num_servers + 1 if part and place.size == place.local_size else 0
            report(settings, result, store.num_workers, place.local_size + servers)


def _open_store(name: str) -> kv.KVStore:
    store = kv.create(name)
    if isinstance(store, kv.KVStore):
        complete = store.num_workers >= launchers.detect_placement().size
        if complete and store.is_capable("optimizer"):
            return store
        store.close()
        if not complete:
            raise CapabilityError(
                f"store {name!r} does not connect all processes of the demo; try 'shared' or 'dist_sync'"
            )
    raise CapabilityError(f"store {name!r} cannot run an optimizer, which the demo needs; try 'local'")


@contextlib.contextmanager
def _progress(settings: TrainingSettings, visible: bool) -> Iterator[Callable[[float], None]]:
    """Show a bar over the epochs on stderr; yields a function that advances it and gets the accuracy."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TimeElapsedColumn

    text = "epochs, test accuracy {task.fields[accuracy]:.3f}"
    columns = ("{task.description}", BarColumn(), MofNCompleteColumn(), text, TimeElapsedColumn())
    bar = Progress(*columns, console=Console(stderr=True), disable=not visible)
    task = bar.add_task("training", total=settings.epochs, accuracy=0.0)

    def show(accuracy: float) -> None:
        bar.start()  # not before: so an error before the first epoch is the only line
        bar.update(task, advance=1, accuracy=accuracy)

    try:
        yield show
    finally:
        if bar.live.is_started:
            bar.stop()


def report(settings: TrainingSettings, result: TrainingResult, workers: int, processes: int) -> None:
    """Print accuracy, speed, the digest of the weights, and the parts of the time, on stdout."""
    from rich.console import Console
    from rich.table import Table

    console, seconds = Console(highlight=False), result.seconds
    size = f"{settings.replicas} replicas" if workers == 1 else f"{workers} workers of {settings.replicas}"
    console.print(f"{settings.optimizer} on store {settings.store!r}, {size}")
    console.print(f"test accuracy      {result.accuracy:.4f}")
    console.print(f"epochs per second  {settings.epochs / seconds:.1f}")
    console.print(f"weights            {result.weights}")
    table, last = Table("time spent in", "seconds", "share"), "loop itself"  # such as cutting batches
    rows = {**result.parts, last: seconds - sum(result.parts.values()), "total": seconds}
    for name, part in rows.items():
        table.add_row(name, f"{part:.3f}", f"{part / seconds:.1%}", end_section=name == last)
    console.print(table)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    if processes > cores:
        these = "a core" if cores == 1 else f"{cores} cores"
        console.print(f"{processes} processes share {these}: while some compute, the others wait for a core")
