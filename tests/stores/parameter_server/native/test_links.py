"""The replies of a server over streams, with the requests handled in C and without: they must be the same.

`KVSTORE_LINKS_SEED` takes up the seed that a failure prints.
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import random
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pace
import pytest
from stores.parameter_server.native.served import (
    JOB,
    TABLES,
    Answer,
    K,
    P,
    Server,
    TableServer,
    Worker,
    unpacked,
)

from kvstore.errors import KVStoreError
from kvstore.kernels import cpu
from kvstore.optimizer.update_clock import UpdateClock
from kvstore.settings.hosts import host_identity
from kvstore.stores.parameter_server.protocol import messages as m
from kvstore.stores.parameter_server.protocol.messages import Batch, Record
from kvstore.stores.parameter_server.server.store_shard import StoreShard
from kvstore.stores.parameter_server.transport.frames import MessageCodec
from kvstore.stores.parameter_server.transport.native._streams import StreamSet

#: Optimizers that are drawn meet float16 slices.
pytestmark = pytest.mark.filterwarnings("ignore:float16 weights lose small updates")

TWO_BIT = 1

#: Sizes and types of the slices, by number: none, one, small ones, more than 16 and than 32 KiB.
SHAPES = [
    (0, "float32"), (1, "float32"), (33, "float32"), (5, "float64"), (7, "float16"), (3, "int64"),
    (4500, "float32"), (9000, "float32"), (2500, "float64"),
]  # fmt: skip

# -------------------------------------------------------------------------------------------- random programs


def schedule(step: int) -> dict[str, Any]:
    return {"name": "FactorScheduler", "config": {"step": step, "factor": 0.5, "base_lr": 0.3}}


#: Optimizers, some with the same parameters in all updates, and the parameters that may change.
RULES: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    ("sgd", {"learning_rate": 0.5}, {"wd": 0.01}),
    ("sgd", {"momentum": 0.9, "lr_mult": [["0", 0.5], ["6", 0.1]]}, {"momentum": 0.5, "clip_gradient": 1.0}),
    ("sgd", {"momentum": 0.9, "begin_num_update": 7}, {"lr_scheduler": schedule(1)}),
    ("sgd", {"lr_scheduler": schedule(3)}, {"lr_scheduler": schedule(5)}),
    ("sgd", {"momentum": 0.9, "multi_precision": True}, {"wd": 0.01}),
    ("nag", {"momentum": 0.9}, {"rescale_grad": 0.25}),
    ("adagrad", {}, {"epsilon": 1e-3}),
    ("rmsprop", {"centered": True}, {"learning_rate": 0.2}),
    ("dcasgd", {"momentum": 0.5}, {"lamda": 0.1}),
    ("signum", {}, {"wd_lh": 0.1}),
    ("ftrl", {}, {"lamda1": 0.1}),
    ("adam", {}, {"beta1": 0.8}),
    ("sgld", {}, {"learning_rate": 0.2}),
    ("lars", {"momentum": 0.9}, {"eta": 0.1}),
]


class Program:
    """Drives a server by a seed. Its next action never depends on the replies."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.chance = server, random.Random(seed)
        self.data = np.random.default_rng(seed)
        workers = self.chance.choice([1, 2, 2, 3])
        self.slices = sorted(self.chance.sample(range(len(SHAPES)), self.chance.randint(1, 5)))
        self.threshold = 0.5
        self.crowded = self.chance.random() < 0.2
        #: Whether most pushed values are packed, and summed without an optimizer.
        self.packs = self.chance.random() < 0.3
        server.mode = "sync" if self.packs or self.chance.random() < 0.6 else "async"
        #: Whether payloads lie in shared memory; else workers leave. The memory of a worker that left can be
        #: read by a link, which has mapped it, and by no other process.
        self.shares = self.chance.random() < (0.3 if self.packs else 0.6)
        self.pushed = {(rank, i): 0 for rank in range(workers) for i in self.slices}
        self.sequence = dict.fromkeys(range(workers), 0)
        self.sent: dict[int, list[tuple[Record, Any]]] = {rank: [] for rank in range(workers)}
        self.later: list[tuple[int, list[Record], list[Any]]] = []
        self.rests = False
        self.divides = not self.packs and random.Random(-seed).random() < 0.3
        self.begin_settings(seed)
        self.rule: tuple[str, dict[str, Any], dict[str, Any]] | None = None
        self.kept: dict[int, bytes] = {}
        self.changed: list[list[int]] = []
        server.define(SHAPES)
        server.start(workers)
        for i in self.slices:
            self.send(0, [self.request(0, K.INIT, i)])
        if self.chance.random() < (0.1 if self.packs else 0.6):
            self.change_settings("optimizer")

    def begin_settings(self, seed: int) -> None:
        self.drawn = random.Random(seed + 1)
        self.version = self.clock = self.ordinal = self.epoch = 0
        self.text = ""

    @property
    def ranks(self) -> list[int]:
        return sorted(self.server.workers)

    def payload(self, slice_: int) -> Any:
        n, dtype = SHAPES[slice_]
        return (self.data.standard_normal(n) * 4).astype(dtype)

    def request(self, rank: int, kind: int, slice_: int, round_: int = 0, **more: Any) -> tuple[Record, Any]:
        self.sequence[rank] += 1
        version, self.clock = self.version, self.clock + (self.chance.random() < 0.3)
        if self.chance.random() < 0.1:  # a round new to the worker, or unknown to the server
            version = max(0, version + self.chance.choice([-2, -1, -1, 1]))
        time = max(0, self.clock - self.chance.choice([0, 0, 0, 1, 5]))
        epoch = max(0, self.epoch - self.drawn.choice([0, 0, 0, 0, 1]))  # perhaps of older counts
        stamp = UpdateClock(time=time, epoch=epoch).stamp
        record = Record(kind, slice_, self.sequence[rank], round_, version, stamp)  # type: ignore[arg-type]
        data = None
        if kind in (K.INIT, K.ASSIGN, K.PUSH, K.PUSHPULL):
            record, data = self.filled(rank, record)
        return record._replace(**more), data

    def filled(self, rank: int, record: Record) -> tuple[Record, Any]:
        data, chance = self.payload(record.slice), self.chance
        pushes = record.kind in (K.PUSH, K.PUSHPULL)
        if (
            pushes
            and SHAPES[record.slice][1] == "float32"
            and chance.random() < (0.95 if self.packs else 0.2)
        ):
            size = server_loop_size(SHAPES[record.slice][0])
            data = self.data.integers(0, 256, size, np.uint8)
            other = chance.random() < (0.03 if self.packs else 0.2)
            record = record._replace(coding=TWO_BIT, threshold=0.25 if other else self.threshold)
        elif pushes and SHAPES[record.slice][1] == "float32" and self.divides:
            other = chance.random() < 0.1
            record = record._replace(
                coding=cpu.DIVIDED, threshold=chance.choice([3.0, 0.0]) if other else 4.0
            )
        if pushes and data.nbytes and self.shares and chance.random() < 0.4:
            worker = self.server.workers[rank]
            block = worker.pool.allocate(data.nbytes)
            assert block is not None
            block.array[:] = data.view(np.uint8)
            worker.blocks[record.sequence] = block
            flags = m.IN_PLACE if record.kind == K.PUSHPULL and chance.random() < 0.7 else 0
            return record._replace(
                place=P.SHARED, frame=block.segment, offset=block.offset, nbytes=data.nbytes, flags=flags
            ), None
        if pushes and chance.random() < 0.02:
            data = data[:-1]
        if record.coding == TWO_BIT and record.kind == K.PUSHPULL and chance.random() < 0.8:
            record = record._replace(flags=m.PACKED)
        return record._replace(place=P.FRAME, nbytes=data.nbytes), data

    def send(self, rank: int, made: list[tuple[Record, Any]]) -> None:
        records, payloads = [], []
        for record, data in made:
            if data is not None and record.place == P.FRAME:
                record = record._replace(frame=len(payloads))
                payloads.append(data)
            records.append(record)
        self.server.send(rank, records, payloads)
        # Without rounds, and where rounds do not wait for all, it counts in which order workers push.
        ordered = self.server.mode == "async" or self.rests
        if not self.crowded or self.chance.random() < 0.4 or ordered:
            self.server.pump()

    def usual(self, rank: int, i: int) -> tuple[Record, Any]:
        chance = self.chance
        count = self.pushed[rank, i]
        behind = min(self.pushed[other, i] for other in self.ranks)
        kind = chance.choice([K.PUSH, K.PUSHPULL, K.PUSHPULL, K.PULL])
        if kind == K.PULL or count - behind > 3:
            flags = chance.choice([0, m.PACKED, m.PACKED, m.BY_FRAME])
            return self.request(rank, K.PULL, i, min(count, behind + 1), flags=flags)
        self.pushed[rank, i] = count + 1
        return self.request(rank, kind, i, count + 1)

    def faulty(self, rank: int, i: int) -> tuple[Record, Any]:
        """A request that is special, repeated or nonsense."""
        chance = self.chance
        sent = [one for one in self.sent[rank] if one[0].slice == i]
        what = chance.randrange(9)
        if what < 3 and sent:
            record, data = chance.choice(sent[-12:])
            probe = what == 0 and record.kind != K.PULL_ROWS
            if probe:
                record = record._replace(flags=m.PROBE, place=P.NONE, nbytes=0)
            return record, None if probe else data
        if what == 3:
            return self.request(rank, K.PULL, i, self.pushed[rank, i], flags=m.OF_ROUND)
        if what == 4:
            # The result depends on whether a seal or a push is first, which a crowd leaves open.
            return self.request(rank, chance.choice([99 if self.crowded else K.SEAL, 77, 255]), i)
        if what == 5:
            record, _ = self.request(rank, K.PULL, chance.choice([50, 1 << 31, (1 << 32) - 1]))
            return record._replace(kind=chance.choice([K.PULL, K.INIT])), None
        if what == 6:
            odd = chance.choice([float("nan"), float("inf"), float("-inf")])
            return self.request(rank, K.PUSH, i, self.pushed[rank, i] + 1, threshold=odd)
        if what == 7:
            odd_frame = {"place": P.SHARED, "frame": chance.choice([0, 3, 4096, (1 << 32) - 1]), "nbytes": 8}
            offset = chance.choice([0, (1 << 22) - 4, (1 << 64) - 8])
            kind = chance.choice([K.PULL, K.PUSH, K.PUSHPULL])
            return self.request(rank, kind, i, self.pushed[rank, i] + 1, **odd_frame, offset=offset)
        return self.request(rank, K.PUSH, i, chance.choice([0, 500, (1 << 64) - 1]))

    def batch(self) -> None:
        chance, rank = self.chance, self.chance.choice(self.ranks)
        if chance.random() < 0.5:  # the worker that is behind continues
            rank = min(self.ranks, key=lambda one: sum(self.pushed[one, i] for i in self.slices))
        # A worker makes its next request of a slice when the previous request is answered; its replies for
        # several in one message depends on which of them the sums come between.
        slices = chance.sample(self.slices, chance.randint(1, len(self.slices)))
        if self.crowded:
            slices += slices[: chance.randint(0, 3)]
        odd = chance.randrange(len(slices)) if chance.random() < 0.2 else -1
        made = [self.faulty(rank, i) if at == odd else self.usual(rank, i) for at, i in enumerate(slices)]
        self.sent[rank] += made
        if chance.random() < 0.05:  # out of order
            self.later.append((rank, made))  # type: ignore[arg-type]
            return
        self.send(rank, made)
        if self.later and chance.random() < 0.5:
            rank, made = self.later.pop(0)  # type: ignore[misc,assignment]
            if rank in self.ranks:
                self.send(rank, made)

    def special(self) -> None:
        chance, server = self.chance, self.server
        server.pump()
        rank, i = chance.choice(self.ranks), chance.choice(self.slices)
        what = chance.randrange(15)
        if what < 3:
            made = [self.request(rank, chance.choice([K.ASSIGN, K.INIT]), i)]
            self.sent[rank] += made
            self.send(rank, made)
        elif what < 5:
            self.changed.append(server.capture())
        elif what < 7:
            server.workers[rank].open()
            server.pump()
        elif what == 7 and len(self.slices) > 1:
            self.send(rank, [self.request(rank, K.FORGET, i)])
            self.slices.remove(i)
        elif what == 8 and chance.random() < 0.5:
            self.change_settings(
                chance.choice(["optimizer", "optimizer", "configure", "counts", "none", "command"])
            )
        elif what == 9 and not self.shares and len(self.ranks) > 1 and chance.random() < 0.5:
            server.workers.pop(rank).close()
            lost = (m.Loss("worker", rank, 1.0),) if chance.random() < 0.7 else ()
            server.view(losses=lost)
        elif what == 10 and chance.random() < 0.3:
            resting = (rank,) if len(self.ranks) > 1 and chance.random() < 0.7 else ()
            server.view(resting=resting)
            self.rests = bool(resting)
        elif what == 11:
            self.kept = server.states()
            self.send(rank, [self.request(rank, K.FETCH_STATE, i, self.pushed[rank, i])])
        elif what == 12 and i in self.kept:
            record, _ = self.request(rank, K.PUT_STATE, i)
            self.send(rank, [(record._replace(place=P.FRAME, nbytes=len(self.kept[i])), self.kept[i])])
        elif what > 12 and self.rule is not None:
            self.change_settings("configure")

    def change_settings(self, kind: str) -> None:
        """Send the server an optimizer, other settings of it, other counts, or a command."""
        self.version += 1
        if kind == "command":
            self.server.install("any", kind=kind)
        elif kind == "configure" and self.chance.random() < 0.1:  # an invalid optimizer
            self.server.install(
                json.dumps({"name": "adm", "config": {}}), self.version, self.ordinal, self.epoch
            )
        else:
            self.described(kind)
            # The settings of an announced version, or of a version between two, may be replaced.
            version = max(1, self.version - (self.drawn.random() < 0.1))
            self.server.install(self.text, version, self.ordinal, self.epoch)

    def described(self, kind: str) -> None:
        """Note the settings after a change."""
        self.ordinal += kind in ("optimizer", "none")
        self.epoch += kind in ("optimizer", "none", "counts")
        if kind == "none":
            self.rule, self.text = None, ""
        elif kind == "optimizer":
            self.rule = self.chance.choice(RULES)
            self.text = json.dumps({"name": self.rule[0], "config": self.rule[1]})
        elif kind == "configure" and self.rule is not None:
            name, config, changes = self.rule
            self.rule = name, {**config, **changes}, {}
            self.text = json.dumps({"name": name, "config": self.rule[1]})

    def run(self, steps: int) -> dict[str, Any]:
        for _ in range(steps):
            if self.chance.random() < 0.12:
                self.special()
                self.server.pump()  # else the order of this and another worker's message would decide
            else:
                self.batch()
        server = self.server
        server.pump()
        return {
            "answers": {
                (rank, sequence): [
                    one._replace(round=0 if one.kind != K.VALUE else one.round) for one in found
                ][:1]
                for rank, worker in (server.workers.items() if not self.crowded else ())
                for sequence, found in sorted(worker.answers.items())
            },
            "values": server.values(),
            "states": {i: unpacked(data) for i, data in server.states().items()},
            "versions": server.loop._storage.store_shard(0).rounds.versions,
            "received": {rank: server.session(rank).received for rank in server.workers},
            "low": {rank: (server.session(rank).low, server.session(rank).above) for rank in server.workers},
            "changed": self.changed,
        }


