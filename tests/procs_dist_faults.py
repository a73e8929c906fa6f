"""What the processes of a job with servers do while one of them is killed, stopped or cut off."""

from __future__ import annotations

import contextlib
import hashlib
import select
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from jobs import hear, tell
from references import Array

import kvstore as kv

F = np.float32
#: One key of one slice, and one of five slices (of 64 KB) on all servers.
SHAPES = {"small": (101,), "large": (80_003,)}
SLICE_BYTES = 1 << 16
ELEMENTS = SLICE_BYTES // 4
RATE, MOMENTUM = 0.5, 0.5


class Load:
    """Rounds whose values say which round they are of.

    In round t every worker pushes ``t * (rank + 1)``, so that the sum is ``t`` times a constant.
    """

    def __init__(self, **options: Any) -> None:
        self.options = {"slice_bytes": SLICE_BYTES, **options}
        self.store = kv.create("dist_sync", **self.options)
        self.rank, self.n = self.store.rank, self.store.num_workers
        self.t = 0  # rounds
        self.made = 0  # keys
        self.store.init(list(SHAPES), [np.zeros(shape, F) for shape in SHAPES.values()])
        self.outs = {key: np.empty(shape, F) for key, shape in SHAPES.items()}

    def parts(self) -> list[Array]:
        self.t += 1
        return [np.full(shape, self.t * (self.rank + 1), F) for shape in SHAPES.values()]

    def check(self) -> None:
        want = self.t * self.n * (self.n + 1) // 2
        for key, out in self.outs.items():
            assert (out == want).all(), f"{key!r}, round {self.t}: {np.unique(out)} instead of {want}"

    # ----------------------------------------------------------------------------------------------- phases

    def push(self) -> None:
        for _ in range(2):
            self.store.push(list(SHAPES), self.parts())
        self.pulled()

    def pulled(self) -> None:
        self.store.pull(list(SHAPES), out=list(self.outs.values()))
        self.check()

    def pull(self) -> None:
        self.store.push(list(SHAPES), self.parts())
        for _ in range(5):
            self.pulled()

    def pushpull(self) -> None:
        self.store.pushpull(list(SHAPES), self.parts(), out=list(self.outs.values()))
        self.check()

    def init(self) -> None:
        self.made += 1
        names = [f"{self.made}.{i}" for i in range(3)]
        self.store.init(names, [np.full(SHAPES["large"], self.made, F)] * 3)
        self.store.pull(names[0], out=self.outs["large"])
        assert (self.outs["large"] == self.made).all()

    def barrier(self) -> None:
        self.store.barrier()

    def settings(self) -> None:
        store = kv.create("dist_sync", group="settings", **self.options)
        store.init("w", np.zeros(30_000, F))
        store.set_optimizer(kv.optimizer.SGD(learning_rate=1.0))
        store.set_learning_rate(0.5)
        out = np.empty(30_000, F)
        store.pushpull("w", np.ones(30_000, F), out=out)
        assert (out == -0.5 * self.n).all()
        store.close()

    def close(self) -> None:
        other = kv.create("dist_sync", group="short", **self.options)
        other.init("w", np.ones(30_000, F))
        other.close()

    # ------------------------------------------------------------------------------------------ after a loss

    def rounds(self) -> dict[str, list[int]]:
        """Round that each slice is of; each must be of one round, and of one of the last."""
        found = {}
        unit = self.n * (self.n + 1) / 2
        for key, shape in SHAPES.items():
            out = np.empty(shape, F)
            self.store.pull(key, out=out)
            pieces = [out[start : start + ELEMENTS] for start in range(0, len(out), ELEMENTS)]
            assert all((piece == piece[0]).all() for piece in pieces), (key, np.unique(out))
            found[key] = [float(piece[0]) / unit for piece in pieces]
            assert all(self.t - 3 <= one <= self.t for one in found[key]), (found, self.t)
        return found


def digest(store: Any, keys: list[str]) -> str:
    """Of values, as a file of this library holds them."""
    made = hashlib.blake2b(digest_size=8)
    for key in sorted(keys):
        out = np.empty(SHAPES[key], F)
        store.pull(key, out=out)
        made.update(out.tobytes())
    return made.hexdigest()


def until_lost(phase: str, folder: str) -> dict[str, Any]:
    """Repeat one thing until somebody dies; then read, save and close, as far as that must work."""
    tell("starts")
    made: list[Load] = []
    error: Any = None
    try:
        made.append(Load())
        made[0].pushpull()
        tell("ready")
        end = time.monotonic() + 30
        while time.monotonic() < end:
            getattr(made[0], phase)()
        raise AssertionError("nobody died")
    except kv.PeerLostError as caught:
        noticed, error = time.monotonic(), caught
    report = {"noticed": noticed, "role": error.role, "rank": error.rank, "text": str(error), "phase": phase}
    if made:
        report["values"] = afterwards(made[0], error.role, folder)
        made[0].store.close()
    tell("closed")
    return report


