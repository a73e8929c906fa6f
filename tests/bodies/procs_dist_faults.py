"""The processes of jobs with servers while one of them is killed, stopped or cut off."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import hashlib
import itertools
import json
import logging
import os
import random
import re
import resource
import select
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pace
import pytest
from jobs import hear, tell
from own_rules import Added
from references import Array
from tested_store import together

import kvstore as kv
from kvstore.store import start_pushpull
from kvstore.stores.hierarchy import pusher
from kvstore.stores.parameter_server.server import loop as server_loop
from kvstore.stores.parameter_server.worker.process import WorkerProcess

F = np.float32
#: One key of one slice, and one of five slices (of 64 KB) on all servers.
SHAPES = {"small": (101,), "large": (80_003,)}
SLICE_BYTES = 1 << 16
ELEMENTS = SLICE_BYTES // 4
#: A variable of tests: slices of 1 MB, which each thread of a server receives and sends itself.
LARGE = "TEST_LARGE_SLICES"
RATE, MOMENTUM = 0.5, 0.5
_CLONE_NEWNET = 0x40000000


def choose_slices() -> None:
    """Have slices as large as the test wants them; where workers sum by hosts two of them are a portion."""
    global SLICE_BYTES, ELEMENTS
    if LARGE in os.environ:
        SHAPES["large"], SLICE_BYTES = (1_000_003,), 1 << 20
        ELEMENTS = SLICE_BYTES // 4
    pusher._PORTION = 2 * SLICE_BYTES


def tell_start() -> None:
    """Say that this worker starts, and when the scheduler knows it: from then on its death is noticed."""
    met = WorkerProcess.start_heartbeats

    def known(process: WorkerProcess, message: Any) -> None:
        met(process, message)
        tell("known")

    WorkerProcess.start_heartbeats = known  # type: ignore[method-assign]
    tell("starts")


class Load:
    """Rounds whose values contain the number of their round.

    In round t every worker pushes ``t * (rank + 1)``, so that the sum is ``t`` times a constant.
    """

    def __init__(self, **options: Any) -> None:
        choose_slices()
        self.options = {"slice_bytes": SLICE_BYTES, **options}
        self.store = kv.create("dist_sync", **self.options)
        self.rank, self.n = self.store.rank, self.store.num_workers
        self.t = 0  # rounds
        self.made = 0  # keys
        self.has_rows = False
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

    def quick(self) -> None:
        for key, part, out in zip(SHAPES, self.parts(), self.outs.values(), strict=True):
            for _ in range(3):
                self.store.pushpull(key, part, out=out)
        self.check()

    def init(self) -> None:
        self.made += 1
        names = [f"{self.made}.{i}" for i in range(3)]
        self.store.init(names, [np.full(SHAPES["large"], self.made, F)] * 3)
        self.store.pull(names[0], out=self.outs["large"])
        assert (self.outs["large"] == self.made).all()

    def rows(self) -> None:
        """Push rows, one of them common to all workers, and pull them: two slices, a sum over the living."""
        if not self.has_rows:
            self.store.init("rows", kv.RowSparseArray.zeros((64, ELEMENTS // 32)))
            self.has_rows = True
        ids = [0, 1 + self.rank, 40 + self.rank]
        part = np.full((3, ELEMENTS // 32), 10**self.rank, F)
        self.store.push("rows", kv.RowSparseArray(part, ids, (64, ELEMENTS // 32)))
        out = kv.RowSparseArray.zeros((64, ELEMENTS // 32))
        self.store.row_sparse_pull("rows", out=out, row_ids=np.array(ids))
        assert (out.data[1:] == 10**self.rank).all(), out.data[1:]
        (total,) = map(int, np.unique(out.data[0]))
        assert str(total).strip("01") == "", total
        assert total // 10**self.rank % 10 == 1, total

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


def until_lost(phase: str, folder: str, dies: str = "one") -> dict[str, Any]:
    """Repeat one thing until one dies, or a host; then read, save and close, as far as that must work."""
    tell_start()
    made: list[Load] = []
    error: Any = None
    try:
        made.append(Load())
        made[0].pushpull()
        tell("ready")
        end = pace.deadline(30)
        while time.monotonic() < end:
            getattr(made[0], phase)()
        raise AssertionError("nobody died")
    except kv.PeerLostError as caught:
        noticed, error = time.monotonic(), caught
    report = {"noticed": noticed, "role": error.role, "rank": error.rank, "text": str(error), "phase": phase}
    if made:
        try:
            report["values"] = afterwards(made[0], error.role, folder, dies == "one")
        except kv.PeerLostError as caught:
            # Pushes without a pull may be two rounds apart: the error says so.
            if phase != "push" or "the last round that is whole is" not in str(caught):
                raise
            report["values"] = str(caught)
        made[0].store.close()
    tell("closed")
    return report


def afterwards(load: Load, role: str, folder: str, one: bool) -> Any:
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
    told = float(os.environ["KVSTORE_DEAD_AFTER"])  # the first call waits for the scheduler's word
    for name, call in calls.items():
        start = time.monotonic()
        try:
            call()
        except kv.PeerLostError as error:
            assert role in str(error), (name, str(error))
        else:
            raise AssertionError(f"{name} went well, without the {role}")
        assert time.monotonic() - start < told + pace.seconds(3), name
        told = 0.0
    assert store.num_dead_nodes() == 1 or not one
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


def whole_after_loss(seed: int, victim: int, killed: bool) -> dict[str, Any]:
    """Train until `victim` is lost; then reads and saves are of one round for all keys of a call.

    The victim is killed by the test, or dies after some message, between the slices of a key.
    """
    draw = random.Random(seed)
    kind = draw.choice(["sums", "weights", "rows", "whole"])
    verb = draw.choice(["pushpull", "push pull", "push push pull"])
    messages = draw.randrange(1, 60)
    shapes = {"a": (4, 1000) if kind == "rows" else (9_001,), "b": (2, 1000) if kind == "rows" else (3_001,)}
    large = kind != "rows" and seed % 3 == 2  # so that servers send in two threads
    if large:
        shapes = {"a": (700_000,), "b": (400_001,)}
    store = kv.create("dist_sync", slice_bytes=1 << 20 if large else 4096)
    unit = store.num_workers * (store.num_workers + 1) // 2
    values = [kv.RowSparseArray.zeros(one) if kind == "rows" else np.zeros(one, F) for one in shapes.values()]
    store.init(list(shapes), values)
    if kind != "sums":
        store.set_optimizer(Added() if kind == "whole" else kv.optimizer.SGD(learning_rate=-1.0))
    store.barrier()
    tell("ready")
    if store.rank == victim and not killed:
        die_after(messages)
    t, report = 0, {"kind": kind, "verb": verb}
    try:
        while True:
            t = one_round(store, shapes, kind, verb, t, unit)
    except kv.PeerLostError as error:
        assert (error.role, error.rank) == ("worker", victim), error
    try:
        return {**report, "rounds": whole_rounds(store, shapes, t, unit)}
    except kv.PeerLostError as error:
        # Pushes without a pull may be two rounds apart: the error says so.
        assert verb == "push push pull", error
        assert "its slices are of round" in str(error), error
        return {**report, "apart": str(error)}
    finally:
        store.close()


def reads_after_a_loss() -> list[float]:
    """Learn of a loss between a push and the pull after it: that pull raises, the next pulls read."""
    with kv.create("dist_sync") as store:
        store.init(["pushed", "other"], [np.zeros(3, F), np.full(3, 5, F)])
        store.push("pushed", np.ones(3, F))
        tell("pushed")
        end = time.monotonic() + pace.seconds(20)
        while not store.num_dead_nodes():
            assert time.monotonic() < end, "the loss was not noticed"
            time.sleep(0.01)
        out = np.empty(3, F)
        store.pull("other", out=out)
        found = [float(out[0])]
        with pytest.raises(kv.PeerLostError, match="worker 1"):
            store.pull("pushed", out=out)
        store.pull("pushed", out=out)
        return [*found, float(out[0])]


def rests_after_init() -> None:
    """Push nothing, and stay."""
    with kv.create("dist_sync") as store:
        store.init(["pushed", "other"], [np.zeros(3, F), np.full(3, 5, F)])
        tell("ready")
        hear()


def die_after(messages: int) -> None:
    """Die by SIGKILL after so many more messages to servers."""
    from kvstore.stores.parameter_server.transport.sockets import WorkerSockets
    from kvstore.stores.parameter_server.worker.quick_calls import QuickCall

    send, send_quickly, left = WorkerSockets.send, QuickCall._send, itertools.count(messages, -1)

    def count() -> None:
        if next(left) <= 0:
            os.kill(os.getpid(), signal.SIGKILL)

    def counted(self: Any, peer: Any, message: Any) -> None:
        send(self, peer, message)
        if peer != "scheduler":
            count()

    def counted_quickly(self: Any, epoch: int) -> None:
        send_quickly(self, epoch)
        count()

    WorkerSockets.send = counted  # type: ignore[method-assign]
    QuickCall._send = counted_quickly  # type: ignore[method-assign]


def one_round(store: Any, shapes: dict[str, Any], kind: str, verb: str, t: int, unit: int) -> int:
    """Push so that after round t every element is t times `unit`, and check that it is."""
    for _ in range(verb.count("push ")):
        t += 1
        store.push(list(shapes), parts_of(store, shapes, kind, t))
    outs = [np.empty(shape, F) for shape in shapes.values()]
    if verb == "pushpull":
        t += 1
        store.pushpull(list(shapes), parts_of(store, shapes, kind, t), out=outs)
    else:
        store.pull(list(shapes), out=outs, ignore_sparse=False)
    assert all((out == t * unit).all() for out in outs), (t, [np.unique(out) for out in outs])
    return t


def parts_of(store: Any, shapes: dict[str, Any], kind: str, t: int) -> list[Any]:
    """Return the value that this worker pushes in round t."""
    size = (store.rank + 1) * (t if kind == "sums" else 1)
    parts = [np.full(shape, size, F) for shape in shapes.values()]
    if kind != "rows":
        return parts
    return [kv.RowSparseArray(part, np.arange(len(part)), part.shape) for part in parts]


def whole_rounds(store: Any, shapes: dict[str, Any], t: int, unit: int) -> list[float]:
    """Round of each key, read alone, all together, and from a file: always the same, and one for all."""
    outs = {key: np.empty(shape, F) for key, shape in shapes.items()}
    for key, out in outs.items():
        store.pull(key, out=out, ignore_sparse=False)
    rounds = [float(np.unique(out / unit)[0]) for out in outs.values()]
    assert all(len(np.unique(out)) == 1 for out in outs.values()), {k: np.unique(o) for k, o in outs.items()}
    assert len(set(rounds)) == 1, rounds
    assert t - 3 <= rounds[0] <= t + 2, (rounds, t)
    again = [np.empty(shape, F) for shape in shapes.values()]
    store.pull(list(shapes), out=again, ignore_sparse=False)
    assert all((one == other).all() for one, other in zip(again, outs.values(), strict=True))
    path = Path(os.environ["TMPDIR"]) / f"whole-{store.rank}.safetensors"
    store.save(path)
    with kv.create("local", processes=1) as local:
        local.load(path)
        local.pull(list(shapes), out=again, ignore_sparse=False)
    assert all((one == other).all() for one, other in zip(again, outs.values(), strict=True))
    return rounds


def _read_on(store: Any, out: Any, seen: list[float]) -> list[float]:
    """Read once more, and check that the value is of one round, and of none before."""
    store.pull("w", out=out)
    assert (out == out[0]).all(), np.unique(out)
    assert out[0] >= seen[-1], (out[0], seen[-1])
    return [*seen, float(out[0])]


def reads_while_others_go_on(seed: int) -> dict[str, Any]:
    """Worker 0 joins, and reads while the others push: each read is of one round, never of an older one."""
    draw = random.Random(seed)
    store, size = kv.create("dist_sync", slice_bytes=4096), 20_001
    store.init("w", np.zeros(size, F))
    values = np.full(size, store.rank + 1, F)
    store.set_optimizer(kv.optimizer.SGD(learning_rate=-1.0))
    seen = [0.0]
    if store.rank:
        for _ in range(draw.randrange(50, 150)):
            store.push("w", values)
            store.pull("w", out=np.empty(size, F))
        store.join()
    else:
        store.join()
        out = np.empty(size, F)
        for _ in range(draw.randrange(20, 60)):
            while not (seen := _read_on(store, out, seen))[-1]:  # until the others have begun
                time.sleep(0.001)
    store.barrier()
    store.close()
    return {"seen": sorted(set(seen))}


def heard() -> bool:
    """Whether the test has said something."""
    return bool(select.select([0], [], [], 0)[0])


def going_on(phase: str, codec: str = "") -> dict[str, Any]:
    """Continue with the remaining workers until worker 0 has to stop and says so in a key of its own."""
    tell_start()
    load = Load(on_peer_loss="continue")
    load.n = 0
    load.check = lambda: None  # type: ignore[method-assign]  # its sums are of the living workers
    store, rank, n = load.store, load.rank, load.store.num_workers
    store.init("stop", np.zeros(n + 1, F))
    if codec:
        for _ in range(2):
            store.set_gradient_compression({"type": codec})
    t = 0
    tell("ready")
    while True:
        t += 1
        mine = np.zeros(n + 1, F)
        mine[rank], mine[n] = t % 1000, rank == 0 and heard()
        value = np.full(SHAPES["large"], 10**rank, F)
        store.pushpull(["stop", "large"], [mine, value])
        assert mine[rank] == t % 1000
        totals = sorted(map(int, np.unique(value)))
        for total in totals:
            assert str(total).strip("01") == "", total  # a sum over some of the workers
            assert total // 10**rank % 10 == 1
        if t == 1:
            tell("working")
        if mine[n]:
            break
        if phase != "pushpull":
            getattr(load, phase)()
    store.barrier()
    store.close()
    return {"last": totals, "stop": mine.tolist()[-1:]}


def one_by_one(verb: str, meets: bool) -> dict[str, Any]:
    """Continue as `going_on` does, in passes of one call for each key; no pass is seen in part."""
    tell_start()
    store = kv.create("dist_sync", on_peer_loss="continue", slice_bytes=SLICE_BYTES)
    shapes = {**{f"w{i}": (101 + i,) for i in range(4)}, **SHAPES}
    store.init([*shapes, "stop"], [np.zeros(shape, F) for shape in shapes.values()] + [np.zeros(1, F)])
    tell("ready")
    passes, stop = 0, False
    while not stop:
        passes += 1
        members: set[int] = set(range(store.num_workers))
        for at, (key, shape) in enumerate(shapes.items()):
            value = np.full(shape, 10**store.rank, F)
            if verb == "pushpull" or (passes + at) % 2:
                store.pushpull(key, value)
            else:
                store.push(key, value)
                store.pull(key, out=value)
            totals = sorted(map(int, np.unique(value)))  # of slices: a worker may die between two of them
            for total in totals:
                assert str(total).strip("01") == "", total  # a sum over some of the workers
                present = {rank for rank in members if total // 10**rank % 10}
                # A worker that is missing in the key before is dead, or has not begun: none joins in between.
                assert str(total).count("1") == len(present), (key, totals, members)
                assert store.rank in present
            members = {rank for rank in members if all(total // 10**rank % 10 for total in totals)}
        if meets:
            store.barrier()
        flag = np.array([store.rank == 0 and heard()], F)
        store.pushpull("stop", flag)
        stop = bool(flag[0])
        if passes == 1:
            tell("working")
    store.barrier()
    store.close()
    return {"members": sorted(members), "totals": totals}


def rests_after_close() -> None:
    """Close the store, and stay."""
    load = Load()
    load.pushpull()
    load.store.barrier()
    load.store.close()
    tell("closed")
    hear()


def goes_on_alone() -> dict[str, Any]:
    """Another worker closes its store, and dies later: that is no loss."""
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


def trained(rounds: int, pause: float = 0.0, halts: bool = False, **options: Any) -> dict[str, Any]:
    """Train through some rounds, each checked; the results must not depend on the faults of the job.

    After a quarter of them it may halt, until the test says something.
    """
    load = Load(**options)
    weights = kv.create("dist_sync", group="weights", **load.options)
    weights.init("w", np.zeros(50_001, F))
    weights.init("rows", kv.RowSparseArray.zeros((500, 3)))
    weights.set_optimizer(kv.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM))
    tell("ready")
    out = np.empty(50_001, F)
    longest, begun = 0.0, time.monotonic()
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
            if halts:
                hear()
        time.sleep(pause)
    table = np.empty((500, 3), F)
    weights.pull("rows", out=table)
    made = hashlib.blake2b(out.tobytes() + table.tobytes(), digest_size=8).hexdigest()
    expected = expected_weight(rounds, load.n)
    assert (out == expected).all(), (np.unique(out), expected)
    load.store.barrier()
    weights.close()
    load.store.close()
    return {"digest": made, "longest": longest, "lasted": time.monotonic() - begun}


def expected_weight(rounds: int, workers: int) -> float:
    """The result of the optimizer on those pushes."""
    with kv.create("local", processes=1) as local:
        local.init("w", np.zeros(1, F))
        local.set_optimizer(kv.optimizer.SGD(learning_rate=RATE, momentum=MOMENTUM))
        for step in range(rounds):
            local.push("w", [np.full(1, (step + 1) * (rank + 1), F) for rank in range(workers)])
        return float(local.view("w")[0])


def until_fenced(phase: str = "pushpull", stays: bool = False) -> dict[str, Any]:
    """Work until a worker is lost, or this one is fenced; on request, stay until the test ends it."""
    load = Load()
    load.pushpull()
    tell("ready")
    try:
        while True:
            getattr(load, phase)()
    except (kv.PeerLostError, kv.FencedError) as caught:
        noticed, error = time.monotonic(), caught
    tell("noticed")
    if stays:
        hear()
    if isinstance(error, kv.FencedError):
        with pytest.raises(kv.FencedError):
            load.store.push("small", np.ones(SHAPES["small"], F))
        with pytest.raises(kv.FencedError):
            load.store.pull("small", out=load.outs["small"])
        for look in (lambda: len(load.store), lambda: "small" in load.store, lambda: "other" in load.store):
            with pytest.raises(kv.FencedError):
                look()
        assert "FencedError" in repr(load.store)
    load.store.close()
    return {"error": type(error).__name__, "noticed": noticed, "text": str(error)}


def on_command(loss: str, size: int = 3) -> None:
    """Push, pull, or both, as the test requests; report the result of each."""
    store = kv.create("dist_sync", on_peer_loss=loss)
    own, out = np.full(size, 10.0**store.rank, F), np.zeros(size, F)
    store.init("w", out)
    calls: dict[str, Callable[[], Any]] = {
        "push": lambda: store.push("w", own),
        "pull": lambda: store.pull("w", out=out),
        "pushpull": lambda: store.pushpull("w", own, out=out),
    }

    def outcome(call: Callable[[], Any]) -> str:
        try:
            call()
        except kv.KVStoreError as error:
            return f"{type(error).__name__}: {error}"
        return f"{out[0]:g}"

    tell("ready")
    while (word := hear()) != "close":
        tell(f"{word}: {outcome(calls[word.split()[0]])}")
    store.close()


def beside_one_that_reads_nothing(keys: int) -> None:
    """Worker 1 asks for all values, reads none, and is stopped; worker 0 trains at the same time."""
    from kvstore.stores.parameter_server.transport.stream_client import StreamClient

    store = kv.create("dist_async")
    names = [f"w{i}" for i in range(keys)]
    store.init(names, [np.zeros(1 << 18, F)] * keys)
    store.barrier()
    if store.rank == 1:
        store.pull("w0", out=np.empty(1 << 18, F))  # a stream is open then
        StreamClient.receive = lambda self: time.sleep(0.01) or []  # type: ignore[method-assign]
        works = [store.pull(name, out=np.empty(1 << 18, F), async_op=True) for name in names]
        time.sleep(0.5)
        assert not any(work.done() for work in works)
        tell("asks")
        os.kill(os.getpid(), signal.SIGSTOP)
    tell("ready")
    hear()
    for step in range(1, 101):
        value = np.full(1 << 18, step, F)
        store.pushpull(names[step % 2], value)
        assert (value == step).all(), np.unique(value)
    tell("trained")
    hear()


def server_of_files() -> None:
    """Be a server that may open FILES files, and waits for HANDSHAKES so many milliseconds."""
    from servers import server

    _limit()
    server()


def scheduler_of_files() -> None:
    """Be a scheduler that may open FILES files, and waits for HANDSHAKES so many milliseconds."""
    from servers import scheduler

    _limit()
    scheduler()


def _limit() -> None:
    from kvstore.stores.parameter_server.transport import options

    count = int(os.environ["FILES"])
    resource.setrlimit(resource.RLIMIT_NOFILE, (count, count))
    options._HANDSHAKE = int(os.environ.get("HANDSHAKES", options._HANDSHAKE))


def behind() -> None:
    """Be a server that announces to the others an address given by the test, which knows the real address."""
    from servers import server

    from kvstore.stores.parameter_server.transport import sockets

    class Behind(sockets.ServerSockets):
        def __init__(self, *arguments: Any) -> None:
            super().__init__(*arguments)
            tell(f"at {self.address}")
            self.address = hear()
            assert self._streams is not None
            listener = self._streams._listener
            tell(f"streams at {listener.address}")
            listener.address = hear()

    server_loop.ServerSockets = Behind  # type: ignore[misc]
    server()


def scheduler_behind() -> None:
    """Be a scheduler that announces for its echo an address given by the test."""
    from servers import scheduler

    from kvstore.stores.parameter_server.scheduler import loop as scheduler_loop
    from kvstore.stores.parameter_server.transport import sockets

    class Behind(sockets.SchedulerSockets):
        elsewhere = ""

        @property
        def echo(self) -> str:
            self.elsewhere = self.elsewhere or hear()
            return self.elsewhere

        @echo.setter
        def echo(self, address: str) -> None:
            tell(f"echo at {address}")

    scheduler_loop.SchedulerSockets = Behind  # type: ignore[misc]
    scheduler()


# --------------------------------------------------------------------------------------------- ends and exits


def ends(how: str, rank: int) -> dict[str, Any]:
    """The worker of `rank` ends in some way; the others get PeerLostError."""
    load = Load()
    store = load.store
    if load.rank == rank:
        load.pushpull()
        tell("ends")
        if how == "_exit":
            os._exit(0)
        elif how == "exception":
            raise ZeroDivisionError("on purpose")
        elif how == "with":
            with store:
                raise ZeroDivisionError("on purpose")
        elif how == "exit from with":
            with store:
                sys.exit(3)
        elif how == "thread":
            threading.Thread(target=os._exit, args=(1,)).start()
            time.sleep(10)
        elif how == "abort":
            resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
            os.abort()
    with pytest.raises(kv.PeerLostError) as caught:
        while True:
            load.pushpull()
    noticed = time.monotonic()
    assert caught.value.rank == rank
    store.close()
    return {"noticed": noticed}


def leaves_well(how: str, rank: int) -> None:
    """A worker that closes its store, or just ends, is not lost: rounds continue without it."""
    load = Load()
    store = load.store
    store.barrier()
    if load.rank == rank:
        if how == "close":
            store.close()
        elif how == "sys.exit":
            sys.exit(0)
        return
    value = np.ones(3, F)
    store.init("v", value)
    end = pace.deadline(10)
    while value[0] != load.n - 1 and time.monotonic() < end:
        value[...] = 1
        store.pushpull("v", value)
    assert value[0] == load.n - 1
    store.barrier()
    store.close()


def leaves_in_the_middle(name: str, how: str, leaver: int, seed: int) -> dict[str, Any]:
    """One worker leaves after some rounds, in one way or another; the others continue, and get a warning."""
    draw = random.Random(seed)
    last, more = draw.randrange(1, 20), 0 if how == "at the end" else draw.randrange(2, 8)
    store = kv.create(name, slice_bytes=4096)
    log = Warnings()
    store.init(["a", "b"], [np.zeros(5_000, F), np.zeros(3, F)])
    totals = []
    for t in range(1, last + more + 1):
        if store.rank == leaver and t > last:
            break
        values = [np.full(5_000, 10**store.rank, F), np.full(3, 10**store.rank, F)]
        if draw.random() < 0.5:
            store.pushpull(["a", "b"], values)
        else:
            store.push(["a", "b"], values)
            store.pull(["a", "b"], out=values)
        totals.append(int(values[0][0]))
    if store.rank == leaver and how == "sys.exit":
        tell("result " + json.dumps({"totals": totals, "warnings": log.texts}))
        sys.exit(0)
    if store.rank == leaver and how == "join":
        store.join()
    if store.rank != leaver or how == "join":
        time.sleep(draw.random() * 0.05 * store.rank)  # they do not all close at once
    store.close()
    return {"totals": totals, "warnings": log.texts, "last": last}


class Warnings(logging.Handler):
    """The warnings and errors of the store."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.texts: list[str] = []
        logging.getLogger("kvstore").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        """Keep it."""
        self.texts.append(record.getMessage())