# --------------------------------------------------------------------------------------- programs with tables


class TableProgram(Program):
    """Drives a server of tables by a seed."""

    def __init__(self, server: Server, seed: int) -> None:
        self.server, self.chance = server, random.Random(seed)
        self.data = np.random.default_rng(seed)
        workers = self.chance.choice([1, 2, 2, 3])
        self.slices = sorted(self.chance.sample(range(len(TABLES)), self.chance.randint(1, 3)))
        self.crowded = self.shares = self.packs = self.rests = False
        server.mode = "sync" if self.chance.random() < 0.85 else "async"
        self.pushed = {(rank, i): 0 for rank in range(workers) for i in self.slices}
        self.sequence = dict.fromkeys(range(workers), 0)
        self.sent: dict[int, list[tuple[Record, Any]]] = {rank: [] for rank in range(workers)}
        self.later: list[tuple[int, list[Record], list[Any]]] = []
        self.begin_settings(seed)
        self.rule = None
        self.kept: dict[int, bytes] = {}
        self.changed: list[list[int]] = []
        self.pasts: list[Any] = []
        server.define(TABLES)
        server.start(workers)
        for i in self.slices:
            self.send(0, [self.request(0, K.INIT, i)])
        if self.chance.random() < 0.9:
            self.change_settings("optimizer")

    def filled(self, rank: int, record: Record) -> tuple[Record, Any]:
        n, start, rest, dtype = TABLES[record.slice]
        chance, all_rows = self.chance, record.kind == K.ASSIGN or chance_of(self.chance, 0.8)
        if record.kind != K.PUSH and all_rows:
            data = self.data.standard_normal((n - start, *rest)).astype(dtype)
            return record._replace(place=P.FRAME, nbytes=data.nbytes), data
        if chance.random() < 0.03:
            data = self.data.standard_normal((n - start, *rest)).astype(dtype)  # a dense gradient
            return record._replace(place=P.FRAME, nbytes=data.nbytes), data
        ids = self.ids(record.slice)
        data = (4 * self.data.standard_normal((len(ids), *rest))).astype(dtype)
        if chance.random() < 0.02:
            data = data[:-1]
        made = record._replace(place=P.FRAME, nbytes=ids.nbytes + data.nbytes, rows=len(ids))
        return made, (ids, data)

    def ids(self, slice_: int) -> Any:
        """Draw ids of a slice, some of which are not as they should be."""
        n, start = TABLES[slice_][:2]
        count = self.chance.choice([0, 1, (n - start) // 3, (n - start) // 2, n - start])
        ids = np.sort(self.data.choice(np.arange(start, n, dtype=np.int64), count, replace=False))
        if count and self.chance.random() < 0.04:
            ids[self.chance.randrange(count)] = self.chance.choice([-1, 0, start, n - 1, n, 1 << 62])
        return ids

    def usual(self, rank: int, i: int) -> tuple[Record, Any]:
        chance, count = self.chance, self.pushed[rank, i]
        behind = min(self.pushed[other, i] for other in self.ranks)
        if count - behind > 1 or chance.random() < 0.4:
            ids, round_ = self.ids(i), min(count, behind + 1)
            if chance.random() < 0.1:
                return self.request(rank, K.PULL, i, round_)
            flags = m.OF_ROUND if chance.random() < 0.05 else 0
            more = {"rows": len(ids), "nbytes": ids.nbytes, "place": P.FRAME, "flags": flags}
            return self.request(rank, K.PULL_ROWS, i, round_, **more)[0], ids
        self.pushed[rank, i] = count + 1
        return self.request(rank, K.PUSH, i, count + 1)

    def special(self) -> None:
        if self.chance.random() < 0.3:
            self.pasts.append(self.server.past())  # type: ignore[attr-defined]
        super().special()

    def run(self, steps: int) -> dict[str, Any]:
        found = super().run(steps)
        return {**found, "pasts": [*self.pasts, self.server.past()]}  # type: ignore[attr-defined]


def chance_of(chance: random.Random, share: float) -> bool:
    return chance.random() < share


def server_loop_size(n: int) -> int:
    return cpu.encoded_bytes(TWO_BIT, n)


def ran(seed: int, links: bool, steps: int, tables: bool = False) -> tuple[dict[str, Any], int]:
    with pytest.MonkeyPatch.context() as patch:
        server = (TableServer if tables else Server)(patch, links)
        try:
            found = (TableProgram if tables else Program)(server, seed).run(steps)
            return found, server.sockets.seen
        finally:
            server.close()


def first_seed() -> int:
    return int(os.environ.get("KVSTORE_LINKS_SEED", random.SystemRandom().getrandbits(32)))


def alike(one: list[Answer] | None, other: list[Answer] | None) -> bool:
    """Whether two first answers are the same, as far as both could be read."""
    if not one or not other:
        return one == other
    unread = one[0].payload is None or other[0].payload is None
    return one == other if not unread else one[0].kind == other[0].kind


def check(seed: int, steps: int, tables: bool = False) -> None:
    (ours, _), (theirs, _) = ran(seed, True, steps, tables), ran(seed, False, steps, tables)
    told = f"KVSTORE_LINKS_SEED={seed}"
    for name, expected in theirs.items():
        if name != "answers":
            assert ours[name] == expected, f"{told}: {name}"
    differ = [
        one
        for one in sorted(theirs["answers"].keys() | ours["answers"].keys())
        if not alike(theirs["answers"].get(one), ours["answers"].get(one))
    ]
    assert not differ, (
        f"{told}: {differ[0]} is {str(ours['answers'].get(differ[0]))[:300]}, "
        f"and without links {str(theirs['answers'].get(differ[0]))[:300]}"
    )


def test_with_links_and_without_the_answers_are_the_same() -> None:
    first = first_seed()
    for seed in range(first, first + 25):  # a thousand at night
        check(seed, 40)


@pytest.mark.parametrize("seed", [606591532, 1736614159])
def test_what_has_overtaken_others_is_handled_when_a_link_gets_these(seed: int) -> None:
    check(seed, 40)


def test_tables_with_links_and_without_are_the_same() -> None:
    first = first_seed()
    for seed in range(first, first + 25):  # a thousand at night
        check(seed, 40, tables=True)


def test_a_table_whose_last_rows_are_added_by_an_update() -> None:
    check(2790226327, 40, tables=True)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("tables", [False, True])
def test_with_links_and_without_a_thousand_programs_are_the_same(tables: bool) -> None:
    first = first_seed()
    for seed in range(first, first + 1000):
        check(seed, 200, tables)


def test_links_handle_most_requests() -> None:
    seen, all_seen = (sum(ran(seed, links, 40)[1] for seed in range(20)) for links in (True, False))
    assert seen < 0.7 * all_seen


def test_links_update_and_answer_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    table, seen = 2, []
    n, start, rest, dtype = TABLES[table]
    server = TableServer(monkeypatch, True)
    try:
        server.define(TABLES)
        server.start(2)
        first = np.ones((n - start, *rest), dtype)
        init = Record(K.INIT, table, 1, 0, place=P.FRAME, nbytes=first.nbytes)
        server.send(0, [init], [first])
        server.pump()
        text = json.dumps({"name": "sgd", "config": {"learning_rate": 0.5}})
        server.install(text)
        ids = np.arange(start, n - 10, dtype=np.int64)
        gradient = np.full((len(ids), *rest), 0.25, dtype)
        for round_ in range(1, 5):
            for rank in range(2):
                number = 2 * round_ - (rank == 1)  # rank 0 has sent one more, the value
                nbytes = ids.nbytes + gradient.nbytes
                push = Record(
                    K.PUSH, table, number, round_, 1, round_, rows=len(ids), place=P.FRAME, nbytes=nbytes
                )
                server.send(rank, [push], [(ids, gradient)])
                server.pump()
                pull = Record(
                    K.PULL_ROWS, table, number + 1, round_, rows=len(ids), place=P.FRAME, nbytes=ids.nbytes
                )
                server.send(rank, [pull], [ids])
                server.pump()
            seen.append(server.sockets.seen)
            expected = np.full_like(gradient, 1 - 0.25 * round_)
            for rank, worker in server.workers.items():
                answer = worker.answers[2 * round_ + (rank == 0)][0]
                assert answer == (K.VALUE, round_, ids.tobytes() + expected.tobytes())
    finally:
        server.close()
    assert seen[1] == seen[-1], "rounds after the first one need no Python"


def test_links_send_sums_packed(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = []
    close = Server.close

    def counted(server: Server) -> None:
        counts.append(sum(one.packed for one in server.workers.values()))
        close(server)

    monkeypatch.setattr(Server, "close", counted)
    for seed in range(80):
        ran(seed, True, 40)
    assert sum(counts) > 40


def left() -> dict[str, int]:
    """What should not grow: descriptors, mappings of shared memory, and objects of servers."""
    gc.collect()
    names = {"Link", "WorkerSession", "SliceRounds", "DenseSlice", "SliceTable", "Stream", "Worker"}
    maps = Path("/proc/self/maps").read_text()
    return {
        "descriptors": len(os.listdir("/proc/self/fd")),
        "mappings": maps.count("memfd:kvstore"),
        "objects": sum(type(one).__name__ in names for one in gc.get_objects()),
    }


def test_nothing_is_left_of_a_server() -> None:
    ran(0, True, 40)
    before = left()
    for seed in range(1, 20):
        ran(seed, True, 40)
    assert left() == before


# ---------------------------------------------------------------------------------------------- large values

NUMBERS = 300_000  # of a value that several threads send


@pytest.fixture
def large(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    """Have a large value, and two threads that serve four workers."""
    server = Server(monkeypatch, True)
    server.sockets.all.close()
    server.sockets.all = StreamSet(two_threads=True)
    server.define([(NUMBERS, "float32")])
    server.start(4)
    server.send(0, [of_large(1, 0, K.INIT)], [np.zeros(NUMBERS, np.float32)])
    server.pump()
    yield server
    server.close()


def of_large(sequence: int, round_: int, kind: Any = K.PUSHPULL) -> Record:
    return Record(kind, 0, sequence, round_, place=P.FRAME, nbytes=4 * NUMBERS, flags=m.BY_FRAME)


def bring(server: Server, round_: int, parts: list[Any]) -> None:
    """Push all parts of a round, and wait for the sums: one whose second thread works looks calm."""
    for rank, part in enumerate(parts):
        server.send(rank, [of_large(round_ + (rank == 0), round_)], [part])
    end = pace.deadline(60)
    while not all(round_ + (rank == 0) in one.answers for rank, one in server.workers.items()):
        assert time.monotonic() < end
        server.pump()


def all_may_run_on(cpus: str) -> bool:
    """Whether all threads of this process may."""
    found = []
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(OSError):  # it has ended
            found.append(cpus in (task / "status").read_text())
    return all(found)


def test_large_sums_are_those_of_their_rounds_whichever_thread_sends_them(large: Server) -> None:
    chance = np.random.default_rng(1)
    cpus = Path("/proc/self/status").read_text().split("Cpus_allowed:")[1].split("\n")[0]
    for round_ in range(1, 25):
        parts = [chance.standard_normal(NUMBERS, np.float32) for _ in range(4)]
        bring(large, round_, parts)
        total = (((parts[0] + parts[1]) + parts[2]) + parts[3]).tobytes()
        for rank, worker in large.workers.items():
            assert worker.answers.pop(round_ + (rank == 0)) == [Answer(K.VALUE, round_, total)]
    end = pace.deadline(20)
    while not all_may_run_on(cpus):  # one may be on its way to another processor
        assert time.monotonic() < end


def test_a_large_sum_is_sent_though_no_thread_serves(large: Server) -> None:
    """A thread that waits until all is sent, as before the end, does not serve during the wait."""
    for round_ in range(1, 12):
        bring(large, round_, [np.ones(NUMBERS, np.float32)] * 4)
    for rank in (1, 2, 3, 0):  # the last is a worker of the first thread
        large.send(rank, [of_large(12 + (rank == 0), 12)], [np.ones(NUMBERS, np.float32)])
        if rank:
            large.pump()
    end = pace.deadline(60)
    while large.values()[0][0] != 12:
        assert time.monotonic() < end
        assert large.sockets.all.serve(0) == []
    while not all(stream.sent for stream in large.sockets.streams.values()):
        assert time.monotonic() < end
        for worker in large.workers.values():
            large._collect(worker)
    for rank, worker in large.workers.items():
        while 12 + (rank == 0) not in worker.answers:
            assert time.monotonic() < end
            large._collect(worker)


# ------------------------------------------------------------------------------------ requests between


@pytest.fixture(params=[True, False], ids=["links", "no links"])
def server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    made = Server(monkeypatch, request.param)
    made.define([(8, "float32"), (8, "float32")])
    yield made
    made.close()


def ones(value: float) -> Any:
    return np.full(8, value, np.float32)


def push(sequence: int, round_: int, slice_: int = 0, kind: int = K.PUSH) -> Record:
    return Record(kind, slice_, sequence, round_, place=P.FRAME, nbytes=32)  # type: ignore[arg-type]


def begun(server: Server, workers: int = 2) -> None:
    """Have a value in slice 0, and a first round, after which links know where the value is."""
    server.start(workers)
    server.send(0, [push(1, 0, kind=K.INIT)], [ones(7)])
    server.pump()
    for rank in range(workers):
        server.send(rank, [push(2 if rank == 0 else 1, 1)], [ones(1)])
        server.pump()


def test_a_value_as_it_was_after_a_round_is_not_that_of_the_next(server: Server) -> None:
    begun(server)
    server.view(resting=(1,))
    server.send(0, [push(3, 2)], [ones(2)])
    server.pump()
    wants = Record(K.PULL, 0, 2, 2, flags=m.OF_ROUND)
    server.send(1, [wants], [])  # both are there when the server looks
    server.send(0, [push(4, 3)], [ones(3)])
    server.pump()
    server.send(1, [wants._replace(sequence=3)], [])
    server.pump()
    found = server.workers[1].answers
    assert server.values()[0] == (3, ones(3).tobytes())
    assert found[2][0].payload == ones(2).tobytes()
    assert found[3][0].kind in (K.VALUE, K.FAILED)


def test_an_answer_is_read_before_a_sum_of_the_same_message(server: Server) -> None:
    begun(server, 1)
    server.send(0, [Record(K.PULL, 0, 3, 1), push(4, 2)], [ones(9)])
    server.pump()
    assert server.workers[0].answers[3] == [Answer(K.VALUE, 1, ones(1).tobytes())]
    assert server.values()[0] == (2, ones(9).tobytes())


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("links", [True, False])
@pytest.mark.parametrize(("mode", "values"), [
    ("sync", [[-1, -4], [-1, -4]]),
    ("async", [[0, -3], [-2, -5]]),
])  # fmt: skip
def test_a_server_that_may_be_started_again_writes_over_nothing_that_was_pushed(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    mode: str,
    values: list[list[int]],
    links: bool,
    saves: bool,
) -> None:
    server = Server(monkeypatch, links, snapshot=str(tmp_path) if saves else "")
    server.mode = mode
    server.define([(8, "float32")])
    begun(server)
    server.install('{"name": "sgd", "config": {"learning_rate": 1.0}}')
    for round_ in (2, 3):  # the second without Python, where there are links
        for rank in (0, 1):
            sequence = round_ + 1 - rank
            record = put(server, rank, sequence, round_, rank + 1)
            server.send(rank, [record._replace(version=1, flags=m.IN_PLACE)], [])
            server.pump()
        for rank, worker in server.workers.items():
            value, sequence = ones(values[rank][round_ - 2]).tobytes(), round_ + 1 - rank
            there = worker.blocks[sequence].array[:32].tobytes()
            assert worker.answers[sequence] == [Answer(K.VALUE, worker.answers[sequence][0].round, value)]
            assert there == (ones(rank + 1).tobytes() if saves else value)
    server.close()


# ------------------------------------------------------------------------------------------ parts of hosts

#: Workers 0 and 1 are of one host, worker 2 is of another.
SEATS = ((0, 0), (1, 0), (2, 2))


def begun_by_hosts(server: Server, host: str = "") -> None:
    """Have a value in slice 0, and workers that push for their hosts."""
    for rank in range(3):
        server.workers[rank] = Worker(server, rank, 100 + rank)
    server.view(seats=SEATS)
    for worker in server.workers.values():
        worker.attach(server.epoch, host)
        worker.open()
    server.send(0, [push(1, 0, kind=K.INIT)], [ones(7)])
    server.pump()


def put(server: Server, rank: int, sequence: int, round_: int, value: float) -> Record:
    """Put a part into memory of a worker, and ask for what comes of it."""
    block = server.workers[rank].pool.allocate(32)
    assert block is not None
    block.array[:] = ones(value).view(np.uint8)
    server.workers[rank].blocks[sequence] = block
    record = push(sequence, round_, kind=K.PUSHPULL)
    return record._replace(place=P.SHARED, frame=block.segment, offset=block.offset)


@pytest.mark.parametrize("dies", [False, True])
@pytest.mark.parametrize("packed", [False, True])  # a sum of both kinds of parts is Python's
def test_a_part_of_a_host_lies_in_memory_of_its_sender(server: Server, packed: bool, dies: bool) -> None:
    begun_by_hosts(server)
    put(server, 0, 0, 0, 100)  # at the same place of another worker's memory
    for round_ in (1, 2):
        server.send(1, [put(server, 1, round_, round_, round_)], [])
        server.pump()
        if dies and round_ == 2:
            server.workers.pop(1).close()
            server.view(seats=SEATS, losses=(m.Loss("worker", 1, 5.0),))
        if packed:
            record = push(round_, round_)._replace(coding=TWO_BIT, threshold=0.5, nbytes=4)
            server.send(2, [record], [bytes([PARTS[0]] * 2 + [0, 0])])
        else:
            server.send(2, [push(round_, round_)], [ones(0.5)])
        server.pump()
    other = np.array([0.5, -0.5, 0, 0.5] * 2, np.float32) if packed else ones(0.5)
    assert server.values()[0] == (2, (ones(2) + other).tobytes())


def test_a_part_whose_worker_died_before_it_was_found_has_not_come(server: Server) -> None:
    begun_by_hosts(server)
    record = put(server, 1, 1, 1, 5)
    server.workers[1].pool.close()
    server.send(1, [record], [])
    server.pump()
    server.send(2, [push(1, 1, kind=K.PUSHPULL)], [ones(1)])
    server.pump()
    assert server.workers[2].answers == {}
    server.send(0, [push(2, 1, kind=K.PUSHPULL)], [ones(5)])  # the same sum, as another of its host sends it
    server.pump()
    assert server.workers[2].answers[1] == [Answer(K.VALUE, 1, ones(6).tobytes())]


def test_only_a_server_of_the_host_shares_memory_with_its_pushers(server: Server) -> None:
    here = host_identity()
    begun_by_hosts(server, here)
    assert all(worker.memory is not None for worker in server.workers.values())
    worker = server.workers[1] = Worker(server, 1, 500)
    server.view(seats=SEATS)
    worker.attach(server.epoch, f"0{here}")
    assert server.session(1) is not None
    assert worker.memory is None
    server.send(1, [put(server, 1, 1, 1, 5)], [])  # says that it does, all the same
    server.send(2, [push(1, 1, kind=K.PUSHPULL)], [ones(1)])
    worker.open()
    server.send(1, [put(server, 1, 1, 1, 5)], [])
    server.pump()
    assert [one.kind for one in server.workers[2].answers[1]] == [K.FAILED]


# -------------------------------------------------------------------------------------------- packed sums


PARTS = (0b11_10_00_11, 0b11_11_10_00)  # of four elements each: +1 -1 0 +1, and +1 +1 -1 0
SUM = np.array([1, 0, -0.5, 0.5] * 2, np.float32)


def push_packed(server: Server, sequences: tuple[int, int], round_: int) -> None:
    """Have both workers push the values that they have packed."""
    for rank, sequence in enumerate(sequences):
        record = push(sequence, round_)._replace(coding=TWO_BIT, threshold=0.5, nbytes=4)
        server.send(rank, [record], [bytes([PARTS[rank]] * 2 + [0, 0])])
        server.pump()


def pulled(server: Server, rank: int, sequence: int, round_: int, flags: int = 0) -> bytes | None:
    server.send(rank, [Record(K.PULL, 0, sequence, round_, flags=flags)], [])
    server.pump()
    (answer,) = server.workers[rank].answers[sequence]
    assert answer.kind == K.VALUE
    return answer.payload


def test_a_packed_sum_is_read_packed_and_plain(server: Server) -> None:
    begun(server)
    push_packed(server, (3, 2), 2)
    assert pulled(server, 0, 4, 2, m.PACKED) == SUM.tobytes()
    assert pulled(server, 1, 3, 2) == SUM.tobytes(), "a request for plain numbers gets these"
    assert pulled(server, 0, 5, 2, m.PACKED) == SUM.tobytes(), "and others still get the parts"
    assert server.workers[0].packed == (2 if server.sockets.links else 0) and not server.workers[1].packed
    assert server.values()[0] == (2, SUM.tobytes())
    assert pulled(server, 0, 6, 2, m.PACKED) == SUM.tobytes(), "Python may write an array that it has read"
    assert server.workers[0].packed == (2 if server.sockets.links else 0)


def test_the_value_before_a_packed_round_stays(server: Server) -> None:
    begun(server)
    push_packed(server, (3, 2), 2)
    for rank in range(2):
        server.send(rank, [push(4 - rank, 3)], [ones(3)])
        server.pump()
    assert pulled(server, 1, 4, 2, m.OF_ROUND) == SUM.tobytes()
    assert server.values()[0] == (3, ones(6).tobytes())
    push_packed(server, (5, 5), 4)
    assert pulled(server, 1, 6, 3, m.OF_ROUND) == ones(6).tobytes()
    push_packed(server, (6, 7), 5)
    assert pulled(server, 1, 8, 4, m.OF_ROUND) == SUM.tobytes()
    assert server.values()[0] == (5, SUM.tobytes())


def test_an_optimizer_updates_a_packed_sum(server: Server) -> None:
    begun(server)
    push_packed(server, (3, 2), 2)
    server.install(json.dumps({"name": "sgd", "config": {"learning_rate": 1.0}}))
    for round_ in (3, 4):
        for rank in range(2):
            record = push(round_ + 1 - rank, round_)._replace(version=1)
            server.send(rank, [record], [ones(0.25)])
            server.pump()
    assert server.values()[0] == (4, (SUM - 1).tobytes())
    assert pulled(server, 0, 6, 4, m.PACKED) == (SUM - 1).tobytes()


# ------------------------------------------------------------------------------------------------ updates


LARGE = 9000  # elements of a slice, whose value is sent alone


def number_of_applies(server: Server, patch: pytest.MonkeyPatch) -> list[int]:
    """A list of one number, which counts how often Python sums or updates from now on."""
    count, apply = [0], server.loop._storage.apply_rounds

    def counted(action: Any) -> Any:
        count[0] += 1
        return apply(action)

    patch.setattr(server.loop._storage, "apply_rounds", counted)
    return count


def started(
    patch: pytest.MonkeyPatch, links: bool, name: str, config: dict[str, Any], mode: str = "sync"
) -> Server:
    """A server of two workers with an optimizer, and a slice that has had one update."""
    server = Server(patch, links)
    server.mode = mode
    server.define([(LARGE, "float32")])
    server.start(2)
    server.send(0, [pushed(1, 0, 0, K.INIT)], [full(7)])
    server.pump()
    server.install(json.dumps({"name": name, "config": config}))
    for rank in range(2):
        server.send(rank, [pushed(2 - rank, 1, 1)], [full(1)])
        server.pump()
    return server


def full(value: float) -> Any:
    return np.full(LARGE, value, np.float32) / np.arange(1, LARGE + 1, dtype=np.float32)


def pushed(sequence: int, round_: int, version: int, kind: int = K.PUSH, frame: int = 0) -> Record:
    place = {"place": P.FRAME, "frame": frame, "nbytes": 4 * LARGE}
    stamp = UpdateClock(time=round_, epoch=1).stamp
    return Record(kind, 0, sequence, round_, version, stamp, **place)  # type: ignore[arg-type]


@pytest.mark.parametrize("mode", ["sync", "async"])
@pytest.mark.parametrize(("name", "config", "repeated"), [
    ("sgd", {}, True), ("sgd", {"momentum": 0.9, "wd": 0.01}, True), ("nag", {}, True), ("rmsprop", {}, True),
    ("sgd", {"lr_scheduler": schedule(2)}, False), ("adam", {}, False), ("sgld", {}, False),
])  # fmt: skip
@pytest.mark.parametrize("stream", [1, 1 << 30])
def test_updates_with_the_same_parameters_need_no_python(
    monkeypatch: pytest.MonkeyPatch, name: str, config: dict[str, Any], repeated: bool, mode: str, stream: int
) -> None:
    cpu.set_stream_bytes(stream)
    found = []
    for links in (True, False):
        server = started(monkeypatch, links, name, config, mode)
        count = number_of_applies(server, monkeypatch)
        for round_ in range(2, 7):
            for rank in range(2):
                server.send(rank, [pushed(round_ + 1 - rank, round_, 1, K.PUSHPULL)], [full(round_ + rank)])
                server.pump()
        assert (count[0] == 0) == (links and repeated)
        answers = [worker.answers for worker in server.workers.values()]
        found.append((server.values(), {i: unpacked(one) for i, one in server.states().items()}, answers))
        server.close()
    assert found[0] == found[1]
    assert found[0][1][0][1] == {"0": 6 if mode == "sync" else 12}


def test_pushes_that_count_by_themselves_are_each_answered_with_their_value(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    server = started(monkeypatch, True, "sgd", {"learning_rate": 1.0}, "async")
    count = number_of_applies(server, monkeypatch)
    kinds = [K.PULL, K.PUSHPULL, K.PUSHPULL, K.PULL, K.PUSH, K.PULL]
    records = [
        pushed(3 + at, 0, 1, kind) if kind != K.PULL else Record(K.PULL, 0, 3 + at)
        for at, kind in enumerate(kinds)
    ]
    server.send(0, [one._replace(flags=m.BY_FRAME) for one in records], [full(2)])
    server.pump()
    answers = [server.workers[0].answers[3 + at] for at in range(len(kinds))]
    values = [full(7) - full(1) - full(1)]
    for _ in range(3):
        values.append(values[-1] - full(2))
    expected = [values[i].astype(np.float32).tobytes() if i >= 0 else None for i in (0, 1, 2, 2, -1, 3)]
    rounds = [2, 3, 4, 4, 5, 5]
    kinds = [K.DONE if kind == K.PUSH else K.VALUE for kind in kinds]
    assert count == [0]
    assert [len(one) for one in answers] == [1] * 6
    assert [(one[0].kind, one[0].round) for one in answers] == list(zip(kinds, rounds, strict=True))
    assert [one[0].payload or None for one in answers] == expected
    server.close()


@pytest.mark.parametrize("kind", ["optimizer", "configure", "counts", "none", "command"])
def test_settings_that_change_hold_from_their_round_on(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    found = []
    for links in (True, False):
        server = started(monkeypatch, links, "sgd", {"momentum": 0.9})
        text = json.dumps({"name": "sgd", "config": {"momentum": 0.5, "learning_rate": 0.25}})
        text = {"counts": json.dumps({"name": "sgd", "config": {"momentum": 0.9}}), "none": ""}.get(
            kind, text
        )
        new = kind in ("optimizer", "none")
        for round_ in range(2, 9):
            if round_ == 4 and kind == "command":
                server.install("any", kind=kind)
            elif round_ == 4:
                server.install(text, 2, 1 + new, 1 + new + (kind == "counts"))
            version = 1 if round_ < 6 else 2  # workers know of it later than the server
            for rank in range(2):
                record = pushed(round_ + 1 - rank, round_, version - (round_ == 7 and rank), K.PUSHPULL)
                server.send(rank, [record], [full(round_)])
                server.pump()
        found.append((server.values(), {i: unpacked(one) for i, one in server.states().items()}))
        assert server.loop._storage.store_shard(0).rounds.versions == {0: 2}
        server.close()
    assert found[0] == found[1]


@pytest.mark.parametrize("links", [True, False])
def test_the_largest_stamp_of_a_round_counts_if_it_is_one_of_its_update_counts(
    monkeypatch: pytest.MonkeyPatch, links: bool
) -> None:
    server = started(monkeypatch, links, "sgd", {"momentum": 0.9})
    count, found = number_of_applies(server, monkeypatch), []
    stamps = [(1, 3), (1, 9), (2, 50), (0, 90), (1, 10)]  # epoch and time
    for round_, (epoch, time_) in enumerate(stamps, 2):
        for rank in range(2):
            stamp = UpdateClock(time=time_ if rank else 1, epoch=epoch if rank else 1).stamp
            record = pushed(round_ + 1 - rank, round_, 1)._replace(clock=stamp)
            server.send(rank, [record], [full(1)])
            server.pump()
        found.append(unpacked(server.states()[0])[1:3])
    assert (count[0] == 0) == links
    server.close()
    assert [time_ for _, time_ in found] == [3, 9, 4, 5, 10]
    assert [counts for counts, _ in found] == [{"0": count} for count in range(2, 7)]


def test_a_state_that_is_set_counts_from_then_on(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for links in (True, False):
        server = started(monkeypatch, links, "sgd", {"momentum": 0.9})
        kept = server.states()[0]
        for round_ in range(2, 9):
            for rank in range(2):
                server.send(
                    rank, [pushed(round_ + 1 - rank + (round_ > 5 and not rank), round_, 1)], [full(1)]
                )
                server.pump()
            if round_ == 5:
                record = Record(K.PUT_STATE, 0, 7, 0, 1, place=P.FRAME, nbytes=len(kept))
                server.send(0, [record], [np.frombuffer(kept, np.uint8)])
                server.pump()
                assert unpacked(server.states()[0]) == unpacked(kept)
        found.append((server.values(), unpacked(server.states()[0])))
        server.close()
    assert found[0] == found[1]
    assert found[0][1][1] == {"0": 4}


def test_a_snapshot_has_what_was_updated_without_python(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    server = started(monkeypatch, True, "sgd", {"momentum": 0.9})
    shard = server.loop._storage.store_shard(0)
    shard.capture(tmp_path, {})()
    for round_ in range(2, 5):
        for rank in range(2):
            server.send(rank, [pushed(round_ + 1 - rank, round_, 1)], [full(round_)])
            server.pump()
    shard.capture(tmp_path, {})()
    restored, _ = StoreShard.restore(tmp_path)
    assert restored.read_value(0).tobytes() == shard.read_value(0).tobytes()
    assert unpacked(restored.fetch_state(0)) == unpacked(shard.fetch_state(0))
    assert unpacked(shard.fetch_state(0))[1] == {"0": 4}
    assert restored.rounds.versions == shard.rounds.versions
    server.close()


@pytest.mark.parametrize("optimizer", [True, False])
def test_the_value_before_a_round_without_python_is_kept(
    monkeypatch: pytest.MonkeyPatch, optimizer: bool
) -> None:
    server = started(monkeypatch, True, "sgd" if optimizer else "adam", {})
    for round_ in range(2, 5):
        before = server.values()[0][1]
        for rank in range(2):
            server.send(rank, [pushed(round_ + 1 - rank, round_, 1)], [full(round_)])
            server.pump()
        assert server.loop._storage.store_shard(0).past_value(0, round_ - 1).tobytes() == before
        with pytest.raises(KVStoreError, match="not kept"):
            server.loop._storage.store_shard(0).past_value(0, round_ - 2)
    server.close()


# ------------------------------------------------------------------------------------------------ any number


@pytest.mark.parametrize("number", [1 << 20, 1 << 31, (1 << 32) - 1])
def test_a_slice_of_any_number_can_be_named(server: Server, number: int) -> None:
    begun(server)
    server.send(1, [push(2, 0, number, K.INIT)], [ones(1)])
    server.send(1, [Record(K.PULL, number, 3)], [])
    server.pump()
    server.tell(
        m.SlicesNotice(
            0, (m.KeyEntry(m.KeySpec("far", (8,), "float32"), 9, (m.Slice(number, 0, 0, 8),), False),)
        )
    )
    server.send(1, [Record(K.PULL, number, 4)], [])
    server.pump()
    assert [found[0].kind for found in server.workers[1].answers.values()] == [
        K.DONE,
        K.FAILED,
        K.DONE,
        K.VALUE,
    ]


def test_a_stream_that_breaks_with_answers_in_flight_costs_no_other_worker(server: Server) -> None:
    begun(server)
    server.send(1, [push(2, 2, kind=K.PUSHPULL)], [ones(4)])
    server.pump()
    server.workers[1].close_stream()
    server.send(0, [push(3, 2, kind=K.PUSHPULL)], [ones(5)])
    server.pump()
    assert server.workers[0].answers[3] == [Answer(K.VALUE, 2, ones(9).tobytes())]
    server.workers[1].open()
    server.send(1, [push(2, 2, kind=K.PUSHPULL)], [ones(4)])
    server.pump()
    assert server.workers[1].answers[2][-1] == Answer(K.VALUE, 2, ones(9).tobytes())


def test_a_worker_that_is_replaced_is_answered_no_more(server: Server) -> None:
    begun(server)
    server.send(1, [push(2, 2, kind=K.PUSHPULL)], [ones(4)])
    server.pump()
    old = server.workers[1]
    server.workers[1] = Worker(server, 1, 500)
    server.view(losses=())
    server.workers[1].attach(server.epoch)
    server.workers[1].open()
    server.send(0, [push(3, 2, kind=K.PUSHPULL)], [ones(5)])
    server.send(1, [push(1, 2, kind=K.PUSHPULL)], [ones(1)])
    server.pump()
    assert server.workers[0].answers[3] == [Answer(K.VALUE, 2, ones(6).tobytes())]
    assert server.workers[1].answers[1] == [Answer(K.VALUE, 2, ones(6).tobytes())]
    batch = Batch(0, 1, old.incarnation, 1, [push(3, 3)], (ones(3),))
    assert old.stream is not None
    old.stream.send(MessageCodec(JOB).encode(batch))
    server.pump()
    with contextlib.suppress(ConnectionError):
        assert old.stream.receive() == []
    assert server.values()[0] == (2, ones(6).tobytes())
    old.close()


def test_a_slice_is_forgotten_with_parts_and_waiting_requests(server: Server) -> None:
    begun(server)
    server.send(1, [push(2, 2, kind=K.PUSHPULL)], [ones(4)])
    server.pump()
    server.send(0, [Record(K.FORGET, 0, 3), Record(K.PULL, 0, 4, 1), push(5, 2)], [ones(2)])
    server.pump()
    assert [found[0].kind for found in server.workers[1].answers.values()] == [K.DONE, K.FAILED]
    kinds = {sequence: found[0].kind for sequence, found in server.workers[0].answers.items()}
    assert kinds == {1: K.DONE, 2: K.DONE, 3: K.DONE, 4: K.FAILED, 5: K.FAILED}
    server.tell(m.InstallRequest(0, 0, "drop", ""))
    server.send(0, [push(6, 1)], [ones(2)])
    server.pump()


# ------------------------------------------------------------------------------------------- hostile messages


def odd(frames: list[bytes], chance: random.Random) -> list[bytes]:
    """Put faults into a batch: any bytes, numbers at their limits, frames that lack or are too many."""
    found = [bytearray(frame) for frame in frames]
    for _ in range(chance.randint(1, 4)):
        first = found[0]
        what = chance.randrange(7)
        if what == 0:
            first[chance.randrange(len(first))] ^= 1 << chance.randrange(8)
        elif what < 4 and len(first) >= 52 + 79:  # a number of a record
            form, at = chance.choice(FIELDS)
            value = chance.choice(LIMITS) % (1 << 8 * struct.calcsize(form))
            struct.pack_into(form, first, 52 + 79 * chance.randrange((len(first) - 52) // 79) + at, value)
        elif what == 4:
            del first[chance.randrange(1, len(first)) :]
        elif what == 5 and len(found) > 1:
            found[chance.randrange(1, len(found))] = bytearray(chance.choice([0, 1, 31, 33, 100]))
        elif what == 6:
            found[1:] = chance.choice([[], found[1:] * 2, [bytearray()] * 300])
        if len(found[0]) < 20:
            break
    return [bytes(frame) for frame in found]


LIMITS = [
    0,
    1,
    2,
    3,
    31,
    32,
    33,
    255,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**63 - 1,
    2**63,
    2**64 - 32,
    2**64 - 1,
]
#: Of a record: kind, slice, sequence, round, version, coding, rows, place, frame, offset, nbytes, flags.
FIELDS = [
    ("<B", 0), ("<I", 1), ("<Q", 5), ("<Q", 13), ("<I", 21), ("<B", 33), ("<Q", 42), ("<B", 50), ("<I", 51),
    ("<Q", 55), ("<Q", 63), ("<Q", 71),
]  # fmt: skip


ROWS = Record(K.PULL_ROWS, 0, 3, 1)
STATE = Record(K.PUT_STATE, 0, 3, 1)
UNFIT = {
    "no ids": ROWS,
    "ids of no rows": ROWS._replace(place=P.FRAME, nbytes=16),
    "ids in two frames": ROWS._replace(place=P.FRAME, nbytes=24, frame=1, rows=2),
    "ids in memory": ROWS._replace(place=P.SHARED, nbytes=16),
    "ids in memory that is not there": ROWS._replace(place=P.SHARED, nbytes=16, frame=9, rows=2),
    "a state of rows": STATE._replace(place=P.FRAME, nbytes=24, frame=1, rows=1),
    "a state in memory that is not there": STATE._replace(place=P.SHARED, nbytes=16, frame=9),
}


@pytest.mark.parametrize("name", UNFIT)
def test_a_payload_that_is_none_for_its_request_fails_that_alone(server: Server, name: str) -> None:
    begun(server)
    server.install('{"name": "sgd", "config": {}}')
    frames = () if UNFIT[name].place == P.NONE else (bytes(40_000), bytes(12), bytes(12))
    server.raw(0, MessageCodec(JOB).encode(Batch(0, 0, 100, server.epoch, [UNFIT[name]], frames)))
    server.pump()
    assert [one.kind for one in server.workers[0].answers[3]] == [K.FAILED]
    server.send(0, [Record(K.PULL, 0, 4, 1)], [])
    server.pump()
    assert [one.kind for one in server.workers[0].answers[4]] == [K.VALUE]


def hostile(seed: int, links: bool, count: int) -> dict[int, list[Answer]]:
    """Send mutated batches as worker 2, which rests, and rounds as the others; return the others' replies."""
    chance = random.Random(seed)
    with pytest.MonkeyPatch.context() as patch:
        server = Server(patch, links)
        try:
            server.define([(8, "float32"), (9000, "float32")])
            begun(server, 3)
            server.view(resting=(2,))
            session = server.session(2)
            for i in range(count):
                wild = [push(session.low + 1, session.low), Record(K.PULL, 0, session.low + 2)]
                wild += [Record(K.PULL, 1, session.low + 3), push(session.low + 4, 3, 1, K.PUSHPULL)]
                batch = Batch(0, 2, 102, server.epoch, wild[: chance.randint(1, 4)], (ones(0), bytes(40_000)))
                server.raw(2, odd([bytes(one) for one in MessageCodec(JOB).encode(batch)], chance))
                if server.workers[2].stream is None:
                    server.workers[2].open()
                if i % 10 == 0:
                    number = 2 + i // 10
                    server.send(0, [push(number + 1, number, kind=K.PUSHPULL)], [ones(number)])
                    server.send(1, [push(number, number, kind=K.PUSHPULL)], [ones(number)])
                if i % 5 == 0:
                    server.pump()
            server.pump()
            return {**server.workers[0].answers, **{-i: a for i, a in server.workers[1].answers.items()}}
        finally:
            server.close()


def check_hostile(seed: int, count: int) -> None:
    told = f"KVSTORE_LINKS_SEED={seed}"
    for found in (hostile(seed, True, count), hostile(seed, False, count)):
        assert len(found) == 2 * (count // 10) + 3, told
        assert all(len(answers) == 1 for answers in found.values()), told
        assert {answers[0].kind for answers in found.values()} <= {K.DONE, K.VALUE, K.FAILED}, told


def test_hostile_messages_disturb_no_other_worker() -> None:
    check_hostile(first_seed(), 1000)


@pytest.mark.nightly
@pytest.mark.timeout(3600)
def test_a_hundred_thousand_hostile_messages_disturb_no_other_worker() -> None:
    first = first_seed()
    for seed in range(first, first + 50):
        check_hostile(seed, 2000)
