"""The limit of row-sparse cases: for each way of its server and number of parts, its table is the sum's."""

from __future__ import annotations

import ctypes
import itertools
import socket
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from bench.peers.dist import row_update
from bench.runner import compiled

pytestmark = [
    pytest.mark.bench,
    pytest.mark.skipif(compiled.compiler() is None, reason="the limit is C"),
]

Array = npt.NDArray[np.float32]
Ids = npt.NDArray[np.int64]
ROWS, WIDTH, RATE = 700, 5, 0.5
TABLE = np.arange(ROWS * WIDTH, dtype=np.float32).reshape(ROWS, WIDTH)
WAYS = list(itertools.product(range(len(row_update.WAYS)), row_update.PARTS))


def _at(array: npt.NDArray[np.generic]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


class Limit:
    """A server, and two workers' connections to it for each way."""

    def __init__(self) -> None:
        self.code = compiled.load(Path(row_update.__file__).with_suffix(".c"))
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.table = TABLE.copy()
        rows = ctypes.c_int64(ROWS), ctypes.c_int64(WIDTH), ctypes.c_float(RATE)
        serve = self.code.row_update_serve
        arguments = self.listener.fileno(), 2, _at(self.table), *rows
        self.server = threading.Thread(target=serve, args=arguments, daemon=True)
        self.server.start()
        self.lines = {
            (number, rank): self._line(number, rank, way)
            for number, (way, _) in enumerate(WAYS)
            for rank in (0, 1)
        }

    def close(self) -> None:
        """End the server's threads."""
        self.listener.shutdown(socket.SHUT_RDWR)
        for line in (self.listener, *self.lines.values()):
            line.close()
        self.server.join(20)

    def _line(self, group: int, rank: int, way: int) -> socket.socket:
        line = socket.create_connection(self.listener.getsockname(), 20)
        line.settimeout(None)
        line.sendall(struct.pack("4q", group, rank, way, ROWS))
        return line

    def trip(self, number: int, rank: int, ids: Ids, rows: Array, wanted: Ids, out: Array) -> None:
        failed = self.code.row_update_trip(
            self.lines[number, rank].fileno(), WAYS[number][1], ctypes.c_int64(ROWS), ctypes.c_int64(WIDTH),
            _at(ids), ctypes.c_int64(len(ids)), _at(rows), _at(wanted), ctypes.c_int64(len(wanted)), _at(out),
        )  # fmt: skip
        assert not failed

    def trips(self, number: int, ids: list[Ids], rows: list[Array], wanted: list[Ids]) -> list[Array]:
        """Have both workers push and pull."""
        outs = [np.full((len(one), WIDTH), -1, np.float32) for one in wanted]
        threads = [
            threading.Thread(target=self.trip, args=(number, rank, ids[rank], rows[rank], wanted[rank], out))
            for rank, out in enumerate(outs)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(20)
            assert not thread.is_alive()
        return outs


@pytest.fixture(scope="module")
def limit() -> Iterator[Limit]:
    made = Limit()
    yield made
    made.close()


ids = st.lists(st.integers(0, ROWS - 1), unique=True, max_size=80).map(lambda one: np.array(sorted(one), np.int64))


@pytest.mark.parametrize("number", range(len(WAYS)))
@given(pushed=st.tuples(ids, ids), wanted=st.tuples(ids, ids))
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_each_worker_gets_the_rows_that_it_asks_for(
    limit: Limit, number: int, pushed: tuple[Ids, Ids], wanted: tuple[Ids, Ids]
) -> None:
    everything = np.arange(ROWS, dtype=np.int64)
    nothing = np.empty(0, np.int64), np.empty((0, WIDTH), np.float32)
    before = limit.trips(number, [nothing[0]] * 2, [nothing[1]] * 2, [everything] * 2)[0]
    rows = [np.full((len(one), WIDTH), 2 * rank + 2, np.float32) for rank, one in enumerate(pushed)]
    after = before.copy()
    for one, values in zip(pushed, rows, strict=True):
        after[one] -= np.float32(RATE) * values  # small whole numbers: exact in any order
    found = limit.trips(number, list(pushed), rows, list(wanted))
    for one, out in zip(wanted, found, strict=True):
        np.testing.assert_array_equal(out, after[one])
