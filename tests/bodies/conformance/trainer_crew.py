"""Programs of `kvstore.trainer.Trainer`, and the body of a worker that plays them."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import jobs
import numpy as np

import kvstore as kv
from kvstore.settings.launchers import detect_placement
from kvstore.trainer import Parameter, Trainer

F = np.float32
LAST = 1
SHAPES = {"a": (6, 5), "b": (5,), "z": (5, 2)}


class Play:
    """One run of one program: alone, or with a store that sums or updates."""

    def __init__(self, way: dict[str, Any], size: int, store: kv.KVStore | None, folder: str) -> None:
        self.way, self.size, self.store, self.folder = way, size, store, folder
        self.rank = 0 if store is None else detect_placement().rank
        self.ranks = range(size) if store is None else range(self.rank, self.rank + 1)

    @property
    def is_alone(self) -> bool:
        """Whether this process plays all workers."""
        return self.store is None

    def parameters(self, dtype: Any = F) -> list[Parameter]:
        """Return the parameters; the first gradient is computed before a store has shared them."""
        random = np.random.default_rng(1)
        return [Parameter(name, random.normal(0, 0.5, shape).astype(dtype)) for name, shape in SHAPES.items()]

    def trainer(self, params: Any, rule: Any = "sgd", **settings: Any) -> Trainer:
        """Return the trainer of a program."""
        settings = {"learning_rate": 0.2, **settings}
        updates = None if self.store is None else self.way["updates"]
        return Trainer(params, rule, settings, kvstore=self.store, update_on_kvstore=updates)

    def feed(
        self, params: list[Parameter], step: int, which: Callable[[int], bool] = lambda rank: True
    ) -> None:
        """Write this worker's gradients, which depend on the weights; alone, the sums over all."""
        for number, param in enumerate(params):
            if param.grad_req == "null":
                continue
            parts = [self._gradient(number, param, rank, step) for rank in self.ranks if which(rank)]
            _write(param, sum(parts[1:], parts[0]))

    def _gradient(self, number: int, param: Parameter, rank: int, step: int) -> Any:
        random = np.random.default_rng([number, rank, step])
        weight = np.asarray(param.data(), np.float64)
        return np.tanh(weight) * random.normal(0, 1, param.shape) + random.normal(0, 1, param.shape)


def _write(param: Parameter, value: Any) -> None:
    if isinstance(param.grad(), np.ndarray):
        param.grad()[...] = value
    else:
        import torch

        param.grad().copy_(torch.from_numpy(value))


def numbers(*params: Any) -> list[list[float]]:
    """Return the values to compare."""
    return [[float(x) for p in some for x in np.asarray(p.data(), np.float64).ravel()] for some in params]


def _loop(play: Play, params: Any = None, rule: str = "sgd", steps: int = 4, **settings: Any) -> Any:
    params = play.parameters() if params is None else params
    trainer = play.trainer(params, rule, **settings)
    for step in range(steps):
        play.feed(params, step)
        trainer.step(2 * play.size)
    return numbers(params)


# ---------------------------------------------------------------------------------------------- programs


def sgd(play: Play) -> Any:
    return _loop(play, momentum=0.9, wd=0.01)


def adam(play: Play) -> Any:
    return _loop(play, rule="adam", learning_rate=0.05)


def clipped_by_the_rule(play: Play) -> Any:
    return _loop(play, clip_gradient=0.05)


def tensors_of_torch(play: Play) -> Any:
    """Weights and gradients are tensors of torch."""
    import torch

    made = [torch.from_numpy(p.data()) for p in play.parameters()]
    params = [Parameter(n, one, torch.zeros_like(one)) for n, one in zip(SHAPES, made, strict=True)]
    return _loop(play, params, momentum=0.9)


def float16(play: Play) -> Any:
    """Weights of 16 bits, with float32 masters."""
    return _loop(play, play.parameters(np.float16), momentum=0.9, multi_precision=True)


def clipped_between(play: Play) -> Any:
    """allreduce_grads, a norm over all gradients, update."""
    params = play.parameters()
    trainer = play.trainer(params)
    for step in range(4):
        play.feed(params, step)
        trainer.allreduce_grads()
        norm = np.sqrt(sum(float(np.square(p.grad()).sum()) for p in params))
        for param in params:
            param.grad()[...] *= min(1.0, 1.0 / norm)
        trainer.update(1)
    return numbers(params)


def batch_sizes(play: Play) -> Any:
    """The last batch is smaller."""
    params = play.parameters()
    trainer = play.trainer(params)
    for step, size in enumerate((8, 8, 2)):
        play.feed(params, step)
        trainer.step(size)
    return numbers(params)


