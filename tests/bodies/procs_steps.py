"""What workers do that make whole steps, until one of them is killed in the middle of one."""

from __future__ import annotations

import os
import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from histories import deaths
from jobs import hear, tell
from own_rules import Added
from references import Array
from safetensors.numpy import load_file

import kvstore as kv
from kvstore.optimizer import states

F = np.float32
#: One slice, and several on all servers; in the shared store a small key, and one of several chunks.
SHAPES = {"bias": (5,), "table": (3_001,), "weight": (20_001,)}
SLICE_BYTES = 1 << 14
RULES = ["sums", "sgd", "momentum", "adam", "master", "whole", "scheduled"]
STYLES = ["push and pull", "pull in it", "pushpull", "ahead", "one call"]


def rule_of(name: str) -> Any:
    """Make an optimizer; None: pushes replace."""
    if name == "scheduled":
        schedule = kv.optimizer.lr_scheduler.FactorScheduler(3, 0.9, base_lr=0.5)
        return kv.optimizer.SGD(learning_rate=0.5, momentum=0.9, lr_scheduler=schedule)
    made = {
        "sgd": lambda: kv.optimizer.SGD(learning_rate=0.5),
        "momentum": lambda: kv.optimizer.SGD(learning_rate=0.5, momentum=0.9),
        "adam": lambda: kv.optimizer.Adam(learning_rate=0.1),
        "master": lambda: kv.optimizer.SGD(learning_rate=0.5, momentum=0.9, multi_precision=True),
        "whole": Added,
    }
    return made[name]() if name in made else None


class Steps:
    """Steps of all workers of a job, and the result of a store of one process for the same gradients."""

    def __init__(self, store: Any, rule: str, style: str, folder: str) -> None:
        self.store, self.style = store, style
        self.dtype = np.dtype(np.float16 if rule == "master" else F)
        self.local = kv.create("local", processes=1)
        self.folder = Path(folder)
        self.t = 0
        self.outs = {key: np.empty(shape, self.dtype) for key, shape in SHAPES.items()}
        self.updates = rule != "sums"
        self.after: dict[int, tuple[dict[str, Array], Any]] = {}  # values and states, by step
        for one in (self.store, self.local):
            one.init(list(SHAPES), [np.ones(shape, self.dtype) for shape in SHAPES.values()])
            if self.updates:
                one.set_optimizer(rule_of(rule))
        self._note()

    def gradient(self, key: str, rank: int) -> Array:
        """The gradients that a worker pushes in this step; sums of them are exact."""
        return np.full(SHAPES[key], (self.t * 3 + rank * 7 + len(key)) % 64, self.dtype)

    def step(self) -> None:
        """Make one step, which the local store makes before."""
        self.t += 1
        workers = range(self.store.num_workers)
        for key in SHAPES:
            self.local.push(key, [self.gradient(key, rank) for rank in workers])
        self._note()
        gradients = {key: self.gradient(key, self.store.rank) for key in SHAPES}
        with self.store.step():
            if self.style == "one call":
                self.store.pushpull(list(SHAPES), list(gradients.values()), out=list(self.outs.values()))
            for key, gradient in gradients.items() if self.style != "one call" else ():
                self._push(key, gradient)
        if self.style == "push and pull":
            self.store.pull(list(SHAPES), out=list(self.outs.values()))
        if self.style != "ahead":
            wanted = self.after[self.t][0]
            assert all((out == wanted[key]).all() for key, out in self.outs.items()), f"step {self.t}"

    def _push(self, key: str, gradient: Array) -> None:
        if self.style == "pushpull":
            self.store.pushpull(key, gradient, out=self.outs[key])
            return
        self.store.push(key, gradient)
        if self.style == "pull in it":
            self.store.pull(key, out=self.outs[key])

    def _note(self) -> None:
        path = self.folder / f"local-{self.store.rank}-{os.getpid()}.safetensors"
        values = {key: self.local.view(key).copy() for key in SHAPES}
        self.after[self.t] = values, self._states(self.local, path) if self.updates else None
        self.after.pop(self.t - 6, None)

    def _states(self, store: Any, path: Path) -> Any:
        """The states of a store by way of a file: arrays, counts, and the schedule's time."""
        store.save_optimizer_states(path)
        content = states.read_states(str(path))
        arrays = {name: array for name, array in load_file(path).items() if array.any()}
        return arrays, {key: n for key, n in content.counts.items() if n}, content.num_update

    def saved(self) -> list[int]:
        """Save, and return the step of the values and that of the states; every element is compared."""
        path = self.folder / f"saved-{self.store.rank}.safetensors"
        self.store.save(path)
        values = load_file(path)
        found = [t for t, (wanted, _) in self.after.items() if _same_values(values, wanted)]
        assert len(found) == 1, (found, self.t, {key: np.unique(one)[:5] for key, one in values.items()})
        if not self.updates:
            return found
        kept = self._states(self.store, path.with_suffix(".states"))
        same = [t for t, (_, wanted) in self.after.items() if _same_states(kept, wanted)]
        assert len(same) == 1, (same, found, kept[1:], [one[1][1:] for one in self.after.values()])
        return found + same