def uneven(batches: list[int]) -> dict[str, Any]:
    """Every worker has another number of batches, and says when it has no more."""
    load = Load(on_peer_loss="raise")
    store = load.store
    sums = []
    for _ in range(batches[load.rank]):
        value = np.full(SHAPES["large"], 10**load.rank, F)
        store.pushpull("large", value)
        assert (value == value[0]).all()
        sums.append(int(value[0]))
    store.join()
    store.pull("large", out=load.outs["large"])
    for want in range(max(batches)):
        assert want >= len(sums) or sums[want] == sum(10**r for r, b in enumerate(batches) if b > want), sums
    store.close()
    return {"sums": sums}


def forks() -> None:
    """The child has no part in the job, and no worker notices its end."""
    load = Load()
    store = load.store
    for t in range(3):
        load.pushpull()
        child = os.fork()
        if child == 0:
            try:
                calls: list[Callable[[], Any]] = [
                    lambda: store.push("small", np.ones(SHAPES["small"], F)),
                    lambda: store.pull("small", out=load.outs["small"]),
                    lambda: store.pushpull("small", np.ones(SHAPES["small"], F)),
                    store.barrier,
                    lambda: store.init("v", np.ones(3, F)),
                    store.join,
                    lambda: kv.create("dist_sync"),
                ]
                for call in calls:
                    with pytest.raises(kv.KVStoreError, match="is a fork of"):
                        call()
                store.close()
                if t == 1:
                    os.kill(os.getpid(), signal.SIGKILL)
            except BaseException:
                traceback.print_exc()
                os._exit(1)
            if t == 0:
                os._exit(0)
            sys.exit(0)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        assert code == (-9 if t == 1 else 0), (t, code)
    load.pushpull()
    store.barrier()
    store.close()


