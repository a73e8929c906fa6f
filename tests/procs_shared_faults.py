"""What the processes of a job do while one of them is killed, stopped, starved or interrupted."""

from __future__ import annotations

import hashlib
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import tell
from references import Array

import kvstore as kv

F = np.float32
SHAPES = {
    "small": (101,),
    "large": (60_001,),
    "home": (70_003,),
    "slot": (40_009,),
    "one": (7, 3),
    "two": (33_000,),
}
TABLE = (50, 3)
RATE, MOMENTUM = 0.5, 0.5


class Traffic:
    """Rounds over keys of every kind in two stores, whose values say how many rounds they have seen.

    In round t every worker pushes ``t * (rank + 1)``, so that a sum is ``t`` times a constant; the second
    store has an optimizer, whose weights are compared with those of a local one.
    """

    def __init__(self, seed: int, **options: Any) -> None:
        self.random = random.Random(seed)  # the same on all workers
        self.sums = kv.create("shared", **options)
        self.weights = kv.create("shared", **options)
        self.rank, self.n = self.sums.rank, self.sums.num_workers
        self.t = 0
        self.stores = [self.sums, self.weights]
        for store in self.stores:
            store.init(list(SHAPES), [np.zeros(shape, F) for shape in SHAPES.values()])
            store.init("rows", kv.RowSparseArray.zeros(TABLE))
        self.weights.set_optimizer(kv.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM))
        self.homes = [store.empty("home") for store in self.stores]
        self.outs = {key: np.empty(shape, F) for key, shape in SHAPES.items()}

    def part(self, key: str) -> Array:
        return np.full(SHAPES[key], self.t * (self.rank + 1), F)

    def rows(self, rank: int, t: int) -> kv.RowSparseArray:
        ids = sorted({t % TABLE[0], (3 * t + rank) % TABLE[0], rank})
        return kv.RowSparseArray(np.full((len(ids), TABLE[1]), t * (rank + 1), F), ids, TABLE)

    def round(self) -> None:
        """One round of every key in both stores, in an order that is the same everywhere."""
        self.t += 1
        moves = [(i, move) for i in range(2) for move in ("small", "large", "home", "slot", "pair", "rows")]
        self.random.shuffle(moves)
        for i, move in moves:
            getattr(self, f"_{move}")(self.stores[i], self.homes[i])

    def _small(self, store: Any, home: Array) -> None:
        store.pushpull("small", self.part("small"), out=self.outs["small"])
        self.check(store, "small")

    def _large(self, store: Any, home: Array) -> None:
        value = self.part("large")
        store.pushpull("large", value)
        self.outs["large"][...] = value
        self.check(store, "large")

    def _home(self, store: Any, home: Array) -> None:
        home[...] = self.part("home")
        store.pushpull("home", home)
        self.outs["home"][...] = home
        self.check(store, "home")

    def _slot(self, store: Any, home: Array) -> None:
        store.push("slot", self.part("slot"))
        store.pull("slot", out=self.outs["slot"])
        self.check(store, "slot")

    def _pair(self, store: Any, home: Array) -> None:
        keys = ["one", "two"]
        store.pushpull(keys, [self.part(key) for key in keys], out=[self.outs[key] for key in keys])
        for key in keys:
            self.check(store, key)

    def _rows(self, store: Any, home: Array) -> None:
        store.push("rows", self.rows(self.rank, self.t))
        out = kv.RowSparseArray.zeros(TABLE)
        store.row_sparse_pull("rows", out=out, row_ids=np.arange(10))

    def check(self, store: Any, key: str) -> None:
        if store is self.sums:
            want = self.t * self.n * (self.n + 1) // 2
            got = self.outs[key]
            assert (got == want).all(), f"key {key!r}, round {self.t}: {np.unique(got)} instead of {want}"

    # --------------------------------------------------------------------------------------- after the end

    def value(self, store: Any, key: str) -> Array:
        store.pull(key, out=self.outs[key])
        return self.outs[key]

    def report(self, folder: str) -> dict[str, Any]:
        """Rounds that the values have seen, after checking that each is that of one complete round."""
        seen: dict[str, int] = {}
        digest = hashlib.blake2b(digest_size=8)
        expected = list(self.trajectory(self.t + 1))
        for i, store in enumerate(self.stores):
            for key in SHAPES:
                value = self.value(store, key)
                digest.update(value.tobytes())
                assert (value == value.flat[0]).all(), f"store {i}, key {key!r}: {np.unique(value)}, {self.t}"
                first = float(value.flat[0])
                known = [t * self.n * (self.n + 1) / 2 for t in range(self.t + 2)] if i == 0 else expected
                assert first in known, f"store {i}, key {key!r}: {first} is of no round, {self.t}"
                seen[f"{i} {key}"] = known.index(first)
                assert self.t - 2 <= seen[f"{i} {key}"] <= self.t, (seen, self.t)
            table = np.empty(TABLE, F)
            store.pull("rows", out=table)
            digest.update(table.tobytes())
            if i == 0:
                seen["0 rows"] = self.round_of_rows(table)
            path = Path(folder) / f"values-{self.rank}-{i}.safetensors"
            store.save(path)
            with kv.create("local", processes=1) as local:
                local.load(path)
                for key in SHAPES:
                    assert np.array_equal(local.view(key), self.value(store, key))
        self.weights.save_optimizer_states(Path(folder) / f"states-{self.rank}.safetensors")
        return {"seen": seen, "digest": digest.hexdigest(), "t": self.t}

    def trajectory(self, rounds: int) -> Any:
        """The weight after each round."""
        with kv.create("local", processes=1) as local:
            local.init("w", np.zeros(1, F))
            local.set_optimizer(kv.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM))
            yield 0.0
            for t in range(1, rounds + 1):
                local.push("w", [np.full(1, t * (w + 1), F) for w in range(self.n)])
                yield float(local.view("w")[0])

    def round_of_rows(self, table: Array) -> int:
        for t in range(max(0, self.t - 2), self.t + 1):
            want = np.zeros(TABLE, F)
            for w in range(self.n if t else 0):
                part = self.rows(w, t)
                want[part.indices] += part.data
            if np.array_equal(table, want):
                return t
        raise AssertionError(f"the rows are of no round near {self.t}: {table[:, 0]}")


def until_lost(seed: int, folder: str) -> dict[str, Any]:
    """Work until a peer dies; then read, save and close."""
    traffic = Traffic(seed)
    tell("ready")
    end = time.monotonic() + 20
    try:
        while time.monotonic() < end:
            traffic.round()
        raise AssertionError("nobody died")
    except kv.PeerLostError as error:
        noticed, first = time.monotonic(), error
    for store in traffic.stores:
        provoke(store)
        with pytest.raises(kv.PeerLostError):
            store.push("small", np.ones(SHAPES["small"], F))
        with pytest.raises(kv.PeerLostError):
            store.barrier()
    report = traffic.report(folder)
    for store in traffic.stores:
        store.close()
    return {**report, "noticed": noticed, "rank": first.rank, "text": str(first)}


def provoke(store: Any) -> None:
    """Have the store say that a peer is lost."""
    with pytest.raises(kv.PeerLostError):
        store.barrier()