def rate_changes(play: Play) -> Any:
    params = play.parameters()
    trainer = play.trainer(params, momentum=0.9)
    for step in range(4):
        trainer.set_learning_rate(0.2 / (step + 1))
        play.feed(params, step)
        trainer.step(4)
    return numbers(params)


def factors(play: Play) -> Any:
    """lr_mult and wd_mult of a parameter change while training."""
    params = play.parameters()
    trainer = play.trainer(params, wd=0.1)
    for step in range(4):
        params[0].lr_mult, params[2].wd_mult = 1.0 / (step + 1), 0.5 * step
        play.feed(params, step)
        trainer.step(4)
    return numbers(params)


def frozen(play: Play) -> Any:
    params = play.parameters()
    params[1] = Parameter("b", np.zeros(5, F), grad_req="null")
    return _loop(play, params)


def states(play: Play) -> Any:
    """States are saved and loaded between two steps."""
    params = play.parameters()
    trainer = play.trainer(params, "adam", learning_rate=0.05)
    for step in range(4):
        if step == 2:
            path = f"{play.folder}/{play.way['kind']}-{play.rank}.states"
            trainer.save_states(path)
            if play.store is not None:
                play.store.barrier()
            trainer.load_states(path)
        play.feed(params, step)
        trainer.step(4)
    return numbers(params)


def stale_on_all(play: Play) -> Any:
    """A gradient was not written since the last step, and the program does not say that it may be old."""
    params = play.parameters()
    trainer = play.trainer(params)
    for param in params:
        param.fresh = [True]
    play.feed(params, 0)
    trainer.step(4)
    trainer.step(4)
    return numbers(params)


def stale_on_one(play: Play) -> Any:
    """One worker has no new gradient of a parameter; ignore_stale_grad=True."""
    params = play.parameters()
    trainer = play.trainer(params)
    for step in range(3):
        for number, param in enumerate(params):
            old = step == 1 and number == 0
            parts = [
                play._gradient(number, param, rank, step) for rank in play.ranks if not (old and rank == LAST)
            ]
            if parts:
                param.set_grad(sum(parts[1:], parts[0]).astype(F))
            else:
                param.fresh = [False]
        trainer.step(4, ignore_stale_grad=True)
    return numbers(params)


def rows(play: Play) -> Any:
    """Row-sparse gradients: other rows on each worker."""
    table = np.random.default_rng(1).normal(0, 1, (8, 3)).astype(F)
    param = Parameter("table", table, kv.RowSparseArray.zeros((8, 3), F))
    trainer = play.trainer([param])
    for step in range(3):
        total = np.zeros((8, 3), F)
        for rank in play.ranks:
            total[[rank, rank + 2 + step]] += 1.0 + rank
        ids = np.flatnonzero(total.any(1))
        param.set_grad(kv.RowSparseArray(total[ids], ids, (8, 3)))
        trainer.step(2)
    return numbers([param])


def skipped_by_all(play: Play) -> Any:
    params = play.parameters()
    trainer = play.trainer(params)
    for step in range(4):
        play.feed(params, step)
        if step != 1:
            trainer.step(4)
    return numbers(params)


def skipped_by_one(play: Play) -> Any:
    params = play.parameters()
    trainer = play.trainer(params)
    for step in range(4):
        play.feed(params, step)
        if not (step == 1 and play.rank == LAST):
            trainer.step(4)
    return numbers(params)


def rate_differs(play: Play) -> Any:
    return _loop(play, learning_rate=0.1 * (1 + play.rank))


def shapes_differ(play: Play) -> Any:
    return _loop(play, [Parameter("w", np.ones((2, 3 + play.rank), F))])


PROGRAMS = {
    program.__name__: program
    for program in (
        sgd, adam, clipped_by_the_rule, tensors_of_torch, float16, clipped_between, batch_sizes, rate_changes,
        factors, frozen, states, stale_on_all, stale_on_one, rows, skipped_by_all, skipped_by_one,
        rate_differs, shapes_differ,
    )
}  # fmt: skip


def play_all(way: dict[str, Any], size: int, folder: str) -> str:
    """Play the programs that the test names, until it says that there are no more."""
    while (name := jobs.hear(3600)) != "end":
        jobs.tell(f"{name} " + json.dumps(_attempt(name, way, size, folder)))
    return "ended"


def _attempt(name: str, way: dict[str, Any], size: int, folder: str) -> Any:
    found: dict[str, Any] = {}
    try:
        if way["kind"] == "alone":
            return {"found": PROGRAMS[name](Play(way, size, None, folder))}
        with kv.create(way["store"], group=name) as store:
            try:
                return {"found": PROGRAMS[name](Play(way, size, store, folder))}
            except Exception as error:
                found = {"error": f"{type(error).__name__}: {error}"}
    except Exception as error:
        found = found or {"error": f"{type(error).__name__}: {error}"}
    return found