def interrupted(where: str, goes_on: bool) -> float:
    """Ctrl-C during a wait for a worker that has not arrived yet."""
    if where == "create":
        return interrupted_at_the_start()
    load = Load()
    store, size = load.store, SHAPES["large"]
    if load.rank == 1:
        hear()
        with contextlib.suppress(kv.PeerLostError):
            store.push("large", np.ones(size, F))
            if where == "barrier":
                store.barrier()
            store.push("large", np.ones(size, F))
            store.pull("large", out=load.outs["large"])
        store.close()
        return 0.0
    if where in ("pull", "barrier"):
        store.push("large", np.ones(size, F))
    out = np.zeros(size, F)
    with pytest.raises(KeyboardInterrupt):
        tell("waits")
        if where == "barrier":
            store.barrier()
        elif where == "pull":
            store.pull("large", out=out)
        elif where == "pushpull":
            store.pushpull("large", np.ones(size, F), out=out)
        elif where == "push":
            while True:  # the third waits
                store.push("large", np.ones(size, F))
    at = time.monotonic()
    client = store._backend._client
    left = {name: (one.done, one.error, one.requests[:1]) for name, one in client._operations.open.items()}
    assert not left, (left, client.driver.failure)  # nothing is left of the abandoned call
    tell("interrupted")
    if where == "pushpull" and goes_on:
        try:  # it can continue if the pushed array is in shared memory, and else raises
            store.pull("large", out=load.outs["large"])
        except kv.KVStoreError as error:
            check_why(error)
            goes_on = False
    if where in ("pull", "barrier") or (where == "pushpull" and goes_on):
        value = np.ones(size, F)
        store.pull("large", out=value)
        assert (value == 2).all()
        assert not out.any()  # an abandoned call writes nothing later
        store.pushpull("large", value)
        assert (value == 3).all()
    else:
        with pytest.raises(kv.KVStoreError) as caught:
            store.pull("large", out=out)
        check_why(caught.value)
    store.close()
    return at