def afterwards(load: Load, role: str, folder: str) -> Any:
    """Nothing can be written any more; what there is can be read where its server lives."""
    store = load.store
    with pytest.raises(kv.PeerLostError):  # if it was another store that noticed
        while True:
            load.pushpull()
    calls: dict[str, Callable[[], Any]] = {
        "pushpull": lambda: store.pushpull("small", np.ones(SHAPES["small"], F)),
        "push": lambda: store.push("large", np.ones(SHAPES["large"], F)),
        "init": lambda: store.init("new", np.ones(3, F)),
        "barrier": store.barrier,
        "join": store.join,
    }
    for name, call in calls.items():
        start = time.monotonic()
        try:
            call()
        except kv.PeerLostError as error:
            assert role in str(error), (name, str(error))
        else:
            raise AssertionError(f"{name} went well, without the {role}")
        assert time.monotonic() - start < 3, name
    if role != "worker":
        with pytest.raises(kv.PeerLostError, match=role):
            store.pull(list(SHAPES), out=list(load.outs.values()))
        return None
    before = digest(store, list(SHAPES)), load.rounds()
    path = Path(folder) / f"values-{load.rank}.safetensors"
    store.save(path)
    with kv.create("local", processes=1) as local:
        local.load(path)
        for key, shape in SHAPES.items():
            out = np.empty(shape, F)
            store.pull(key, out=out)
            assert np.array_equal(local.view(key), out)
    return before


def heard() -> bool:
    """Whether the test has said something."""
    return bool(select.select([0], [], [], 0)[0])


def going_on(phase: str) -> dict[str, Any]:
    """Work on with those who are left, until worker 0 is told to stop and says so in a key of its own."""
    tell("starts")
    load = Load(on_peer_loss="continue")
    load.check = lambda: None  # type: ignore[method-assign]  # the sums are of those who live
    load.n = 0
    store, rank, n = load.store, load.rank, load.store.num_workers
    store.init("stop", np.zeros(n + 1, F))
    t = 0
    tell("ready")
    while True:
        t += 1
        mine = np.zeros(n + 1, F)
        mine[rank], mine[n] = t, rank == 0 and heard()
        store.pushpull("stop", mine)
        assert mine[rank] == t
        value = np.full(SHAPES["large"], 10**rank, F)
        store.pushpull("large", value)
        for total in map(int, np.unique(value)):
            assert str(total).strip("01") == "", total  # a sum over some of the workers
            assert total // 10**rank % 10 == 1
        if phase not in ("pushpull", "settings"):
            with contextlib.suppress(kv.DuplicateKeyError):
                getattr(load, phase)()
        if t == 1:
            tell("working")
        if mine[n]:
            break
    last = sorted(map(int, np.unique(value)))
    store.barrier()
    store.close()
    return {"last": last, "stop": mine.tolist()[-1:]}


def rests_after_close() -> None:
    """Close the store, and stay."""
    load = Load()
    load.pushpull()
    load.store.barrier()
    load.store.close()
    tell("closed")
    hear()


def goes_on_alone() -> dict[str, Any]:
    """Somebody else closes its store, and dies later: that is no loss."""
    load = Load()
    load.pushpull()
    load.store.barrier()
    tell("ready")
    hear()
    value = np.ones(30, F)
    load.store.init("after", value)
    for _ in range(5):
        load.store.pushpull("after", value)
        value[...] = 1
    load.store.barrier()
    load.store.close()
    return {}


# ----------------------------------------------------------------------------------- undisturbed, or hardly


def trained(rounds: int, pause: float = 0.0, **options: Any) -> dict[str, Any]:
    """Train through some rounds, each checked; what comes out must not depend on what is done to the job."""
    load = Load(**options)
    weights = kv.create("dist_sync", group="weights", **load.options)
    weights.init("w", np.zeros(50_001, F))
    weights.init("rows", kv.RowSparseArray.zeros((500, 3)))
    weights.set_optimizer(kv.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM))
    tell("ready")
    out = np.empty(50_001, F)
    longest = 0.0
    for step in range(rounds):
        start = time.monotonic()
        load.pushpull()
        load.push()
        weights.push("w", np.full(50_001, (step + 1) * (load.rank + 1), F))
        ids = np.array(sorted({step % 500, (7 * step + load.rank) % 500}))
        weights.push("rows", kv.RowSparseArray(np.full((len(ids), 3), step, F), ids, (500, 3)))
        weights.pull("w", out=out)
        longest = max(longest, time.monotonic() - start)
        if step == rounds // 4:
            tell("working")
        time.sleep(pause)
    table = np.empty((500, 3), F)
    weights.pull("rows", out=table)
    made = hashlib.blake2b(out.tobytes() + table.tobytes(), digest_size=8).hexdigest()
    expected = expected_weight(rounds, load.n)
    assert (out == expected).all(), (np.unique(out), expected)
    load.store.barrier()
    weights.close()
    load.store.close()
    return {"digest": made, "longest": longest}


def expected_weight(rounds: int, workers: int) -> float:
    """What the optimizer makes of those pushes."""
    with kv.create("local", processes=1) as local:
        local.init("w", np.zeros(1, F))
        local.set_optimizer(kv.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM))
        for step in range(rounds):
            local.push("w", [np.full(1, (step + 1) * (rank + 1), F) for rank in range(workers)])
        return float(local.view("w")[0])


def until_fenced(phase: str = "pushpull") -> dict[str, Any]:
    """Work until somebody is lost, or until this process is found to have been."""
    load = Load()
    load.pushpull()
    tell("ready")
    try:
        while True:
            getattr(load, phase)()
    except (kv.PeerLostError, kv.FencedError) as caught:
        noticed, error = time.monotonic(), caught
    tell("noticed")
    if isinstance(error, kv.FencedError):
        with pytest.raises(kv.FencedError):
            load.store.push("small", np.ones(SHAPES["small"], F))
        with pytest.raises(kv.FencedError):
            load.store.pull("small", out=load.outs["small"])
    load.store.close()
    return {"error": type(error).__name__, "noticed": noticed, "text": str(error)}