def _same_values(values: dict[str, Array], wanted: dict[str, Array]) -> bool:
    return all((values[f"value/{key}"] == value).all() for key, value in wanted.items())


def _same_states(kept: Any, wanted: Any) -> bool:
    arrays = {name: array.reshape(-1) for name, array in kept[0].items()}
    same = arrays.keys() == wanted[0].keys() and kept[1:] == wanted[1:]
    return same and all((arrays[name] == array.reshape(-1)).all() for name, array in wanted[0].items())


def until_lost(name: str, rule: str, style: str, seed: int, victim: int, how: str, folder: str) -> Any:
    """Make steps until the victim is killed, by itself or by the test; then return the saved values."""
    options = {"slice_bytes": SLICE_BYTES} if name != "shared" else {}
    store = kv.create(name, **options)
    steps = Steps(store, rule, style, folder)
    store.barrier()
    tell("ready")
    draw = random.Random(seed)
    last = draw.randrange(1, 12) if store.rank == victim and how != "killed" else -1
    try:
        while True:
            if steps.t + 1 == last:
                deaths.in_a_step(how, draw.random() * 0.006)
            steps.step()
    except kv.PeerLostError as error:
        assert error.role == "worker" and error.rank == victim, error
    found = steps.saved()
    assert steps.saved() == found
    store.close()
    return found


def goes_ahead(dies: str) -> dict[str, float]:
    """Worker 0 makes steps ahead of worker 1, which dies between two, or with an array that was to be read.

    Returns the values that worker 0 reads then, each key by itself.
    """
    store = kv.create("shared")
    outs = {key: np.empty(20_001 if key == "b" else 5, F) for key in "abc"}
    store.init(list(outs), [np.zeros_like(out) for out in outs.values()])
    _push_all(store, outs, "abc", 1)
    store.pull(list(outs), out=list(outs.values()))
    if dies == "between":
        _push_all(store, outs, "c", 2)
        store.pull("c", out=outs["c"])
    if store.rank == 0:
        _push_all(store, outs, "ab", 3)
    store.barrier()
    if store.rank == 1:
        _dies(store, outs, dies)
    if dies == "between":  # no worker has noticed yet
        _push_all(store, outs, "bc", 4)
    tell("ahead")
    hear()
    with pytest.raises(kv.PeerLostError):
        if dies == "in it":
            _push_all(store, outs, "bc", 4)
        store.pull(["b", "c"], out=[outs["b"], outs["c"]])
    for key, out in outs.items():
        store.pull(key, out=out)
    store.close()
    return {key: float(out[0]) for key, out in outs.items()}


def _push_all(store: Any, outs: dict[str, Array], keys: str, value: float) -> None:
    with store.step():
        for key in keys:
            store.push(key, np.full_like(outs[key], value))


def _dies(store: Any, outs: dict[str, Array], dies: str) -> None:
    """Wait for the end; "in it": when the others may read this process's array, and have not."""
    from kvstore.stores.shared.waiting import RoundWaiter

    def end(*arguments: Any, **options: Any) -> None:
        tell("ahead")
        hear()

    if dies == "between":
        end()
    RoundWaiter.complete = end  # type: ignore[method-assign]
    with store.step():
        for key in "ab":
            store.pushpull(key, np.full_like(outs[key], 3), out=outs[key])