def interrupted_sum(size: int) -> float:
    """Ctrl-C in the wait for a sum that was started: the next wait completes it."""
    load = Load()
    store, value = load.store, np.ones(size, F)
    store.init("sum", np.zeros(size, F))
    if load.rank == 1:
        hear()
        store.pushpull(["sum"], [value])
        store.pushpull(["sum"], [value])
        store.close()
        return 0.0
    work = start_pushpull(store, ["sum"], [value], None, 2, waits=True)
    with pytest.raises(KeyboardInterrupt):
        tell("waits")
        work.wait()
    at = time.monotonic()
    tell("interrupted")
    assert not work.done()
    work.wait()
    assert (value == 1.5).all()
    store.pushpull(["sum"], [value])
    assert (value == 3).all()
    store.close()
    return at


def check_why(error: Exception) -> None:
    """A worker that has left the job reports where, why, and the next step for the user."""
    assert re.fullmatch(
        r"worker 0 gave up in a push\S* \(key 'large', round \d+\) while its arrays were being sent, and has "
        r"left the job: close the store, and start the job again\. The cause: KeyboardInterrupt",
        str(error),
    ), error


def interrupted_at_the_start() -> float:
    """Ctrl-C while the other worker is not there yet; it may be created once more."""
    with pytest.raises(KeyboardInterrupt):
        tell("waits")
        Load()
    tell("interrupted")
    return time.monotonic()


