"""Bodies of processes that train with `kvstore.trainer`, and the expected results."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
from references import lcg

import kvstore as kv
from kvstore.trainer import Parameter, Trainer

F = np.float32
SHAPES = {"weight": (3, 4), "bias": (3,), "large": (70_001,)}
GRADIENTS = 100


def values(stream: int, step: int, worker: int, replica: int) -> list[Any]:
    """An array for each parameter."""
    number = stream + 10 * step + 2 * worker + replica
    return [lcg(int(np.prod(shape)), number).reshape(shape) for shape in SHAPES.values()]


def made(replicas: int) -> list[Parameter]:
    """Parameters whose first replica has the same start in every worker."""
    starts = dict(zip(SHAPES, values(0, 0, 0, 0), strict=True))
    return [Parameter(name, [start.copy() for _ in range(replicas)]) for name, start in starts.items()]


def feed(params: list[Parameter], step: int, replicas: Iterable[int], worker: int = 0) -> None:
    """Write the gradients of a step."""
    for replica in replicas:
        for param, gradient in zip(params, values(GRADIENTS, step, worker, replica), strict=True):
            param.grad(replica)[...] = gradient


def by_hand(rule: str, settings: dict[str, Any], steps: int, workers: int, replicas: int) -> list[Any]:
    """Weights of a loop without any store: sums in order, then one update."""
    weights = values(0, 0, 0, 0)
    updater = kv.optimizer.get_updater(kv.optimizer.create(rule, rescale_grad=1 / 8, **settings))
    for step in range(steps):
        for key, weight in enumerate(weights):
            parts = []
            for worker in range(workers):
                part = values(GRADIENTS, step, worker, 0)[key]
                for replica in range(1, replicas):
                    part = part + values(GRADIENTS, step, worker, replica)[key]
                parts.append(part)
            total = parts[0]
            for part in parts[1:]:
                total = total + part
            updater(key, total, weight)
    return weights


def train(name: str, updates: bool, steps: int) -> str:
    """Workers and replicas together have the weights of the loop by hand."""
    store = kv.create(name)
    params = made(replicas=2)
    if store.rank > 0:
        for param in params:
            param.set_data(7 * np.ones(param.shape, F))  # rank 0's values count
    settings = {"learning_rate": 0.05, "wd": 0.01}
    with store:
        trainer = Trainer(params, "adam", settings, kvstore=store, update_on_kvstore=updates)
        for step in range(steps):
            feed(params, step, range(2), store.rank)
            trainer.step(8)
        assert trainer._choice.updates is updates
        expected = by_hand("adam", settings, steps, store.num_workers, 2)
        for param, weight in zip(params, expected, strict=True):
            for replica in param.list_data():
                np.testing.assert_array_equal(replica, weight)
        store.barrier()
    return "trained"


def train_async() -> str:
    """Every push counts once."""
    param = Parameter("w", np.zeros(5, F))
    with Trainer([param], "sgd", {"learning_rate": 1}, kvstore="dist_async") as trainer:
        for _ in range(10):
            param.grad()[:] = -1
            trainer.step(1)
        store = trainer.kvstore
        store.barrier()
        store.pull(0, out=param.data())
        assert (param.data() == 10 * store.num_workers).all()
        store.barrier()
    return "trained"


def settings(name: str, folder: str) -> list[float]:
    """Rates, factors and batch sizes change in all workers."""
    params = [Parameter("a", np.ones(3, F)), Parameter("b", np.ones(3, F))]
    with Trainer(params, "sgd", {"learning_rate": 1}, kvstore=name) as trainer:

        def step(batch_size: float) -> None:
            for param in params:
                param.grad()[:] = 0.5
            trainer.step(batch_size)

        step(1)  # 1 - 1
        trainer.set_learning_rate(0.5)
        step(1)  # - 0.5
        step(2)  # - 0.25
        params[0].lr_mult = 0
        step(1)
        found = [float(param.data()[0]) for param in params]
        assert found == [-0.75, -1.25], found
        trainer.kvstore.barrier()
    return found


def stale(name: str, folder: str) -> list[float]:
    """A worker without a gradient adds nothing, and delays no other worker."""
    param = Parameter("w", np.ones(3, F))
    with Trainer([param], "sgd", {"learning_rate": 1}, kvstore=name) as trainer:
        param.set_grad(np.ones(3, F))
        trainer.step(1)
        if trainer.kvstore.rank == 0:
            param.set_grad(np.ones(3, F))
        trainer.step(1, ignore_stale_grad=True)
        trainer.step(1, ignore_stale_grad=True)
        found: list[float] = param.data().tolist()
        assert found == [-2, -2, -2], found
        trainer.kvstore.barrier()
    return found


def resume(name: str, folder: str) -> list[float]:
    """One worker saves, all load: the states are those of then, and so is the rate."""
    param = Parameter("w", np.ones(3, F))
    path = Path(folder, "states")
    with Trainer([param], "sgd", {"learning_rate": 1, "momentum": 0.5}, kvstore=name) as trainer:

        def step() -> None:
            param.grad()[:] = 0.5
            trainer.step(1)

        step()  # momentum -1, weight 0
        store = trainer.kvstore
        if store.rank == 0:
            trainer.save_states(path)
        store.barrier()
        trainer.set_learning_rate(8)
        step()  # momentum -8.5, weight -8.5
        store.barrier()
        trainer.load_states(path)
        store.barrier()
        assert trainer.learning_rate == 1
        step()  # momentum -1.5, weight -10
        found: list[float] = param.data().tolist()
        assert found == [-10, -10, -10], found
        store.barrier()
    return found


def resume_checkpoint(name: str, updates: bool, folder: str, first: int) -> list[float]:
    """Two steps, and in the next job two more from there, with the weights and the rate of a loop by hand."""
    param = Parameter("w", np.full(3, 4 - first, F))
    settings = {"learning_rate": 1 if first == 0 else 64, "momentum": 0.5}
    options = {"kvstore": name, "update_on_kvstore": updates}
    with (
        kv.CheckpointManager(folder) as manager,
        Trainer([param], "sgd", settings, **options) as trainer,
    ):
        found = trainer.restore_checkpoint(manager)
        assert (found is None) == (first == 0)
        assert trainer.learning_rate == 1
        for step in range(first, first + 2):
            param.grad()[:] = 1
            trainer.step(trainer.kvstore.num_workers)
            assert trainer.optimizer.num_update == step + 1
        momentum, weight = 0.0, 4.0
        for _ in range(first + 2):
            momentum = 0.5 * momentum - 1
            weight += momentum
        assert param.data().tolist() == [weight] * 3, (param.data(), weight)
        trainer.save_checkpoint(manager, first + 2)
        trainer.kvstore.barrier()
    return [weight, momentum]


def rows(name: str, folder: str) -> list[Any]:
    """Row-sparse weights, and row-sparse gradients of dense ones."""
    shape = (6, 2)

    def some(*ids: int) -> kv.RowSparseArray:
        return kv.RowSparseArray(np.ones((len(ids), 2), F), list(ids), shape)

    table = Parameter("table", kv.RowSparseArray.from_dense(np.ones(shape, F)), some(0))
    dense = Parameter("dense", np.ones(shape, F), some(0))
    with Trainer([table, dense], "sgd", {"learning_rate": 1}, kvstore=name) as trainer:
        trainer._prepare_store()
        rank = trainer.kvstore.rank
        for param in (table, dense):
            param.set_grad(some(rank, 4))
        trainer.step(1)
        found = [table.row_sparse_data([0, 1, 2, 4]).data[:, 0].tolist(), dense.data()[:, 0].tolist()]
        assert found == [[0, 0, 1, -1], [0, 0, 1, 1, -1, 1]], found
        trainer.kvstore.barrier()
    return found


def one_after_the_other(name: str, folder: str) -> list[Any]:
    """All of these in one job, with a store for each."""
    return [body(name, folder) for body in (settings, stale, resume, rows)]


def other_settings(what: str, check_every: int) -> str:
    """Worker 1 has another rate from the start, or another batch size in the third step."""
    with kv.create("shared") as store:
        differs = store.rank == 1
        params = made(1)
        rate = 0.2 if differs and what == "rate" else 0.1
        options: dict[str, Any] = {"update_on_kvstore": False, "check_every": check_every}
        trainer = Trainer(params, "sgd", {"learning_rate": rate}, kvstore=store, **options)
        steps = 0
        try:
            for step in range(4):
                feed(params, step, [0], store.rank)
                trainer.step(3 if differs and what == "batch" and step == 2 else 4)
                steps += 1
        except kv.ConfigError as error:
            store.barrier()
            return f"after {steps}: {error}"
        return f"after {steps}"
