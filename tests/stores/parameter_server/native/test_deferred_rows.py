"""Rows of a table that a server sends while it continues: a reply has them as they were when it was made."""

from __future__ import annotations

import gc
import json
import random
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pace
import pytest
from stores.parameter_server.native.served import Answer, K, P, TableServer

from kvstore.stores.parameter_server.native._native import TableRows
from kvstore.stores.parameter_server.protocol.messages import Record
from kvstore.stores.parameter_server.transport import ciphers
from kvstore.stores.parameter_server.transport.native._streams import StreamSet

ROWS, WIDTH = 40_000, 64  # 10 MB, several times what sockets take
IDS = np.arange(0, ROWS, 2, dtype=np.int64)  # and half of them still are


class Job:
    """A server of one table that SGD updates, and three workers; round `r` adds `r` to each row of `IDS`."""

    def __init__(self, patch: pytest.MonkeyPatch, two: bool, cipher: int) -> None:
        self.server = TableServer(patch, True)
        self.server.sockets.all.close()
        self.server.sockets.all = StreamSet(two_threads=two)
        self.server.sockets.cipher = cipher
        self.server.define([(ROWS, 0, (WIDTH,), "float32")])
        self.server.start(3)
        self.last = dict.fromkeys(range(3), 0)  # sequence numbers
        first = np.zeros((ROWS, WIDTH), np.float32)
        self.send(0, K.INIT, 0, [first], place=P.FRAME, nbytes=first.nbytes)
        self.server.pump()
        text = json.dumps({"name": "sgd", "config": {"learning_rate": 1.0}})
        self.server.install(text)

    def send(self, rank: int, kind: Any, round_: int, payloads: list[Any], **record: Any) -> int:
        self.last[rank] += 1
        self.server.send(rank, [Record(kind, 0, self.last[rank], round_, **record)], payloads)
        return self.last[rank]

    def push(self, rank: int, round_: int) -> None:
        """Rank 0 pushes all of it: the other workers add zeros."""
        rows = np.full((len(IDS), WIDTH), -float(round_) if rank == 0 else 0.0, np.float32)
        size = IDS.nbytes + rows.nbytes
        more = {"clock": round_, "version": 1, "rows": len(IDS), "place": P.FRAME, "nbytes": size}
        self.send(rank, K.PUSH, round_, [(IDS, rows)], **more)

    def pull(self, rank: int, round_: int) -> int:
        return self.send(rank, K.PULL_ROWS, round_, [IDS], rows=len(IDS), place=P.FRAME, nbytes=IDS.nbytes)

    def serve(self, *ranks: int) -> None:
        """Serve once; these workers read the replies."""
        self.server.loop._serve_once()
        for rank in ranks:
            self.server._collect(self.server.workers[rank])

    def serve_until(self, round_: int, *ranks: int) -> None:
        """Until a round is done; so its requests arrived before."""
        end = pace.deadline(60)
        while self.server.loop._machine._stores[0].requests.slices[0].round != round_:
            assert time.monotonic() < end
            self.serve(*ranks)

    def answered(self, rank: int, sequence: int) -> list[Answer]:
        end = pace.deadline(60)
        while sequence not in self.server.workers[rank].answers:
            assert time.monotonic() < end
            self.serve(rank)
        return self.server.workers[rank].answers.pop(sequence)

    def stuck(self, rank: int) -> bool:
        """Whether a part of the data for the worker is not sent yet."""
        return not self.server.sockets.streams[self.server.workers[rank].peer].sent

    def round(self, number: int, *readers: int) -> None:
        for rank in range(3):
            self.push(rank, number)
        self.serve_until(number, *readers)


def after(round_: int) -> list[Answer]:
    value = round_ * (round_ + 1) / 2
    rows = np.full((len(IDS), WIDTH), value, np.float32)
    return [Answer(K.VALUE, round_, IDS.tobytes() + rows.tobytes())]


@pytest.fixture(params=["one thread", "two threads", "encrypted"])
def job(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Job]:
    encrypted = request.param == "encrypted"
    if encrypted and not ciphers.available_ciphers():
        pytest.skip("this process has no cipher")
    made = Job(monkeypatch, request.param != "one thread", ciphers.available_ciphers()[0] if encrypted else 0)
    for number in range(1, 10):  # of which the first one shows the table, and the second thread gets streams
        made.round(number, 0, 1, 2)
    made.server.pump()
    yield made
    made.server.close()


def asked(job: Job, rank: int) -> int:
    """Have a worker ask for rows and read none of them; its request's number."""
    sequence = job.pull(rank, 9)
    end = pace.deadline(60)
    while not job.stuck(rank):
        assert time.monotonic() < end
        job.serve()
    return sequence


def test_rows_are_those_of_their_round_though_the_next_ones_change_them(job: Job) -> None:
    sequences = [asked(job, rank) for rank in range(3)]
    seen = job.server.sockets.seen
    for number in (10, 11):
        job.round(number)
    assert job.server.sockets.seen == seen, "no round was Python's"
    assert all(map(job.stuck, range(3)))
    for rank, sequence in enumerate(sequences):
        assert job.answered(rank, sequence) == after(9)
        assert job.answered(rank, job.pull(rank, 11)) == after(11)


def test_rows_are_those_of_their_round_though_python_changes_them(job: Job) -> None:
    sequence = asked(job, 1)
    dense = np.full((ROWS, WIDTH), -10, np.float32)
    for rank in range(3):
        part = dense if rank == 0 else np.zeros_like(dense)
        job.send(rank, K.PUSH, 10, [part], clock=10, version=1, place=P.FRAME, nbytes=part.nbytes)
    job.serve_until(10, 0, 2)
    assert job.answered(1, sequence) == after(9)
    assert job.answered(1, job.pull(1, 10)) == after(10)


def test_rows_are_sent_though_their_table_is_forgotten(job: Job) -> None:
    sequence = asked(job, 1)
    job.send(0, K.FORGET, 0, [])
    end = pace.deadline(60)
    while job.last[0] not in job.server.workers[0].answers:
        assert time.monotonic() < end
        job.serve(0)
    gc.collect()
    assert not any(isinstance(one, TableRows) for one in gc.get_objects())
    assert job.answered(1, sequence) == after(9)


def test_a_worker_that_leaves_while_rows_are_sent_costs_the_others_nothing(job: Job) -> None:
    sequence = asked(job, 1)
    asked(job, 2)
    job.server.workers[2].close_stream()
    for rank in range(3):
        if rank == 2:
            job.server.workers[2].open()
            job.server.workers[2].attach(job.server.epoch)
        job.push(rank, 10)
    job.serve_until(10)
    assert job.answered(1, sequence) == after(9)
    assert job.answered(2, job.pull(2, 10)) == after(10)


@pytest.mark.parametrize("seed", range(4))
def test_rows_are_those_of_their_round_whenever_they_are_read(job: Job, seed: int) -> None:
    chance = random.Random(seed)
    asked_at: dict[int, dict[int, int]] = {rank: {} for rank in range(3)}
    for number in range(10, 30):
        for rank in range(3):
            if len(asked_at[rank]) < 3 and chance.random() < 0.7:
                asked_at[rank][job.pull(rank, number - 1)] = number - 1
        job.round(number, *(rank for rank in range(3) if chance.random() < 0.3))
    for rank, sequences in asked_at.items():
        for sequence, round_ in sequences.items():
            assert job.answered(rank, sequence) == after(round_)