# ------------------------------------------------------------------------------------------------- strangers


def refused(error: str, **options: Any) -> str:
    """Creating the store must end in an error."""
    start = time.monotonic()
    with pytest.raises(getattr(kv, error)) as caught:
        kv.create("dist_sync", **options)
    assert time.monotonic() - start < float(os.environ["KVSTORE_TIMEOUT"]) + pace.seconds(9)
    return str(caught.value)


def refused_with(error: str, options: dict[str, Any]) -> str:
    """The same with options."""
    return refused(error, **options)


def sits() -> None:
    """Create a store, say so, and wait for the test."""
    load = Load()
    tell("in")
    hear()
    load.pushpull()
    load.store.close()


def creates_one_more() -> dict[str, Any]:
    """Create a store, and another one when the test says so; return what became of that."""
    first = kv.create("dist_sync")
    tell("in")
    hear()
    try:
        second = kv.create("dist_sync")
        second.init("w", np.zeros(3, F))
    except kv.KVStoreError as error:
        first.close()
        return {"error": type(error).__name__, "role": getattr(error, "role", ""), "text": str(error)}
    return {"error": "", "role": "", "text": ""}


def of_another_version() -> str:
    """A process of a later release."""
    from kvstore.stores.parameter_server.protocol import messages
    from kvstore.stores.parameter_server.worker import process

    process.m = SimpleNamespace(**{**vars(messages), "PROTOCOL": 99})  # type: ignore[assignment]
    return refused("ProtocolError")


def many_stores(times: int) -> dict[str, Any]:
    """Create and close stores; return the resources of the process."""
    marks = []
    for i in range(times):
        with kv.create("dist_sync", group="many") as store:
            store.init("w", np.full(5000, i, F))
            value = np.ones(5000, F)
            store.pushpull("w", value)
            assert (value == store.num_workers).all()
        if i + 1 in (times // 4, times):
            marks.append(held())
    return {"marks": marks}


def held() -> list[int]:
    """Descriptors and threads, the fewest of half a second: ZeroMQ closes in a thread of its own."""
    gc.collect()
    counts = []
    for _ in range(25):
        counts.append([len(os.listdir("/proc/self/fd")), len(os.listdir("/proc/self/task"))])
        time.sleep(0.02)
    return [min(column) for column in zip(*counts, strict=True)]


# ---------------------------------------------------------------------------------------------------- hunger


def starved_worker() -> str:
    """There is no memory for the value that a worker pushes; the store can be used afterwards."""
    load = Load()
    if load.rank == 0:
        used = int(Path("/proc/self/statm").read_text().split()[0]) * 4096
        resource.setrlimit(resource.RLIMIT_AS, (used + (96 << 20), used + (96 << 20)))
        huge = np.broadcast_to(np.zeros((), F), 1 << 26)
        with pytest.raises((MemoryError, kv.KVStoreError)) as caught:
            load.store.init("huge", huge)
    load.pushpull()
    load.store.barrier()
    load.store.close()
    return type(caught.value).__name__ if load.rank == 0 else ""


def starved_server() -> None:
    """Be a server with little memory."""
    from servers import server

    used, more = int(Path("/proc/self/statm").read_text().split()[0]) * 4096, 640 << 20
    resource.setrlimit(resource.RLIMIT_AS, (used + more, used + more))
    server()


def without_disk() -> None:
    """Be a server whose files can grow until the test sends a line."""
    from servers import server

    def fill() -> None:
        hear()
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
        tell("full")

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    threading.Thread(target=fill, daemon=True).start()
    server()


def first_values_on_a_full_disk() -> str:
    """The first value of a key waits for a snapshot, which cannot be written."""
    store = kv.create("dist_sync")
    with pytest.raises(kv.StateFileError) as caught:
        store.init("large", np.zeros(SHAPES["large"], F))
    store.close()
    return str(caught.value)


def too_much_for_a_server() -> str:
    """A key that does not fit into the servers' memory is an error, and nothing else."""
    load = Load()
    for _ in range(2):  # the first may be sent in frames; from the second on the server has our memory mapped
        load.pushpull()
    text = ""
    if load.rank == 0:
        with pytest.raises((MemoryError, kv.KVStoreError)) as caught:
            for i in range(30):
                load.store.init(f"huge{i}", np.ones(1 << 24, F))
        text = f"{type(caught.value).__name__}: {caught.value}"
    load.store.barrier()
    for _ in range(5):
        load.pushpull()
    load.store.barrier()
    load.store.close()
    return text


def too_much_for_all(late: float) -> str:
    """First values that a server refuses are an error on all workers, also late ones; then all continue."""
    load = Load()
    load.pushpull()
    if load.rank:
        time.sleep(late)
    with pytest.raises(kv.KVStoreError) as caught:
        for i in range(30):
            load.store.init(f"huge{i}", np.ones(1 << 24, F))
    load.store.barrier()
    load.store.init("afterwards", np.full(3, load.rank + 5, F))
    assert load.store.pull("afterwards", out=(out := np.zeros(3, F))) is None
    assert out.tolist() == [5, 5, 5]
    load.pushpull()
    load.store.barrier()
    load.store.close()
    return f"{type(caught.value).__name__}: {caught.value}"


def check_own_part(load: Load) -> None:
    """Each slice is the sum of all parts of this round, or of what travelled with this worker's alone."""
    own = sum(rank + 1 for rank in together(load.rank))
    good = load.t * own, load.t * load.n * (load.n + 1) // 2
    for key, out in load.outs.items():
        for start in range(0, len(out), ELEMENTS):
            piece = out[start : start + ELEMENTS]
            assert piece[0] in good, (key, load.t, np.unique(piece))
            assert (piece == piece[0]).all(), (key, load.t, np.unique(piece))


def going_through_restarts() -> dict[str, Any]:
    """Sum and count while servers are replaced.

    Of a round that one worker had its reply to and another had not, the first worker's part is lost with the
    pushes after the snapshot, and the other part is sent again: its value has its own part, once.
    """
    load = Load()
    exact, load.check = load.check, lambda: check_own_part(load)  # type: ignore[method-assign]
    store, n = load.store, load.n
    counts = kv.create("dist_sync", group="counts", **load.options)
    counts.init("w", np.zeros(50_001, F))
    counts.init("stop", np.zeros(1, F))
    counts.set_optimizer(kv.optimizer.SGD(learning_rate=-1.0))  # weights count the rounds
    value, stop = np.empty(50_001, F), np.zeros(1, F)
    tell("ready")
    steps = 0
    while not stop[0]:
        load.pushpull()
        steps += 1
        value[...] = 1 / n
        counts.pushpull("w", value)
        for start in range(0, len(value), ELEMENTS):
            piece = value[start : start + ELEMENTS]
            assert (piece == piece[0]).all(), np.unique(piece)
            assert piece[0] <= steps
        stop[0] = load.rank == 0 and heard()
        counts.pushpull("stop", stop)
    load.check = exact  # type: ignore[method-assign]
    load.pushpull()
    counts.barrier()
    counts.pull("w", out=value)
    made = hashlib.blake2b(value.tobytes(), digest_size=8).hexdigest()
    counts.close()
    store.close()
    return {"digest": made, "steps": steps, "seen": sorted(map(float, np.unique(value)))}


def reads_of_a_dead_server() -> float:
    """Push and pull; the server is another one when its first answer is read."""
    from kvstore.errors import ProtocolError
    from kvstore.stores.parameter_server.transport.shared_buffers import PeerBuffers

    segment = PeerBuffers.view_segment

    def gone(self: PeerBuffers, number: int) -> Any:
        PeerBuffers.view_segment = segment  # type: ignore[method-assign]
        tell("reads")
        hear()
        raise ProtocolError("the server is gone")

    with kv.create("dist_sync") as store:
        out = np.zeros(20_000, F)
        store.init("w", out)
        PeerBuffers.view_segment = gone  # type: ignore[method-assign]
        store.pushpull("w", np.full_like(out, store.rank + 1), out=out)
        PeerBuffers.view_segment = segment  # type: ignore[method-assign]
        assert (out == out[0]).all()
        store.barrier()
        again = np.empty_like(out)
        store.pushpull("w", np.ones_like(out), out=again)
        assert (again == store.num_workers).all()
        return float(out[0])


def leaves_with_open_pushes() -> str:
    """Leave the job while pushes without a waiter have no reply; return the text of the next call's error."""
    from kvstore.stores.parameter_server.protocol.messages import Failure

    store = kv.create("dist_sync")
    out = np.zeros(100, F)
    store.init("w", out)
    store.pushpull("w", out)
    tell("ready")
    hear()
    store.push("w", out)
    store._backend._client.leave_as_lost(Failure("KVStoreError", "it was interrupted"))
    with pytest.raises(kv.KVStoreError) as caught:
        store.pull("w", out=out)
    store.close()
    return str(caught.value)


# -------------------------------------------------------------------------------------------- other networks


def enter(pid: str) -> None:
    """Enter the network namespace of another process."""
    libc = ctypes.CDLL(None, use_errno=True)
    with open(f"/proc/{pid}/ns/net") as network:
        assert libc.setns(network.fileno(), _CLONE_NEWNET) == 0


def elsewhere(body: str, arguments: list[Any], network: str) -> Any:
    """Run a body in another network."""
    enter(network)
    return globals()[body](*arguments)


def server_elsewhere() -> None:
    """Be a server in another network."""
    from servers import server

    enter(os.environ["TEST_NETWORK"])
    os.environ["KVSTORE_HOST"] = os.environ["TEST_BINDS"]
    server()


def scheduler_elsewhere() -> None:
    """Be a scheduler in another network."""
    from servers import scheduler

    enter(os.environ["TEST_NETWORK"])
    scheduler()


def through_absences(rounds: int) -> dict[str, Any]:
    """Run all operations that need the scheduler, and rounds between, while it ends and restarts."""
    tell("starts")
    load = Load()
    tell("ready")
    slow = 0.0
    for step in range(rounds):
        for phase in (load.push, load.pushpull, load.quick, load.barrier):
            begun = time.monotonic()
            phase()
            slow = max(slow, time.monotonic() - begun)
        if step % 4 == 0:
            load.init()
            load.settings()
    load.close()
    found = digest(load.store, list(SHAPES))
    load.store.close()
    return {"digest": found, "slow": slow}
